"""Datasets of TFDS as a source, in the form that its version 4.9 writes.

The slow test at the end uses that library, if it is installed.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from encoded_images import png
from test_array_record import example, write

from tfaccel import UserError, sources
from tfaccel.config import DataConfig
from tfaccel.data.there import check_there
from tfaccel.experiment.open_data import open_sources

LENGTHS = {"train": [4, 3], "test": [2]}


def saved(folder, kind="tfrecord", **more):
    """Writes a dataset named "pets", with the classes cat, bird and dog."""
    folder.mkdir(parents=True)
    splits = [{"name": s, "shardLengths": list(map(str, n))} for s, n in LENGTHS.items()]
    info = {"name": "pets", "version": "1.0.0", "fileFormat": kind, "splits": splits}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    kinds = {"image": {"image": {}}, "label": {"classLabel": {"numClasses": "3"}}}
    features = {"id": {"text": {}}} | kinds | more
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    (folder / "label.labels.txt").write_text("cat\nbird\ndog\n")
    for split, lengths in LENGTHS.items():
        first = 0
        for number, length in enumerate(lengths):
            path = folder / f"pets-{split}.{kind}-{number:05d}-of-{len(lengths):05d}"
            records = [example(index) for index in range(first, first + length)]
            if kind == "tfrecord":
                with tf.io.TFRecordWriter(str(path)) as writer:
                    list(map(writer.write, records))
            else:
                write(path, records)
            first += length
    return folder


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_images_labels_and_names(tmp_path, kind):
    source = sources.tfds(saved(tmp_path / "pets" / "1.0.0", kind), "train")
    assert [source.images.read(index) for index in range(7)] == list(map(png, range(7)))
    assert source.labels.tolist() == [index % 3 for index in range(7)]
    assert source.class_names == ("cat", "bird", "dog")


def test_by_config(tmp_path):
    settings = {"root": str(saved(tmp_path / "1.0.0")), "source": "tfds"}
    data = DataConfig(**settings, train="train", test="test", image_column="image")
    check_there(data, "test")
    train, test = open_sources(data)
    assert (len(train), len(test)) == (7, 2)
    assert test.class_names == train.class_names  # no dog is in the test images
    with pytest.raises(UserError, match="path_column='x' needs source='csv'"):
        DataConfig(source="tfds", path_column="x")


def test_no_names(tmp_path):
    folder = saved(tmp_path / "1.0.0")
    (folder / "label.labels.txt").unlink()
    assert sources.tfds(folder, "test").class_names == ("0", "1", "2")


def test_wrong_folders(tmp_path):
    folder = saved(tmp_path / "1.0.0", mask={"image": {}})
    for place, split, said in (
        (tmp_path / "none", "train", "none does not exist"),
        (tmp_path, "train", "has no dataset_info.json; expected the folder of one version"),
        (folder, "trian", "has no split 'trian'; did you mean 'train'"),
        (folder, "train", r"of which several could be it \(image, mask\); give image_column"),
    ):
        with pytest.raises(UserError, match=said):
            sources.tfds(place, split)
    with pytest.raises(UserError, match=r"label_column='class', but .* has the features id,"):
        sources.tfds(folder, "train", image_column="image", label_column="class")
    file = folder / "pets-train.tfrecord-00001-of-00002"
    with tf.io.TFRecordWriter(str(file)) as writer:
        writer.write(example(0))
    with pytest.raises(UserError, match=r"has 5 images, but dataset_info.json says 7"):
        sources.tfds(folder, "train", image_column="image")
    file.unlink()
    with pytest.raises(UserError, match="00001-of-00002 does not exist, one of 1 missing files"):
        sources.tfds(folder, "train")
    info = (folder / "dataset_info.json").read_text()
    (folder / "dataset_info.json").write_text(info.replace('"tfrecord"', '"parquet"'))
    with pytest.raises(UserError, match="format parquet; expected tfrecord or array_record"):
        sources.tfds(folder, "train")
    (folder / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset_info.json cannot be read"):
        sources.tfds(folder, "train")


# The builder looks for its own metadata in the folder of its module.
BUILDER = """
import sys
import numpy as np, tensorflow_datasets as tfds

class Pets(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=["dog", "cat"])}))
    def _split_generators(self, manager):
        return {"train": self._generate_examples(9)}
    def _generate_examples(self, count):
        for index in range(count):
            yield index, {"image": np.full((4 + index, 5, 3), index, np.uint8), "label": index % 2}

Pets(data_dir=sys.argv[1], file_format=sys.argv[2]).download_and_prepare()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_what_the_library_writes(tmp_path, kind):
    pytest.importorskip("tensorflow_datasets", reason="tensorflow_datasets is not installed")
    program = [sys.executable, "-c", BUILDER, str(tmp_path), kind]
    subprocess.run(program, check=True, capture_output=True, timeout=300)
    source = sources.tfds(tmp_path / "pets" / "1.0.0", "train")
    assert source.class_names == ("dog", "cat")
    heights = [int.from_bytes(source.images.read(index)[20:24]) for index in range(9)]
    assert sorted(heights) == list(range(4, 13))
    np.testing.assert_array_equal(source.labels, np.array(heights) % 2)
