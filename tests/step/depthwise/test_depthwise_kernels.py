"""Depthwise convolutions by tfaccel's kernels: what they are given, and where they are used."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from depthwise_stand_in import call_module
from keras import layers
from own_kernels_cases import check_refusal, check_training, uses
from stablehlo_parser import parsed

from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.step.depthwise import calls, choose
from tfaccel.step.depthwise import depthwise as depthwise_lib
from tfaccel.step.depthwise.calls import Depthwise
from tfaccel.step.depthwise.choose import Depthwises
from tfaccel.step.depthwise.depthwise import convolved

TOLERANCE = {tf.bfloat16: 2**-8, tf.float16: 2**-11}  # of one rounding


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(depthwise_lib, "call_module", call_module)


def plain(x, kernel, is_same):
    padding = "SAME" if is_same else "VALID"
    return tf.nn.depthwise_conv2d(x, kernel[..., None], [1] * 4, padding)


def strips(rows):
    """Of 14 rows, unless strips of 7 leave fewer rows without work."""
    return -(-rows // (14 if -rows % 14 <= -rows % 7 else 7))


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("window", calls.WINDOWS)
@pytest.mark.parametrize("channels", [8, 16, 24, 72, 96, 960])
@pytest.mark.parametrize("side", [7, 8, 56])
def test_programs_compute_each_value_once(side, channels, window, is_same):
    of = Depthwise(3, side, side + 1, channels, window, is_same, tf.bfloat16)
    images, height, width, _ = of.output_shape
    assert (height == side) == is_same
    for text, rows, columns in (
        (calls.forward(of), height, width),
        (calls.of_x(of), side, side + 1),
    ):
        programs = images * strips(rows) * -(-columns // 4) * blocks(channels, (64, 32, 16, 8))
        assert f"grid_x = {programs} : i32" in text
    items = images * strips(height) * -(-width // 4)
    parts = of.sums[0]
    turns = -(-items // parts)
    assert (parts - 1) * turns < items <= parts * turns
    programs = parts * blocks(channels, (32, 16, 8))
    assert f"grid_x = {programs} : i32" in calls.of_kernel(of)


def blocks(channels, sizes):
    """Of the better one of the two largest sizes that a pixel fills."""
    fitting = [each for each in sizes if each <= channels][:2]
    return -(-channels // min(fitting, key=lambda each: -channels % each))


def texts_of(of):
    return [calls.forward(of), calls.of_x(of), calls.of_kernel(of)]


@pytest.mark.parametrize("window", calls.WINDOWS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_texts_are_whole(dtype, window):
    other = {tf.bfloat16: r"\bf16\b|xf16", tf.float16: "bf16"}[dtype]
    for text in texts_of(Depthwise(2, 9, 8, 16, window, True, dtype)):
        kernel = re.search(r'ir = "(.*?)"', text)[1]
        assert not re.search(r"\{[a-z_]+\}", kernel)
        assert not re.search(other, kernel)
        assert kernel.count(" = arith.constant ") >= 12
        # XLA does not end the compilation of a store whose mask is known to be false everywhere.
        assert kernel.count("tt.elementwise_inline_asm") == ("@depthwise_forward" in kernel)


@pytest.mark.parametrize("window", calls.WINDOWS)
def test_xla_parses_the_modules(window):
    """XLA's own parser takes the text and the configuration; only a GPU runs the kernels."""
    of = Depthwise(2, 9, 8, 16, window, False, tf.bfloat16)
    x, y = (tf.TensorSpec(each, of.dtype) for each in (of.shape, of.output_shape))
    kernel, sums = tf.TensorSpec(of.kernel_shape, tf.float32), tf.TensorSpec(of.sums, tf.float32)
    given = [([x, kernel], [y]), ([y, kernel], [x]), ([x, y], [sums])]
    for text, (arguments, results) in zip(texts_of(of), given, strict=True):
        made = parsed(text, arguments, results)
        assert made.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
        assert "tt.func public @depthwise_" in made


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("window", calls.WINDOWS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients(stand_in, dtype, window, is_same):
    """The output, the gradients, and the gradients of both beside float64."""
    of = Depthwise(2, 9, 8, 8, window, is_same, dtype)
    draw = np.random.default_rng(0)
    shapes = (of.shape, of.kernel_shape, of.output_shape)
    given = [tf.cast(tf.constant(draw.normal(size=each)), dtype) for each in shapes]

    def found(function, x, kernel, gradient):
        with tf.GradientTape() as outer:
            outer.watch([x, kernel])
            with tf.GradientTape() as inner:
                inner.watch([x, kernel])
                y = function(x, kernel)
            first = inner.gradient(y, [x, kernel], output_gradients=gradient)
            penalty = sum(tf.reduce_sum(tf.cast(each, tf.float64) ** 2) for each in first)
        return [y, *first, *outer.gradient(penalty, [x, kernel])]

    made = tf.function(lambda *a: found(lambda x, k: convolved(of, x, k), *a), autograph=False)(
        *given
    )
    wide = [tf.cast(each, tf.float64) for each in given]
    wanted = found(lambda x, k: plain(x, k, is_same), *wide)
    for each, other, factor in zip(made, wanted, (1, 1, 1, 3, 3), strict=True):
        assert each.dtype == dtype
        error = np.abs(tf.cast(each, tf.float64) - other).max() / np.abs(other).max()
        assert error <= factor * TOLERANCE[dtype]


def layer_of(kind, *args, **settings):
    return lambda: kind(*args, dtype="mixed_bfloat16", **settings)


X = tf.constant(np.random.default_rng(0).normal(size=(2, 9, 8, 16)), tf.float32)
CASES = {
    "groups": (layer_of(layers.Conv2D, 16, 7, padding="same", groups=16), 1),
    "groups, valid": (layer_of(layers.Conv2D, 16, 3, groups=16), 1),
    "depthwise": (layer_of(layers.DepthwiseConv2D, 5, padding="same"), 1),
    "separable": (layer_of(layers.SeparableConv2D, 24, 3, padding="same", activation="relu"), 1),
    "two outputs a group": (layer_of(layers.Conv2D, 32, 3, groups=16), 0),
    "two channels a group": (layer_of(layers.Conv2D, 16, 3, groups=8), 0),
    "no groups": (layer_of(layers.Conv2D, 16, 3), 0),
    "two outputs a channel": (layer_of(layers.DepthwiseConv2D, 3, depth_multiplier=2), 0),
    "separable, two outputs": (layer_of(layers.SeparableConv2D, 8, 3, depth_multiplier=2), 0),
    "strides": (layer_of(layers.DepthwiseConv2D, 3, strides=2), 0),
    "separable with strides": (layer_of(layers.SeparableConv2D, 8, 3, strides=2), 0),
    "dilation": (layer_of(layers.DepthwiseConv2D, 3, dilation_rate=2), 0),
    "another window": (layer_of(layers.DepthwiseConv2D, 2), 0),
    "a long window": (layer_of(layers.DepthwiseConv2D, (3, 5)), 0),
    "float32": (lambda: layers.DepthwiseConv2D(3), 0),
}  # fmt: skip


def called(monkeypatch, function, x, depthwises=None):
    """Returns how often a call of `function` used the kernels, and what it returned."""
    kernels = {"depthwise": depthwises or Depthwises()}
    return uses(monkeypatch, choose, "convolved", function, x, **kernels)


@pytest.mark.parametrize("case", CASES)
def test_where_it_is_used(stand_in, monkeypatch, case):
    make, wanted = CASES[case]
    layer = make()
    layer.build(X.shape)
    for each in layer.weights:
        each.assign(np.random.default_rng(1).normal(size=each.shape))
    used, found = called(monkeypatch, layer, X)
    assert used == wanted
    other = layer(X)
    assert found.dtype == other.dtype
    np.testing.assert_allclose(
        tf.cast(found, tf.float32), tf.cast(other, tf.float32), rtol=2**-6, atol=2**-4
    )


@pytest.mark.parametrize(("strides", "wanted"), [(1, 1), ((1, 1), 1), (2, 0)])
@pytest.mark.parametrize("name", ["conv", "depthwise_conv", "separable_conv"])
def test_functions_of_keras_ops(stand_in, monkeypatch, name, strides, wanted):
    x = tf.cast(X, tf.bfloat16)
    shapes = {"conv": [(3, 3, 1, 16)], "depthwise_conv": [(3, 3, 16, 1)]}
    shapes["separable_conv"] = [(3, 3, 16, 1), (1, 1, 16, 8)]
    draw = np.random.default_rng(1)
    kernels = [tf.cast(tf.constant(draw.normal(size=each)), x.dtype) for each in shapes[name]]

    def function(x):
        return getattr(keras.ops, name)(x, *kernels, strides, "same")

    used, found = called(monkeypatch, function, x)
    assert used == wanted
    np.testing.assert_allclose(
        tf.cast(found, tf.float32), tf.cast(function(x), tf.float32), rtol=2**-6, atol=0.2
    )


@pytest.mark.parametrize(
    "x",
    [
        tf.zeros((2, 9, 8, 12), tf.bfloat16),
        tf.zeros((0, 9, 8, 16), tf.bfloat16),
    ],
    ids=["channels not in eights", "no images"],
)
def test_shapes_that_it_leaves_to_xla(stand_in, monkeypatch, x):
    layer = layers.DepthwiseConv2D(3, dtype="bfloat16")
    layer.build(x.shape)
    used, found = called(monkeypatch, layer, x)
    assert used == 0
    assert found.shape == layer(x).shape


def test_an_image_without_known_size(stand_in, monkeypatch):
    layer = layers.DepthwiseConv2D(3, dtype="bfloat16")
    layer.build((None, None, None, 8))
    used = []
    monkeypatch.setattr(choose, "convolved", lambda *args: used.append(args))

    @tf.function(
        input_signature=[tf.TensorSpec((None, None, None, 8), tf.bfloat16)], autograph=False
    )
    def run(x):
        with layer_paths(xla=True, all_reduce=None, depthwise=Depthwises()):
            return layer(x)

    assert run(tf.zeros((1, 5, 5, 8), tf.bfloat16)).shape == (1, 3, 3, 8)
    assert not used


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    [
        ((1, 2**12, 2**12, 64), True),
        ((1, 2**14, 2**14, 8), False),  # 2^31 values
        ((2**20, 64, 64, 8), True),
    ],
)
def test_limits(shape, is_taken):
    """Images whose values a program cannot count go to cuDNN."""
    taken = []

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.bfloat16)], autograph=False)
    def run(x):
        taken.append(choose._is_taken(x, tf.zeros((3, 3, shape[3]), tf.bfloat16), True))

    run.get_concrete_function()
    assert taken == [is_taken]


def test_refusal_of_a_kernel(stand_in, monkeypatch, caplog):
    depthwises, layer = Depthwises(), layers.DepthwiseConv2D(3, dtype="bfloat16")
    check_refusal(depthwises, lambda: called(monkeypatch, layer, X, depthwises)[0], caplog)


def classifier():
    inputs = keras.Input((8, 8, 8))
    x = layers.DepthwiseConv2D(3, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Conv2D(8, 5, groups=8, padding="same", activation="relu")(x)
    x = layers.SeparableConv2D(16, 3, activation="relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training(stand_in, monkeypatch, num_replicas):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(48, 8, 8, 8)).astype("f4")
    y = (x.mean((1, 2)) @ draw.normal(size=(8, 3))).argmax(1)
    x += np.eye(8)[y][:, None, None] * 2
    settings = {"num_replicas": num_replicas, "rtol": 3e-2}
    check_training(monkeypatch, Depthwises, classifier, x, y, **settings)
