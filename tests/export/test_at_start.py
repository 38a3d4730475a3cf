"""What the export would refuse at the end is refused at the start."""

import io
import pathlib
import re
import shutil
import struct
import threading
import zlib

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.config import ExportConfig
from tfaccel.data.source import Blobs
from tfaccel.export import at_start, card, kinds, onnx
from tfaccel.export.at_start import check_at_start
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.export.samples import take_samples


@pytest.fixture
def root(tmp_path):
    random = np.random.default_rng(0)
    for index in range(4):
        path = tmp_path / "images" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        PIL.Image.fromarray(random.integers(0, 256, (6, 5), dtype=np.uint8)).save(path)
    return tmp_path / "images"


def job(setup, root, *, loss=None, loader="memory"):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((6, 5, 1)), layers.Flatten(), layers.Dense(2)])
    run.compile(model, loss=loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    images = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2, "loader": loader}
    train = run.image_folder(root, shuffle=True, augment="mnist", **images)
    return {
        "model": model,
        "train": train,
        "loader": run.image_folder(root, **images),
        "runtime": run.runtime,
    }


@pytest.mark.parametrize("loader", [pytest.param("memory", marks=pytest.mark.slow), "tf_data"])
def test_what_suits_passes(setup, root, tmp_path, loader):
    check_at_start(**job(setup, root, loader=loader), path=tmp_path / "1")


