import numpy as np
import PIL.Image
from sklearn.datasets import load_digits

from tfaccel.data.digits import ensure_digits
from tfaccel.data.sources import class_folders


def test_writes_every_digit_once(tmp_path):
    root = ensure_digits(tmp_path)
    train, test = class_folders(root / "training"), class_folders(root / "testing")
    assert (len(train), len(test)) == (1437, 360)
    assert train.class_names == test.class_names == tuple("0123456789")


def test_pixels_and_labels_are_scikit_learns(tmp_path):
    digits = load_digits()
    for file in sorted(ensure_digits(tmp_path).glob("*/*/*.png"))[::100]:
        index = int(file.stem)
        assert int(file.parent.name) == digits.target[index]
        # 16 grey levels spread over 255: the nearest is less than half a level away.
        written = np.asarray(PIL.Image.open(file)) / 255 * 16
        np.testing.assert_allclose(written, digits.images[index], atol=0.04)


def test_second_call_writes_nothing(tmp_path):
    root = ensure_digits(tmp_path)
    before = root.stat().st_mtime_ns
    assert ensure_digits(tmp_path) == root
    assert root.stat().st_mtime_ns == before
    assert [each.name for each in root.parent.iterdir()] == ["digits"]
