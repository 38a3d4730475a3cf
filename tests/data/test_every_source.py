"""Each source through `run.loader`, to the end of an epoch, on the CPU, one GPU and two."""

import dataclasses
import os
import pathlib
import shutil
import tarfile

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from encoded_images import record

import tfaccel
from tfaccel import preset, sources
from tfaccel.config import DataConfig
from tfaccel.experiment.open_data import open_source

NUM_SYNTHETIC = 23


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Class folders of JPEGs: TFACCEL_TEST_JPEGS, or smooth photographs of various sizes."""
    if "TFACCEL_TEST_JPEGS" in os.environ:
        return pathlib.Path(os.environ["TFACCEL_TEST_JPEGS"])
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for index in range(NUM_SYNTHETIC):
        coarse = PIL.Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        image = coarse.resize(random.integers(70, 140, 2).tolist(), PIL.Image.Resampling.BICUBIC)
        path = root / "ab"[index % 2] / f"{index:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        image.save(path, quality=95)
    return root


def write_tfrecords(folder, root):
    root.mkdir()
    for shard in range(3):
        with tf.io.TFRecordWriter(str(root / f"train-{shard:05d}-of-00003")) as writer:
            for index in range(shard, len(folder), 3):
                writer.write(record(folder.images.read(index), folder.labels[index]))
    return sources.tfrecord(str(root / "train-*"))


def write_tars(folder, root):
    root.mkdir()
    for shard in range(3):
        with tarfile.open(root / f"train-{shard:06d}.tar", "w") as tar:
            for index in range(shard, len(folder), 3):
                label = root / "label"
                label.write_text(str(folder.labels[index]))
                tar.add(folder.images.files[index], f"{index:06d}.jpg")
                tar.add(label, f"{index:06d}.cls")
    return sources.webdataset(str(root / "train-*.tar"))


def write_arrow(folder, root):
    pa = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    root.mkdir()
    images = [folder.images.read(index) for index in range(len(folder))]
    rows = pa.table({"image": pa.array(images, pa.binary()), "label": folder.labels})
    with pa.ipc.new_file(root / "a.arrow", rows.schema) as file:
        file.write_table(rows, max_chunksize=4)
    return sources.arrow(root / "a.arrow")


def write_array_record(folder, root):
    library = pytest.importorskip(
        "array_record.python.array_record_module", reason="the extra `arrayrecord` is not installed"
    )
    root.mkdir()
    writer = library.ArrayRecordWriter(str(root / "a.array_record"), "group_size:1")
    for index in range(len(folder)):
        keys = {"image_key": "image", "label_key": "label"}
        writer.write(record(folder.images.read(index), folder.labels[index], **keys))
    writer.close()
    return sources.array_record(root / "a.array_record", image_key="image", label_key="label")


def write_items(folder, root):
    return sources.random_access([(folder.images.read(i), n) for i, n in enumerate(folder.labels)])


def write_list(folder, root):
    root.mkdir()
    lines = zip(folder.images.files, folder.labels, strict=True)
    (root / "train.csv").write_text("path,label\n" + "\n".join(f"{a},{b}" for a, b in lines))
    return sources.image_list(root / "train.csv")


def write_pairs(folder, root):
    for index, file in enumerate(folder.images.files):
        for side in ("blurry", "sharp"):  # the same image: the pair must stay equal
            path = root / side / "one" / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, path)
    return sources.image_pairs(root / "blurry", root / "sharp")


MAKE = {
    "folders": lambda folder, root: folder,
    "csv": write_list,
    "tfrecord": write_tfrecords,
    "webdataset": write_tars,
    "array_record": write_array_record,
    "random_access": write_items,
    "arrow": write_arrow,
    "pairs": write_pairs,
}


def epochs_of(run, source, num_epochs=2, **settings):
    """Each epoch's real (x, y), in order."""
    settings = {"image_size": (32, 32), "global_batch_size": 10, "augment": "imagenet"} | settings
    loader = run.loader(source, shuffle=True, **settings)
    local = run.strategy.experimental_local_results
    epochs = []
    for _ in range(num_epochs):
        batches = [[np.concatenate(local(each)) for each in batch] for batch in loader]
        x, y, weight = (np.concatenate(each) for each in zip(*batches, strict=True))
        epochs.append((x[weight > 0], y[weight > 0]))
    return epochs


