"""Exports of several classes an image, and of numbers, write a column for each by its name."""

import shutil

import keras
import numpy as np
import pytest
from answer_rows import StopError, rows_of, stopping_after
from conftest import compare_here, in_replicas
from keras import layers
from listed_images import SIZE, files_of, pixels_of, write_listed

import tfaccel
from tfaccel import UserError, sources
from tfaccel.cli import main
from tfaccel.experiment import predict_many as room
from tfaccel.experiment.predict_many import predict_many

BATCH = {"global_batch_size": 4, "gpu_ids": ()}
NUM, BAD = 13, (0, 7)
pytestmark = pytest.mark.usefixtures("small_pieces")
COLUMNS = {"multilabel": ("a", "b", "error"), "regression": ("x", "image")}
LOSSES = {
    "multilabel": keras.losses.BinaryCrossentropy(from_logits=True),
    "regression": keras.losses.MeanSquaredError(),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_listed(tmp_path_factory.mktemp("list"), NUM)


def export_of(root, path, task, columns):
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)  # as conftest does it for each test
        run = tfaccel.setup(gpu_ids=())
        source = sources.image_list(
            root / "list.csv", path_column="path", label_columns=columns, task=task
        )
        with run.scope():
            image = keras.Input((10, 8, 1), name="image")
            head = layers.Dense(len(columns), kernel_initializer="he_normal", name=task)
            model = keras.Model(image, head(layers.Flatten()(image)))
        run.compile(model, loss=LOSSES[task])
        run.export(model, path, loader=run.loader(source, global_batch_size=NUM, **SIZE), samples=4)
    return path


@pytest.fixture(scope="module", params=["multilabel", "regression"])
def task(request):
    return request.param


@pytest.fixture(scope="module")
def export(root, task, tmp_path_factory):
    return export_of(root, tmp_path_factory.mktemp("export") / "1", task, COLUMNS[task])


@pytest.fixture
def files(root, tmp_path):
    """The images, of which two are damaged."""
    copy = shutil.copytree(root, tmp_path / "files")
    paths = files_of(copy, NUM)
    for index in BAD:
        (copy / paths[index]).write_bytes(b"no image")
    return paths


def answers_of(export, task, files):
    """A slow reference: Keras's own model, one image at a time; None for a damaged file."""
    model = keras.saving.load_model(export / "model.keras", compile=False)
    answers = []
    for index, file in enumerate(files):
        if index in BAD:
            answers.append(None)
            continue
        outputs = model(pixels_of(file)[None]).numpy()[0].astype(float)
        answers.append(outputs if task == "regression" else 1 / (1 + np.exp(-outputs)))
    return answers


@pytest.mark.parametrize("loader", ["dali_cpu", "tf_data"])
def test_each_class_or_number_has_a_column_by_its_name(export, task, files, tmp_path, loader):
    output = tmp_path / "answers.csv"
    assert predict_many(export, files, output, top=1, loader=loader, **BATCH) == 2
    rows = rows_of(output)
    kind = "probability" if task == "multilabel" else "predicted"
    heads = ["image", *(f"{kind}_{name}" for name in COLUMNS[task]), "error"]
    assert [row["image"] for row in rows] == files
    for row, answer in zip(rows, answers_of(export, task, files), strict=True):
        assert list(row) == heads
        _, *values, error = row.values()
        if answer is None:
            assert set(values) == {None}
            assert error.startswith("not_an_image")
        else:
            np.testing.assert_allclose(np.array(values, float), answer, rtol=1e-3, atol=1e-5)
            assert error is None


@pytest.mark.parametrize("number", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_a_stopped_call_continues_with_the_same_bytes(export, files, tmp_path, monkeypatch, number):
    whole, output = tmp_path / "whole.csv", tmp_path / "answers.csv"
    predict_many(export, files, whole, top=3, **BATCH)
    with monkeypatch.context() as patch:
        stopping_after(patch, number)
        with pytest.raises(StopError):
            predict_many(export, files, output, top=3, **BATCH)
    assert not output.exists()
    assert predict_many(export, files, output, top=3, **BATCH) == 2
    assert output.read_bytes() == whole.read_bytes()


def test_two_replicas_write_what_one_writes(export, files, tmp_path, monkeypatch):
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    predict_many(export, files, one, top=3, **BATCH)
    in_replicas(monkeypatch, room, 2)
    predict_many(export, files, two, top=3, **BATCH)
    for row, other in zip(rows_of(one), rows_of(two), strict=True):
        assert (row.pop("image"), row.pop("error")) == (other.pop("image"), other.pop("error"))
        values = (np.array([each or 0 for each in row.values()], float) for row in (row, other))
        np.testing.assert_allclose(*values, rtol=1e-5)


def test_outputs_that_are_nan_are_errors_in_place_of_values(export, files, tmp_path):
    copy = shutil.copytree(export, tmp_path / "copy")
    model = keras.saving.load_model(copy / "model.keras", compile=False)
    bias = model.layers[-1].bias
    bias.assign([float("nan"), *np.zeros(bias.shape[0] - 1)])
    model.save(copy / "model.keras")
    assert predict_many(copy, files, tmp_path / "a.csv", top=3, **BATCH) == NUM
    _, *values, error = rows_of(tmp_path / "a.csv")[1].values()
    assert set(values) == {None}
    assert "infinite or NaN" in error


def test_a_single_class_has_one_probability(root, tmp_path):
    export = export_of(root, tmp_path / "1", "multilabel", ("a",))
    files = files_of(root, NUM)
    assert predict_many(export, files, tmp_path / "a.csv", top=3, **BATCH) == 0
    rows = rows_of(tmp_path / "a.csv")
    assert list(rows[0]) == ["image", "probability_a", "error"]
    for row, answer in list(zip(rows, answers_of(export, "multilabel", files), strict=True))[1:6]:
        assert float(row["probability_a"]) == pytest.approx(answer[0], rel=1e-3)


def test_flags_that_choose_among_classes_do_not_suit_a_file_of_all(
    export, task, files, tmp_path, capsys
):
    given = ["predict", f"--model={export}", "--gpu-ids=", "--global-batch-size=4"]
    given += [f"--output={tmp_path / 'a.csv'}", files[3]]
    with pytest.raises(UserError, match=r"--top=1, but .* remove --top"):
        main.main([*given, "--top=1"])
    with pytest.raises(UserError, match=r"--threshold=0.2 with --output.* remove --threshold"):
        main.main([*given, "--threshold=0.2"])
    printed = ["predict", f"--model={export}", files[3]]
    if task == "regression":
        with pytest.raises(UserError, match=r"--threshold=0.2, but .* gives numbers for an image"):
            main.main([*printed, "--threshold=0.2"])
    with pytest.raises(UserError, match=r"--top=1, but .* gives .*; remove --top"):
        main.main([*printed, "--top=1"])
    assert main.main(given) == 0
    assert len(rows_of(tmp_path / "a.csv")) == 1
