"""The cross-entropy of a step that XLA compiles against TensorFlow's operation."""

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from tfaccel.keras_internals import cross_entropy
from tfaccel.keras_internals.cross_entropy import gathered
from tfaccel.keras_internals.layer_paths import layer_paths

PLAIN = tf.nn.sparse_softmax_cross_entropy_with_logits
OURS = gathered(PLAIN)
ON_GPU = gathered(PLAIN, on_gpu=True)
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def few_classes_are_many(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_MANY_CLASSES", 2)


def with_gradient(function, labels, logits, weights=None):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = function(labels=labels, logits=logits)
        total = loss if weights is None else loss * weights
    return loss, tape.gradient(total, logits)


def compiled(function, labels, logits, weights=None):
    run = tf.function(
        lambda *args: with_gradient(function, *args), jit_compile=True, autograph=False
    )
    return run(labels, logits, weights)


# What is for GPUs, XLA compiles for the CPU as well.
FORMS = [
    pytest.param(with_gradient, OURS, id="eager"),
    pytest.param(compiled, OURS, id="xla"),
    pytest.param(compiled, ON_GPU, id="one_read"),
]


@pytest.mark.parametrize(("run", "ours"), FORMS)
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 4), (6,), (3, 1), (1, 9), (0, 4)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-12), ("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)],
)
def test_alike_float64(run, ours, shape, dtype, tolerance):
    labels = tf.constant(RANDOM.integers(0, shape[-1], shape[:-1]), tf.int64)
    logits = tf.cast(RANDOM.normal(size=shape) * 4, dtype)
    weights = RANDOM.uniform(size=shape[:-1])
    found = run(ours, labels, logits, tf.cast(weights, dtype))
    wanted = with_gradient(PLAIN, labels, tf.cast(logits, tf.float64), tf.constant(weights))
    for each, other in zip(found, wanted, strict=True):
        assert each.dtype == logits.dtype
        assert each.shape == other.shape
        np.testing.assert_allclose(tf.cast(each, tf.float64), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_labels_of_either_type(dtype):
    logits = tf.constant(RANDOM.normal(size=(4, 3)))
    labels = tf.constant([2, 0, 1, 1], dtype)
    np.testing.assert_allclose(OURS(labels, logits), PLAIN(labels, logits), rtol=1e-12)


@pytest.mark.parametrize(("run", "ours"), FORMS)
def test_large_logits_keep_their_gradient(run, ours):
    labels, rows = tf.constant([1, 0]), np.array([[3e4, 3e4 - 1, -3e4], [-9e4, -9e4, 9e4]])
    found = run(ours, labels, tf.constant(rows, tf.float32))
    wanted = with_gradient(PLAIN, labels, tf.constant(rows))
    for each, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ours", [OURS, ON_GPU])
def test_gradients_of_the_gradient(ours):
    logits = tf.constant(RANDOM.normal(size=(4, 5)))
    labels, along = tf.constant([0, 4, 2, 2]), tf.constant(RANDOM.normal(size=(4, 5)))

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def second(function):
        with tf.GradientTape() as outer:
            outer.watch(logits)
            _, gradient = with_gradient(function, labels, logits)
            directed = tf.reduce_sum(gradient * along)
        return outer.gradient(directed, logits)

    found = second(ours)
    np.testing.assert_allclose(found, second(PLAIN), rtol=1e-10, atol=1e-12)
    assert np.abs(found).max() > 0.01


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_label_that_is_no_class_is_nan_as_in_xla(weight):
    labels = tf.constant([0, -1, 2, 3, 2**40], tf.int64)
    logits = tf.constant(RANDOM.normal(size=(5, 3)), tf.float32)
    weights = tf.fill([5], weight)
    wanted = compiled(PLAIN, labels, logits, weights)
    for run, ours in [each.values for each in FORMS]:
        for each, other in zip(run(ours, labels, logits, weights), wanted, strict=True):
            np.testing.assert_allclose(each, other, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.isnan(wanted[0]), [False, True, False, True, True])


@pytest.mark.parametrize(("run", "ours"), FORMS)
def test_infinite_logits_are_as_in_xla(run, ours):
    inf = np.inf
    rows = [[1, -inf, 2, -inf, -inf], [0, 0, 1, -inf, -inf], [-inf] * 5, [0, inf, 0, 0, 0]]
    rows += [[np.nan, 0, 0, 0, 0], [inf, inf, 0, 0, 0]]
    labels, logits = tf.constant([0, 3, 1, 2, 1, 2]), tf.constant(rows, tf.float32)
    wanted = compiled(PLAIN, labels, logits)
    assert np.isfinite(wanted[0][0])
    assert np.isinf(wanted[0][1])
    assert np.isnan(wanted[0][2:]).all()
    for each, other in zip(run(ours, labels, logits), wanted, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-6)


@pytest.mark.parametrize(("rows", "wanted"), [(65_536, 2), (65_535, 0)])
def test_many_rows_of_few_classes_are_kept_with_the_classes_first(monkeypatch, rows, wanted):
    """On a GPU, the logits and their gradient have the constraint."""
    monkeypatch.undo()
    call_module = xla.call_module
    anywhere = {"disabled_checks": ["platform"]}
    monkeypatch.setattr(xla, "call_module", lambda *a, **k: call_module(*a, **{**k, **anywhere}))
    run = tf.function(lambda *args: with_gradient(ON_GPU, *args), jit_compile=True, autograph=False)
    given = tf.TensorSpec((rows,), tf.int64), tf.TensorSpec((rows, 21), tf.float32)
    made = run.experimental_get_compiler_ir(*given)(stage="hlo", platform_name="CPU")
    lines = [line for line in made.splitlines() if "LayoutConstraint" in line]
    assert len(lines) == wanted
    assert all("{0,1}" in line for line in lines), lines


def test_rows_of_many_classes_are_read_once():
    logits = tf.constant(RANDOM.normal(size=(3, 50_257)) * 5, tf.bfloat16)
    labels = tf.constant([0, 50_256, 7], tf.int64)
    wanted = with_gradient(PLAIN, labels, tf.cast(logits, tf.float64))
    found = compiled(ON_GPU, labels, tf.cast(logits, tf.float32))
    # Here XLA adds the powers one after the other; each sum is rounded.
    for each, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("labels", "logits"),
    [
        (np.zeros((3,), int), np.zeros((4, 2))),
        (np.zeros((4, 1), int), np.zeros((4, 2))),
        (0, 1.0),
    ],
)
def test_what_does_not_fit_gets_tensorflows_error(labels, logits):
    said = []
    for function in (PLAIN, OURS):
        with pytest.raises(ValueError, match="logits") as caught:
            function(labels, logits)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_sizes_that_do_not_fit_when_run_are_an_error(num_labels):
    specs = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 2], tf.float32)]
    run = tf.function(OURS, input_signature=specs, jit_compile=True, autograph=False)
    assert run(np.zeros(4, int), np.zeros((4, 2), "float32")).shape == (4,)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        run(np.zeros(num_labels, int), np.zeros((4, 2), "float32"))


