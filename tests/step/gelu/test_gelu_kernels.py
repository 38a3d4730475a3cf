"""GELU by tfaccel's kernels on any device: what they are given, and where they are used."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from gelu_stand_in import call_module
from keras import layers
from own_kernels_cases import check_refusal, check_training, labelled_rows, uses
from stablehlo_parser import parsed

from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.keras_internals.product_bias import with_bias
from tfaccel.step.gelu import calls, choose
from tfaccel.step.gelu import gelu as gelu_lib
from tfaccel.step.gelu.calls import Gelu
from tfaccel.step.gelu.choose import Gelus
from tfaccel.step.gelu.gelu import bias_gelu

# Of one rounding to the dtype, and of the polynomial.
TOLERANCE = {tf.bfloat16: 2**-8, tf.float16: 2**-11 + 1e-4}
POINTS = np.concatenate([np.linspace(-12, 12, 40001), [-3e38, -1e5, 0.0, 1e5, 3e38]])


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(gelu_lib, "call_module", call_module)


def exact(x, approximate):
    """In float64. TensorFlow's own rounds its constants to float32."""
    if approximate:
        return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + tf.math.erf(x * np.sqrt(0.5)))


@pytest.mark.parametrize("approximate", [False, True])
def test_polynomial(approximate):
    """In float32, as the kernels compute it, at moderate and at extreme numbers."""
    x = POINTS.astype("f4")
    factors = np.array(calls.factors(approximate=approximate), "f4")
    assert factors[-1] <= 0
    assert np.trim_zeros(factors, "b")[-1] < 0
    with np.errstate(over="ignore"):
        square = x * x
        polynomial = functools.reduce(
            lambda y, f: y * square + f, np.trim_zeros(factors, "b")[::-1]
        )
        found = x / (1 + np.exp2(x * polynomial))
    wide = x.astype("f8")
    wanted = exact(tf.constant(wide[np.abs(wide) < 20]), approximate).numpy()
    inner = found[np.abs(wide) < 20]
    # float64's 1 + erf(x) is as inexact as 1e-16 where gelu(x) is as small.
    np.testing.assert_allclose(inner, wanted, rtol=1e-4, atol=2e-7)
    np.testing.assert_array_equal(found[np.abs(wide) > 20], np.maximum(x[np.abs(wide) > 20], 0))