@pytest.mark.usefixtures("export_decodes_png")
def test_a_decoder_that_parts_is_named_with_the_file(setup, root, tmp_path, monkeypatch):
    asked = job(setup, root)
    pixels = Preprocessing.pixels
    monkeypatch.setattr(Preprocessing, "pixels", lambda *a: pixels(*a) // 2)
    with pytest.raises(
        UserError, match=r"test image .*0\.png into other pixels.*from the decoder on"
    ):
        check_at_start(**asked, path=tmp_path / "1")


def test_a_file_that_the_export_cannot_decode_is_named(setup, root, tmp_path, monkeypatch):
    def fails(*_):
        raise tf.errors.InvalidArgumentError(None, None, "not a JPEG or PNG file")

    asked = job(setup, root)
    monkeypatch.setattr(Preprocessing, "pixels", fails)
    with pytest.raises(UserError, match=r"the loader reads the test images .*0\.png and .*, but"):
        check_at_start(**asked, path=tmp_path / "1")


@pytest.mark.usefixtures("export_decodes_png")
def test_a_training_image_alone_is_found_too(setup, root, tmp_path, monkeypatch):
    asked = job(setup, root)
    check = at_start._check_pixels
    monkeypatch.setattr(
        at_start, "_check_pixels", lambda *a, of, **b: of == "test" or check(*a, of=of, **b)
    )
    pixels = Preprocessing.pixels
    monkeypatch.setattr(Preprocessing, "pixels", lambda *a: pixels(*a) // 2)
    with pytest.raises(UserError, match=r"training image .*0\.png into other pixels"):
        check_at_start(**asked, path=tmp_path / "1")


def test_a_loss_that_says_nothing_of_the_outputs_is_refused(setup, root, tmp_path):
    with pytest.raises(UserError, match="was compiled with the loss"):
        check_at_start(
            **job(setup, root, loss=keras.losses.MeanSquaredError()), path=tmp_path / "1"
        )


def test_too_little_room_is_said(setup, root, tmp_path, monkeypatch):
    asked = job(setup, root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(UserError, match=r"needs about .* MiB in .* 0\.0 MiB free"):
        check_at_start(**asked, path=tmp_path / "1")


def test_the_loader_says_what_range_its_pixels_have(setup, root, caplog):
    caplog.set_level("INFO", "tfaccel")
    run = setup()
    images = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2}
    assert run.image_folder(root, **images).pixel_range == (0, 1)
    run.image_folder(root, **images)
    assert (
        caplog.text.count("data: pixels range from 0 to 1 (for 0 to 255 set mean=0, std=1/255)")
        == 1
    )
    assert run.image_folder(root, **images, mean=0.5, std=0.5).pixel_range == (-1, 1)
    assert "data: pixels range from -1 to 1 (for 0 to 255" in caplog.text
    as_keras = run.image_folder(root, **images, std=1 / 255)
    assert as_keras.pixel_range == (0, pytest.approx(255))
    assert caplog.messages[-2] == "data: pixels range from 0 to 255"


# What a script is told as its first `fit` begins.


def script(setup, make, **compiled):
    run = setup(xla=False)
    with run.scope():
        model = make()
    run.compile(model, **({"optimizer": "sgd", "loss": CROSS_ENTROPY} | compiled))
    return run, model


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IMAGES = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2, "loader": "memory"}


def of_layers(*some, flat=True):
    given = keras.Input((6, 5, 1))
    outputs = layers.Flatten()(given) if flat else given
    for each in some:
        outputs = each(outputs)
    return keras.Model(given, outputs)


class Unknown(keras.Model):
    """A model of which Keras knows no inputs."""

    def __init__(self):
        super().__init__()
        self.flat, self.dense = layers.Flatten(), layers.Dense(2)

    def call(self, x):
        return self.dense(self.flat(x))


class Nameless(layers.Layer):
    """A layer that says nothing of its arguments."""

    def __init__(self, factor, name=None):
        super().__init__(name=name)
        self.factor = factor

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return {"name": self.name}


def same_names():
    both = [keras.Input((6, 5, 1), name=name) for name in ("a-b", "a.b")]
    return keras.Model(both, layers.Dense(2)(layers.Flatten()(layers.Add()(both))))


def of_lambda():
    return of_layers(layers.Lambda(lambda x: x / 2), layers.Dense(2))


def inner_lambda():
    inner = keras.Sequential([keras.Input((30,)), layers.Lambda(lambda x: x / 2)])
    return of_layers(inner, layers.Dense(2))


def two_outputs():
    given = keras.Input((6, 5, 1))
    flat = layers.Flatten()(given)
    return keras.Model(
        given, [layers.Dense(2, name="one")(flat), layers.Dense(2, name="two")(flat)]
    )


class NoCall(keras.Model):
    """A model of which there is nothing to export."""


REFUSED = {
    "no call": NoCall,
    "a lambda": of_lambda,
    "a lambda within": inner_lambda,
    "a poor config": lambda: of_layers(Nameless(2.0), layers.Dense(2)),
}


@pytest.mark.usefixtures("export_not_saved")
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_script_is_told_once_what_its_end_would_refuse(setup, root, tmp_path, caplog, make):
    run, model = script(setup, make)
    test = run.image_folder(root, **IMAGES)
    for _ in range(2):
        at_start.warn_at_start(model, test, test, run.runtime)
    told = [each.message for each in caplog.records if "run.export would refuse" in each.message]
    assert len(told) == 1
    with pytest.raises(UserError) as refused:
        run.export(model, tmp_path / "1", loader=test)
    assert str(refused.value) in told[0]


class OfLayer(Unknown):
    """A subclassed model that Keras cannot make again."""

    def __init__(self, layer):
        super().__init__()
        self.dense = layer


@pytest.mark.usefixtures("export_not_saved", "export_decodes_png")
@pytest.mark.parametrize(
    "make",
    [Unknown, pytest.param(lambda: OfLayer(layers.Dense(2)), marks=pytest.mark.slow)],
    ids=["with model.keras", "without model.keras"],
)
def test_a_subclassed_model_on_a_loader_is_exported_as_the_start_says(
    setup, root, tmp_path, caplog, make
):
    run, model = script(setup, make)
    test = run.image_folder(root, **IMAGES)
    with caplog.at_level("INFO", logger="tfaccel"):
        model.fit(test, verbose=0)
    assert "an export's pixels match the loader's in 4 images" in caplog.text
    assert "would refuse" not in caplog.text
    without = "no model.keras" in caplog.text
    run.check_export(model, tmp_path / "2", loader=test)
    run.export(model, tmp_path / "1", loader=test)
    assert without != (tmp_path / "1" / "model.keras").exists()


def test_of_several_outputs_and_another_loss_a_script_is_told(setup, root, tmp_path, caplog):
    for make, loss in (
        (two_outputs, [CROSS_ENTROPY] * 2),
        (lambda: of_layers(layers.Dense(1)), "mse"),
    ):
        caplog.clear()
        run, model = script(setup, make, loss=loss)
        test = run.image_folder(root, **IMAGES)
        at_start.warn_at_start(model, None, test, run.runtime)
        with pytest.raises(UserError) as refused:
            run.export(model, tmp_path / "1", loader=test)
        assert str(refused.value) in caplog.text


def test_names_that_become_the_same_are_told(setup, tmp_path, caplog):
    run, model = script(setup, same_names)
    at_start.warn_at_start(model, None, None, run.runtime)
    with pytest.raises(UserError) as refused:
        run.export(model, tmp_path / "1")
    assert str(refused.value) in caplog.text


@pytest.mark.usefixtures("export_not_saved", "export_decodes_png")
def test_a_script_whose_export_will_pass_is_told_nothing_bad(setup, root, tmp_path, caplog):
    """A Sequential without an Input, too, whose inputs are known once it is built."""
    run, model = script(setup, lambda: keras.Sequential([layers.Flatten(), layers.Dense(2)]))
    test = run.image_folder(root, **IMAGES)
    with caplog.at_level("INFO", logger="tfaccel"):
        model.fit(test, validation_data=test, verbose=0)
    assert "an export's pixels match the loader's in 4 images" in caplog.text
    assert "refuse" not in caplog.text
    run.export(model, tmp_path / "1", loader=test)


@pytest.mark.usefixtures("export_decodes_png")
def test_a_script_is_told_of_a_decoder_that_parts(setup, root, caplog, monkeypatch):
    run, model = script(setup, lambda: of_layers(layers.Dense(2)))
    train = run.image_folder(root, shuffle=True, augment="mnist", **IMAGES)
    pixels = Preprocessing.pixels
    monkeypatch.setattr(Preprocessing, "pixels", lambda *a: pixels(*a) // 2)
    at_start.warn_at_start(model, train, None, run.runtime)
    assert "the training image" in caplog.text
    assert "into other pixels than the loader" in caplog.text


def test_a_look_that_fails_does_not_end_a_script(setup, root, caplog, monkeypatch):
    def fails(*_):
        raise KeyError("what nobody foresaw")

    run, model = script(setup, lambda: of_layers(layers.Dense(2)))
    monkeypatch.setattr(at_start, "_check_quickly", fails)
    model.fit(run.image_folder(root, **IMAGES), verbose=0)
    assert (
        "could not check whether run.export takes this model ('what nobody foresaw')" in caplog.text
    )


# What a script may ask before it trains: the end's own sentences.


class NoConfig(layers.Layer):
    """A layer whose config JSON does not hold."""

    def call(self, x):
        return x

    def get_config(self):
        return super().get_config() | {"lock": threading.Lock()}


class Complex(layers.Layer):
    """A layer of which ONNX has no operation."""

    def call(self, x):
        return tf.math.real(tf.signal.fft(tf.cast(x, tf.complex64)))


class Numbers:
    """Examples that your own code makes."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.zeros((6, 5, 1), np.float32), 0


def subclass():
    class Own(keras.Model):
        pass

    given = keras.Input((6, 5, 1))
    return Own(given, layers.Dense(2)(layers.Flatten()(given)))


def text():
    words = keras.Input((), dtype="string")
    one_hot = layers.StringLookup(vocabulary=["a"], output_mode="one_hot")(words)
    return keras.Model(words, layers.Dense(2)(one_hot))


def of_any_size():
    given = keras.Input((None, None, 1))
    return keras.Model(given, layers.Dense(2)(layers.GlobalMaxPooling2D()(given)))


def two_inputs():
    both = [keras.Input((6, 5, 1), name=name) for name in "ab"]
    return keras.Model(both, layers.Dense(2)(layers.Flatten()(layers.Add()(both))))


class Small(layers.Layer):
    """A layer that refuses what is above 1, as random input may be."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 1.0)]):
            return tf.identity(x)


def fine():
    return of_layers(layers.Dense(2))


TEST = {"loader": "test"}
# What makes the model, what it is compiled with, and what is asked for.
REFUSED_AT_ONCE = {
    "no known inputs": (Unknown, {}, {}),
    "names that become the same": (same_names, {}, {}),
    "a path that exists": (fine, {}, {"path": "images"}),
    "a path below a file": (fine, {}, {"path": "images/a/0.png/x/1"}),
    "a path with a long name": (fine, {}, {"path": "x" * 250}),
    "no average": (fine, {}, {"weights": "average"}),
    "no average of a model without optimizer": (fine, {"optimizer": None}, {"weights": "average"}),
    "images that do not fit": (fine, {}, {"images": np.zeros((2, 3))}),
    "any size": (of_any_size, {}, {}),
    "text": (text, {}, {}),
    "a loader of your own data": (fine, {}, {"loader": "own"}),
    "a loader that draws": (fine, {}, {"loader": "train"}),
    "two inputs": (two_inputs, {}, TEST),
    "two outputs": (two_outputs, {"loss": [CROSS_ENTROPY] * 2}, TEST),
    "no loss": (fine, {"loss": None}, TEST),
    "another loss": (fine, {"loss": "mse"}, TEST),
    "a loss of your own": (fine, {"loss": lambda y, x: x}, TEST),
    "a lambda": (of_lambda, {}, {}),
    "a poor config": (REFUSED["a poor config"], {}, {}),
    "a config that is no JSON": (lambda: of_layers(NoConfig(), layers.Dense(2)), {}, {}),
    "a subclass in float32": (Unknown, {}, {"computes_in": "float32"}),
    "a layer that refuses the input": (lambda: of_layers(Small(), layers.Dense(2)), {}, {}),
    "an operation that ONNX lacks": (lambda: of_layers(Complex()), {}, {"onnx": True}),
}


@pytest.mark.rehearsed
@pytest.mark.parametrize(
    ("make", "compiled", "asked"), REFUSED_AT_ONCE.values(), ids=REFUSED_AT_ONCE
)
def test_what_the_end_refuses_the_start_refuses_in_the_same_words(
    setup, root, tmp_path, make, compiled, asked
):
    run, model = script(setup, make, **compiled)
    loaders = {
        "test": lambda: run.image_folder(root, **IMAGES),
        "train": lambda: run.image_folder(root, augment="mnist", **IMAGES),
        "own": lambda: run.examples(Numbers(), global_batch_size=2),
    }
    asked = {"path": "1"} | asked
    asked["path"] = tmp_path / asked["path"]
    if "loader" in asked:
        asked["loader"] = loaders[asked["loader"]]()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as at_the_start:
        run.check_export(model, **asked)
    with pytest.raises(UserError) as at_the_end:
        run.export(model, **asked)
    assert without_numbers(at_the_start) == without_numbers(at_the_end)
    assert sorted(tmp_path.rglob("*")) == before


def without_numbers(raised):
    """The sentence, without the addresses of objects."""
    return re.sub(r"0x[0-9a-f]+", "", str(raised.value))


def test_missing_libraries_are_told_before(setup, tmp_path, monkeypatch):
    run, model = script(setup, fine)
    monkeypatch.setattr(onnx, "LIBRARIES", ("no_such_library",))
    with pytest.raises(UserError, match="no_such_library is not installed"):
        run.check_export(model, tmp_path / "1", onnx=True)


def test_what_passes_leaves_nothing_and_is_exported(setup, root, tmp_path):
    run, model = script(setup, fine)
    test = run.image_folder(root, **IMAGES)
    run.check_export(model, tmp_path / "new" / "1", loader=test, onnx=True)
    assert list(tmp_path.iterdir()) == [root]


def test_room_for_what_the_export_is_asked_is_looked_for(setup, root, tmp_path, monkeypatch):
    asked = job(setup, root)
    monkeypatch.setattr(at_start, "_check_room", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(UserError, match=r"samples for the check of the export .*set TMPDIR"):
        check_at_start(**asked, path=tmp_path / "1")


# Kinds of files.


def with_chunks(data, *chunks):
    """A PNG with more chunks before its pixels."""
    return data[:33] + b"".join(chunks) + data[33:]


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


SLOW = ["tf_data", "memory"]
GAMMA, SRGB = chunk(b"gAMA", struct.pack(">I", 100_000)), chunk(b"sRGB", b"\0")


def colour_png(random):
    file = io.BytesIO()
    coarse = PIL.Image.fromarray(random.integers(0, 256, (3, 3, 3), dtype=np.uint8))
    coarse.resize((20, 24), PIL.Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def coloured(tmp_path):
    """Colour PNGs in two classes: plain, and with chunks that tell of their colours."""
    random, root = np.random.default_rng(0), tmp_path / "coloured"
    for index, chunks in enumerate([(), (GAMMA,), (SRGB,), (SRGB, GAMMA), (), ()]):
        path = root / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(with_chunks(colour_png(random), *chunks))
    return root


@pytest.mark.usefixtures("export_not_saved")
@pytest.mark.parametrize(
    "loader", ["dali_cpu", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_grey_of_colour_files_with_gamma_is_the_same_from_start_to_export(
    setup, coloured, tmp_path, loader
):
    asked = job(setup, coloured, loader=loader)
    check_at_start(**asked, path=tmp_path / "1")
    data = asked["loader"].data
    samples = take_samples(data, asked["runtime"], 6)
    for index, name in enumerate(samples.names):
        with PIL.Image.open(name) as image:
            grey = np.asarray(image.convert("L").resize((5, 6), PIL.Image.Resampling.BILINEAR))
        assert np.abs(255 * samples.inputs[index][..., 0] - grey).max() < 3
    run = setup()
    facts = card.read(run.export(asked["model"], tmp_path / "1", loader=asked["loader"]))
    assert {each["name"]: each["value"] for each in facts["parity"]["checks"]}["pixels"] < 1


def test_a_kind_of_file_that_is_rare_is_looked_at(setup, coloured, tmp_path, monkeypatch):
    asked = job(setup, coloured)
    asked["config"] = ExportConfig(samples=1)
    monkeypatch.setattr(at_start, "NUM_IMAGES", 1)
    looked = []
    check = at_start._check_pixels
    monkeypatch.setattr(
        at_start,
        "_check_pixels",
        lambda samples, *a, of, **b: (
            looked.append((of, *samples.names)),
            check(samples, *a, of=of, **b),
        ),
    )
    check_at_start(**asked, path=tmp_path / "1")
    (test, *of_test), (training, *of_training) = looked
    assert (test, training) == ("test", "training")
    for names in (of_test, of_training):
        assert {1, 2, 3} < {int(pathlib.Path(each).stem) for each in names}
        assert len(names) == 5  # and two of the plain ones


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("PNG", {}),
        ("JPEG", {"progressive": False}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"subsampling": 0}),
        ("PNG", {"gamma": True}),
        ("BMP", {}),
    ],
)
def test_each_of_these_is_a_kind_of_its_own(tmp_path, form, settings):
    plain = PIL.Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    for index in range(3):
        plain.save(tmp_path / f"{index}.tif", "TIFF")
    if settings.pop("gamma", False):
        file = io.BytesIO()
        plain.save(file, form)
        (tmp_path / "3.tif").write_bytes(with_chunks(file.getvalue(), GAMMA))
    else:
        plain.save(tmp_path / "3.tif", form, **settings)
    (tmp_path / "4.tif").write_bytes(b"no image")
    blobs = Blobs([str(tmp_path / f"{index}.tif") for index in range(5)])
    assert kinds.of_each_kind(blobs, num_threads=2).tolist() == [0, 1, 3]
