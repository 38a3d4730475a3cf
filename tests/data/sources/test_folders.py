import os
import pathlib
import re

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.config import DataConfig
from tfaccel.data.sources import class_folders
from tfaccel.experiment.open_data import open_source


def test_lists_files_by_class_then_name(folder):
    listed = class_folders(folder)
    assert listed.class_names == ("a", "b", "c")
    assert [pathlib.Path(file).name for file in listed.images.files[:3]] == [
        "00.png",
        "03.png",
        "06.png",
    ]
    assert listed.labels.dtype == "int32"
    assert listed.labels.tolist() == [0] * 13 + [1] * 12 + [2] * 12


def test_numbers_classes_by_their_names_as_text(tmp_path):
    for name in ("10", "2", "1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.PNG").touch()
    assert class_folders(tmp_path).class_names == ("1", "10", "2")


def test_passes_over_names_that_start_with_a_dot(folder, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").touch()
    (tmp_path / "a" / ".DS_Store").touch()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert len(class_folders(tmp_path)) == 1


def test_class_names_number_the_classes_of_a_folder_that_lacks_some(folder, caplog):
    found = class_folders(folder, class_names=["x", "c", "b", "a"])
    assert found.class_names == ("x", "c", "b", "a")
    assert found.labels.tolist() == [3] * 13 + [2] * 12 + [1] * 12
    assert f"{folder} has no images of these classes: x" in caplog.text
    with pytest.raises(UserError, match="has the class 'c', which is not among the 2 class_names"):
        class_folders(folder, class_names=["a", "b"])


def wrong_folders(root: pathlib.Path):
    """(what is wrong, the folder to give, words the message must have)."""
    (root / "training").mkdir()
    yield "misspelt", root / "trainin", "did you mean 'training'"
    yield "nothing near", root / "no" / "where", f"nor does {root / 'no'}"
    yield "empty", root / "training", "is empty; expected one folder of images per class"
    (root / "file").touch()
    yield "a file", root / "file", "cannot be listed (Not a directory)"

    flat = root / "flat"
    flat.mkdir()
    (flat / "1.png").touch()
    yield "images without classes", flat, "'1.png'; expected one folder per class"

    hollow = root / "hollow"
    (hollow / "cats").mkdir(parents=True)
    yield "an empty class", hollow, "cats is empty"

    text = root / "text"
    (text / "cats").mkdir(parents=True)
    (text / "cats" / "notes.txt").touch()
    yield "a file that is no image", text, "'notes.txt', which is not an image"

    above = root / "above"
    (above / "training" / "cats").mkdir(parents=True)
    yield "one level too high", above, f"did you mean {above / 'training'}"


def test_each_wrong_folder_is_named_with_its_cure(tmp_path):
    for what, wrong, words in wrong_folders(tmp_path):
        with pytest.raises(UserError) as error:
            class_folders(wrong)
        assert words in str(error.value), what
        assert "\n" not in str(error.value), what


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list any folder")
def test_names_a_folder_it_may_not_list(tmp_path):
    tmp_path.joinpath("closed").mkdir(mode=0)
    with pytest.raises(UserError, match="Permission denied"):
        class_folders(tmp_path / "closed")


def test_counts_all_that_are_no_images(tmp_path):
    for name in ("a/0.png", "a/1.gif", "b/0.png", "b/1.gif", "b/2.txt", "c/0.gif", "d/0.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError) as error:
        class_folders(tmp_path)
    assert f"class folder {tmp_path / 'a'} holds '1.gif', which is not an image" in str(error.value)

    others = f"nor are 3 others, first {tmp_path / 'b' / '1.gif'}, {tmp_path / 'b' / '2.txt'};"
    assert others in str(error.value)
    assert "\n" not in str(error.value)


def made(root: pathlib.Path, *files: str) -> pathlib.Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


@pytest.mark.parametrize(
    ("given", "files", "cure"),
    [
        # As zip files are unpacked: a folder in a folder.
        ("", ["d/cat/1.png", "d/dog/1.png"], "did you mean {}/d as the image folder?"),
        ("", ["d/d/cat/1.png", "d/d/dog/1.png"], "did you mean {}/d/d as the image folder?"),
        ("", ["d/cat/1.png", "__MACOSX/d/cat/._1.png"], "did you mean {}/d as the image folder?"),
        # One folder for each split.
        (
            "",
            ["test/cat/1.png", "train/cat/1.png"],
            "did you mean {}/train as the image folder? (and test",
        ),
        ("", ["d/test/cat/1.png", "d/train/cat/1.png"], "did you mean {}/d/train as the image fol"),
        # Classes of classes.
        (
            "",
            ["animal/cat/1.png", "animal/dog/1.png", "plant/rose/1.png"],
            "the classes are one level deeper in each of 2 folders, such as animal/cat: move all",
        ),
        # Images and a folder.
        ("", ["cat/1.png", "cat/old/1.png"], "move the images of old into {}/cat, or old away"),
        # One level too deep.
        (
            "train/cat",
            ["train/cat/1.png", "train/dog/1.png"],
            "did you mean {}/train as the image folder? It holds cat and 1 other",
        ),
        ("flat", ["flat/1.png", "flat/2.png"], "one folder per class, or list the images and the"),
        ("train", ["train/1.png", "test/1.png"], "one folder per class, or list the images and"),
        ("", ["cat/1.png", "labels.csv"], "holds the file 'labels.csv'; expected one folder per"),
    ],
)
def test_a_wrong_level_is_named_with_the_folder_that_was_meant(tmp_path, given, files, cure):
    made(tmp_path, *files)
    with pytest.raises(UserError) as error:
        class_folders(tmp_path / given)
    assert cure.format(tmp_path) in str(error.value)
    assert "did you mean" in cure or "did you mean" not in str(error.value)


def test_passes_over_what_archives_and_file_managers_leave(tmp_path):
    leave = ["Thumbs.db", "__MACOSX/a/._1.png", "desktop.ini", ".ipynb_checkpoints/1.png"]
    leave += ["a/Thumbs.db", "a/.ipynb_checkpoints/1-checkpoint.png", "a/@eaDir/1.png/SYNO.jpg"]
    found = class_folders(made(tmp_path, "a/1.png", "b/1.png", *leave))
    assert found.class_names == ("a", "b")
    assert len(found) == 2


def test_a_link_may_not_put_a_file_into_two_classes(tmp_path):
    made(tmp_path, "a/1.png", "b/2.png", "a/0.png")
    (tmp_path / "a" / "again.png").symlink_to("1.png")  # twice in one class is another weight
    assert len(class_folders(tmp_path)) == 4
    (tmp_path / "b" / "z.png").symlink_to("../a/1.png")
    with pytest.raises(UserError, match="are one file, through a link, in two classes") as error:
        class_folders(tmp_path)
    assert f"{tmp_path / 'a' / '1.png'} and {tmp_path / 'b' / 'z.png'}" in str(error.value)


def test_a_link_may_not_be_a_class_of_its_own(tmp_path):
    made(tmp_path, "a/1.png")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match="are one file, through a link, in two classes"):
        class_folders(tmp_path)


def test_what_is_no_path_is_refused():
    with pytest.raises(UserError, match="None is no path; give a str"):
        class_folders(None)


def test_classes_without_a_split_are_answered_with_settings_that_split_them(tmp_path):
    root = tmp_path / "my photos"
    for name in ("circle", "square"):
        (root / name).mkdir(parents=True)
        for index in range(10):
            PIL.Image.new("L", (4, 4)).save(root / name / f"{index} of ten.png")
    with pytest.raises(UserError) as raised:
        class_folders(root / "training")
    said = str(raised.value)
    assert "holds the classes themselves (circle, square)" in said
    settings = dict(re.findall(r"--config\.data\.(\w+)=([^\s,]+)", said))
    assert settings == {"train": ".", "validation_split": "0.2"}
    data = DataConfig(root=str(root), train=".", validation_split=0.2)
    sizes = {}
    for part in ("train", "test"):
        source = open_source(data, part)
        assert source.class_names == ("circle", "square")
        sizes[part] = np.bincount(source.labels).tolist()
    assert sizes == {"train": [8, 8], "test": [2, 2]}