# Keras's losses in a step.

LABELS = RANDOM.integers(0, 6, (4, 3))
IGNORED = np.where(RANDOM.uniform(size=LABELS.shape) < 0.4, -1, LABELS)
WEIGHTS = RANDOM.uniform(size=LABELS.shape).astype("float32")


def of_logits(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def of_softmax(y, logits, weights):
    loss = keras.losses.SparseCategoricalCrossentropy()
    return loss(y, keras.ops.softmax(logits), weights)


def of_probabilities(y, logits, weights):
    loss = keras.losses.SparseCategoricalCrossentropy()
    return loss(y, keras.ops.softmax(logits) * 1.0, weights)


def in_step(loss, y, x, weights, *, is_quick):
    @tf.function(jit_compile=True, autograph=False)
    def step(y, x, weights):
        with layer_paths(xla=is_quick, all_reduce=None), tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(y, x, weights)
        return value, tape.gradient(value, x)

    made = step.get_concrete_function(y, x, weights)
    types = {each.type for each in made.graph.get_operations()}
    assert ("SparseSoftmaxCrossEntropyWithLogits" in types) != is_quick
    return step(y, x, weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    ("loss", "y"),
    [
        pytest.param(of_logits(), LABELS, id="mean"),
        pytest.param(of_logits(reduction="sum"), LABELS.astype("uint8"), id="sum"),
        pytest.param(of_logits(reduction=None), LABELS.astype("float32"), id="none"),
        pytest.param(of_logits(reduction="mean_with_sample_weight"), LABELS[..., None], id="own"),
        pytest.param(of_logits(ignore_class=-1), IGNORED, id="ignored"),
        pytest.param(of_softmax, LABELS, id="softmax"),
        pytest.param(of_probabilities, LABELS, id="probabilities"),
    ],
)
def test_keras_losses_in_a_step(loss, y, weights, dtype):
    x = tf.cast(RANDOM.normal(size=(4, 3, 6)), dtype)
    y, weights = tf.constant(y), None if weights is None else tf.constant(weights)
    found = in_step(loss, y, x, weights, is_quick=True)
    wanted = in_step(loss, y, x, weights, is_quick=False)
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    for each, other in zip(found, wanted, strict=True):
        assert each.dtype == other.dtype
        assert np.isfinite(tf.cast(each, tf.float32)).all()
        each, other = (tf.cast(one, tf.float32) for one in (each, other))
        np.testing.assert_allclose(each, other, rtol=tolerance, atol=tolerance)


def test_a_mean_over_rows_sums_no_row_and_class_at_once():
    """XLA did, in any order: on a GPU it summed over the rows in the kernel of the gradient."""
    y, x = tf.zeros([64], tf.int64), tf.zeros([64, 300])

    def program(function):
        def step(y, x):
            return with_gradient(lambda **each: tf.reduce_mean(function(**each)), y, x)

        made = tf.function(step, jit_compile=True, autograph=False).experimental_get_compiler_ir(
            y, x
        )
        return made(stage="optimized_hlo")

    assert "dimensions={0,1}, to_apply" in program(PLAIN)  # else this test shows nothing
    assert "dimensions={0,1}, to_apply" not in program(OURS)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "classes"), [(16_384, 50_257), (2_097_152, 21), (256, 1000)])
