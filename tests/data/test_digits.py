import errno

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.data import digits
from tfaccel.data.digits import COLUMNS, ensure_digits, ensure_listed_digits, load_digits
from tfaccel.data.sources import class_folders, image_list


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tfaccel"


def test_writes_every_digit_once():
    root = ensure_digits()
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


def test_pixels_and_labels_are_written_as_they_are():
    images, labels = load_digits()
    for file in sorted(ensure_digits().glob("*/*/*.png"))[::100]:
        index = int(file.stem)
        assert int(file.parent.name) == labels[index]
        # 16 grey levels spread over 255: the nearest is less than half a level away.
        written = np.asarray(PIL.Image.open(file)) / 255 * 16
        np.testing.assert_allclose(written, images[index], atol=0.04)


def test_second_call_writes_nothing(cache):
    root = ensure_digits()
    before = root.stat().st_mtime_ns
    assert ensure_digits() == root
    assert root.stat().st_mtime_ns == before
    assert list(cache.iterdir()) == [root]


def test_a_disk_that_is_full_is_said_and_nothing_stays(cache, monkeypatch):
    def full(root):
        (root / "training").mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(digits, "_write", full)
    with pytest.raises(UserError, match=r"digits cannot be written to .* \(No space left on dev"):
        ensure_digits()
    assert list(cache.iterdir()) == []


def test_the_lists_say_what_the_images_show(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = ensure_listed_digits()
    assert ensure_listed_digits() == root
    counts = {}
    for split in ("training", "testing"):
        source = image_list(root / f"{split}.csv", label_columns=COLUMNS[1:])
        assert (source.task, source.target_names) == ("regression", COLUMNS[1:])
        counts[split] = len(source)
        for index in range(0, len(source), 60):
            even, loop, value, ink = source.labels[index]
            assert (even, loop) == (value % 2 == 0, value in (0, 6, 8, 9))
            pixels = np.asarray(PIL.Image.open(source.images.files[index]))
            assert ink == pytest.approx(pixels.sum() / 255, abs=1e-3)
    assert counts == {"training": 1437, "testing": 360}
