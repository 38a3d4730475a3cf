"""Damaged and hostile files: each ends in a sentence, or is made anew."""

import io
import os
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from tfaccel import UserError, sources


def write_tar(file, *members):
    with tarfile.open(file, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "label",
    [
        b'{"label": ' * 100_000,
        b"[" * 1_000_000,
        b'{"label": 1' + b"0" * 30 + b"}",
        b'{"label": ' + b"9" * 5000 + b"}",
        b'{"label": 1e400}',
        b" " * 3_000_000 + b'{"label": 1}',
    ],
)
def test_a_label_of_json_that_is_none(tmp_path, label):
    file = write_tar(tmp_path / "x.tar", ("0.jpg", b"x"), ("0.json", label))
    with pytest.raises(UserError, match=r"x.tar: '0.json' holds .* expected the number of a class"):
        sources.webdataset(file, label_ext="json")


@pytest.mark.parametrize("label", [b"9" * 5000, b"1" + b"0" * 30, "\uff11".encode()])
def test_a_label_of_digits_that_is_none(tmp_path, label):
    file = write_tar(tmp_path / "x.tar", ("0.jpg", b"x"), ("0.cls", label))
    with pytest.raises(UserError, match=r"x.tar: '0.cls' holds"):
        sources.webdataset(file)


def test_a_sample_may_not_be_there_twice(tmp_path):
    first, other = [("0.jpg", b"x"), ("0.cls", b"0")], [("1.jpg", b"x"), ("1.cls", b"0")]
    again = [("0.jpg", b"y"), ("0.cls", b"1")]
    file = write_tar(tmp_path / "x.tar", *first, *other, *again)
    with pytest.raises(UserError, match="samples 0 and 2, counted from 0, are both '0'"):
        sources.webdataset(file)
    file = write_tar(tmp_path / "y.tar", *first, *again, *other)
    with pytest.raises(UserError, match="sample '0' has two files 'jpg'"):
        sources.webdataset(file)


def test_a_tar_that_promises_more_than_there_is(tmp_path):
    file = write_tar(tmp_path / "x.tar", ("0.jpg", b"x"), ("0.cls", b"1"))
    data = bytearray(file.read_bytes())
    header = tarfile.TarInfo("0.cls")
    header.size = 2**60
    data[1024:1536] = header.tobuf(tarfile.GNU_FORMAT)
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"x.tar is"):
        sources.webdataset(file)
    # Nor is an index believed that promises as much.
    (tmp_path / "x.idx").write_text(f"v1.2 1\njpg 512 1 0.jpg cls 1536 {2**60} 0.cls\n")
    with pytest.raises(UserError, match=r"x.tar is"):
        sources.webdataset(file)


def write_records(file):
    with tf.io.TFRecordWriter(str(file)) as writer:
        for number in range(3):
            features = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"image"])),
                "image/class/label": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[number])
                ),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    return file


@pytest.mark.parametrize(
    "index",
    [
        f"0 {2**62}\n",
        f"0 {2**80}\n",
        f"{2**62} {2**62}\n",
        "-1 5\n",
        "x\n",
        "0 1\n" * 3,
        "\0" * 100,
    ],
)
def test_an_index_of_records_that_promises_too_much_is_made_anew(tmp_path, index):
    file = write_records(tmp_path / "x.tfrecord")
    (tmp_path / "x.tfrecord.idx").write_text(index)
    assert sources.tfrecord(file).labels.tolist() == [0, 1, 2]
    assert (tmp_path / "x.tfrecord.idx").read_text() != index


def garbage(data, arrays):
    return b"PK\x03\x04" + os.urandom(500)


def another_shape(data, arrays):
    """A header that promises 2**60 cells."""
    return data.replace(b"'shape': (3,), ", b"'shape': (%d,)," % 10**12)


def cut(data, arrays):
    return data[:-100]


