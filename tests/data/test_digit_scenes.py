"""The embedded scenes of digits with masks."""

import numpy as np
import PIL.Image

from tfaccel.data import digit_scenes
from tfaccel.data.digit_scenes import NUM_CLASSES, NUM_SCENES, SIDE, ensure_digit_scenes


def read(folder):
    return np.stack([np.asarray(PIL.Image.open(each)) for each in sorted(folder.iterdir())])


def test_every_image_has_a_mask_and_every_class_is_there(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = ensure_digit_scenes()
    for split, count in NUM_SCENES.items():
        images, masks = (read(root / split / kind) for kind in ("images", "masks"))
        assert (images.shape, images.dtype) == ((count, SIDE, SIDE, 3), np.uint8)
        assert (masks.shape, masks.dtype) == ((count, SIDE, SIDE), np.uint8)
        assert set(np.unique(masks)) == set(range(NUM_CLASSES))
        assert 0.75 < (masks == 0).mean() < 0.95
        # Digits differ from what is around them: the mask belongs to the image.
        for image, mask in zip(images.astype(float), masks, strict=True):
            background = np.median(image[mask == 0], axis=0)
            differs = np.abs(image - background).max(axis=-1) > 40
            assert differs[mask > 0].mean() > 0.75 > 0.3 > differs[mask == 0].mean()


def test_scenes_are_the_same_wherever_they_are_written(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        digit_scenes._write(tmp_path / name)
    for file in ("train/images/007.png", "test/masks/059.png"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
