"""Layer normalization as a traced step has it, against float64 and XLA's parser."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.keras_internals.layouts import in_order

ROWS, SIZE = (3, 5), 48


def values(dtype, *, mean=0.0):
    draw = np.random.default_rng(0)
    x = mean + draw.normal(size=(*ROWS, SIZE))
    gradient = draw.normal(size=x.shape)
    return tf.constant(x, dtype), tf.constant(gradient, dtype)


def layer_of(**settings):
    layer = keras.layers.LayerNormalization(dtype="float32", **settings)
    layer.build((None, SIZE))
    rng = np.random.default_rng(1)
    layer.set_weights([rng.normal(size=each.shape) for each in layer.get_weights()])
    return layer


def with_gradients(layer, x, gradient, *, quick):
    """Returns the output, the gradients of the input and the weights, and a second gradient."""

    @tf.function(autograph=False)
    def run(x):
        with layer_paths(xla=quick, all_reduce=None), tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = keras.ops.layer_normalization(
                    x, layer.gamma, layer.beta, axis=-1, epsilon=layer.epsilon
                )
            weights = layer.trainable_variables
            first = tape.gradient(y, [x, *weights], output_gradients=gradient)
            squared = tf.reduce_sum(tf.square(tf.cast(first[0], tf.float64)))
        return [y, *first, outer.gradient(squared, x)]

    return [tf.cast(each, tf.float64).numpy() for each in run(x)]


@pytest.mark.parametrize("mean", [0.0, 20.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("settings", [{}, {"center": False}, {"scale": False}], ids=str)
def test_alike_keras_in_float32(settings, dtype, tolerance, mean):
    layer = layer_of(**settings)
    x, gradient = values(dtype, mean=mean)
    own = with_gradients(layer, x, gradient, quick=True)
    wide = with_gradients(layer, *(tf.cast(e, tf.float32) for e in (x, gradient)), quick=False)
    theirs = with_gradients(layer, x, gradient, quick=False)
    for index, (each, wanted) in enumerate(zip(own, wide, strict=True)):
        is_last = index == len(own) - 1  # the second gradient
        size = np.abs(wanted).max()
        error = np.abs(each - wanted).max() / size
        keras_error = np.abs(theirs[index] - wanted).max() / size
        assert error < max((5 if is_last else 1) * tolerance, 2 * keras_error), index


@pytest.mark.parametrize("shape", [(3, 5, 1), (1, 3, 5, 1), (15,)])
def test_any_number_of_axes(shape):
    """The same rows have the same results in other shapes; 1e-5, for other orders of sums."""
    layer = layer_of()
    given = values("bfloat16")
    other = with_gradients(layer, *(tf.reshape(each, [*shape, SIZE]) for each in given), quick=True)
    for found, wanted in zip(other, with_gradients(layer, *given, quick=True), strict=True):
        assert found.shape in ((*shape, SIZE), (SIZE,))
        np.testing.assert_allclose(found.ravel(), wanted.ravel(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [(None, 4, 4, SIZE), (None, None, None, SIZE)])
def test_a_shape_that_is_not_known_when_traced(spec):
    layer = layer_of()

    @tf.function(input_signature=[tf.TensorSpec(spec, tf.bfloat16)], autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None):
            return keras.ops.layer_normalization(x, layer.gamma, layer.beta, axis=-1)

    x = tf.cast(tf.random.stateless_normal((2, 4, 4, SIZE), [1, 2]), tf.bfloat16)
    wanted = run(x[:1])
    assert run.get_concrete_function().output_shapes.rank == 4
    np.testing.assert_array_equal(tf.cast(run(x)[:1], "float32"), tf.cast(wanted, "float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_one_number(dtype):
    x = tf.fill((4, SIZE), tf.constant(300.3, dtype))
    layer = layer_of()
    y, of_x, *_ = with_gradients(layer, x, tf.ones_like(x), quick=True)
    np.testing.assert_allclose(y, np.tile(layer.beta.numpy(), (4, 1)), atol=2e-2)
    assert np.isfinite(of_x).all()


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("float32", {}), ("bfloat16", {"axis": 1}), ("bfloat16", {"axis": [1, 2]})],
    ids=str,
)
def test_other_forms_are_keras_own(dtype, settings):
    layer = keras.layers.LayerNormalization(**settings)
    x, _ = values(dtype)
    own = layer(x)

    @tf.function(autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None):
            return layer(x)

    np.testing.assert_array_equal(*(tf.cast(each, tf.float32) for each in (run(x), own)))
    operations = {e.type for e in run.get_concrete_function(x).graph.get_operations()}
    assert "IdentityN" not in operations  # of a custom gradient


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_xla_parses_the_constraint(kind, dtype, monkeypatch):
    """On a GPU, the input of the layer and its gradient have the constraint."""
    call_module = xla.call_module
    anywhere = {"disabled_checks": ["platform"]}
    monkeypatch.setattr(xla, "call_module", lambda *a, **k: call_module(*a, **{**k, **anywhere}))
    layer = getattr(keras.layers, kind)(dtype=dtype)
    layer.build((None, None, SIZE))

    @tf.function(jit_compile=True, autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None, on_gpu=True), tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x * x)
        return y, tape.gradient(y, x)

    x, _ = values(dtype)
    made = run.experimental_get_compiler_ir(x)(stage="hlo", platform_name="CPU")
    lines = [line for line in made.splitlines() if "LayoutConstraint" in line]
    assert len(lines) == 2
    assert all("{2,1,0}" in line for line in lines), lines


def test_unknown_shapes_are_returned_as_they_are():
    @tf.function(input_signature=[tf.TensorSpec((None, SIZE))], autograph=False)
    def run(x):
        assert in_order(x) is x
        return x

    run.get_concrete_function()
