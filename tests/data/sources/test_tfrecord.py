import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from nvidia.dali import fn, pipeline_def
from nvidia.dali import tfrecord as tfrec

from tfaccel import UserError
from tfaccel.data.sources import tfrecord

# (image, label, name, target); images longer than the pieces in which records are read, too.
EXAMPLES = [
    (bytes([row]) * size, row % 5 + 1, f"class {row % 5}", b"target %d" % row)
    for row, size in enumerate((10, 5000, 1, 300, 20_000, 127, 128, 4096, 4097, 70_000, 2))
]


def feature(value):
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=np.ravel(value).tolist()))


def serialized(**features):
    features = {key.replace("__", "/"): feature(value) for key, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(file, records, compression=None):
    with tf.io.TFRecordWriter(str(file), compression) as writer:
        for record in records:
            writer.write(record)


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """The examples in two shards of 7 and 4, with other features around what is asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = [
        serialized(
            a=0, image__encoded=image, image__class__label=label, name=name.encode(), target=target,
            z=b"z" * 9000,
        )
        for image, label, name, target in EXAMPLES
    ]  # fmt: skip
    folder = tmp_path / "shards"
    folder.mkdir()
    write(folder / "train-00000-of-00002", records[:7])
    write(folder / "train-00001-of-00002", records[7:])
    return folder


def contents(blobs):
    return [blobs.read(index) for index in range(len(blobs))]


def blank(shard):
    """Wipes a shard, in a way that only who reads it sees."""
    status = shard.stat()
    shard.write_bytes(bytes(status.st_size))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_gives_every_records_bytes_and_label(shards):
    source = tfrecord(shards / "train-*", first_label=1)
    assert contents(source.images) == [each[0] for each in EXAMPLES]
    assert source.labels.dtype == "int32"
    assert source.labels.tolist() == [each[1] - 1 for each in EXAMPLES]
    assert source.class_names == ("0", "1", "2", "3", "4")
    assert source.targets is None


def test_names_become_classes_and_targets_become_pairs(shards):
    source = tfrecord(str(shards / "train-*"), label_key="name")
    assert source.class_names == tuple(f"class {index}" for index in range(5))
    assert source.labels.tolist() == [each[1] - 1 for each in EXAMPLES]
    pairs = tfrecord([shards / "train-00001-of-00002"], target_key="target")
    assert contents(pairs.images) == [each[0] for each in EXAMPLES[7:]]
    assert contents(pairs.targets) == [each[3] for each in EXAMPLES[7:]]
    assert pairs.labels is None


def test_shards_are_sorted_and_each_is_read_once(shards):
    first, second = sorted(shards.iterdir())
    source = tfrecord([second, shards / "train-*", first])
    assert source.images.files == (str(first), str(second))
    assert len(source) == len(EXAMPLES)
    # The indexes that were written match the pattern, and are no shards.
    assert len(tfrecord(shards / "train-*")) == len(EXAMPLES)


def test_the_index_is_what_dali_would_write(shards):
    tfrecord(shards / "train-*")
    for shard in sorted(shards.glob("train-*-of-00002")):
        expected, offset, data = [], 0, shard.read_bytes()
        while offset < len(data):
            length = 16 + struct.unpack_from("<Q", data, offset)[0]
            expected.append(f"{offset} {length}\n")
            offset += length
        assert shard.with_name(f"{shard.name}.idx").read_text() == "".join(expected)


@pytest.mark.slow
def test_the_index_is_what_tfrecord2idx_writes(shards, tmp_path):
    tfrecord(shards / "train-*")
    for shard in sorted(shards.glob("train-*-of-00002")):
        tool = f"{sys.prefix}/bin/tfrecord2idx"
        subprocess.run([sys.executable, tool, shard, tmp_path / "idx"], check=True)
        ours = shard.with_name(f"{shard.name}.idx").read_text()
        assert ours == (tmp_path / "idx").read_text()


def test_dali_reads_through_the_index(shards):
    source = tfrecord(shards / "train-*")
    files = source.images.files

    @pipeline_def(batch_size=len(EXAMPLES), num_threads=1, device_id=None)
    def pipeline():
        features = {"image/class/label": tfrec.FixedLenFeature([1], tfrec.int64, -1)}
        read = fn.readers.tfrecord(
            path=list(files), index_path=[f"{file}.idx" for file in files], features=features
        )
        return read["image/class/label"]

    (labels,) = pipeline().run()
    assert labels.as_array()[:, 0].tolist() == source.labels.tolist()


def test_a_second_look_reads_no_shard(shards):
    before = tfrecord(shards / "train-*")
    for shard in shards.glob("train-*-of-00002"):
        blank(shard)
    after = tfrecord(shards / "train-*")
    np.testing.assert_array_equal(before.images.offsets, after.images.offsets)
    np.testing.assert_array_equal(before.labels, after.labels)
    with pytest.raises(UserError):
        tfrecord(shards / "train-*", label_key="name")  # is not known yet


def test_a_shard_that_changed_is_looked_through_again(shards):
    first = sorted(shards.iterdir())[0]
    tfrecord(first)
    write(first, [serialized(image__encoded=b"new", image__class__label=3)])
    source = tfrecord(first)
    assert contents(source.images) == [b"new"]
    assert source.labels.tolist() == [3]


def test_an_index_that_is_there_is_read(shards, tmp_path):
    first, second = sorted(shards.iterdir())
    tfrecord([first, second], index_dir=tmp_path / "idx")
    assert sorted(shards.iterdir()) == [first, second]
    places = [tmp_path / "idx" / f"{each.name}.idx" for each in (first, second)]
    for columns in (tmp_path / "idx").glob(".*.npz"):
        columns.unlink()
    before = [place.stat().st_mtime_ns for place in places]
    places[1].write_text("0 99\n")  # one that does not fit is made anew
    source = tfrecord([first, second], index_dir=tmp_path / "idx")
    assert contents(source.images) == [each[0] for each in EXAMPLES]
    assert places[0].stat().st_mtime_ns == before[0]
    assert places[1].read_text().startswith("0 ")
    assert len(places[1].read_text().splitlines()) == 4


def test_an_index_of_other_records_of_the_same_size_in_all_is_made_anew(shards):
    first = sorted(shards.iterdir())[0]
    tfrecord(first)
    records = [serialized(image__encoded=each[0], image__class__label=each[1]) for each in EXAMPLES]
    write(first, records)
    tfrecord(first)
    write(first, reversed(records))
    source = tfrecord(first)
    assert contents(source.images) == [each[0] for each in reversed(EXAMPLES)]


def test_where_no_index_can_be_written_the_cache_has_it(shards, tmp_path, caplog):
    (tmp_path / "file").touch()
    settings = {"index_dir": tmp_path / "file" / "below"}
    with caplog.at_level("INFO", "tfaccel"):
        tfrecord(shards / "train-*", **settings)
    cache = tmp_path / "cache" / "tfaccel" / "index"
    assert f"data: wrote the shards' indexes to {cache}" in caplog.messages
    assert len(list(cache.iterdir())) == 4
    for shard in shards.iterdir():
        blank(shard)
    assert len(tfrecord(shards / "train-*", **settings)) == len(EXAMPLES)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_left_alone(shards, tmp_path):
    shards.chmod(0o500)
    tfrecord(shards / "train-*")
    assert len(list(shards.iterdir())) == 2
    assert len(list((tmp_path / "cache" / "tfaccel" / "index").iterdir())) == 4


def test_where_nothing_can_be_written_it_says_so(shards, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(tfrecord(shards / "train-*", index_dir=tmp_path / "file")) == len(EXAMPLES)
    assert "cannot be kept (Not a directory)" in caplog.text


def test_two_processes_may_make_the_index_at_once(shards):
    program = (
        "import sys; from tfaccel.data import sources; "
        "print(len(sources.tfrecord(sys.argv[1] + '/train-*')))"
    )
    command = [sys.executable, "-c", program, str(shards)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.communicate()[0] for each in both] == [f"{len(EXAMPLES)}\n"] * 2
    assert len(list(shards.iterdir())) == 2 + 4  # and nothing half written
    assert contents(tfrecord(shards / "train-*").images) == [each[0] for each in EXAMPLES]


def wrong_shards(folder):
    """(what is wrong, the shards, settings, words that the message must have)."""
    record = serialized(image__encoded=b"x", image__class__label=1)
    good = folder / "good"
    write(good, [record] * 3)
    yield "misspelt", folder / "god", {}, "does not exist; did you mean 'good'"
    yield "no match", folder / "train-*", {}, f"no shard matches {folder / 'train-*'}"
    yield "a folder", folder, {}, f"is a folder; expected a pattern of its shards: {folder}/*"
    yield "braces", folder / "x-{0..3}", {}, "use * for a range of shards"
    yield "none", [], {}, "list of shards is empty"

    (folder / "empty").touch()
    yield "empty", folder / "empty", {}, "empty is empty; write it again"
    write(folder / "gzip", [record] * 3, "GZIP")
    yield "compressed", folder / "gzip", {}, "gzip is compressed with GZIP"
    (folder / "text").write_text("not a TFRecord, but long enough to hold a header")
    yield "a text", folder / "text", {}, "text is not a TFRecord file"
    data = good.read_bytes()
    (folder / "cut").write_bytes(data[:-3])
    yield "cut in the data", folder / "cut", {}, "cut is cut short: it ends at byte"
    (folder / "cut2").write_bytes(data[: 2 * len(data) // 3 + 5])
    yield "cut in a header", folder / "cut2", {}, "in record 2; copy or write it again"
    (folder / "bad").write_bytes(data[: len(data) // 3] + b"\1" + data[len(data) // 3 + 1 :])
    yield "damaged", folder / "bad", {}, f"is damaged at byte {len(data) // 3}"
    write(folder / "raw", [b"no example, but a record"])
    yield "no example", folder / "raw", {}, "raw, record 0 is not a tf.train.Example"

    key = {"image_key": "image/encode"}
    yield (
        "wrong key",
        good,
        key,
        "record 0: there is no image_key='image/encode'; did you mean 'image/encoded' (set "
        "--config.data.image_key=image/encoded, in a script image_key='image/encoded')",
    )
    key = {"label_key": "xyz"}
    yield "no such key", good, key, "expected one of: image/class/label, image/encoded"
    key = {"image_key": "image/class/label"}
    yield "a number", good, key, "image_key='image/class/label' is a number; expected an encoded"
    write(folder / "pixels", [serialized(image__encoded=b"\xff" * 999, image__class__label=(1, 2))])
    yield (
        "two labels",
        folder / "pixels",
        {},
        "label_key='image/class/label' has 2 values; expected one",
    )
    key = {"label_key": "image/encoded"}
    yield "no name", folder / "pixels", key, "has 999 bytes that are not the name of a class"
    mixed = [record, serialized(image__encoded=b"x", image__class__label=b"cat")]
    write(folder / "mixed", mixed)
    yield "mixed", folder / "mixed", {}, "mixed, record 1: its label is a number but others"
    write(folder / "named", mixed[1:])
    yield "mixed shards", [good, folder / "named"], {}, "have numbers as label and others names"
    yield "labels from 1", good, {"first_label": 2}, "the label is 1; expected at least first_label"
    yield "first label", good, {"first_label": -1}, "first_label=-1"


def test_each_wrong_shard_is_named_with_its_cure(tmp_path):
    for what, pattern, settings, words in wrong_shards(tmp_path):
        with pytest.raises(UserError) as error:
            tfrecord(pattern, **settings)
        assert words in str(error.value), what
        assert "\n" not in str(error.value), what


def test_warns_where_labels_seem_to_count_from_one(shards, caplog):
    tfrecord(shards / "train-*")
    assert "if classes count from 1, give first_label=1" in caplog.messages[-1]


def test_finds_features_in_any_order_of_any_encoding(tmp_path):
    """By hand: value before key, numbers unpacked, a negative one, unknown fields between."""

    def field(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    image = field(1, field(1, b"image"))  # a Feature of a BytesList
    label = field(3, b"\x08\x07")  # not packed
    negative = field(3, field(1, b"\xff" * 9 + b"\x01"))  # -1
    entries = [
        field(1, field(2, image) + field(1, b"i")),
        b"\x28\x05",  # field 5, an integer
        field(1, field(1, b"l") + field(2, label)),
        field(1, field(1, b"n") + field(2, negative)),
        field(1, field(1, b"e")),
    ]
    # Field 1 may come in parts, which are merged; field 6 is a fixed32.
    record = field(1, entries[0]) + b"\x35abcd" + field(1, entries[2] + entries[3] + entries[4])
    assert tf.train.Example.FromString(record).features.feature["l"].int64_list.value == [7]
    write(tmp_path / "shard", [record])
    source = tfrecord(tmp_path / "shard", image_key="i", label_key="l")
    assert contents(source.images) == [b"image"]
    assert source.labels.tolist() == [7]
    with pytest.raises(UserError, match="the label is -1; expected at least first_label=0"):
        tfrecord(tmp_path / "shard", image_key="i", label_key="n")
    with pytest.raises(UserError, match="image_key='e' has 0 values; expected one"):
        tfrecord(tmp_path / "shard", image_key="e", label_key="l")
