import numpy as np
import PIL.Image
import PIL.ImageFilter

from tfaccel.data import blurred
from tfaccel.data.blurred import ensure_blurred


def pixels(file):
    return np.asarray(PIL.Image.open(file))


def place(file):
    return tuple(map(int, file.stem.split("-")))


def test_every_blurry_crop_has_its_sharp_one():
    root = ensure_blurred()
    for split, count in (("train", 216), ("test", 42)):
        files = [
            {str(each.relative_to(root / split / name)) for each in root.glob(f"{split}/{name}/*")}
            for name in ("blurry", "sharp")
        ]
        assert files[0] == files[1]
        assert len(files[0]) == count


def test_crops_are_of_the_photograph_and_of_it_blurred_as_a_whole():
    root = ensure_blurred()
    photo = blurred.load_photo()
    whole = photo.filter(PIL.ImageFilter.GaussianBlur(blurred.BLUR_RADIUS))
    for file in sorted(root.glob("*/sharp/*.png"))[::50]:
        top, left = place(file)
        rows, columns = slice(top, top + 96), slice(left, left + 96)
        np.testing.assert_array_equal(pixels(file), np.asarray(photo)[rows, columns])
        blurry = file.parents[1] / "blurry" / file.name
        np.testing.assert_array_equal(pixels(blurry), np.asarray(whole)[rows, columns])


def test_no_pixel_that_is_tested_was_blurred_into_a_training_crop():
    root = ensure_blurred()
    last_trained = max(place(each)[0] + 95 for each in root.glob("train/blurry/*"))
    first_tested = min(place(each)[0] for each in root.glob("test/blurry/*"))
    assert first_tested - last_trained > 6 * blurred.BLUR_RADIUS
    assert max(place(each)[1] for each in root.glob("*/*/*")) + 96 <= 512
    assert max(place(each)[0] for each in root.glob("*/*/*")) + 96 <= 600


def test_a_second_call_writes_nothing():
    root = ensure_blurred()
    before = root.stat().st_mtime_ns
    assert ensure_blurred() == root
    assert root.stat().st_mtime_ns == before
    assert [each.name for each in root.parent.glob("portrait*")] == ["portrait"]
