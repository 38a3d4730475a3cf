"""Very many files have the export's own answers, a row each, however often a call is stopped."""

import importlib.util
import json
import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from answer_rows import StopError, rows_of, stopping_after
from conftest import compare_here, in_replicas
from keras import layers

import tfaccel
from tfaccel import UserError
from tfaccel.cli import main
from tfaccel.experiment import predict_many as room
from tfaccel.experiment.predict_many import predict_many

SIZE = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8, "std": 0.5}
BATCH = {"global_batch_size": 4, "gpu_ids": ()}
NEEDS_PYARROW = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="Parquet needs the extra `parquet`"
)
pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.fixture(scope="module")
def export(folder, tmp_path_factory):
    """An export of a model of three classes, without a SavedModel that decodes in other ways."""
    path = tmp_path_factory.mktemp("export") / "1"
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)  # as conftest does it for each test
        run = tfaccel.setup(gpu_ids=())
        with run.scope():
            head = layers.Dense(3, kernel_initializer="he_normal")
            image = keras.Input((12, 10, 1), name="image")
            model = keras.Model(image, head(layers.Flatten()(image)))
        run.compile(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        run.export(model, path, loader=run.image_folder(folder, loader="memory", **SIZE), samples=4)
    return path


@pytest.fixture
def files(folder, tmp_path):
    """The 37 images, of which two are damaged and one is missing."""
    root = shutil.copytree(folder, tmp_path / "files")
    paths = [str(each) for each in sorted(root.rglob("*.png"))]
    for index in (0, 17):
        (root / paths[index]).write_bytes(b"no image")
    (root / paths[36]).unlink()
    return paths


@pytest.fixture(scope="module")
def served(export):
    return tf.saved_model.load(str(export)).signatures["predict_bytes"]


@pytest.mark.parametrize("loader", ["dali_cpu", "tf_data"])
def test_each_file_has_one_row_with_the_exports_own_answer(export, served, files, tmp_path, loader):
    output = tmp_path / "answers.csv"
    assert predict_many(export, files, output, top=2, loader=loader, **BATCH) == 3
    rows = rows_of(output)
    assert [row["image"] for row in rows] == files
    for index, row in enumerate(rows):
        if index in (0, 17, 36):
            assert row["class_1"] is row["probability_2"] is None
            assert row["error"].split(":")[0] == ("missing" if index == 36 else "not_an_image")
            continue
        answer = served(image_bytes=tf.constant([tf.io.read_file(files[index]).numpy()]))
        chances = answer["probabilities"].numpy()[0]
        order = np.argsort(-chances)
        assert row["error"] is None
        for place in (0, 1):
            assert row[f"class_{place + 1}"] == "abc"[order[place]]
            found = float(row[f"probability_{place + 1}"])
            assert found == pytest.approx(chances[order[place]], rel=1e-3, abs=1e-5)


STOPPED = [
    *[(".csv", number) for number in (1, 7, 18, 36)],
    pytest.param(".parquet", 18, marks=NEEDS_PYARROW),
]


@pytest.mark.parametrize(("ending", "number"), STOPPED)
def test_a_stopped_call_is_continued_with_the_same_bytes(
    export, files, tmp_path, monkeypatch, ending, number
):
    whole, output = tmp_path / f"whole{ending}", tmp_path / f"answers{ending}"
    predict_many(export, files, whole, top=3, **BATCH)
    with monkeypatch.context() as patch:
        stopping_after(patch, number)
        with pytest.raises(StopError):
            predict_many(export, files, output, top=3, **BATCH)
    assert not output.exists()
    assert len(list((tmp_path / f"{output.name}.pieces").glob(f"0*{ending}"))) == number // 5
    assert predict_many(export, files, output, top=3, **BATCH) == 3
    assert output.read_bytes() == whole.read_bytes()


def test_a_file_that_vanishes_meanwhile_has_an_error_after_the_next_call(
    export, files, tmp_path, monkeypatch
):
    output, scored = tmp_path / "answers.csv", room.scored

    def removing(*given):
        (tmp_path / files[25]).unlink()
        return scored(*given)

    with monkeypatch.context() as patch:
        patch.setattr(room, "scored", removing)
        with pytest.raises(UserError, match="run the same command again"):
            predict_many(export, files, output, top=3, **BATCH)
    assert predict_many(export, files, output, top=3, **BATCH) == 4
    rows = rows_of(output)
    assert [row["image"] for row in rows] == files
    assert [number for number, row in enumerate(rows) if row["error"]] == [0, 17, 25, 36]


def test_two_replicas_give_what_one_gives(export, files, tmp_path, monkeypatch):
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    predict_many(export, files, one, top=3, **BATCH)
    in_replicas(monkeypatch, room, 2)
    predict_many(export, files, two, top=3, **BATCH)
    for row, other in zip(rows_of(one), rows_of(two), strict=True):
        assert {name: each for name, each in row.items() if "prob" not in name} == {
            name: each for name, each in other.items() if "prob" not in name
        }
        if not row["error"]:
            assert float(row["probability_1"]) == pytest.approx(float(other["probability_1"]))


def test_files_that_are_all_damaged_have_a_row_each(export, tmp_path):
    paths = [str(tmp_path / f"{index}.png") for index in range(7)]
    for each in paths:
        with open(each, "wb") as file:
            file.write(b"no image")
    assert predict_many(export, paths, tmp_path / "a.csv", top=1, **BATCH) == 7
    assert [row["image"] for row in rows_of(tmp_path / "a.csv")] == paths


def test_other_files_or_another_model_do_not_continue(export, files, tmp_path, monkeypatch):
    output = tmp_path / "answers.csv"
    with monkeypatch.context() as patch:
        stopping_after(patch, 8)
        with pytest.raises(StopError):
            predict_many(export, files, output, top=3, **BATCH)
    with pytest.raises(UserError, match="its rows, files differ"):
        predict_many(export, files[:-1], output, top=3, **BATCH)
    with pytest.raises(UserError, match="its columns differ"):
        predict_many(export, files, output, top=1, **BATCH)
    with pytest.raises(UserError, match="its computed by differ"):
        predict_many(export, files, output, top=3, gpu_ids=(), global_batch_size=8)


def test_an_export_of_an_earlier_tfaccel_has_one_class_an_image(export, files, tmp_path):
    copy = shutil.copytree(export, tmp_path / "copy")
    card = json.loads((copy / "tfaccel.json").read_text())
    for name in ("exclusive", "task", "target_names"):  # which it did not note
        del card[name]
    (copy / "tfaccel.json").write_text(json.dumps(card))
    for name, folder in (("now.csv", export), ("earlier.csv", copy)):
        assert predict_many(folder, files[:12], tmp_path / name, top=3, **BATCH) == 1
    assert (tmp_path / "earlier.csv").read_bytes() == (tmp_path / "now.csv").read_bytes()
    whole = [float(row["probability_1"]) for row in rows_of(tmp_path / "earlier.csv")[1:]]
    assert min(whole) >= 1 / 3  # of three classes with the sum 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answers": "image"}, "does not predict the classes of image files"),
        ({"preprocessing": {"stored_size": [24, 20]}}, "which a loader of files does not"),
    ],
)
def test_exports_that_a_loader_cannot_serve_are_refused(export, files, tmp_path, changes, said):
    copy = shutil.copytree(export, tmp_path / "copy")
    card = json.loads((copy / "tfaccel.json").read_text())
    if "preprocessing" in changes:
        changes = {"preprocessing": card["preprocessing"] | changes["preprocessing"]}
    (copy / "tfaccel.json").write_text(json.dumps(card | changes))
    with pytest.raises(UserError, match=said):
        predict_many(copy, files, tmp_path / "a.csv", top=3, **BATCH)
    (copy / "tfaccel.json").write_text(json.dumps(card))
    (copy / "model.keras").unlink()
    with pytest.raises(UserError, match=r"has no model\.keras"):
        predict_many(copy, files, tmp_path / "a.csv", top=3, **BATCH)


