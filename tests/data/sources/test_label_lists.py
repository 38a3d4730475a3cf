"""Several classes an image, and numbers, in TFRecord and WebDataset shards."""

import io
import json
import tarfile

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from tfaccel import UserError
from tfaccel.config import DataConfig
from tfaccel.data.sources import tfrecord, webdataset
from tfaccel.experiment.open_data import open_sources


@pytest.fixture(scope="module")
def png():
    file = io.BytesIO()
    PIL.Image.new("L", (4, 4)).save(file, "png")
    return file.getvalue()


def write_records(path, png, labels):
    """Writes a record for each label: a list of whole numbers, floats or names."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for values in labels:
            feature = tf.train.Feature()
            if values and isinstance(values[0], str):
                feature.bytes_list.value.extend(each.encode() for each in values)
            elif values and isinstance(values[0], float):
                feature.float_list.value.extend(values)
            else:
                feature.int64_list.value.extend(values)
            image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[png]))
            both = {"image/encoded": image, "image/class/label": feature}
            example = tf.train.Example(features=tf.train.Features(feature=both))
            writer.write(example.SerializeToString())
    return path


def write_tar(path, png, labels, extension):
    """Writes a sample for each label, which is the text of a file."""
    with tarfile.open(path, "w") as tar:
        for number, text in enumerate(labels):
            for name, data in (("png", png), (extension, text.encode())):
                member = tarfile.TarInfo(f"{number}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


HOT = [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("labels", "settings", "names"),
    [
        ([[0, 1], [], [2]], {}, ("0", "1", "2")),
        ([[1, 2], [], [3]], {"first_label": 1}, ("0", "1", "2")),
        ([[0, 1], [], [2]], {"class_names": ("a", "b", "c")}, ("a", "b", "c")),
        ([["b", "é"], [], ["x"]], {}, ("b", "x", "é")),
        ([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]], {}, ("0", "1", "2")),
    ],
)
def test_records_with_several_classes(tmp_path, png, labels, settings, names):
    path = write_records(tmp_path / "train-0", png, labels)
    for _ in range(2):  # from the shard, then from its index
        source = tfrecord(path, task="multilabel", **settings)
        assert (source.task, source.class_names) == ("multilabel", names)
        wanted = np.array(HOT)[:, [0, 2, 1]] if "é" in names else HOT
        np.testing.assert_array_equal(source.labels, np.array(wanted, np.float32))
        assert source.labels.dtype == "float32"
        assert source.images.read(2) == png


@pytest.mark.parametrize("labels", [[[0.5], [-1.25], [3.0]], [[5], [-2], [3]], [[0.1, 2.0]] * 3])
def test_records_with_numbers(tmp_path, png, labels):
    path = write_records(tmp_path / "train-0", png, labels)
    source = tfrecord(path, task="regression")
    assert source.task == "regression"
    assert source.target_names == (("label",) if len(labels[0]) == 1 else ("label 0", "label 1"))
    np.testing.assert_array_equal(source.labels, np.array(labels, np.float32))


@pytest.mark.parametrize(
    ("labels", "settings", "words"),
    [
        ([[0, 1], [2]], {}, "has 2 values; expected one. For several classes an image, use task="),
        ([[0.5], [1.0]], {}, "is float; expected bytes, or whole numbers for labels. For a regr"),
        ([[0.5], [1.0, 2.0]], {"task": "regression"}, "2 labels; expected as many for each image"),
        ([[0.5], [float("nan")]], {"task": "regression"}, "column label is 'nan'; expected a fini"),
        ([[1.0], [0.5]], {"task": "multilabel"}, "the column 0 is '0.5'; expected 0 or 1"),
        ([[3], [-1]], {"task": "multilabel"}, "the label is -1; expected the number of a class, f"),
        ([[3]], {"task": "multilabel", "class_names": "abc"}, "the label is 3; expected the numb"),
        ([["d"]], {"task": "multilabel", "class_names": "abc"}, "'d', which is not among the 3"),
        ([["d"]], {"task": "regression"}, "the column label is 'd'; expected a finite number"),
        ([["d"]], {"task": "some"}, "task='some'; expected one of: classes, multilabel, regressi"),
    ],
)
def test_the_record_at_fault_is_named(tmp_path, png, labels, settings, words):
    path = write_records(tmp_path / "train-0", png, labels)
    with pytest.raises(UserError) as error:
        tfrecord(path, **settings)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("extension", "texts", "names"),
    [
        ("cls", ["0 1", "", "2\n"], ("0", "1", "2")),
        ("cls", ["a\nb", "", "c"], ("a", "b", "c")),
        ("json", [json.dumps({"label": each}) for each in (["a", "b"], [], "c")], ("a", "b", "c")),
        ("json", [json.dumps({"label": each}) for each in ([0, 1], [], 2)], ("0", "1", "2")),
    ],
)
def test_tars_with_several_classes(tmp_path, png, extension, texts, names):
    path = write_tar(tmp_path / "train.tar", png, texts, extension)
    for _ in range(2):
        source = webdataset(path, label_ext=extension, task="multilabel")
        assert (source.task, source.class_names) == ("multilabel", names)
        np.testing.assert_array_equal(source.labels, np.array(HOT, np.float32))


def test_tars_with_numbers(tmp_path, png):
    path = write_tar(tmp_path / "a.tar", png, ["0.5 1", "-2 3e1\n"], "cls")
    source = webdataset(path, task="regression")
    assert source.target_names == ("label 0", "label 1")
    np.testing.assert_array_equal(source.labels, np.array([[0.5, 1], [-2, 30]], np.float32))
    path = write_tar(tmp_path / "b.tar", png, ['{"label": 0.5}', '{"label": 2}'], "json")
    source = webdataset(path, label_ext="json", task="regression")
    np.testing.assert_array_equal(source.labels, np.array([[0.5], [2]], np.float32))
    for text, words in (
        ("x", "holds b'x'; expected numbers, with blanks"),
        ("nan", "is 'nan'; exp"),
    ):
        path = write_tar(tmp_path / f"{text}.tar", png, [text], "cls")
        with pytest.raises(UserError, match=words):
            webdataset(path, task="regression")


def test_a_config_opens_both_parts_with_the_classes_of_training(tmp_path, png):
    write_records(tmp_path / "train-0", png, [["a", "b"], ["c"]])
    write_records(tmp_path / "test-0", png, [["c"], []])
    settings = {"source": "tfrecord", "train": "train-*", "test": "test-*", "task": "multilabel"}
    train, test = open_sources(DataConfig(root=str(tmp_path), **settings))
    assert train.class_names == test.class_names == ("a", "b", "c")
    np.testing.assert_array_equal(test.labels, [[0, 0, 1], [0, 0, 0]])
    with pytest.raises(UserError, match=r"task='regression' with source='folders'; expected so"):
        DataConfig(task="regression")
