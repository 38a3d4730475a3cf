import numpy as np
import PIL.Image

from tfaccel.data.digits import ensure_digits, load_digits
from tfaccel.data.sources import class_folders


def test_writes_every_digit_once(tmp_path):
    root = ensure_digits(tmp_path)
    train, test = class_folders(root / "training"), class_folders(root / "testing")
    assert (len(train), len(test)) == (1437, 360)
    assert train.class_names == test.class_names == tuple("0123456789")


def test_they_are_those_of_the_source():
    images, labels = load_digits()
    assert (images.shape, images.dtype, images.max()) == ((1797, 8, 8), np.uint8, 16)
    # As scikit-learn's own description and first example have them.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert labels[:10].tolist() == list(range(10))


def test_pixels_and_labels_are_written_as_they_are(tmp_path):
    images, labels = load_digits()
    for file in sorted(ensure_digits(tmp_path).glob("*/*/*.png"))[::100]:
        index = int(file.stem)
        assert int(file.parent.name) == labels[index]
        # 16 grey levels spread over 255: the nearest is less than half a level away.
        written = np.asarray(PIL.Image.open(file)) / 255 * 16
        np.testing.assert_allclose(written, images[index], atol=0.04)


def test_second_call_writes_nothing(tmp_path):
    root = ensure_digits(tmp_path)
    before = root.stat().st_mtime_ns
    assert ensure_digits(tmp_path) == root
    assert root.stat().st_mtime_ns == before
    assert [each.name for each in root.parent.iterdir()] == ["digits"]