def test_outputs_that_are_nan_are_errors(export, files, tmp_path):
    copy = shutil.copytree(export, tmp_path / "copy")
    model = keras.saving.load_model(copy / "model.keras", compile=False)
    model.layers[-1].bias.assign([0.0, float("nan"), 0.0])
    model.save(copy / "model.keras")
    assert predict_many(copy, files, tmp_path / "a.csv", top=3, **BATCH) == len(files)
    assert "infinite or NaN" in rows_of(tmp_path / "a.csv")[1]["error"]


@pytest.mark.parametrize("ending", [".csv", pytest.param(".parquet", marks=NEEDS_PYARROW)])
def test_the_command_writes_the_file_and_a_file_given_twice_has_one_row(
    export, files, tmp_path, capsys, ending
):
    folder = str(tmp_path / "files")
    output = tmp_path / f"out{ending}"
    flags = ["--gpu-ids=", "--global-batch-size=4", "--top=1", f"--output={output}"]
    code = main.main(["predict", f"--model={export}", *flags, files[5], folder])
    assert code == 1
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    rows = rows_of(output)
    assert [row["image"] for row in rows] == [
        files[5],
        *(each for each in files[:36] if each != files[5]),
    ]


@NEEDS_PYARROW
def test_parquet_has_what_csv_has_with_all_digits(export, files, tmp_path):
    text, table = tmp_path / "a.csv", tmp_path / "a.parquet"
    for each in (text, table):
        assert predict_many(export, files, each, top=2, **BATCH) == 3
    for row, other in zip(rows_of(text), rows_of(table), strict=True):
        assert list(row) == list(other)
        for name, cell in row.items():
            if name.startswith("probability") and cell:
                cell, other[name] = float(cell), pytest.approx(other[name], rel=1e-6)
            assert cell == other[name]


@NEEDS_PYARROW
def test_a_name_that_parquet_cannot_have_is_refused_before_the_work(export, tmp_path):
    bad = os.fsdecode(b"caf\xe9.png")
    with pytest.raises(UserError, match="is not valid UTF-8"):
        predict_many(export, [bad], tmp_path / "a.parquet", top=2, **BATCH)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--output={}/a.txt"], r"ends in \.txt; give a file that ends in \.csv or \.parquet"),
        (["--output={}/a.csv", "--json"], "remove --json"),
        (["--loader=tf_data"], "without --output"),
        (["--output={}/none/a.csv"], "cannot be written"),
        (["--output={}/a.csv", "--loader=memory"], "loader"),
    ],
)
def test_mistakes_of_the_command_have_one_sentence(export, files, tmp_path, flags, said):
    flags = [each.replace("{}", str(tmp_path)) for each in flags]
    with pytest.raises(UserError, match=said):
        main.main(["predict", f"--model={export}", *flags, files[5]])
    assert not (tmp_path / "a.csv").exists()
