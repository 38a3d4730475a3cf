"""Convolutions as a traced step has them against Keras's own, on the same inputs."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals.layer_paths import layer_paths

layers = keras.layers
HALF = {"dtype": "mixed_bfloat16"}


def values(shape, dtype="float32", seed=0):
    return tf.cast(np.random.default_rng(seed).normal(size=shape), dtype)


def trained(model, x, *, paths, training=True, xla=False):
    """The outputs and the gradient of each variable and of the inputs, in float32, by name.

    `xla` compiles them; the paths are those that are given, whether or not it does.
    """
    weights = model.trainable_variables

    @tf.function(jit_compile=xla, autograph=False)
    def run(x):
        with paths(), tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.nest.flatten(model(x, training=training))
            # Weighted: the gradient of a plain sum of normalized values is zero.
            loss = sum(
                tf.reduce_sum(tf.cast(each, "float32") * values(each.shape, seed=1))
                for each in outputs
            )
        return outputs, tape.gradient(loss, [x, *(each.value for each in weights)])

    outputs, gradients = run(x)
    names = ["inputs", *(each.name for each in weights)]
    by_name = zip(names, gradients, strict=True)
    return [each.numpy().astype("float32") for each in outputs], {
        name: None if each is None else tf.cast(each, "float32").numpy() for name, each in by_name
    }


def ours(xla=True, on_gpu=False):
    return lambda: layer_paths(xla=xla, all_reduce=None, on_gpu=on_gpu)


def sequential(*each, shape=(6, 5, 3)):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape), *each])
    random = np.random.default_rng(2)
    model.set_weights([random.uniform(0.5, 1.5, weight.shape) for weight in model.weights])
    return model


# Windows of one pixel, and of a few grey ones.


@pytest.mark.parametrize(
    ("strides", "padding"),
    [
        (1, "valid"),
        (2, "same"),
        ((3, 2), "valid"),
        pytest.param(1, "same", marks=pytest.mark.slow),
        pytest.param(2, "valid", marks=pytest.mark.slow),
        pytest.param((3, 2), "same", marks=pytest.mark.slow),
    ],
)
def test_a_product_is_the_convolution_and_so_are_its_gradients(strides, padding):
    model = sequential(layers.Conv2D(4, 1, strides=strides, padding=padding))
    assert_alike(model, values((2, 6, 5, 3)))


@pytest.mark.parametrize(
    ("size", "padding"),
    [
        (3, "valid"),
        ((2, 4), "same"),
        pytest.param(3, "same", marks=pytest.mark.slow),
        pytest.param((2, 4), "valid", marks=pytest.mark.slow),
        pytest.param((5, 1), "valid", marks=pytest.mark.slow),
        pytest.param((5, 1), "same", marks=pytest.mark.slow),
    ],
)
def test_of_grey_pixels_too(size, padding):
    model = sequential(layers.Conv2D(4, size, padding=padding), shape=(6, 5, 1))
    assert_alike(model, x := values((2, 6, 5, 1)))
    assert "Conv2D" not in operations(model, x)


@pytest.mark.parametrize(
    ("size", "padding", "shape"),
    [
        (2, "valid", (7, 5, 3)),
        ((2, 3), "same", (4, 6, 3)),
        pytest.param(2, "same", (4, 6, 1), marks=pytest.mark.slow),
        pytest.param((3, 1), "valid", (7, 5, 12), marks=pytest.mark.slow),
    ],
)
def test_of_patches_too(size, padding, shape):
    model = sequential(layers.Conv2D(4, size, strides=size, padding=padding), shape=shape)
    assert_alike(model, x := values((2, *shape)))
    assert "Conv2D" not in operations(model, x)


@pytest.mark.parametrize(
    ("size", "channels", "settings"),
    [
        (3, 3, {"padding": "same"}),
        ((2, 4), 7, {}),
        pytest.param((3, 1), 2, {"dilation_rate": 2, "padding": "same"}, marks=pytest.mark.slow),
    ],
)
def test_few_channels_get_zeros_on_a_gpu(size, channels, settings):
    model = sequential(layers.Conv2D(4, size, **HALF, **settings), shape=(6, 5, channels))
    x = values((2, 6, 5, channels))
    assert "Pad" in operations(model, x, on_gpu=True)
    assert "Pad" not in operations(model, x)
    assert_near(model, x, on_gpu=True)


@pytest.mark.parametrize(
    ("channels", "settings"),
    [
        (3, {"dtype": "float32"}),
        (3, {"dtype": "mixed_float16"}),  # XLA adds the zeros
        (3, {"strides": 2}),
        (3, {"kernel_size": 1}),
        (6, {"groups": 2}),
        (8, {}),
    ],
)
def test_other_channels_get_no_zeros(channels, settings):
    settings = HALF | {"kernel_size": 3} | settings
    model = sequential(layers.Conv2D(4, **settings), shape=(6, 5, channels))
    assert "Pad" not in operations(model, values((2, 6, 5, channels)), on_gpu=True)


def assert_near(model, x, *, on_gpu=False, tolerance=0.02):
    theirs = trained(model, x, paths=contextlib.nullcontext)
    received = trained(model, x, paths=ours(on_gpu=on_gpu), xla=True)
    np.testing.assert_allclose(received[0], theirs[0], rtol=tolerance, atol=tolerance)
    for name, each in theirs[1].items():  # bfloat16 has 8 bits, and sums are up to 480 products
        scale = np.abs(each).max()
        np.testing.assert_allclose(received[1][name], each, rtol=3e-2, atol=3e-2 * scale)


def assert_alike(model, x):
    theirs = trained(model, x, paths=contextlib.nullcontext)
    received = trained(model, x, paths=ours(), xla=True)
    np.testing.assert_allclose(received[0], theirs[0], rtol=1e-5, atol=1e-5)
    for name, each in theirs[1].items():
        np.testing.assert_allclose(received[1][name], each, rtol=1e-5, atol=1e-5)


def operations(model, x, *, xla=True, on_gpu=False):
    @tf.function(autograph=False)
    def run(x):
        with ours(xla, on_gpu)():
            return model(x, training=True)

    graph = run.get_concrete_function(x).graph
    return [each.type for each in graph.get_operations()]


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_with_xla_it_is_a_product_in_the_layers_type(dtype):
    model = sequential(layers.Conv2D(4, 1, dtype=dtype))
    x = values((2, 6, 5, 3))
    assert "MatMul" in operations(model, x)
    assert "Conv2D" not in operations(model, x)
    assert "Conv2D" in operations(model, x, xla=False)
    with ours()():
        assert model(x).dtype == model.layers[0].compute_dtype


@pytest.mark.parametrize(
    ("channels", "layer"),
    [
        (3, layers.Conv2D(4, (1, 2))),
        (3, layers.Conv2D(6, 1, groups=3)),
        (3, layers.Conv2D(4, 2, dilation_rate=2)),
        (3, layers.DepthwiseConv2D(1)),
        (1, layers.Conv2D(4, 2, dilation_rate=2)),
        (1, layers.Conv2D(4, 3, strides=2)),
        (1, layers.Conv2D(4, (6, 6), padding="same")),
    ],
    ids=["window", "groups", "dilation", "depthwise", "grey dilation", "grey strides", "large"],
)
def test_other_convolutions_stay_what_they_are(channels, layer):
    shape = 6, 5, channels
    found = operations(sequential(layer, shape=shape), values((2, *shape)))
    assert "MatMul" not in found
    # Keras runs grouped ones in a function of their own.
    assert {"Conv2D", "DepthwiseConv2dNative", "StatefulPartitionedCall"} & set(found)


# Biases before a batch normalization.


# Transposed convolutions.


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {}),
        ((2, 3), {"padding": "same", "activation": "tanh"}),
        pytest.param(1, {"use_bias": False}, marks=pytest.mark.slow),
        pytest.param((3, 1), {"padding": "valid"}, marks=pytest.mark.slow),
    ],
)
def test_of_transposed_windows_side_by_side(size, settings):
    model = sequential(layers.Conv2DTranspose(4, size, strides=size, **settings))
    assert_alike(model, x := values((2, 6, 5, 3)))
    assert "Conv2DBackpropInput" not in operations(model, x)
    assert "Conv2DBackpropInput" in operations(model, x, xla=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"strides": 1},
        {"strides": 3},
        {"strides": 2, "output_padding": 1},
        {"strides": 1, "dilation_rate": 2, "kernel_size": 1},
    ],
    ids=["overlap", "gaps", "padding", "dilation"],
)
def test_other_transposed_windows_stay_what_they_are(settings):
    model = sequential(layers.Conv2DTranspose(4, **{"kernel_size": 2, **settings}))
    assert "Conv2DBackpropInput" in operations(model, values((2, 6, 5, 3)))


def test_transposed_windows_of_unknown_height_go_to_keras():
    model = sequential(layers.Conv2DTranspose(4, 2, strides=2), shape=(None, 5, 3))
    types = operations(model, tf.TensorSpec((2, None, 5, 3)))
    assert "Conv2DBackpropInput" in types


# What XLA writes before a product.


PRODUCTS = [(layers.Conv2D, 1), (layers.Conv2DTranspose, 2)]


@pytest.mark.parametrize(("layer", "size"), PRODUCTS)
def test_a_relu_of_batch_norm_is_written_before_a_product(layer, size):
    norm = layers.BatchNormalization(**HALF), layers.Activation("relu", **HALF)
    model = sequential(*norm, layer(4, size, strides=size, **HALF))
    x = values((8, 6, 5, 3))
    assert operations(model, x).count("XlaOptimizationBarrier") == 1
    assert_near(model, x)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_relu_of_a_sum_may_be_in_the_product(dtype):
    x = keras.Input((6, 5, 3))
    y = layers.BatchNormalization(dtype=dtype)(x)
    y = y if dtype == "float32" else layers.Add(dtype=dtype)([x, y])
    y = layers.Conv2D(4, 1, dtype=dtype)(layers.Activation("relu", dtype=dtype)(y))
    types = operations(keras.Model(x, y), values((2, 6, 5, 3)))
    assert "MatMul" in types
    assert "XlaOptimizationBarrier" not in types


class TwoReaders(keras.Model):
    """The convolution's outputs are normalized, and also given as they are."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = layers.Conv2D(4, 3), layers.BatchNormalization()

    def call(self, x, training=False):
        y = self.conv(x)
        return self.norm(y, training=training), y


