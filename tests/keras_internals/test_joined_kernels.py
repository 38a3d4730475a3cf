"""What XLA reads together: which gradients and matrices, and that no bit of them changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers
from keras.src.backend.common.variables import AutocastScope

from tfaccel.keras_internals.joined_kernels import joined_sums, joined_updates
from tfaccel.keras_internals.layer_paths import layer_paths

EXTREMES = [0.0, -0.0, 1.0, -1e-30, 3e38, np.inf, -np.inf, np.nan]


def traced(specs, function=joined_updates):
    """Returns which gradients `function` changed, and the graph."""
    changed = []

    @tf.function(autograph=False)
    def run():
        given = [None if each is None else tf.zeros(each[0], each[1]) for each in specs]
        changed.extend(new is not old for old, new in zip(given, function(given), strict=True))

    graph = run.get_concrete_function().graph
    return changed, [each.type for each in graph.get_operations()]


def test_small_gradients_of_one_shape_and_dtype():
    f32, f16 = tf.float32, tf.float16
    specs = [((8,), f32), ((8,), f32), ((4, 2), f32), ((8,), f16), ((4, 2), f32), ((8,), f32)]
    changed, operations = traced(specs)
    assert changed == [True, True, True, False, True, True]
    assert operations.count("XlaOptimizationBarrier") == 1  # the ones of all shapes


@pytest.mark.parametrize(
    "spec",
    [None, ((), tf.float32), ((1,), tf.float32), ((128, 129), tf.float32), ((8,), tf.int32)],
    ids=["none", "scalar", "one value", "large", "integers"],
)
def test_others_stay_as_they_are(spec):
    changed, operations = traced([spec, spec])
    assert changed == [False, False]
    assert "XlaOptimizationBarrier" not in operations


def test_matrices_of_one_shape_and_dtype():
    """Those of one last axis share the ones, and a matrix without others stays as it is."""
    f32, f16 = tf.float32, tf.float16
    shapes = [((300, 64), f32), ((300, 64), f32), ((5, 60, 64), f32), ((5, 60, 64), f32)]
    changed, operations = traced([*shapes, ((300, 64), f16), ((64, 300), f32)], joined_sums)
    assert changed == [True, True, True, True, False, False]
    assert operations.count("XlaOptimizationBarrier") == 1


def test_an_unknown_shape_stays_as_it_is():
    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def run(x):
        assert joined_updates([x, x])[0] is x

    run.get_concrete_function()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_no_bit_changes(dtype):
    values = tf.cast(tf.constant(EXTREMES, tf.float64), dtype)

    @tf.function(jit_compile=True, autograph=False)
    def run(x, y):
        return joined_updates([x, y]) + joined_sums([x[tf.newaxis], y[tf.newaxis]])

    for found in run(values, values):
        assert found.numpy().tobytes() == values.numpy().tobytes()


def weights_after_training(optimizer, num_replicas):
    def make():
        inputs = keras.Input((6,))
        x = layers.BatchNormalization()(layers.Dense(8)(inputs))
        x = layers.Dense(8, activation="relu")(x)
        return keras.Model(inputs, layers.Dense(1)(x))

    keras.utils.set_random_seed(0)
    model = compiled(make, num_replicas, optimizer=optimizer(), loss="mse")
    draw = np.random.default_rng(0)
    x = draw.normal(size=(32, 6)).astype("f4")
    model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def scaled_sgd():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))


def clipped_adamw():
    return keras.optimizers.AdamW(0.01, global_clipnorm=0.5)


@pytest.mark.parametrize(
    ("optimizer", "num_replicas"),
    [(clipped_adamw, 1), pytest.param(scaled_sgd, 2, marks=pytest.mark.slow)],
)
def test_training_is_the_same(monkeypatch, optimizer, num_replicas):
    """1e-6: XLA may sum a norm in another order."""
    used = []

    def noted(gradients):
        found = joined_updates(gradients)
        used.append(sum(new is not old for old, new in zip(gradients, found, strict=True)))
        return found

    monkeypatch.setattr("tfaccel.step.finite.joined_updates", noted)
    own = weights_after_training(optimizer, num_replicas)
    # Of the gradients, the bias and batch norm of eight units, and the next bias; of the state, the
    # moving mean and variance.
    assert set(used) == {4, 2}
    monkeypatch.setattr("tfaccel.step.finite.joined_updates", list)
    for found, wanted in zip(own, weights_after_training(optimizer, num_replicas), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def half_layers(dtype):
    made = [
        layers.Dense(8, dtype=dtype),
        layers.Dense(8, dtype=dtype),
        layers.Dense(4, dtype=dtype),
    ]
    model = keras.Sequential(made)
    model.build((2, 8))
    return model


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "wanted"),
    [
        ("mixed_bfloat16", True, 2),  # of the sizes 8 and 4
        ("mixed_float16", True, 2),
        ("mixed_bfloat16", False, 0),
        ("float32", True, 0),
    ],
)
def test_weights_that_are_cast(dtype, on_gpu, wanted):
    model = half_layers(dtype)

    @tf.function(autograph=False)
    def run(x):
        with layer_paths(xla=True, all_reduce=None, on_gpu=on_gpu):
            return model(x)

    types = [op.type for op in run.get_concrete_function(tf.zeros((2, 8))).graph.get_operations()]
    assert types.count("XlaOptimizationBarrier") == wanted


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_bit_of_a_cast_weight_changes(dtype):
    """Also in a branch, in a loop, and where activations are computed again."""
    weight = keras.Variable(np.array([*EXTREMES, 1.001], "f4"), autocast=True)
    expected = tf.cast(weight.value, dtype).numpy().tobytes()

    @tf.function(jit_compile=True, autograph=False)
    def run(flag):
        def read(*_):
            with AutocastScope(dtype):
                return tf.identity(weight.value)

        with layer_paths(xla=True, all_reduce=None, on_gpu=True):
            branch = tf.cond(flag, read, lambda: read() * 0)
            (looped,) = tf.while_loop(
                lambda _: True, lambda _: (read(),), [tf.zeros(9, dtype)], maximum_iterations=2
            )
            again = tf.recompute_grad(read)()
            return read(), branch, looped, again

    for found in run(tf.constant(True)):
        assert found.dtype == dtype
        assert found.numpy().tobytes() == expected


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_gradient_of_a_table_is_one_of_some_rows(on_gpu):
    table = layers.Embedding(50, 8, dtype="mixed_bfloat16")
    table.build(())

    @tf.function(autograph=False)
    def run(rows):
        with layer_paths(xla=True, all_reduce=None, on_gpu=on_gpu), tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.cast(table(rows), tf.float32) ** 2)
        found = tape.gradient(value, table.embeddings.value)
        assert isinstance(found, tf.IndexedSlices)
        return found

    rows = tf.constant([3, 7, 3])
    found = run(rows)
    np.testing.assert_array_equal(found.indices, rows)
    np.testing.assert_allclose(
        tf.cast(found.values, tf.float32), 2 * tf.gather(table.embeddings.value, rows), rtol=2**-7
    )
