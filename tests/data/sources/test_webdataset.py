import io
import json
import os
import shutil
import tarfile

import numpy as np
import pytest
import wds2idx
from nvidia.dali import fn, pipeline_def

from tfaccel import UserError
from tfaccel.data.sources import webdataset

IMAGES = [bytes([row]) * size for row, size in enumerate((10, 512, 1, 513, 5000))]
LABELS = [2, 0, 1, 0, 4]


def write(file, members, mode="w", **settings):
    with tarfile.open(file, mode, **settings) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def sample(key, row):
    label = LABELS[row]
    return [
        (f"{key}.seg.png", b"target %d" % row),
        (f"{key}.JPG", IMAGES[row]),
        (f"{key}.cls", b"%d\n" % label),
        (f"{key}.json", json.dumps({"label": label, "text": "x"}).encode()),
    ]


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """The images in two shards of 3 and 2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard, rows in enumerate(((0, 1, 2), (3, 4))):
        members = [member for row in rows for member in sample(f"dir.0/{row:04d}", row)]
        write(folder / f"x-{shard:06d}.tar", members)
    return folder


def by_dali(shard, index):
    with wds2idx.IndexCreator(str(shard), str(index), verbose=False) as creator:
        creator.create_index()


def contents(blobs):
    return [blobs.read(index) for index in range(len(blobs))]


def test_gives_every_samples_bytes_and_label(shards):
    for settings in ({}, {"label_ext": "json"}):
        source = webdataset(shards / "*.tar", **settings)
        assert contents(source.images) == IMAGES
        assert source.labels.dtype == "int32"
        assert source.labels.tolist() == LABELS
        assert source.class_names == ("0", "1", "2", "3", "4")


def test_folders_may_be_named_like_a_pattern(shards):
    folder = shards.rename(shards.with_name("x[1]*"))
    for pattern in (folder / "x-*.tar", folder.parent / "x[[]1]*" / "x-*.tar"):
        assert webdataset(pattern).labels.tolist() == LABELS


def test_targets_become_pairs(shards):
    pairs = webdataset(shards / "*.tar", target_ext="seg.png")
    assert contents(pairs.images) == IMAGES
    assert contents(pairs.targets) == [b"target %d" % row for row in range(5)]
    assert pairs.labels is None


def test_what_is_no_sample_is_passed_over(tmp_path):
    members = [("README", b"x"), (".hidden", b"x"), *sample("./a b", 0), ("./._a b.jpg", b"x")]
    write(tmp_path / "x.tar", [*members, ("sub/.DS_Store", b"x")])
    with tarfile.open(tmp_path / "x.tar", "a") as tar:
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    for _ in range(2):  # from the shard, then from the index alone
        assert contents(webdataset(tmp_path / "x.tar").images) == IMAGES[:1]
        next(tmp_path.glob("*.npz")).unlink()


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_may_be_long(tmp_path, tar_format):
    key = "d" * 60 + "/" + "e" * 60
    write(tmp_path / "x.tar", sample("short", 0) + sample(key, 1), format=tar_format)
    # DALI's tool writes wrong offsets for these: its index must not be taken.
    by_dali(tmp_path / "x.tar", tmp_path / "x.idx")
    assert contents(webdataset(tmp_path / "x.tar").images) == IMAGES[:2]


def test_the_index_is_what_wds2idx_writes(shards, tmp_path):
    webdataset(shards / "*.tar")
    for shard in shards.glob("*.tar"):
        by_dali(shard, tmp_path / "idx")
        assert shard.with_suffix(".idx").read_text() == (tmp_path / "idx").read_text()


def test_dali_reads_through_the_index(shards):
    source = webdataset(shards / "*.tar")

    @pipeline_def(batch_size=5, num_threads=1, device_id=None)
    def pipeline():
        return fn.readers.webdataset(
            paths=list(source.images.files),
            index_paths=[str(shards / "x-000000.idx"), str(shards / "x-000001.idx")],
            ext=["JPG"],
        )

    (images,) = pipeline().run()
    assert [bytes(images.at(row)) for row in range(5)] == IMAGES


def test_a_second_look_reads_no_shard(shards):
    before = webdataset(shards / "*.tar")
    for shard in shards.glob("*.tar"):
        status = shard.stat()
        shard.write_bytes(bytes(status.st_size))
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = webdataset(shards / "*.tar")
    np.testing.assert_array_equal(before.images.offsets, after.images.offsets)
    assert after.labels.tolist() == LABELS


def test_an_index_that_fits_is_read_and_any_other_made_anew(shards):
    shard, index = shards / "x-000000.tar", shards / "x-000000.idx"

    def look():
        for columns in shards.glob("*.npz"):
            columns.unlink()
        return contents(webdataset(shard).images)

    look()
    good, written = index.read_text(), index.stat().st_mtime_ns
    assert look() == IMAGES[:3]
    assert index.stat().st_mtime_ns == written
    first, *lines = good.splitlines(keepends=True)
    for stale in (
        "",
        "v1.1 3\n" + "".join(lines),
        first + "".join(lines[:2]),  # a line is missing
        "v1.2 2\n" + "".join(lines[:2]),  # the shard has grown
        good.replace(" 10 ", " 11 "),  # a size is another
        good.replace(" 512 ", " 1024 ", 1),
        good.replace(" 512 ", " "),
    ):
        index.write_text(stale)
        assert look() == IMAGES[:3], stale
        assert index.read_text() == good, stale


def wrong_shards(folder):
    """(what is wrong, the shards, settings, words that the message must have)."""
    good = folder / "good.tar"
    members = sample("a/0", 0) + sample("a/1", 1)
    write(good, members)
    yield "misspelt", folder / "god.tar", {}, "does not exist; did you mean 'good.tar'"
    for mode, name in (("gz", "GZIP"), ("bz2", "bzip2"), ("xz", "xz")):
        write(folder / f"{name}.tar", members, f"w:{mode}")
        yield name, folder / f"{name}.tar", {}, f"{name}.tar is compressed with {name}"
    (folder / "zstd.tar").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(600))
    yield "zstd", folder / "zstd.tar", {}, "is compressed with zstd"
    link = tarfile.TarInfo("a/2.jpg")
    link.linkname = "a/1.jpg"
    for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE):
        link.type = kind
        write(folder / "link.tar", members)
        with tarfile.open(folder / "link.tar", "a") as tar:
            tar.addfile(link)
        yield "a link", folder / "link.tar", {}, "link.tar: 'a/2.jpg' is a link to 'a/1.jpg'"
    (folder / "text.tar").write_text("no tar file" * 100)
    yield "a text", folder / "text.tar", {}, "text.tar is not a tar file, or is cut short"

    data = good.read_bytes()
    for what, size in (("header", 512 + 512 + 100), ("data", 3 * 512 + 5), ("end", 4 * 512)):
        (folder / f"{what}.tar").write_bytes(data[:size])
        yield f"cut in the {what}", folder / f"{what}.tar", {}, f"{what}.tar is "
    (folder / "damaged.tar").write_bytes(data[:1024] + b"x" * 512 + data[1536:])
    yield "damaged", folder / "damaged.tar", {}, "is cut short or damaged at byte 1024"
    write(folder / "hollow.tar", [("README", b"x")])
    yield "no samples", folder / "hollow.tar", {}, "has no files with an extension"

    settings = {"image_ext": "tif;tiff"}
    words = "good.tar: sample 'a/0' has no file tif or tiff, only seg.png, JPG, cls, json; expected"
    yield "no image", good, settings, words
    write(folder / "apart.tar", sorted(members, key=lambda member: member[0].endswith("cls")))
    yield "apart", folder / "apart.tar", {}, "sample 'a/0' has no file cls"
    for label in (b"cat", b"", b"\xff", b"1.5"):
        write(folder / "label.tar", [("0.jpg", b"x"), ("0.cls", label)])
        yield "a label", folder / "label.tar", {}, f"'0.cls' holds {label!r}; expected the number"
    for label in (b"{}", b"[]", b'{"label": true}', b'{"label": 1.5}', b"{", b'{"label": null}'):
        write(folder / "label.tar", [("0.jpg", b"x"), ("0.json", label)])
        yield (
            "json",
            folder / "label.tar",
            {"label_ext": "json"},
            'expected the number of a class, {"',
        )
    write(folder / "minus.tar", [("0.jpg", b"x"), ("0.cls", b"-1")])
    yield "minus", folder / "minus.tar", {}, "minus.tar[bytes 512+1]: the label is -1; expected"


def test_each_wrong_shard_is_named_with_its_cure(tmp_path):
    for what, pattern, settings, words in wrong_shards(tmp_path):
        with pytest.raises(UserError) as error:
            webdataset(pattern, **settings)
        assert words in str(error.value), what
        assert "\n" not in str(error.value), what


def test_one_index_folder_serves_shards_of_equal_names(shards, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for shard in shards.glob("*.tar"):  # of the same size and time of writing
        changed = shard.read_bytes().replace(b'"label": 0', b'"label": 3').replace(b"0\n", b"3\n")
        (other / shard.name).write_bytes(changed)
        os.utime(other / shard.name, ns=(0, shard.stat().st_mtime_ns))
    for _ in range(2):  # made, then read
        for folder, labels in ((shards, LABELS), (other, [2, 3, 1, 3, 4])):
            source = webdataset(folder / "*.tar", index_dir=tmp_path / "idx")
            assert source.labels.tolist() == labels


def test_one_index_folder_serves_a_copy(shards, tmp_path):
    webdataset(shards / "*.tar", index_dir=tmp_path / "idx")
    assert len(list(shards.iterdir())) == 2
    shutil.copytree(shards, tmp_path / "copy")  # of another time of writing
    source = webdataset(tmp_path / "copy" / "*.tar", index_dir=tmp_path / "idx")
    assert contents(source.images) == IMAGES
