"""What onnxruntime reads answers as the SavedModel does."""

import importlib.util
import shutil

import keras
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from conftest import compare_here, decode_png_alone
from keras import layers

import tfaccel
from tfaccel import UserError
from tfaccel.common.errors import RunError
from tfaccel.data import sources
from tfaccel.experiment.models import cifar_resnet
from tfaccel.export import card, onnx, parity
from tfaccel.keras_internals.mirrored import MeanWithMirror, WithMirror

pytestmark = pytest.mark.usefixtures("export_decodes_png")  # of which ONNX has nothing

IMAGES = {"image_size": (12, 10), "channels": 1, "mean": 0.4, "std": 0.3, "global_batch_size": 8}
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 12, 10, 1)).astype(np.float32)


def trained(run, head):
    """A small model, whose batch norm has seen something."""
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((12, 10, 1), name="of_the_model"),
                layers.Conv2D(4, 3, padding="same"),
                layers.BatchNormalization(),
                *head,
            ]
        )
    model(np.random.default_rng(1).normal(2, 3, (8, 12, 10, 1)), training=True)
    return model


def classifier(run):
    model = trained(run, [layers.Flatten(), layers.Dense(3)])  # not float32 of itself
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, "sgd", loss)
    return model


@pytest.fixture
def loader(folder):
    return lambda run: run.image_folder(folder, **IMAGES, loader="memory")


def onnx_of(path):
    """What calls model.onnx, answers by name."""
    session = onnxruntime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return lambda **inputs: dict(zip(names, session.run(names, inputs), strict=True))


def saved_model_of(path):
    loaded = tf.saved_model.load(path)
    served = loaded.signatures["serving_default"]
    return lambda **inputs: {name: each.numpy() for name, each in served(**inputs).items()}


def assert_alike(received, expected, tolerance):
    assert received.keys() == expected.keys()
    for name, array in expected.items():
        assert received[name].dtype == np.float32
        largest = max(1.0, np.abs(array).max())
        np.testing.assert_allclose(received[name], array, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(
    "precision",
    [
        "mixed_float16",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("float32", "mixed_bfloat16")),
    ],
)
def test_it_answers_as_the_saved_model_does(setup, loader, tmp_path, precision):
    run = setup(precision=precision)
    model = classifier(run)
    path = run.export(model, tmp_path / "1", loader=loader(run), samples=8, onnx=True)
    ask, served = onnx_of(path), saved_model_of(path)
    tolerance = parity.TOLERANCE[model.compute_dtype]
    answers = ask(image=PIXELS)
    assert set(answers) == {"logits", "probabilities"}
    assert_alike(answers, served(image=PIXELS), tolerance)
    # Any number of rows.
    assert_alike(ask(image=PIXELS[:1]), served(image=PIXELS[:1]), tolerance)
    assert ask(image=np.repeat(PIXELS, 20, axis=0))["logits"].shape == (100, 3)
    # In float32, whatever the policy.
    exact = keras.models.clone_model(
        model,
        clone_function=lambda each: type(each).from_config(
            each.get_config() | {"dtype": "float32"}
        ),
    )
    exact.set_weights(model.get_weights())
    expected = exact((PIXELS / 255 - 0.4) / 0.3).numpy()
    assert_alike({"": answers["logits"]}, {"": expected}, 1e-5)


@pytest.fixture(scope="module")
def restoration(folder, tmp_path_factory):
    """The path of an export that takes uint8, and answers with an image."""
    root = tmp_path_factory.mktemp("restoration")
    shutil.copytree(folder / "a", root / "targets")
    pairs = sources.image_pairs(folder / "a", root / "targets")
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)  # as conftest does it for each test
        decode_png_alone(patch)
        run = tfaccel.setup(gpu_ids=())
        model = trained(run, [layers.Conv2D(1, 1)])
        run.compile(model, "sgd", "mae")
        loader = run.loader(pairs, **IMAGES, loader="memory")
        settings = {"samples": 4, "pixel_dtype": "uint8", "onnx": True}
        return run.export(model, root / "1", loader=loader, **settings)


def test_it_takes_the_pixels_that_the_saved_model_takes(restoration):
    (taken,) = onnxruntime.InferenceSession(
        restoration / "model.onnx", providers=["CPUExecutionProvider"]
    ).get_inputs()
    assert taken.type == "tensor(uint8)"
    (received,) = onnx_of(restoration)(image=PIXELS.astype(np.uint8)).values()
    (expected,) = saved_model_of(restoration)(image=PIXELS.astype(np.uint8)).values()
    assert_alike({"": received}, {"": expected}, 1e-5)


