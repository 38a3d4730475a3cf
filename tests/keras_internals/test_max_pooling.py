"""Max pooling by kept indices against Keras's own layer, on the same inputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel.keras_internals import max_pooling

LAYER = keras.layers.MaxPooling2D
KERAS_CALL = LAYER.call
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])


def value_and_gradient(layer, inputs, *, xla):
    """The outputs, and the gradient of their weighted squares."""

    @tf.function(jit_compile=xla, autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            weights = tf.cast(np.random.default_rng(1).uniform(1, 2, y.shape), y.dtype)
            loss = tf.reduce_sum(weights * y**2)
        return y, tape.gradient(loss, x)

    return run(inputs)


@pytest.fixture
def use_indexed(monkeypatch):
    """Keras's layer keeps indices; returns the list that calls of Keras's own go to."""
    own = []

    def call(self, inputs):
        own.append(self)
        return KERAS_CALL(self, inputs)

    def use():
        monkeypatch.setattr(LAYER, "call", max_pooling.indexed(call))
        return own

    return use


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    ("window", "strides"),
    [
        ((2, 2), None),
        ((3, 3), 2),
        *(
            pytest.param(window, strides, marks=pytest.mark.slow)
            for window in ((2, 2), (3, 3), (1, 4), (5, 5))
            for strides in (None, 2, (3, 4))
            if (window, strides) not in (((2, 2), None), ((3, 3), 2))
        ),
    ],
)
@pytest.mark.parametrize("few_values", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_is_max_pooling_and_so_is_its_gradient(
    use_indexed, padding, window, strides, few_values
):
    random = np.random.default_rng(0)
    shape = (2, 9, 8, 3)
    # Of few values many are equal, and then the first has all of the gradient.
    x = random.integers(-1, 2, shape) if few_values else random.normal(size=shape)
    x = tf.constant(x, tf.float32)
    layer = LAYER(window, strides=strides, padding=padding)
    expected = value_and_gradient(layer, x, xla=False)
    own = use_indexed()
    received = value_and_gradient(layer, x, xla=True)
    assert own == []
    np.testing.assert_array_equal(received[0], expected[0])
    # Up to 25 windows are summed, in another order.
    np.testing.assert_allclose(received[1], expected[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [
        (3, 2, "same"),
        (3, 1, "valid"),
        pytest.param(3, 2, "valid", marks=pytest.mark.slow),
        pytest.param(3, 1, "same", marks=pytest.mark.slow),
        pytest.param(2, 2, "valid", marks=pytest.mark.slow),
        pytest.param(2, 2, "same", marks=pytest.mark.slow),
        pytest.param((2, 3), (3, 2), "valid", marks=pytest.mark.slow),
        pytest.param((2, 3), (3, 2), "same", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_two_channels_go_together(use_indexed, dtype, window, strides, padding):
    x = np.random.default_rng(0).integers(-4, 5, (2, 9, 8, 4))
    own = use_indexed()
    by_two, by_one = (
        with_ones_back(
            LAYER(window, strides=strides, padding=padding, dtype=each), tf.cast(x, each)
        )
        for each in (dtype, "float32")
    )
    assert own == []
    for ours, theirs in zip(by_two, by_one, strict=True):  # small whole numbers: sums are exact
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("window", "strides", "is_apart"), [(3, 2, True), (2, None, False), (2, 3, False)]
)
def test_a_pass_of_its_own_only_where_windows_overlap(use_indexed, window, strides, is_apart):
    use_indexed()
    run = tf.function(lambda x: tf.gradients(LAYER(window, strides=strides)(x), x), autograph=False)
    graph = run.get_concrete_function(tf.TensorSpec((2, 9, 8, 4), "float16")).graph
    types = {each.type for each in graph.get_operations()}
    assert ("XlaOptimizationBarrier" in types) == is_apart


@pytest.mark.parametrize(
    ("channels", "dtype"),  # of 16 bits two may go together
    [
        (2, "float16"),
        (3, "float16"),
        (2, "bfloat16"),
        pytest.param(3, "bfloat16", marks=pytest.mark.slow),
        pytest.param(2, "float32", marks=pytest.mark.slow),
        (3, "float32"),
    ],
)
def test_types_stay(use_indexed, channels, dtype):
    x = tf.cast(np.random.default_rng(0).normal(size=(2, 7, 6, channels)), dtype)
    layer = LAYER(3, strides=2, dtype=dtype)
    expected = value_and_gradient(layer, x, xla=False)
    own = use_indexed()
    received = value_and_gradient(layer, x, xla=True)
    assert own == []
    for ours, theirs in zip(received, expected, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        np.testing.assert_allclose(
            tf.cast(ours, "float32"), tf.cast(theirs, "float32"), rtol=1e-2, atol=1e-2
        )


def with_ones_back(layer, x):
    """The outputs, and the gradient of their sum, compiled by XLA; in float32."""

    @tf.function(jit_compile=True, autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, tape.gradient(y, x)

    return [tf.cast(each, tf.float32).numpy() for each in run(x)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 9, 8, 4), "float16"),
        ((2, 11, 16, 4), "bfloat16"),
        ((2, 9, 8, 4), "float32"),
        pytest.param((2, 9, 8, 4), "bfloat16", marks=pytest.mark.slow),
        pytest.param((2, 9, 12, 4), "float16", marks=pytest.mark.slow),
        pytest.param((2, 9, 12, 4), "bfloat16", marks=pytest.mark.slow),
        pytest.param((2, 9, 12, 4), "float32", marks=pytest.mark.slow),
        pytest.param((2, 11, 16, 4), "float16", marks=pytest.mark.slow),
        pytest.param((2, 11, 16, 4), "float32", marks=pytest.mark.slow),
    ],
)
def test_padding_spoils_nothing(use_indexed, shape, dtype):
    x = tf.cast(np.random.default_rng(0).integers(-4, 5, shape), dtype)
    layer = LAYER(3, strides=2, padding="same", dtype=dtype)
    expected = tf.cast(layer(x), tf.float32)
    own = use_indexed()
    received, _ = with_ones_back(layer, x)
    assert own == []
    np.testing.assert_array_equal(received, expected)


@DTYPES
def test_zeros_are_equal_whatever_their_signs(use_indexed, dtype):
    x = tf.cast([-0.0, 0.0, -1.0, 0.0, -0.0, -2.0, 0.0, -0.0], dtype)
    own = use_indexed()
    y, gradient = with_ones_back(LAYER((1, 2), dtype=dtype), x[None, None, :, None])
    assert own == []
    np.testing.assert_array_equal(y.flat, [0, 0, 0, 0])
    np.testing.assert_array_equal(gradient.flat, [1, 0, 0, 1, 1, 0, 1, 0])  # the first of two


@DTYPES
def test_denormals_are_told_apart(use_indexed, dtype):
    bits = np.array([1, 2, 3], np.int32 if dtype == "float32" else np.int16)
    x = tf.bitcast(bits, dtype)
    own = use_indexed()
    _, gradient = with_ones_back(LAYER((1, 3), dtype=dtype), x[None, None, :, None])
    assert own == []
    np.testing.assert_array_equal(gradient.flat, [0, 0, 1])


@DTYPES
def test_nan_and_infinity_come_through(use_indexed, dtype):
    own = use_indexed()
    values = np.repeat(np.float32([np.nan, -np.nan, np.inf]), 3)
    x = np.random.default_rng(0).normal(size=(9, 3, 3, 1)).astype(np.float32)
    for image, place, value in zip(x, 3 * (0, 4, 8), values, strict=True):
        image.flat[place] = value
        assert np.signbit(image.flat[place]) == np.signbit(value)  # of NaN, too
    y, _ = with_ones_back(LAYER(3, dtype=dtype), tf.cast(x, dtype))
    np.testing.assert_array_equal(y.flat, values)
    assert own == []


@pytest.mark.parametrize(
    ("window", "strides"), [(3, 1), pytest.param(2, None, marks=pytest.mark.slow), (3, 2)]
)
def test_where_all_is_minus_infinity_no_gradient_goes_to_padding(use_indexed, window, strides):
    x = tf.fill([1, 3, 3, 1], -np.inf)
    layer = LAYER(window, strides=strides, padding="same")
    expected = with_ones_back(layer, x)
    own = use_indexed()
    received = with_ones_back(layer, x)
    assert own == []
    for ours, theirs in zip(received, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("padding", "window"),
    [pytest.param("valid", 3, marks=pytest.mark.slow), ("same", 3), ("same", 2)],
)
def test_its_gradient_has_a_gradient(use_indexed, padding, window):
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 7, 6, 2)), tf.float32)
    layer = LAYER((window, 2), strides=(2, 3), padding=padding)

    def penalty(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(layer(x) ** 3)
            gradient = inner.gradient(loss, x)
            penalty = tf.reduce_sum(gradient**2)
        return penalty, outer.gradient(penalty, x)

    expected = tf.function(penalty, autograph=False)(x)
    own = use_indexed()
    received = tf.function(penalty, jit_compile=True, autograph=False)(x)
    assert own == []
    for ours, theirs in zip(received, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.gpu
@DTYPES
def test_a_gpu_has_the_cpus_bits(use_indexed, dtype):
    random = np.random.default_rng(0)
    values = [0.0, -0.0, 1.0, 2.0, -1.0, np.inf, -np.inf, np.nan]
    odds = [0.2, 0.2, 0.2, 0.2, 0.17, 0.01, 0.01, 0.01]
    x = random.choice(values, (8, 15, 14, 64), p=odds)
    own = use_indexed()
    found = []
    for device in ("/cpu:0", "/gpu:0"):
        with tf.device(device):
            found.append(with_ones_back(LAYER(3, strides=2, dtype=dtype), tf.cast(x, dtype)))
    assert own == []
    for on_cpu, on_gpu in zip(*found, strict=True):
        np.testing.assert_array_equal(on_gpu, on_cpu)


@pytest.mark.parametrize(
    ("settings", "spec"),
    [
        ({"pool_size": 6}, tf.TensorSpec([2, 9, 9, 3])),
        ({"strides": 16}, tf.TensorSpec([2, 99, 99, 3])),  # more pixels than a byte can number
        ({"dtype": "float64"}, tf.TensorSpec([2, 8, 8, 3], tf.float64)),
        ({"data_format": "channels_first"}, tf.TensorSpec([2, 3, 8, 8])),
        ({"dtype": "int32"}, tf.TensorSpec([2, 8, 8, 3], tf.int32)),
        ({}, tf.TensorSpec([2, None, 8, 3])),
        ({}, tf.TensorSpec([2, 8, 8, None])),
        ({"pool_size": 3}, tf.TensorSpec([2, 2, 2, 3])),  # whose error is Keras's
    ],
    ids=str,
)
def test_all_else_goes_to_keras(monkeypatch, settings, spec):
    kept = object()
    monkeypatch.setattr(LAYER, "call", max_pooling.indexed(lambda self, inputs: kept))
    layer = LAYER(**settings)
    seen = []
    tf.function(
        lambda x: seen.append(layer.call(x)), input_signature=[spec], autograph=False
    ).get_concrete_function()
    assert seen == [kept]
