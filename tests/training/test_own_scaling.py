"""A model that scales pixels by itself wants 0..255, at whatever depth it does so."""

import types

import keras
import numpy as np
import PIL.Image
import pytest
from keras import layers

import tfaccel
from tfaccel import UserError
from tfaccel.config import Config, DataConfig, ModelConfig
from tfaccel.experiment import train
from tfaccel.training.own_scaling import misfit, own_scaling, unscaled


def model_of(*first, nested=False):
    inner = [keras.Sequential([keras.Input((6, 5, 1)), *first])] if nested else first
    return keras.Sequential([keras.Input((6, 5, 1)), *inner, layers.Flatten(), layers.Dense(2)])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Rescaling(1 / 255),
        lambda: layers.Rescaling(1 / 127.5, -1),
        lambda: layers.Normalization(mean=120.0, variance=64.0**2),
    ],
)
def test_what_scales_is_found_at_any_depth(make, nested):
    model = model_of(make(), nested=nested)
    assert "scaled twice" in misfit(model, (0.0, 1.0))
    assert "scaled twice" in misfit(model, (-1.0, 1.0))
    assert not misfit(model, (0.0, 255.0))
    assert not misfit(model, None)


def test_what_takes_small_numbers_is_let_pass():
    assert (
        own_scaling(model_of(layers.Rescaling(1 / 9), layers.Normalization(mean=0.5, variance=0.1)))
        is None
    )


@pytest.mark.parametrize(
    "first",
    [
        layers.Normalization(mean=33.0, variance=30.0**2),  # dark images, of little contrast
        layers.Normalization(mean=123.0, variance=1.0),  # as Caffe has it
    ],
)
def test_a_mean_of_large_numbers_says_it_too(first):
    assert "scaled twice" in misfit(model_of(first), (0.0, 1.0))


def test_what_is_made_large_before_is_not_scaled_twice():
    """As `Rescaling(255)` in front of EfficientNetB0, behind a loader that gives 0 to 1."""
    network = model_of(layers.Rescaling(1 / 255))
    for before in (layers.Rescaling(255), layers.Lambda(lambda x: 255 * x), TimesMany()):
        assert own_scaling(keras.Sequential([keras.Input((6, 5, 1)), before, network])) is None
    x = keras.Input((6, 5, 1))
    assert own_scaling(keras.Model(x, network(x * 255))) is None
    assert own_scaling(keras.Model(x, network(layers.RandomFlip()(x)))) is not None


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.own, self.scaling = Own(), layers.Rescaling(1 / 255)

    def call(self, x):
        return self.own(self.scaling(x))


def test_in_a_subclassed_model_it_is_found_wherever_it_stands():
    assert "scaled twice" in misfit(Subclassed(), (0.0, 1.0))


class TimesMany(layers.Layer):
    def call(self, x):
        return 255 * x