@pytest.mark.parametrize("rows", [1, 7, 64, 1000, 25_216, 401_408])
@pytest.mark.parametrize("columns", [8, 200, 384, 3072, 3080])
def test_programs_compute_each_row_once(rows, columns):
    of = Gelu(rows, columns, tf.bfloat16, False)
    wide = of.block_columns
    assert of.column_blocks * wide >= columns > (of.column_blocks - 1) * wide
    row_blocks, of_columns = of.sums
    each = of.turns * of.block_rows("backward")
    assert of_columns == columns
    assert each <= 64
    assert row_blocks * each >= rows > (row_blocks - 1) * each
    assert f"grid_x = {row_blocks * of.column_blocks} : i32" in calls.backward(of)
    programs = -(-rows // of.block_rows("forward")) * of.column_blocks
    assert f"grid_x = {programs} : i32" in calls.forward(of)


@pytest.mark.parametrize("columns", [8, 200, 384, 3072, 3080])
def test_sizes_of_programs(columns):
    """A program of the gradient is half as large as one of the output."""
    of = Gelu(1000, columns, tf.bfloat16, False)
    sizes = {"forward": (calls.forward(of), 2048, 4), "backward": (calls.backward(of), 1024, 2)}
    for name, (text, elements, warps) in sizes.items():
        rows, wide = of.block_rows(name), of.block_columns
        assert rows * wide == elements
        assert f"tensor<{rows}x{wide}xf32>" in text
        assert f"num_warps = {warps} : i32" in text


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_text_is_whole(dtype, approximate):
    of = Gelu(100, 384, dtype, approximate)
    other = {tf.bfloat16: r"\bf16\b|xf16", tf.float16: "bf16"}[dtype]
    for name in ("forward", "backward"):
        text = calls.kernel(name, of, turns=4)
        assert not re.search(r"\{[a-z_]+\}", text)
        assert not re.search(other, text)
        arguments = re.findall(r"%arg\d+(?=: !tt.ptr| = arith)", text)
        assert len(arguments) == len(set(arguments)) == text.count("!tt.ptr<", 0, 900) + 11


@pytest.mark.parametrize("approximate", [False, True])
def test_xla_parses_the_modules(approximate):
    """XLA's own parser takes the text and the configuration; only a GPU runs the kernels."""
    of = Gelu(100, 384, tf.bfloat16, approximate)
    x, bias = tf.TensorSpec((100, 384), of.dtype), tf.TensorSpec((384,), of.dtype)
    sums = tf.TensorSpec(of.sums, tf.float32)
    modules = [(calls.forward(of), [x, bias], [x]), (calls.backward(of), [x, bias, x], [x, sums])]
    for text, arguments, results in modules:
        made = parsed(text, arguments, results)
        assert made.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
        assert "tt.func public @gelu_" in made


def operands(dtype, shape=(6, 5, 24)):
    draw = np.random.default_rng(0)
    arrays = draw.normal(size=shape) * 2, draw.normal(size=shape[-1]), draw.normal(size=shape)
    return [tf.cast(tf.constant(each), dtype) for each in arrays]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients(stand_in, dtype, approximate, is_shared):
    """The output and the gradients of x and bias beside float64, and the gradient's gradient.

    If the sum is shared, something else uses it too, and the bias has both gradients.
    """
    x, bias, gradient = operands(dtype)

    def own(x, bias):
        total = with_bias(x, bias)
        found = bias_gelu(total, x, bias, approximate=approximate)
        return found + total if is_shared else found

    def plain(x, bias):
        return exact(x + bias, approximate) + (x + bias if is_shared else 0)

    def found(function, x, bias, gradient):
        with tf.GradientTape() as outer:
            outer.watch([x, bias])
            with tf.GradientTape() as inner:
                inner.watch([x, bias])
                y = function(x, bias)
            first = inner.gradient(y, [x, bias], output_gradients=gradient)
            penalty = tf.reduce_sum(tf.cast(first[0], tf.float32) ** 2)
        return [y, *first, *outer.gradient(penalty, [x, bias])]

    made = tf.function(functools.partial(found, own), autograph=False)(x, bias, gradient)
    wide = [tf.cast(each, tf.float64) for each in (x, bias, gradient)]
    wanted = found(plain, *wide)
    limit = TOLERANCE[dtype]
    factors = (1, 1, 4, 8, 8)
    for each, other, factor in zip(made, wanted, factors, strict=True):
        factor = max(factor, 3) if is_shared else factor  # it rounds three times
        assert each.dtype == dtype
        size = np.abs(other).max() if factor > 1 else 1  # sums have the errors of their terms
        error = np.abs(tf.cast(each, tf.float64) - other) / np.maximum(np.abs(other), size)
        assert error.max() <= factor * limit


def ops_of(function, *arguments):
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph
    return [each.type for each in graph.get_operations()]


def half_dense(units=16, **settings):
    layer = layers.Dense(units, dtype="mixed_bfloat16", **settings)
    layer.build((2, 8))
    return layer


X = tf.constant(np.random.default_rng(0).normal(size=(2, 8)), tf.float32)
CASES = {
    "in a layer": (lambda: half_dense(activation="gelu"), 1),
    "a function in a layer": (
        lambda: half_dense(activation=lambda x: keras.activations.gelu(x, approximate=True)),
        1,
    ),
    "after a layer": (
        lambda: keras.Sequential([half_dense(), layers.Activation("gelu", dtype="bfloat16")]),
        1,
    ),
    "float32": (lambda: layers.Dense(16, activation="gelu"), 0),
    "no bias": (lambda: half_dense(activation="gelu", use_bias=False), 0),
    "odd columns": (lambda: half_dense(12, activation="gelu"), 0),
    "no product before it": (
        lambda: lambda x: keras.activations.gelu(
            tf.nn.bias_add(tf.cast(x, "bfloat16"), tf.ones(8, "bfloat16"))
        ),
        0,
    ),
    "no bias before it": (lambda: lambda x: keras.activations.gelu(tf.cast(x, "bfloat16")), 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_where_it_is_used(stand_in, monkeypatch, case):
    make, wanted = CASES[case]
    function = make()
    used, found = uses(monkeypatch, choose, "bias_gelu", function, X, gelu=Gelus())
    assert used == wanted
    np.testing.assert_allclose(
        tf.cast(found, tf.float32), tf.cast(function(X), tf.float32), rtol=2**-7, atol=2**-7
    )


def test_a_sum_that_others_use_keeps_its_gradient(stand_in):
    """A tape that asks for the gradient of a layer's output, before the GELU, gets it."""
    layer = half_dense()

    @tf.function(autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None, gelu=Gelus()), tf.GradientTape() as tape:
            total = layer(x)
            found = keras.activations.gelu(total)
        return total, *tape.gradient(found, [total, layer.bias])

    total, of_total, of_bias = run(X)
    with tf.GradientTape() as tape:
        wide = tf.cast(total, tf.float64)
        tape.watch(wide)
        found = exact(wide, False)
    wanted = tape.gradient(found, wide)
    np.testing.assert_allclose(tf.cast(of_total, tf.float64), wanted, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(of_bias, tf.reduce_sum(wanted, 0), rtol=2**-6, atol=2**-6)


def test_refusal_of_a_kernel(stand_in, monkeypatch, caplog):
    gelus, layer = Gelus(), half_dense(activation="gelu")

    def use():
        return uses(monkeypatch, choose, "bias_gelu", layer, X, gelu=gelus)[0]

    check_refusal(gelus, use, caplog)


def classifier():
    inputs = keras.Input((8,))
    x = layers.Dense(32, activation="gelu")(inputs)
    x = layers.Activation("gelu")(layers.Dense(16)(x))
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))


@pytest.mark.parametrize(
    ("num_replicas", "accumulation_steps"),
    [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_training(stand_in, monkeypatch, num_replicas, accumulation_steps):
    settings = {"num_replicas": num_replicas, "accumulation_steps": accumulation_steps}
    check_training(monkeypatch, Gelus, classifier, *labelled_rows(), rtol=2e-2, **settings)


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_kernel_sums_the_gradient_of_the_bias(stand_in, is_shared):
    """Unless something else uses the sum too."""
    layer = half_dense()

    def run(x):
        with layer_paths(xla=True, all_reduce=None, gelu=Gelus()), tf.GradientTape() as tape:
            total = layer(x)
            found = keras.activations.gelu(total)
            found = found + total if is_shared else found
        return tape.gradient(found, layer.trainable_variables)

    assert ops_of(run, X).count("BiasAddGrad") == is_shared
