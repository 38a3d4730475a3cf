"""An export that answers otherwise is refused, and the step in which the two part is named."""

import functools
import re
import shutil

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from keras import layers

from tfaccel import preset
from tfaccel.common.errors import RunError
from tfaccel.data.loaders import tf_image
from tfaccel.export import asked, card, fresh_process, parity, preprocessing, saved_model
from tfaccel.export.preprocessing import Preprocessing

SIZE = (24, 20)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """JPEG files of several sizes, smooth and with edges, in two classes."""
    root, random = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for index in range(4):
        coarse = PIL.Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        path = root / "ab"[index % 2] / f"{index}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse.resize((70 + index, 90), PIL.Image.Resampling.NEAREST).save(path, quality=90)
    return root


def job(setup, root, *, loader="dali_cpu", precision="float32", channels=3, **images):
    """A run, a compiled classifier, and the loader that evaluates it."""
    run = setup(precision=precision)
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((*SIZE, channels), name="image"),
                layers.Conv2D(4, 3),
                layers.BatchNormalization(),
                layers.GlobalMaxPooling2D(),
                layers.Dense(2, dtype="float32"),
            ]
        )
    run.compile(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    settings = {
        "image_size": SIZE,
        "channels": channels,
        "mean": 0.45,
        "std": 0.25,
        "global_batch_size": 3,
        "augment": preset("imagenet_eval"),
    }
    return run, model, run.image_folder(root, loader=loader, **settings | images)


@pytest.mark.fresh_process
def test_a_process_without_tfaccel_and_dali_answers_alike(setup, tmp_path, photographs):
    run, model, loader = job(setup, photographs, precision="mixed_float16")
    facts = card.read(run.export(model, tmp_path / "1", loader=loader))
    checks = {each["name"]: each["value"] for each in facts["parity"]["checks"]}
    assert facts["parity"]["samples"] == 4
    assert 0 < checks["pixels"] < 0.5  # DALI's resize and TensorFlow's round otherwise
    assert checks["normalisation"] < 1e-6
    assert checks["model"] < 1e-2
    assert checks["top-1"] == 0


@pytest.mark.fresh_process
@pytest.mark.parametrize("has_tensorflow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_does_not_load_elsewhere_is_not_exported(
    setup, tmp_path, photographs, monkeypatch, has_tensorflow
):
    """As where a custom operation is in the graph, of which a server knows nothing.

    Whether TensorFlow loads it or cannot be imported at all, which takes no 3 s, the process ends
    with an error; tests/export/test_rehearsal.py has one of TensorFlow itself.
    """

    def cut_short(_, folder, *args, **kwargs):
        (folder / "saved_model.pb").write_bytes(b"no model")

    monkeypatch.setattr(saved_model, "write", cut_short)
    if not has_tensorflow:
        (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run, model, loader = job(setup, photographs)
    with pytest.raises(RunError, match=r"not answer in a process of its own .*nothing was exp"):
        run.export(model, tmp_path / "out" / "1", loader=loader)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.fresh_process
def test_a_process_that_never_answers_is_ended_and_said(setup, tmp_path, photographs, monkeypatch):
    program = tmp_path / "stuck.py"
    program.write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(fresh_process, "__file__", str(program))
    monkeypatch.setattr(saved_model, "write", lambda *_, **__: None)  # which nobody reads
    monkeypatch.setattr(parity, "START_LIMIT_S", 0.4)
    monkeypatch.setattr(parity, "SAMPLE_LIMIT_S", 0.2)
    run, model, loader = job(setup, photographs)
    with pytest.raises(RunError, match=r"^the export did not answer 4 samples .* within 1 s in .*"):
        run.export(model, tmp_path / "out" / "1", loader=loader)
    assert list((tmp_path / "out").iterdir()) == []


def coarse_jpeg(data, size, find, channels):
    """Every fourth pixel of a JPEG alone: a decoder that is far off."""
    image = tf.io.decode_jpeg(data, channels=channels, ratio=4)
    image = tf.cast(tf.image.resize(image, size, method="nearest"), tf.uint8)
    return image if find is None else tf_image._cut(image, *find(size), channels)


def plain_resize(image, new_size):
    """Bilinear without antialiasing, as tf.image.resize and keras.layers.Resizing do by default."""
    return tf.cast(tf.image.resize(image, new_size) + 0.5, tf.uint8)


PLANTED = {
    "decoder": (tf_image, "_exact_jpeg", coarse_jpeg),
    "resize": (tf_image, "_averaged", plain_resize),
}


@pytest.mark.usefixtures("export_not_saved")
@pytest.mark.parametrize(
    ("step", "loader"),
    [
        pytest.param("decoder", "dali_cpu", marks=pytest.mark.slow),
        ("resize", "memory"),
        pytest.param("decoder", "memory", marks=pytest.mark.slow),
        pytest.param("resize", "dali_cpu", marks=pytest.mark.slow),
    ],
)
def test_the_step_that_parts_them_is_named(setup, tmp_path, photographs, monkeypatch, step, loader):
    augment = preset("none" if loader == "memory" else "imagenet_eval")
    run, model, loader = job(setup, photographs, loader=loader, augment=augment)
    monkeypatch.setattr(*PLANTED[step])
    with pytest.raises(RunError, match=rf"pixels: .*The {step} is the first .*\.jpg") as raised:
        run.export(model, tmp_path / "1", loader=loader)
    (kept,) = tmp_path.iterdir()
    assert str(kept) in str(raised.value)
    assert kept.suffix == ".rejected"


@pytest.mark.usefixtures("export_not_saved")
def test_a_normalisation_that_is_another_is_named(setup, tmp_path, photographs, monkeypatch):
    run, model, loader = job(setup, photographs)

    def without_mean(self, pixels):
        return tf.cast(pixels, tf.float32) / (255 * 0.25)

    monkeypatch.setattr(Preprocessing, "inputs", without_mean)
    with pytest.raises(RunError, match=r"the trained model does: normalisation: .*; model: "):
        run.export(model, tmp_path / "1", loader=loader)


@pytest.mark.usefixtures("export_not_saved")
def test_weights_that_are_others_are_found(setup, tmp_path, photographs, monkeypatch):
    run, model, loader = job(setup, photographs)
    write = saved_model.write

    def of_another(model, *args, **kwargs):
        other = keras.models.clone_model(model)
        write(other, *args, **kwargs)

    monkeypatch.setattr(saved_model, "write", of_another)
    with pytest.raises(RunError, match="the trained model does: model: ") as raised:
        run.export(model, tmp_path / "1", loader=loader)
    assert "pixels" not in re.sub("/[^ ]*", "", str(raised.value))


@pytest.mark.usefixtures("export_not_saved")
def test_a_nan_is_no_parity(setup, tmp_path, photographs):
    run, model, loader = job(setup, photographs)
    model.layers[-1].bias.assign([np.nan, 0.0])
    with pytest.raises(RunError, match="model: differs by inf of the largest value"):
        run.export(model, tmp_path / "1", loader=loader)


@pytest.mark.parametrize(
    "window",
    [
        pytest.param("stretch", marks=pytest.mark.slow),
        pytest.param("resized_center_crop", marks=pytest.mark.slow),  # it is that of `job`
        "center_crop",
    ],
)
def test_each_window_is_that_of_dali(setup, tmp_path, photographs, window):
    run, model, loader = job(setup, photographs, augment=preset("none", window=window))
    facts = card.read(run.export(model, tmp_path / "1", loader=loader))
    pixels = facts["parity"]["checks"][1]
    assert pixels["value"] < 0.5, pixels["words"]


@pytest.mark.usefixtures("export_not_saved")
@pytest.mark.parametrize(
    ("window", "loader"),
    [
        ("resized_center_crop", "memory"),
        pytest.param("center_crop", "cache", marks=pytest.mark.slow),
    ],
)
def test_a_size_that_images_are_stored_in_comes_first(setup, tmp_path, photographs, window, loader):
    """They are stretched to it, which no window of the file itself is."""
    settings = {"stored_size": (40, 30), "augment": preset("none", window=window)}
    run, model, loader = job(setup, photographs, loader=loader, **settings)
    facts = card.read(run.export(model, tmp_path / "1", loader=loader))
    assert facts["preprocessing"]["stored_size"] == [40, 30]
    pixels = facts["parity"]["checks"][1]
    assert pixels["value"] < 0.5, pixels["words"]


@pytest.mark.usefixtures("export_not_saved")
def test_a_file_that_a_graph_cannot_decode_is_named_and_left_out(
    setup, tmp_path, photographs, monkeypatch
):
    root = tmp_path / "images"
    shutil.copytree(photographs, root)
    monkeypatch.setattr(preprocessing, "MAX_PIXELS", 200 * 200 - 1)  # of which only one has more
    with PIL.Image.open(root / "a" / "0.jpg") as image:
        image.resize((200, 200)).save(root / "a" / "1.jpg")
    run, model, loader = job(setup, root, channels=1)
    facts = card.read(run.export(model, tmp_path / "1", loader=loader))
    decoded, pixels, *_ = facts["parity"]["checks"]
    assert re.fullmatch(
        r"4 of 5 files, all but .*/a/1\.jpg; left out of the checks below", decoded["words"]
    )
    assert pixels["value"] < 1


@pytest.mark.usefixtures("export_not_saved")
def test_files_of_which_many_cannot_be_decoded_are_a_fault(
    setup, tmp_path, photographs, monkeypatch
):
    run, model, loader = job(setup, photographs)
    monkeypatch.setattr(preprocessing, "MAX_PIXELS", 90 * 71)  # half of them are larger
    with pytest.raises(RunError, match=r"the trained model does: decoded: 2 of 4 files, all but /"):
        run.export(model, tmp_path / "1", loader=loader)


@pytest.mark.parametrize(("largest", "failed"), [(5e-5, True), (1.0, True), (0.0, False)])
def test_small_outputs_are_compared_with_their_own_largest(largest, failed):
    expected = {"output_0": np.full((4, 3), largest, np.float32)}
    check = parity._relative("model", expected, {"output_0": np.zeros((4, 3))}, 1e-2)
    assert check.failed == failed


@pytest.mark.parametrize(
    "precision", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_small_outputs_that_are_the_same_pass(setup, tmp_path, precision):
    """As of a head that has hardly begun to train, written in another precision."""
    run = setup(precision=precision)
    with run.scope():
        model = keras.Sequential([keras.Input((30,)), layers.Dense(50, activation="relu")])
        model.add(layers.Dense(8, kernel_initializer=keras.initializers.RandomNormal(0, 1e-6)))
    facts = card.read(run.export(model, tmp_path / "1", computes_in="float32", xla=True, onnx=True))
    assert [each["name"] for each in facts["parity"]["checks"]] == ["model", "ONNX"]


def test_what_is_as_likely_is_no_other_class(setup):
    setup(precision="float32")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
    expected = np.float32([[0.5, 0.5 - 1e-5, 0], [0.9, 0.1, 0], [0.2, 0.8, 0], [0.1, 0.9, 0]])
    received = np.float32([[0.5 - 1e-5, 0.5, 0], [0.9, 0.1, 0], [0.2, 0.8, 0], [0.9, 0.1, 0]])
    check = parity._same_best("top-1", expected, received, parity._tolerance(model))
    assert check.value == 0.25
    said = "the export and the trained model give the same class for 2 of 4 images, 50.00%"
    assert check.words == f"{said}; ties among the others: 1"
    check = parity._same_best(
        "top-1", expected, received, parity._tolerance(model), np.array([2, 2, 1, 2])
    )
    assert check.words == (
        f"{said}; ties among the others: 1; the export's class is right for 1 of 4, 25%"
    )


@pytest.mark.usefixtures("export_not_saved")
def test_of_very_large_outputs_fewer_are_compared(setup, tmp_path, photographs, monkeypatch):
    run, model, loader = job(setup, photographs)
    monkeypatch.setattr(asked, "MOST_BYTES", 3 * 4 * (24 * 20 * 3 + 8))
    facts = card.read(run.export(model, tmp_path / "1", loader=loader))
    assert facts["parity"]["samples"] == 3


@pytest.mark.usefixtures("export_not_saved")
def test_a_model_of_images_of_any_size(setup, tmp_path, photographs):
    run, _, loader = job(setup, photographs)
    with run.scope():
        model = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(3, 3)])
        model.add(layers.GlobalMaxPooling2D())
    run.compile(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    facts = card.read(run.export(model, tmp_path / "1", loader=loader))
    assert facts["parity"]["samples"] == 4


@pytest.mark.gpu
def test_on_a_gpu_the_decoder_of_the_gpu_is_near_enough(tmp_path, photographs):
    import tfaccel

    setup = functools.partial(tfaccel.setup, gpu_ids=(0,))
    run, model, loader = job(setup, photographs, loader="dali_gpu", precision="mixed_float16")
    facts = card.read(run.export(model, tmp_path / "1", loader=loader, onnx=True))
    keras.config.set_dtype_policy("float32")
    assert all(each["value"] <= each["limit"] for each in facts["parity"]["checks"])
