import shutil

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.data.sources import image_pairs


@pytest.fixture
def roots(tmp_path):
    """Inputs as PNG and targets as BMP, in sub-folders; some that are no images, too."""
    for number, name in enumerate(("b/2/x", "b/10/x", "a/y", "z")):
        for root, suffix in (("blurry", ".png"), ("sharp", ".BMP")):
            file = tmp_path / root / (name + suffix)
            file.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(np.full((4, 4), number, np.uint8)).save(file)
    (tmp_path / "blurry" / "notes.txt").touch()
    (tmp_path / "blurry" / ".cache").mkdir()
    (tmp_path / "blurry" / ".cache" / "x.png").touch()
    return tmp_path / "blurry", tmp_path / "sharp"


def test_pairs_match_by_path_without_suffix(roots):
    source = image_pairs(*roots)
    names = ("a/y", "b/10/x", "b/2/x", "z")
    assert source.images.files == tuple(str(roots[0] / f"{name}.png") for name in names)
    assert source.targets.files == tuple(str(roots[1] / f"{name}.BMP") for name in names)
    assert source.labels is None
    assert source.class_names == ()


def test_the_order_is_that_of_whole_paths_as_text(tmp_path):
    names = sorted(["a/x", "a-b/x", "a", "a.b/x", "ab", "a/b/c", "a/b", "a/b-c/d", "B", "a0/x"])
    for root in ("in", "out"):
        for name in names:
            file = tmp_path / root / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    source = image_pairs(tmp_path / "in", tmp_path / "out")
    assert source.images.files == [str(tmp_path / "in" / f"{name}.png") for name in names]
    assert source.targets.files == [str(tmp_path / "out" / f"{name}.png") for name in names]


def test_a_folder_on_one_side_alone_is_unmatched(roots):
    shutil.rmtree(roots[1] / "b")
    with pytest.raises(UserError, match=r"2 of 4 images below .*, first b/10/x\.png, b/2/x\.png"):
        image_pairs(*roots)


def test_unmatched_images_are_counted_and_named_on_either_side(roots):
    (roots[1] / "a" / "y.BMP").unlink()
    (roots[1] / "b" / "2" / "x.BMP").rename(roots[1] / "b" / "2" / "w.BMP")
    with pytest.raises(UserError) as error:
        image_pairs(*roots)
    message = str(error.value)
    assert f"2 of 4 images below {roots[0]} have no partner below {roots[1]}" in message
    assert "first a/y.png, b/2/x.png; and 1 of 3 images below" in message
    assert "first b/2/w.BMP: expected the same paths" in message


def test_two_of_one_name_are_refused(roots):
    shutil.copy(roots[0] / "z.png", roots[0] / "z.jpg")
    with pytest.raises(UserError, match="differ only in their suffix"):
        image_pairs(*roots)


def test_wrong_roots_are_named(roots, tmp_path):
    with pytest.raises(UserError, match="does not exist; did you mean 'blurry'"):
        image_pairs(tmp_path / "blury", roots[1])
    with pytest.raises(UserError, match="expected two folders"):
        image_pairs(roots[0], roots[0])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no image at any depth"):
        image_pairs(roots[0], tmp_path / "empty")
