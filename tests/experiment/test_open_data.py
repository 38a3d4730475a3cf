"""What a config says of its source reaches it."""

import io
import tarfile

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from tfaccel import UserError
from tfaccel.config import DataConfig, default_config, parse
from tfaccel.data import sources
from tfaccel.data.digits import ensure_digits
from tfaccel.data.sources import class_folders
from tfaccel.experiment.open_data import open_loader, open_source, open_sources


@pytest.fixture(scope="module")
def png():
    file = io.BytesIO()
    PIL.Image.new("L", (4, 4)).save(file, "png")
    return file.getvalue()


def test_the_features_of_tfrecords(tmp_path, png):
    with tf.io.TFRecordWriter(str(tmp_path / "train-0")) as writer:
        for label in (3, 1, 2):
            features = {
                "picture": tf.train.Feature(bytes_list=tf.train.BytesList(value=[png])),
                "kind": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    settings = {"root": str(tmp_path), "source": "tfrecord", "train": "train-*"}
    found = open_source(
        DataConfig(**settings, image_key="picture", label_key="kind", first_label=1), "train"
    )
    np.testing.assert_array_equal(found.labels, [2, 0, 1])
    assert found.images.read(0) == png
    with pytest.raises(UserError, match="there is no image_key='image/encoded'"):
        open_source(DataConfig(**settings), "train")


def test_the_extensions_of_webdatasets(tmp_path, png):
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        for name, data in (("0.img", png), ("0.json", b'{"label": 1}')):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    settings = {"root": str(tmp_path), "source": "webdataset", "train": "train.tar"}
    found = open_source(DataConfig(**settings, image_ext="img", label_ext="json"), "train")
    np.testing.assert_array_equal(found.labels, [1])
    assert found.images.read(0) == png


@pytest.mark.parametrize(
    ("field", "source"),
    [("image_key", "tfrecord"), ("label_ext", "webdataset"), ("targets", "pairs")],
)
def test_what_is_another_sources_is_refused(field, source):
    value = "mask" if field == "targets" else "x"
    said = f"{field}='{value}' needs source='{source}'(| or 'array_record'), but source="
    with pytest.raises(UserError, match=said):
        DataConfig(**{field: value})


@pytest.mark.parametrize(
    ("settings", "times"), [({"validation_split": 0.5}, 1), ({"test": "train"}, 2)]
)
def test_images_are_listed_once_for_both_parts(tmp_path, png, monkeypatch, settings, times):
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
    listed = []

    def listing(*args, **kwargs):
        listed.append(kwargs)
        return class_folders(*args, **kwargs)

    monkeypatch.setattr(sources, "class_folders", listing)
    data = DataConfig(root=str(tmp_path), train="train", **settings)
    found = open_sources(data)
    assert len(listed) == times
    for split, source in zip(("train", "test"), found, strict=True):
        alone = open_source(data, split)
        np.testing.assert_array_equal(source.labels, alone.labels)
        assert source.class_names == alone.class_names == ("a", "b")


def test_only_training_images_are_sampled_by_class(setup):
    config = default_config()
    config.data.update(image_size=(8, 8), channels=1, global_batch_size=64)
    config.data.update(classes="7,1,8", sampling="balanced", train=".", validation_split=0.5)
    config.data.root = str(ensure_digits() / "training")
    config = parse(config)
    run = setup(gpu_ids=(), xla=False)
    train, test = (open_loader(run, config, split) for split in ("train", "test"))
    assert train.class_names == test.class_names == ("7", "1", "8")
    assert (train.data.plan.sampling.how, test.data.plan.sampling) == ("balanced", None)
    rows = [
        train.data.feed(0).rows(step).ids[train.data.feed(0).rows(step).real]
        for step in range(train.num_batches)
    ]
    counts = np.bincount(train.data.source.labels[np.concatenate(rows)])
    assert counts.sum() == train.num_examples
    assert counts.max() - counts.min() <= 1
    assert len(set(np.bincount(train.data.source.labels))) > 1  # they are not equal in the data


@pytest.mark.parametrize("heads", ["path,y,x", "path,x", "path,x,z"])
def test_numbers_of_test_images_are_those_of_the_training_in_their_order(tmp_path, png, heads):
    (tmp_path / "0.png").write_bytes(png)
    for name, columns in (("train", "path,x,y"), ("test", heads)):
        values = ["0.png", "1.5", "2.5"][: columns.count(",") + 1]
        (tmp_path / f"{name}.csv").write_text(f"{columns}\n{','.join(values)}\n")
    settings = {"root": str(tmp_path), "source": "csv", "train": "train.csv", "test": "test.csv"}
    data = DataConfig(**settings, label_columns="*", task="regression")
    said = f"numbers of the test images are {heads[5:].replace(',', ', ')}.*training are x, y"
    with pytest.raises(UserError, match=said):
        open_sources(data)
    train, _ = open_sources(DataConfig(**(settings | {"test": "train.csv"}), label_columns="*"))
    assert train.target_names == ("x", "y")
    (tmp_path / "train.csv").write_text("path,label\n0.png,1.5\n")
    (tmp_path / "test.csv").write_text("path,target\n0.png,2\n")
    _, test = open_sources(DataConfig(**settings))
    np.testing.assert_array_equal(test.labels, [[2]])