@pytest.mark.parametrize(
    ("window", "xla"),
    [
        (1, True),
        (3, False),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_a_bias_that_is_taken_away_has_no_gradient_and_all_else_is_the_same(window, xla):
    model = sequential(layers.Conv2D(4, window), layers.BatchNormalization(), layers.ReLU())
    x = values((4, 6, 5, 3))
    outputs, expected = trained(model, x, paths=contextlib.nullcontext)
    received, gradients = trained(model, x, paths=ours(xla), xla=xla)
    # Rounding is all that Keras's gradient is of.
    np.testing.assert_allclose(expected.pop("bias"), np.zeros(4), atol=1e-4)
    np.testing.assert_array_equal(gradients.pop("bias"), np.zeros(4))
    np.testing.assert_allclose(received, outputs, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, each in expected.items():
        np.testing.assert_allclose(gradients[name], each, rtol=1e-4, atol=1e-4)


def test_moving_statistics_have_the_bias():
    # In float16 too, where the variance comes of one read, and the mean starts far off.
    for dtype, tolerance in (("float32", 1e-5), ("mixed_float16", 2e-3)):
        models = [
            sequential(layers.Conv2D(4, 3, dtype=dtype), layers.BatchNormalization(dtype=dtype))
            for _ in range(2)
        ]
        for model, paths in zip(models, (contextlib.nullcontext, ours()), strict=True):
            trained(model, values((4, 6, 5, 3)), paths=paths)
        theirs, received = ([each.numpy() for each in model.weights] for model in models)
        for mine, wanted in zip(received, theirs, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=tolerance, atol=tolerance)


def test_where_the_bias_is_seen_its_gradient_is_there():
    model, x = TwoReaders(), values((2, 6, 5, 3))
    model(x)
    _, expected = trained(model, x, paths=contextlib.nullcontext)
    _, received = trained(model, x, paths=ours())
    assert np.abs(expected["bias"]).max() > 1
    for name, each in expected.items():
        np.testing.assert_allclose(received[name], each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_gradient_of_a_bias_is_summed_from_half_precision(groups):
    conv = layers.Conv2D(32, 3, padding="same", groups=groups, **HALF)
    model = sequential(conv, layers.LayerNormalization(**HALF), shape=(6, 5, 4))
    x = values((4, 6, 5, 4))

    def num_barriers(xla):
        @tf.function(autograph=False)
        def run(x):
            with ours(xla)():
                y = model(x, training=True)
            return tf.gradients(y, [each.value for each in model.trainable_variables])

        operations = run.get_concrete_function(x).graph.get_operations()
        return sum(each.type == "XlaOptimizationBarrier" for each in operations)

    assert num_barriers(xla=True) == 1
    assert num_barriers(xla=False) == 0
    assert_near(model, x, tolerance=0.1)  # what the norm enlarges is rounded to 1/16


@pytest.mark.parametrize(
    ("conv", "norm", "training"),
    [
        ({"activation": "relu"}, {}, True),
        ({}, {"trainable": False}, True),
        ({}, {}, False),
        ({}, {"axis": 1}, True),
    ],
    ids=["activation", "frozen", "testing", "other axis"],
)
def test_a_bias_that_is_not_taken_away_has_its_gradient(conv, norm, training):
    model = sequential(layers.Conv2D(4, 3, **conv), layers.BatchNormalization(**norm))
    x = values((2, 6, 5, 3))
    _, expected = trained(model, x, paths=contextlib.nullcontext, training=training)
    _, received = trained(model, x, paths=ours(), training=training)
    assert np.abs(expected["bias"]).max() > 0.1
    for name, each in expected.items():
        np.testing.assert_allclose(received[name], each, rtol=1e-4, atol=1e-4)
