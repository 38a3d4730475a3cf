"""Arrow and Parquet files as sources: as Hugging Face's library writes them, and as others do.

The files are written by pyarrow, in the form that `save_to_disk` of datasets 5.2 gives them. The
slow test at the end uses that library, if it is installed.
"""

import io
import json
import os
import shutil

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError, sources
from tfaccel.config import DataConfig
from tfaccel.data.sources import arrow_files
from tfaccel.experiment.open_data import open_sources

pa = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
parquet = pytest.importorskip("pyarrow.parquet")

NAMES = ["cat", "dog"]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(index):
    file = io.BytesIO()
    PIL.Image.fromarray(np.full((4 + index, 5, 3), index, np.uint8)).save(file, "PNG")
    return file.getvalue()


def table(labels, *, first=0, features=True, label=None, images=None, **columns):
    """A table as datasets makes it; each image has a size of its own."""
    count = len(labels)
    images = images or [{"bytes": png(first + i), "path": None} for i in range(count)]
    arrays = {"image": pa.array(images, IMAGE), "label": pa.array(labels, label), **columns}
    notes = {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}
    notes = {b"huggingface": json.dumps({"info": {"features": notes}}).encode()}
    return pa.table(arrays).replace_schema_metadata(notes if features else None)


def write(path, rows, *, batch=3, is_file=False, options=None):
    """Writes an Arrow stream, or an Arrow file, in batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, new(file, rows.schema, options=options) as stream:
        stream.write_table(rows, max_chunksize=batch)
    return path


def saved(folder, *tables):
    """A folder as `save_to_disk` leaves it."""
    names = [f"data-{index:05d}-of-{len(tables):05d}.arrow" for index in range(len(tables))]
    for name, each in zip(names, tables, strict=True):
        write(folder / name, each)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def check(source, wanted, *, labels, class_names):
    assert [source.images.read(i) for i in range(len(source))] == wanted
    assert source.labels.tolist() == labels
    assert source.labels.dtype == np.int32
    assert source.class_names == class_names


ALL = [png(each) for each in range(7)]


def test_a_saved_dataset_is_read_where_it_is(tmp_path):
    folder = saved(tmp_path / "pets", table([0, 1, 0, 1]), table([1, 1, 0], first=4))
    source = sources.arrow(folder)
    check(source, ALL, labels=[0, 1, 0, 1, 1, 1, 0], class_names=("cat", "dog"))
    assert source.images.folder == str(folder)
    assert not (tmp_path / "cache").exists()
    assert "data-00001-of-00002.arrow[bytes " in source.images.name(5)
    # The next start reads the kept index, which notices another file.
    hidden = sorted(each.name for each in folder.iterdir() if each.name.startswith("."))
    assert len(hidden) == 2
    check(sources.arrow(folder), ALL, labels=source.labels.tolist(), class_names=("cat", "dog"))
    write(folder / "data-00001-of-00002.arrow", table([0, 0, 0], first=4))
    assert sources.arrow(folder).labels.tolist() == [0, 1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("is_file", [True, False])
def test_files_of_other_programs_have_numbers_or_names(tmp_path, is_file):
    images = pa.array(ALL[:5], pa.large_binary())
    rows = pa.table({"label": ["dog", "ant", "dog", "cat", "ant"], "picture": images})
    write(tmp_path / "a.arrow", rows.slice(1), is_file=is_file)  # an offset in the buffers
    source = sources.arrow(str(tmp_path / "*.arrow"))
    check(source, ALL[1:5], labels=[0, 2, 1, 0], class_names=("ant", "cat", "dog"))
    numbers = rows.set_column(0, "label", pa.array([3, 0, 3, 1, 0], pa.uint8()))
    write(tmp_path / "b.arrow", numbers, is_file=is_file)
    source = sources.arrow(tmp_path / "b.arrow", class_names=[*"abcd"])
    check(source, ALL[:5], labels=[3, 0, 3, 1, 0], class_names=tuple("abcd"))


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_parquet_is_unpacked_once(tmp_path, compression, monkeypatch):
    parts = table([0, 1, 0, 1]), table([1, 1, 0], first=4)
    for index, each in enumerate(parts):
        file = tmp_path / "data" / f"train-{index}.parquet"
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(each, file, compression=compression, row_group_size=2)
    pattern = str(tmp_path / "data" / "train-*.parquet")
    source = sources.arrow(pattern)
    check(source, ALL, labels=[0, 1, 0, 1, 1, 1, 0], class_names=("cat", "dog"))
    with monkeypatch.context() as patch:
        patch.setattr(arrow_files, "_unpack", None)
        assert sources.arrow(pattern).images.digest() == source.images.digest()
    # The same files elsewhere, as on another host, are the same examples.
    shutil.copytree(tmp_path / "data", tmp_path / "other" / "data")
    other = sources.arrow(str(tmp_path / "other" / "data" / "train-*"))
    assert other.images.digest() == source.images.digest()
    parquet.write_table(table([0, 0, 0], first=4), file)
    assert sources.arrow(pattern).labels.tolist() == [0, 1, 0, 1, 0, 0, 0]


def test_a_full_disk_is_named_before_anything_is_written(tmp_path, monkeypatch):
    parquet.write_table(table([0, 1]), tmp_path / "a.parquet")
    monkeypatch.setattr("tfaccel.common.disk_errors.free_bytes", lambda _: 10)
    with pytest.raises(UserError, match=r"a\.parquet, which is unpacked once, needs .*XDG_CACHE"):
        sources.arrow(tmp_path / "a.parquet")
    assert not (tmp_path / "cache").exists()


def test_columns_are_chosen_by_what_they_hold(tmp_path):
    second = pa.array([0, 1, 2])
    rows = table([0, 1, 1], coarse=second, mask=pa.array(ALL[3:6], pa.binary()))
    write(tmp_path / "a.arrow", rows)
    with pytest.raises(UserError, match="several columns with encoded images: image, mask; give"):
        sources.arrow(tmp_path / "a.arrow")
    source = sources.arrow(tmp_path / "a.arrow", image_column="mask", label_column="coarse")
    check(source, ALL[3:6], labels=[0, 1, 2], class_names=("0", "1", "2"))
    pairs = sources.arrow(tmp_path / "a.arrow", target_column="mask")
    assert [pairs.targets.read(each) for each in range(3)] == ALL[3:6]
    assert [pairs.images.read(each) for each in range(3)] == ALL[:3]
    assert pairs.labels is None


def test_lists_and_numbers_are_labels_of_other_tasks(tmp_path):
    images = pa.array(ALL[:3], pa.binary())
    rows = pa.table({"image": images, "label": [["a"], ["a", "b"], []], "size": [0.5, 2.0, -1.0]})
    write(tmp_path / "a.arrow", rows)
    tags = sources.arrow(tmp_path / "a.arrow", task="multilabel")
    assert (tags.class_names, tags.labels.tolist()) == (("a", "b"), [[1, 0], [1, 1], [0, 0]])
    sizes = sources.arrow(tmp_path / "a.arrow", task="regression", label_column="size")
    assert sizes.labels.tolist() == [[0.5], [2.0], [-1.0]]
    assert sizes.target_names == ("size",)


def without_bytes():
    return table([0, 1], images=[{"bytes": None, "path": "a.png"}] * 2)


@pytest.mark.parametrize(
    ("made", "settings", "words"),
    [
        (without_bytes, {}, "2 rows with the path of an image .*by dataset.save_to_disk"),
        (lambda: table([0, 1]), {"image_column": "photo"}, "has the columns"),
        (lambda: table([0, 1]), {"label_column": "kind"}, "has the columns"),
        (lambda: table([0, 1]), {"image_column": "label"}, "expected encoded images"),
        (lambda: table([0, 2]), {}, "expected the number of a class"),
        (lambda: table([0, -1]), {}, "row 1, 'label': the label is -1"),
    ],
)
def test_messages_name_the_parquet_file_and_not_the_unpacked_one(tmp_path, made, settings, words):
    parquet.write_table(made(), tmp_path / "mine.parquet")
    with pytest.raises(UserError, match=words) as error:
        sources.arrow(tmp_path / "mine.parquet", **settings)
    assert str(tmp_path / "mine.parquet") in str(error.value)
    assert ".parquet.arrow" not in str(error.value)


WRONG = [
    (lambda: table([0, -1]), {}, r"row 1, 'label': the label is -1; .*kept secret in a test set"),
    (lambda: table([0, None]), {}, "row 1, 'label': the label is None; expected the number or the"),
    (lambda: table([0, 2]), {}, "the label is 2; expected the number of a class, from 0, below 2"),
    (without_bytes, {}, "column 'image' of .* has 2 rows with the path of an image and not its"),
    (lambda: table([0, 1], images=[None] * 2), {}, "has 2 rows without an image"),
    (lambda: table([0, 1]), {"image_column": "photo"}, "image_column='photo'; .* has the columns"),
    (
        lambda: table([0, 1]),
        {"image_column": "label"},
        "has values of type int64; expected encoded",
    ),
    (lambda: table([0, 1]).drop(["label"]), {}, "has no labels; give label_column, one of its col"),
    (lambda: table([]), {}, "has no rows"),
    (
        lambda: table([[0.5, None]] * 2),
        {"task": "regression"},
        r"label is \[0.5, None\]; expected n",
    ),
]


@pytest.mark.parametrize(("make", "settings", "words"), WRONG, ids=[each[2] for each in WRONG])
def test_each_mistake_is_one_sentence(tmp_path, make, settings, words):
    write(tmp_path / "a.arrow", make())
    with pytest.raises(UserError, match=words):
        sources.arrow(tmp_path / "a.arrow", **settings)


def test_other_files_and_folders_are_refused(tmp_path):
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    large = table([0, 1], images=[{"bytes": bytes(10**5), "path": ""}] * 2)
    write(tmp_path / "packed.arrow", large, options=options)
    write(tmp_path / "whole.arrow", large)
    with open(tmp_path / "whole.arrow", "r+b") as file:
        file.truncate(os.path.getsize(file.name) // 2)
    (tmp_path / "a.png").write_bytes(ALL[0])
    parquet.write_table(table([0]), tmp_path / "cut.parquet")
    with open(tmp_path / "cut.parquet", "r+b") as file:
        file.truncate(100)
    write(tmp_path / "mixed" / "a.arrow", table([0]))
    write(tmp_path / "mixed" / "b.arrow", table([0]).rename_columns(["image", "class"]))
    saved(tmp_path / "all" / "test", table([0]))
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    for name, words in (
        ("packed.arrow", "is compressed within the Arrow file"),
        ("whole.arrow", "is not a whole Arrow file"),
        ("a.png", "is not a whole Arrow file"),
        ("cut.parquet", "is not a whole Parquet file"),
        ("mixed/*", r"b.arrow has the columns image, class, but .*a.arrow has image, label"),
        (
            "all",
            r"is a dataset of the splits test; give the folder of one of them, e.g. .*all/test",
        ),
        ("mixed", r"is a folder without state.json; expected a folder that save_to_disk"),
        ("nowhere/*", "no shard matches"),
    ):
        with pytest.raises(UserError, match=words):
            sources.arrow(str(tmp_path / name))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.arrow", table([0]))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"a\.arrow needs pyarrow, .*add the extra .*parquet"):
        sources.arrow(tmp_path / "a.arrow")


def test_a_config_opens_both_splits(tmp_path):
    fine = pa.array([1, 0, 0])
    saved(tmp_path / "pets" / "train", table([0, 1, 1], fine=fine))
    saved(tmp_path / "pets" / "test", table([1, 0, 1], fine=fine))
    settings = {"root": str(tmp_path / "pets"), "source": "arrow", "train": "train", "test": "test"}
    train, test = open_sources(DataConfig(**settings))
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 1], [1, 0, 1])
    train, _ = open_sources(DataConfig(**settings, label_column="fine", image_column="image"))
    assert train.labels.tolist() == [1, 0, 0]
    with pytest.raises(UserError, match="image_column='image' needs source='tfds' or 'arrow', but"):
        DataConfig(image_column="image")
    with pytest.raises(UserError, match="path_column='x' needs source='csv'"):
        DataConfig(source="arrow", path_column="x")


@pytest.mark.slow
def test_what_the_library_itself_saves(tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    labels = [0, 1, 0, 1, 1, 0, 0]

    def dataset(images):
        rows = {"image": images, "label": labels}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(features))

    files = [tmp_path / f"{index}.png" for index in range(len(ALL))]
    for file, each in zip(files, ALL, strict=True):
        file.write_bytes(each)
    order = [4, 2, 0, 6]
    dataset([*map(str, files)]).select(order).save_to_disk(str(tmp_path / "saved"))
    embedded = [{"bytes": each, "path": None} for each in ALL]
    dataset(embedded).to_parquet(str(tmp_path / "data.parquet"))
    wanted = [ALL[each] for each in order]
    check(
        sources.arrow(tmp_path / "saved"), wanted, labels=[1, 0, 0, 0], class_names=("cat", "dog")
    )
    check(
        sources.arrow(tmp_path / "data.parquet"),
        ALL,
        labels=labels,
        class_names=tuple(NAMES),
    )