def test_a_gpu_is_as_exact_and_no_slower(monkeypatch, rows, classes):
    monkeypatch.undo()  # the number of many classes is its own
    logits = tf.cast(tf.random.stateless_normal((rows, classes), (1, 2)) * 4, tf.bfloat16)
    labels = tf.random.stateless_uniform((rows,), (3, 4), 0, classes, tf.int64)

    def made(function):
        @tf.function(jit_compile=True, autograph=False)
        def step(labels, logits):
            with tf.GradientTape() as tape:
                tape.watch(logits)
                losses = function(labels=labels, logits=tf.cast(logits, tf.float32))
                value = tf.reduce_mean(losses)
            return losses, tape.gradient(value, logits)

        return step

    # Timed with the last layer, which writes the logits in the order that the loss asks for.
    x = tf.cast(tf.random.stateless_normal((rows, 64), (5, 6)), tf.bfloat16)
    kernel = tf.cast(tf.random.stateless_normal((64, classes), (7, 8)), tf.bfloat16)

    def seconds(function):
        @tf.function(jit_compile=True, autograph=False)
        def step(x, kernel):
            with tf.GradientTape() as tape:
                tape.watch([x, kernel])
                logits = tf.cast(x @ kernel, tf.float32)
                value = tf.reduce_mean(function(labels=labels, logits=logits))
            return value, tape.gradient(value, [x, kernel])

        took = []
        for _ in range(12):
            start = time.perf_counter()
            value, _ = step(x, kernel)
            value.numpy()
            took.append(time.perf_counter() - start)
        return sorted(took[2:])[5]

    ours, plain = made(ON_GPU), made(PLAIN)
    few = slice(0, 64)
    wanted = PLAIN(labels[few], tf.cast(logits[few], tf.float64))
    (losses, gradient), (_, other) = ours(labels, logits), plain(labels, logits)
    np.testing.assert_allclose(losses[few], wanted, rtol=1e-5, atol=1e-5)
    for each in (few, slice(rows - 64, rows)):  # one rounding to bfloat16 apart
        pair = [tf.cast(one[each], tf.float32) * float(rows) for one in (gradient, other)]
        np.testing.assert_allclose(*pair, rtol=1e-2, atol=1e-7)
    found, before = seconds(ON_GPU), seconds(PLAIN)
    assert found < 1.05 * before, f"{1e3 * found:.2f} ms, TensorFlow's {1e3 * before:.2f} ms"
    print(f"{rows} x {classes}: {1e3 * found:.2f} ms, TensorFlow's {1e3 * before:.2f} ms")