def check_epochs(epochs, source):
    for x, y in epochs:
        assert len(x) == len(source)
        if source.labels is None:
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_array_equal(np.bincount(y), np.bincount(source.labels))
    if source.labels is None or len(set(source.labels.tolist())) < len(source):
        assert np.abs(epochs[0][0] - epochs[1][0]).max() > 0.05  # another order, other windows


@pytest.mark.parametrize("name", MAKE)
def test_on_the_cpu(setup, photos, tmp_path, name):
    source = MAKE[name](sources.class_folders(photos), tmp_path / "data")
    epochs = epochs_of(setup(), source)
    check_epochs(epochs, source)
    # Another loader: its own decoder and resize, the same examples and windows.
    for (x, y), (other, labels) in zip(
        epochs, epochs_of(setup(), source, loader="dali_cpu"), strict=True
    ):
        assert np.abs(x - other).mean() < 0.02
        if source.labels is not None:
            np.testing.assert_array_equal(y, labels)


def test_arrays(setup, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (NUM_SYNTHETIC, 16, 12, 3), dtype=np.uint8)
    labels = np.arange(NUM_SYNTHETIC)
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    settings = {"augment": "none", "image_size": (16, 12)}
    for x, y in epochs_of(setup(), sources.arrays(tmp_path), **settings):
        np.testing.assert_allclose(x, images[y] / np.float32(255), atol=1e-6)
        assert sorted(y) == labels.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKE)
def test_on_a_gpu(photos, tmp_path, name):
    source = MAKE[name](sources.class_folders(photos), tmp_path / "data")
    run = tfaccel.setup(gpu_ids=[0])
    epochs = epochs_of(run, source, loader="dali_gpu")
    check_epochs(epochs, source)
    # nvJPEG against libjpeg-turbo, the same windows: their rounding differs, and chroma at edges.
    for (x, y), (other, labels) in zip(
        epochs, epochs_of(run, source, loader="dali_cpu"), strict=True
    ):
        assert np.abs(x - other).mean() < 0.01
        if source.labels is not None:
            np.testing.assert_array_equal(y, labels)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", MAKE)
def test_two_gpus_see_what_one_sees(photos, tmp_path, name):
    source = MAKE[name](sources.class_folders(photos), tmp_path / "data")
    run = tfaccel.setup(gpu_ids=[0, 1])
    epochs = epochs_of(run, source, loader="dali_gpu")
    check_epochs(epochs, source)
    plan = run.loader(
        source, image_size=(32, 32), global_batch_size=10, augment="imagenet", shuffle=True
    ).data.plan
    if source.labels is not None:
        for epoch, (_, y) in enumerate(epochs):
            order = np.concatenate(
                [
                    rows.ids[rows.real]
                    for step in range(plan.num_steps)
                    for replica in range(2)
                    for rows in [plan.rows(epoch=epoch, step=step, replica_index=replica)]
                ]
            )
            np.testing.assert_array_equal(y, source.labels[order])


@pytest.mark.gpu
def test_kept_in_gpu_memory_is_what_is_decoded_anew(photos):
    run = tfaccel.setup(gpu_ids=[0])
    source = sources.class_folders(photos)
    settings = {"augment": preset("cifar", rotation_degrees=10.0)}
    kept = epochs_of(run, source, loader="memory", **settings)
    anew = epochs_of(run, source, loader="dali_cpu", **settings)
    for (x, y), (other, labels) in zip(kept, anew, strict=True):
        np.testing.assert_array_equal(y, labels)
        assert np.abs(x - other).mean() < 0.01


@pytest.mark.parametrize(
    ("kind", "write", "pattern"),
    [("tfrecord", write_tfrecords, "train-*"), ("webdataset", write_tars, "train-*.tar")],
)
def test_a_config_chooses_classes_of_shards(photos, tmp_path, kind, write, pattern):
    """The names are those of the numbers, of which there are four here."""
    folder = sources.class_folders(photos)
    folder = dataclasses.replace(folder, labels=np.arange(len(folder), dtype=np.int32) % 4)
    whole = write(folder, tmp_path / kind)
    data = DataConfig(root=str(tmp_path / kind), source=kind, train=pattern, classes="3,0")
    found = open_source(data, "train")
    wanted = np.flatnonzero(np.isin(whole.labels, (3, 0)))
    assert [found.images.name(each) for each in range(len(found))] == [
        whole.images.name(each) for each in wanted
    ]
    assert found.labels.tolist() == [{3: 0, 0: 1}[each] for each in whole.labels[wanted].tolist()]
    assert found.class_names == ("3", "0")