def saved(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def far_away(data, arrays):
    return saved({**arrays, "image_size": np.full(3, 2**62)})


def below_zero(data, arrays):
    return saved({**arrays, "image_offset": np.full(3, -5)})


def fewer(data, arrays):
    return saved({**arrays, "label": arrays["label"][:2]})


def without_labels(data, arrays):
    return saved({name: each for name, each in arrays.items() if name != "label"})


@pytest.mark.parametrize(
    "change", [garbage, another_shape, cut, far_away, below_zero, fewer, without_labels]
)
def test_columns_that_were_kept_and_damaged_are_made_anew(tmp_path, change):
    file = write_records(tmp_path / "x.tfrecord")
    before = sources.tfrecord(file)
    [place] = tmp_path.glob(".*.npz")
    with np.load(place) as kept:
        arrays = dict(kept)
    changed = change(place.read_bytes(), arrays)
    place.write_bytes(changed)
    after = sources.tfrecord(file)
    assert after.labels.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(after.images.sizes, before.images.sizes)
    assert place.read_bytes() != changed


@pytest.mark.parametrize("text", ["path,label\na.png,1\nb\0.png,2\n", "a.png 1\nb\0.png 2\n"])
def test_a_list_with_a_zero_byte(tmp_path, text):
    (tmp_path / "a.png").touch()
    (tmp_path / "list.csv").write_text(text)
    number = text[: text.index("\0")].count("\n") + 1
    with pytest.raises(UserError, match=f"list.csv line {number} holds a zero byte"):
        sources.image_list(tmp_path / "list.csv")


def test_a_path_with_two_labels(tmp_path, caplog):
    (tmp_path / "a.png").touch()
    for again in ("a.png", "./a.png", f"{tmp_path}//a.png"):
        (tmp_path / "list.csv").write_text(f"path,label\na.png,x\nb.png,y\n{again},y\n")
        with pytest.raises(UserError) as error:
            sources.image_list(tmp_path / "list.csv")
        words = f"lines 2 and 4 give {tmp_path / 'a.png'} the labels 'x' and 'y'; expected one"
        assert words in str(error.value)
    (tmp_path / "list.csv").write_text("path,label\na.png,x\nb.png,y\na.png,x\n")
    assert len(sources.image_list(tmp_path / "list.csv")) == 3
    assert "first lines 2 and 4; such images count more than once" in caplog.text


def header(text):
    data = text.encode()
    return b"\x93NUMPY\x02\0" + len(data).to_bytes(4, "little") + data + bytes(100)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        header("{" * 5000),
        header("(" * 9000 + ")" * 9000),
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (4611686018427387904, 9, 9)}\n"),
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 9, 9)}\n"),
        header("{'descr': '|O', 'fortran_order': False, 'shape': (1, 9, 9)}\n"),
        header("{'descr': 7, 'fortran_order': False, 'shape': (1, 9, 9)}\n"),
        header("{'descr': '|u1', 'fortran_order': False, 'shape': 'x'}\n"),
    ],
)
def test_an_array_whose_header_is_hostile(tmp_path, data):
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(UserError, match=r"x.npy cannot be read \(") as error:
        sources.arrays(tmp_path / "x.npy", np.zeros(1, int))
    assert "\n" not in str(error.value)


def test_shards_that_are_one_file_are_said(tmp_path, caplog):
    file = write_records(tmp_path / "x.tfrecord")
    (tmp_path / "y.tfrecord").symlink_to(file)
    assert len(sources.tfrecord(tmp_path / "*.tfrecord")) == 6
    assert "are one file, through a link; its examples count twice" in caplog.text


def test_pairs_of_one_folder_by_a_link_are_said(tmp_path, caplog):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").touch()
    (tmp_path / "b").symlink_to("a")
    assert len(sources.image_pairs(tmp_path / "a", tmp_path / "b")) == 1
    assert "are one folder, through a link: each image is its own target" in caplog.text
