import hashlib
import os

import numpy as np
import pytest

from tfaccel.data import file_names
from tfaccel.data.file_names import FileNames, GrowingFileNames
from tfaccel.data.source import Blobs

MANY = [
    ("/d/a/1.png", "/d/a/2.png", "/d/b/1.png"),
    ("/d/a/1.png",),
    ("/1.png", "/2.png"),
    ("/d/é/ü.png", "/d/\udcff/x.png", "/d/a b/\n.png"),
    ("/d/./a/1.png", "/d/a/2.png"),
    ("/d/./a/1.png", "/d/./a/2.png"),
    ("/d//a/1.png", "/d/b/../2.png"),
    ("/d/ab/1.png", "/d/ac/1.png", "/d/ab/0.png"),
]


@pytest.mark.parametrize("files", MANY)
def test_is_the_sequence_of_text_that_was_given(files, monkeypatch):
    monkeypatch.setattr(file_names, "AT_A_TIME", 2)
    names = FileNames.of(files)
    assert names == files
    assert tuple(names) == files
    assert names[-1] == files[-1]
    assert names[1:] == files[1:]
    assert len(names) == len(files)
    assert [names.encoded(index) for index in range(len(files))] == [*map(os.fsencode, files)]
    ids = np.arange(len(files))[::-1]
    assert names.taken(ids) == files[::-1]
    padded = [bytes(row).rstrip(b"\0") for row in names.rows(ids)]
    assert padded == [*map(os.fsencode, files[::-1])]
    with pytest.raises(IndexError):
        names[len(files)]


@pytest.mark.parametrize("files", MANY)
def test_the_digest_is_what_checkpoints_have_from_before(files):
    """A run that goes on must find its data the same."""
    folder = os.path.commonpath([os.path.dirname(min(files)), os.path.dirname(max(files))])
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(os.fsencode(file[len(folder) :]) + b"\0")
    assert Blobs(files).folder == folder
    assert Blobs(files).digest() == digest.hexdigest()


@pytest.mark.parametrize(
    ("root", "folders"),
    [
        ("/d", [("a", ["1.png", "2.png"]), ("b", ["1.png"])]),
        ("/d", [("a", ["1.png", "2.png"])]),
        ("/", [("a", ["1.png"]), ("b", ["2.png"])]),
        ("/", [("a", ["1.png"])]),
    ],
)
def test_files_in_folders_are_those_of_their_paths(root, folders):
    names = FileNames.in_folders(root, *zip(*folders, strict=True))
    same = FileNames.of(os.path.join(root, name, file) for name, files in folders for file in files)
    assert names == same
    assert names.folder == same.folder
    assert b"".join(names.below_folder()) == b"".join(same.below_folder())


def test_paths_that_come_part_by_part_may_share_less_and_less():
    parts = [["/d/a/b/2.png", "/d/a/b/1.png"], ["/d/a/c/1.png"], [], ["/d/b/1.png"], ["/e.png"]]
    growing, files = GrowingFileNames(), []
    for part in parts:
        growing.add(part)
        files += part
    names = growing.done()
    assert names == files
    assert names.folder == "/"


def test_refuses_a_zero_byte():
    with pytest.raises(ValueError, match="zero byte"):
        FileNames.of(["/a/1\0.png"])


def test_suffixes_are_those_of_names():
    assert FileNames.of(["/a.b/1.PNG", "/a.b/2", "/a.b/3.tar.gz"]).suffixes() == {".png", "", ".gz"}
    assert FileNames.of(["/a/1.png", "/a/2.jpeg", "/a/3.webp"]).suffixes() == {
        ".png",
        ".jpeg",
        ".webp",
    }
    assert FileNames.of(["/x.y"]).suffixes() == {".y"}
    assert FileNames.of(["/x.very-long-suffix", "/x/.png"]).suffixes() == {".very-long-suffix", ""}