def test_a_model_alone_keeps_its_own_inputs_and_outputs(setup, tmp_path):
    run = setup()
    with run.scope():
        inputs = {"left": keras.Input((2,), name="left"), "right": keras.Input((3,), name="right")}
        outputs = {
            "sum": layers.Dense(1)(inputs["left"]) + layers.Dense(1)(inputs["right"]),
            "other": layers.Dense(2)(inputs["right"]),
        }
        model = keras.Model(inputs, outputs)
    path = run.export(model, tmp_path / "1", onnx=True)
    given = {"left": np.ones((5, 2), np.float32), "right": np.full((5, 3), 2.0, np.float32)}
    answers = onnx_of(path)(**given)
    assert set(answers) == {"sum", "other"}
    assert_alike(answers, saved_model_of(path)(**given), 1e-5)


@pytest.mark.parametrize("num_outputs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_outputs_without_names_are_called_as_the_saved_model_calls_them(
    setup, tmp_path, num_outputs
):
    run = setup()
    with run.scope():
        words = keras.Input((4,), dtype="int32", name="words")
        vectors = layers.Embedding(2, 3)(words)
        outputs = [layers.Dense(2)(vectors) for _ in range(num_outputs)]
        model = keras.Model(words, outputs[0] if num_outputs == 1 else outputs)
    path = run.export(model, tmp_path / "1", onnx=True)
    given = {"words": np.array([[0, 1, 1, 0]], np.int32)}
    answers = onnx_of(path)(**given)
    assert set(answers) == {f"output_{index}" for index in range(num_outputs)}
    assert_alike(answers, saved_model_of(path)(**given), 1e-5)


def test_an_output_that_is_called_as_an_input_is_has_a_suffix(setup, tmp_path):
    run = setup()
    with run.scope():
        image = keras.Input((2,), name="image")
        model = keras.Model(image, {"image": layers.Dense(2)(image)})
    path = run.export(model, tmp_path / "1", onnx=True)
    given = {"image": np.ones((3, 2), np.float32)}
    received = onnx_of(path)(**given)
    assert_alike(received, {"image_output": saved_model_of(path)(**given)["image"]}, 1e-5)


def test_a_restoration_answers_with_an_image(restoration):
    pixels = PIXELS.astype(np.uint8)
    received = onnx_of(restoration)(image=pixels)
    expected = {"image_output": saved_model_of(restoration)(image=pixels)["image"]}
    assert_alike(received, expected, 1e-5)


def mirrored():
    """What is of our own in cifar_resnet, and its gelu."""
    image = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, use_bias=False)(WithMirror()(image))
    x = layers.Activation("gelu")(layers.BatchNormalization()(x))
    logits = layers.Dense(3, dtype="float32")(layers.GlobalMaxPooling2D()(x))
    return keras.Model(image, MeanWithMirror(dtype="float32")(logits))


def cifar():
    return cifar_resnet.build(image_shape=(8, 8, 3), num_outputs=10)


@pytest.mark.parametrize("build", [mirrored, pytest.param(cifar, marks=pytest.mark.slow)])
def test_layers_of_ours_are_in_it_as_plain_operations(setup, tmp_path, build):
    run = setup(precision="mixed_float16")
    with run.scope():
        model = build()
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 3)).astype(np.float32)
    path = run.export(model, tmp_path / "1", images=images, onnx=True)
    expected = {"output_0": model(images).numpy()}
    assert_alike(onnx_of(path)(image=images), expected, parity.TOLERANCE["float16"])


@pytest.mark.slow
def test_what_a_wrapper_wraps_computes_in_float32_too(setup, tmp_path):
    run = setup(precision="mixed_bfloat16")
    with run.scope():
        words = keras.Input((5, 8), name="words")
        model = keras.Model(words, layers.Bidirectional(layers.GRU(4))(words))
    path = run.export(model, tmp_path / "1", onnx=True)
    given = np.ones((2, 5, 8), np.float32)
    expected = {"output_0": keras.ops.convert_to_numpy(tf.cast(model(given), tf.float32))}
    assert_alike(onnx_of(path)(words=given), expected, parity.TOLERANCE["bfloat16"])


def test_the_tail_of_gelu_is_that_of_keras(setup, tmp_path):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((9,), name="x"), layers.Activation("gelu")])
    path = run.export(model, tmp_path / "1", onnx=True)
    x = np.linspace(-8, 8, 9, dtype=np.float32)[None]
    np.testing.assert_allclose(onnx_of(path)(x=x)["output_0"], model(x), rtol=1e-6, atol=1e-6)


