"""ArrayRecord files as a source, written by their own library."""

import importlib

import numpy as np
import pytest
import tensorflow as tf
from encoded_images import epochs_of, png

from tfaccel import UserError, sources
from tfaccel.config import DataConfig
from tfaccel.data.scan.files import scan_files
from tfaccel.data.there import check_there
from tfaccel.experiment.open_data import open_source

NUM = 11
module = importlib.import_module("tfaccel.data.sources.array_record")  # a function has its name


def example(index, *, image="image", label="label", value=None):
    value = [index % 3] if value is None else value
    features = {
        "id": tf.train.Feature(bytes_list=tf.train.BytesList(value=[str(index).encode()])),
        image: tf.train.Feature(bytes_list=tf.train.BytesList(value=[png(index)])),
        label: tf.train.Feature(int64_list=tf.train.Int64List(value=value)),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(path, records, options="group_size:1"):
    library = pytest.importorskip(
        "array_record.python.array_record_module", reason="the extra `arrayrecord` is not installed"
    )
    writer = library.ArrayRecordWriter(str(path), options)
    for each in records:
        writer.write(each)
    writer.close()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files of 5 and 6 records."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "a.array_record", map(example, range(5)))
    write(tmp_path / "b.array_record", map(example, range(5, NUM)), "group_size:4,zstd:3")
    return tmp_path


def opened(files, **settings):
    settings = {"image_key": "image", "label_key": "label"} | settings
    return sources.array_record(files / "*.array_record", **settings)


def test_images_and_labels(files, monkeypatch):
    for _ in range(2):
        source = opened(files)
        assert [source.images.read(index) for index in range(NUM)] == list(map(png, range(NUM)))
        assert source.labels.tolist() == [index % 3 for index in range(NUM)]
        assert source.class_names == ("0", "1", "2")
        assert source.images.name(7).endswith("b.array_record[record 2]")
        assert source.taken(np.array([7, 3])).images.read(0) == png(7)
        monkeypatch.setattr(module, "row_of", None)  # the second start finds the results
    assert opened(files).facts() == source.facts()


@pytest.mark.parametrize("loader", ["tf_data", pytest.param("dali_cpu", marks=pytest.mark.slow)])
def test_epochs_are_those_of_tfrecords(setup, files, loader):
    with tf.io.TFRecordWriter(str(files / "c.tfrecord")) as writer:
        for index in range(NUM):
            writer.write(example(index))
    records = sources.tfrecord(files / "c.tfrecord", image_key="image", label_key="label")
    ours, theirs = (epochs_of(setup(), each, loader=loader) for each in (opened(files), records))
    resumed = epochs_of(setup(), opened(files), loader=loader, first=1)
    for (x, y), (other, labels) in zip(ours + resumed, theirs + theirs[1:], strict=True):
        np.testing.assert_array_equal(x, other)
        np.testing.assert_array_equal(y, labels)


def test_the_audit(files):
    bad = example(0).replace(png(0)[:8], b"notapng!")
    write(files / "c.array_record", [example(1), bad])
    report = scan_files(opened(files), num_workers=1, progress=False)
    assert report.bad_ids.tolist() == [NUM + 1]
    assert scan_files(opened(files), num_workers=1, progress=False).num_reused == NUM + 2


def test_by_config(files):
    settings = {"root": str(files), "source": "array_record", "train": "*.array_record"}
    data = DataConfig(**settings, image_key="image", label_key="label", task="multilabel")
    check_there(data, "train")
    source = open_source(data, "train")
    np.testing.assert_array_equal(source.labels.argmax(1), [index % 3 for index in range(NUM)])


def test_wrong_files(files):
    data = (files / "a.array_record").read_bytes()
    for content, said in (
        (b"no records", "has no records, is cut short, or is no ArrayRecord file"),
        (data[: len(data) // 2], "has no records, is cut short"),
    ):
        (files / "d.array_record").write_bytes(content)
        with pytest.raises(UserError, match=f"d.array_record {said}"):
            opened(files)
    write(files / "d.array_record", [b"\xff\xff"])
    with pytest.raises(UserError, match=r"d.array_record, record 0 is not a tf.train.Example"):
        opened(files)
    named = tf.train.Example.FromString(example(1))
    named.features.feature["label"].bytes_list.value.append(b"cat")
    write(files / "d.array_record", [example(0), named.SerializeToString()])
    with pytest.raises(UserError, match=r"d.array_record, record 1: its label is a number but"):
        opened(files)
    (files / "d.array_record").unlink()
    words = r"there is no image_key='picture'; expected one of.* --config.data.image_key=image, "
    with pytest.raises(UserError, match=words):
        opened(files, image_key="picture")


def test_a_file_that_becomes_shorter(files):
    source = opened(files)
    write(files / "a.array_record", [example(0)])
    with pytest.raises(OSError, match=r"a.array_record, record 3"):
        source.images.read(3)


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_installed", lambda library: False)
    with pytest.raises(UserError, match=r"need array_record; add the extra: .*\[arrayrecord\]"):
        sources.array_record(tmp_path / "x")