def test_fit_and_lint_say_it(setup, tmp_path, caplog):
    for index in range(4):
        path = tmp_path / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(np.full((6, 5), 60 * index, np.uint8)).save(path)
    run = setup(xla=False)
    images = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2}
    with run.scope():
        model = model_of(layers.Rescaling(1 / 255))
    run.compile(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    whole = run.image_folder(tmp_path, **images, std=1 / 255)
    model.evaluate(whole, verbose=0)
    assert "scaled twice" not in caplog.text
    assert not [each for each in tfaccel.lint(model, whole) if "0 to 255" in each.what]
    small = run.image_folder(tmp_path, **images)
    model.evaluate(small, verbose=0)
    assert caplog.text.count("scaled twice") == 1
    assert [each for each in tfaccel.lint(model, small) if "0 to 255" in each.what]


RAW = (0.0, 255.0)


def convolution(*first):
    return [*first, layers.Conv2D(2, 3, name="conv")]


@pytest.mark.parametrize(
    "first",
    [
        convolution(),
        convolution(layers.RandomFlip(), layers.ZeroPadding2D()),
        [layers.Flatten(), layers.Dense(3, name="conv")],
        [
            layers.Permute((2, 1, 3)),
            layers.Reshape((5, 6)),
            layers.ZeroPadding1D(1),
            layers.EinsumDense("btp,pw->btw", (7, 3), bias_axes="tw", name="conv"),
        ],
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_pixels_of_0_to_255_that_nothing_scales_are_said(first, nested):
    model = model_of(*first, nested=nested)
    assert "does not scale them before layer conv" in unscaled(model, RAW)
    for fine in (None, (0.0, 1.0), (-1.0, 1.0), (-124.0, 151.0)):
        assert not unscaled(model, fine)


class Own(layers.Layer):
    def call(self, x):
        return x / 255


@pytest.mark.parametrize(
    "first", [layers.Rescaling(1 / 255), layers.BatchNormalization(), Own(), layers.Lambda(abs)]
)
def test_what_may_scale_is_let_pass(first):
    assert not unscaled(model_of(first, layers.Conv2D(2, 3)), RAW)


def test_an_operation_between_may_scale_too():
    x = keras.Input((6, 5, 1))
    assert not unscaled(keras.Model(x, layers.Conv2D(2, 3)(x / 255)), RAW)
    assert not unscaled(keras.Sequential([layers.Conv2D(2, 3)]), (0.0, 1.0))  # not built


def known(name="resnet50", bias=0.5):
    """A network that has a name of keras.applications, in a classifier; trained where bias is."""
    x = keras.Input((6, 5, 3))
    pad = layers.ZeroPadding2D()(x)
    body = keras.Model(
        x, layers.Conv2D(2, 3, bias_initializer=keras.initializers.Constant(bias))(pad), name=name
    )
    return keras.Sequential([keras.Input((6, 5, 3)), layers.RandomFlip(), body, layers.Flatten()])


@pytest.mark.parametrize(
    ("name", "fits", "words"),
    [
        ("resnet50", (-123.68, 151.061), "the order blue, green, red"),
        ("vgg16", (-123.68, 151.061), "mean=(0.48502, 0.457957, 0.407604)"),
        ("mobilenetv2_1.00_224", (-1.0, 1.0), "mean=(0.5, 0.5, 0.5) and std=(0.5, 0.5, 0.5)"),
        ("densenet121", (-2.1179, 2.64), "std=(0.229, 0.224, 0.225)"),
        ("convnext_tiny", (-2.1179, 2.64), "mean=(0.485, 0.456, 0.406)"),
    ],
)
def test_trained_weights_of_keras_want_their_own_pixels(name, fits, words):
    for other in ((0.0, 1.0), RAW, (-3.0, 3.0)):
        assert words in unscaled(known(name), other)
    assert not unscaled(known(name), fits)
    assert not unscaled(known(name, bias=0), (0.0, 1.0))  # not trained: any small numbers do
    assert "does not scale" in unscaled(known(name, bias=0), RAW)


def test_fit_and_lint_say_that_nothing_scales(setup, tmp_path, caplog):
    for index in range(4):
        path = tmp_path / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(np.full((6, 5), 60 * index, np.uint8)).save(path)
    run = setup(xla=False)
    images = {"image_size": (6, 5), "channels": 1, "global_batch_size": 2}
    with run.scope():
        model = model_of(layers.Conv2D(2, 3, name="conv"))
    run.compile(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    raw = run.image_folder(tmp_path, **images, std=1 / 255)
    model.evaluate(raw, verbose=0)
    model.evaluate(raw, verbose=0)
    assert caplog.text.count("does not scale them before layer conv") == 1
    assert [each for each in tfaccel.lint(model, raw) if "without scaling" in each.what]
    small = run.image_folder(tmp_path, **images)
    assert not [each for each in tfaccel.lint(model, small) if "pixels" in each.what]


def test_a_configs_run_refuses_a_model_that_scales_twice(setup, monkeypatch):
    """Of the networks by name, EfficientNetB0 to B7 scale by themselves, whatever is asked."""
    config = Config(model=ModelConfig(num_outputs=2), data=DataConfig(image_size=(6, 5)))
    monkeypatch.setattr(train, "make_model", lambda *_, **__: model_of(layers.Rescaling(1 / 255)))
    monkeypatch.setattr(train.tasks, "task_of", lambda *_: types.SimpleNamespace(num_outputs=2))
    monkeypatch.setattr(train.tasks, "check_model", lambda *_: None)
    data = types.SimpleNamespace(pixel_range=(0.0, 1.0), class_names=())
    with pytest.raises(UserError, match=r"scaled twice.*--config\.data\.std=0\.0039215686") as said:
        train.build(None, config, data)
    assert "--config.data.mean=0" in str(said.value)
    data.pixel_range = RAW
    assert train.build(None, config, data)[0]