RESIZES = (
    {"antialias": True},
    {"interpolation": "bicubic"},
    {"interpolation": "area"},
    {"interpolation": "lanczos3", "antialias": True},
    {"antialias": True, "crop_to_aspect_ratio": True},
)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "float32"])
def test_resizes_are_those_of_tensorflow(setup, tmp_path, precision):
    """tf2onnx writes some of them wrongly, or as what onnxruntime refuses."""
    run = setup(precision=precision)
    with run.scope():
        image = keras.Input((16, 12, 3), name="image")
        made = [layers.Resizing(8, 9, **each)(image) for each in RESIZES]
        larger = layers.Resizing(20, 17, antialias=True)(image)
        model = keras.Model(image, [*made, larger])
    images = np.random.default_rng(0).uniform(0, 2, (3, 16, 12, 3)).astype(np.float32)
    path = run.export(model, tmp_path / "1", images=images, onnx=True)
    expected = [keras.ops.convert_to_numpy(each).astype(np.float32) for each in model(images)]
    answers = onnx_of(path)(image=images)
    tolerance = parity.TOLERANCE[model.compute_dtype]
    named = {f"output_{index}": each for index, each in enumerate(expected)}
    assert_alike(answers, named, tolerance)


def test_a_resize_of_any_size_is_refused_in_one_sentence(setup, tmp_path):
    run = setup()
    with run.scope():
        image = keras.Input((None, None, 1), name="image")
        small = layers.Resizing(4, 4, antialias=True)(image)
        model = keras.Model(image, layers.GlobalAveragePooling2D()(small), name="any")
    images = np.ones((2, 8, 8, 1), np.float32)
    with pytest.raises(UserError, match=r"ScaleAndTranslate \(of images whose size is not fixed"):
        run.export(model, tmp_path / "1", images=images, onnx=True)


def test_constants_that_layers_hold_are_no_inputs(setup, tmp_path):
    run = setup()
    with run.scope():
        held = layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[1.0, 4.0, 9.0])
        model = keras.Sequential([keras.Input((3,), name="x"), held])
    path = run.export(model, tmp_path / "1", onnx=True)
    (answer,) = onnx_of(path)(x=np.array([[3, 4, 6]], np.float32)).values()
    np.testing.assert_allclose(answer, [[2, 1, 1]], rtol=1e-6)


def test_a_file_that_answers_otherwise_is_not_exported(setup, tmp_path, monkeypatch):
    write = onnx.write

    def wrong(model, *args, **kwargs):
        model.set_weights([1.5 * each for each in model.get_weights()])
        write(model, *args, **kwargs)

    monkeypatch.setattr(onnx, "write", wrong)
    run = setup()
    with pytest.raises(RunError, match=r"does not answer as the trained model does: ONNX: "):
        run.export(classifier(run), tmp_path / "1", images=PIXELS, onnx=True)
    assert not (tmp_path / "1").exists()


@pytest.mark.slow
@pytest.mark.fresh_process
def test_a_process_of_its_own_compares_it(setup, loader, tmp_path):
    run = setup()
    settings = {"samples": 8, "onnx": True}
    path = run.export(classifier(run), tmp_path / "1", loader=loader(run), **settings)
    checks = {each["name"] for each in card.read(path)["parity"]["checks"]}
    assert {"ONNX", "ONNX answers", "ONNX top-1"} <= checks


class LogGamma(layers.Layer):
    """Of which ONNX has none."""

    def call(self, x):
        return tf.math.lgamma(x)


def test_what_onnx_cannot_say_is_one_sentence_and_nothing_is_exported(setup, tmp_path):
    run = setup()
    with run.scope():
        image = keras.Input((4,), name="image")
        model = keras.Model(image, LogGamma()(image), name="gamma")
    with pytest.raises(UserError, match=r"^model gamma has operations that .*: Lgamma; export it"):
        run.export(model, tmp_path / "1", onnx=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "missing", [pytest.param(["tf2onnx"], marks=pytest.mark.slow), ["onnx", "onnxruntime"]]
)
def test_missing_libraries_are_named_with_the_extra_before_anything_is_written(
    setup, tmp_path, monkeypatch, missing
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    run = setup()
    with pytest.raises(UserError, match=f"^{', '.join(missing)} is not installed.*--extra onnx"):
        run.export(classifier(run), tmp_path / "out" / "1", onnx=True)
    assert not (tmp_path / "out").exists()
    run.export(classifier(run), tmp_path / "out" / "1")  # which needs none of them
