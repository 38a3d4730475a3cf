"""Batch normalization of one read, fused, and synchronized, against Keras's, on the same inputs."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from outputs_and_gradients import in_xla, traced

from tfaccel import UserError
from tfaccel.keras_internals import batch_norm
from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.keras_internals.moved import numpy
from tfaccel.keras_internals.written import concatenated

LAYER = keras.layers.BatchNormalization
KERAS_CALL, KERAS_MOMENTS = LAYER.call, LAYER._moments

# Both round one float32 result to the layer's type: they differ by a rounding of it.
ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3}


def normal(shape, *, dtype="float32", mean=0.5, std=2.0, seed=0):
    return tf.cast(np.random.default_rng(seed).normal(mean, std, shape), dtype)


def make_layer(input_shape, *, trainable=True, **settings):
    """A layer whose four weights are not what they start from."""
    layer = LAYER(**settings)
    layer.build(input_shape)
    rng = np.random.default_rng(1)
    layer.set_weights([rng.uniform(0.5, 1.5, each.shape) for each in layer.weights])
    layer.trainable = trainable
    return layer


def numpy32(tensors):
    return [tf.cast(each, "float32").numpy() for each in tensors]


def assert_all_close(ours, theirs, *, rtol, atol):
    for mine, wanted in zip(numpy32(ours), numpy32(theirs), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=rtol, atol=atol)


# One read.


ONE_PASS = [
    ((16, 5, 4, 3), {}),
    ((64, 3, 2), {"axis": 1}),
    ((64, 3), {"scale": False, "center": False}),
    ((16, 5, 4, 3), {"scale": False, "momentum": 0.5}),
    ((16, 5, 4, 3), {"center": False, "epsilon": 0.1}),
]


@pytest.mark.parametrize(
    ("dtype", "shape", "settings", "mean"),
    [
        *(("float16", *each, 300.0) for each in ONE_PASS),
        ("float16", *ONE_PASS[0], 0.5),
        ("bfloat16", *ONE_PASS[1], 300.0),
        *(
            pytest.param(dtype, *each, mean, marks=pytest.mark.slow)
            for dtype, mean in (("float16", 0.5), ("bfloat16", 0.5), ("bfloat16", 300.0))
            for each in ONE_PASS
            if (dtype, mean, each)
            not in (("float16", 0.5, ONE_PASS[0]), ("bfloat16", 300.0, ONE_PASS[1]))
        ),
    ],
)
def test_one_pass_is_keras_own(monkeypatch, dtype, shape, settings, mean):
    """Even where the mean is far from 0, as long as the moving mean is not far from it."""
    layer = make_layer(shape, dtype=f"mixed_{dtype}", **settings)
    layer.moving_mean.assign(np.full(layer.moving_mean.shape, mean * 0.9))
    inputs = normal(shape, dtype=dtype, mean=mean)
    start = layer.get_weights()
    theirs = run_layer(layer, inputs, training=True, steps=1)
    theirs = [numpy32(each) for each in (theirs[0:1], *theirs[1:])]
    layer.set_weights(start)
    monkeypatch.setattr(LAYER, "call", batch_norm.one_pass(unexpected))
    ours = run_layer(layer, inputs, training=True, steps=1)
    ours = [numpy32(each) for each in (ours[0:1], *ours[1:])]
    for mine, wanted in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        # Of outputs and gradients that are rounded, those of sums over rows from rounded parts.
        np.testing.assert_allclose(mine, wanted, rtol=ROUNDING[dtype], atol=30 * ROUNDING[dtype])
    for mine, wanted in zip(ours[2], theirs[2], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4)


# Concatenations.


def dense_block(dtype, axis=-1):
    """Layers that each join their outputs to all before. Four norms and a product read these."""
    keras.utils.set_random_seed(0)
    layers, settings = keras.layers, {"dtype": dtype}
    x = inputs = keras.Input((6, 6, 6))
    for _ in range(3):
        y = layers.BatchNormalization(axis=axis, **settings)(x)
        y = layers.Conv2D(6, 3, padding="same", activation="relu", **settings)(y)
        x = layers.Concatenate(axis=axis, **settings)([x, y])
    y = layers.BatchNormalization(axis=axis, scale=False, **settings)(x)
    outputs = layers.GlobalAveragePooling2D(**settings)(layers.Multiply(**settings)([x, y]))
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(1)
    for each in model.layers:
        if isinstance(each, LAYER):
            each.set_weights([rng.uniform(0.5, 1.5, value.shape) for value in each.weights])
    return model


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_relu_of_a_norm_is_keras_own(on_gpu):
    """Its gradient computes the outputs anew, on a GPU with two sums at once."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 6, 6))
    settings = {"dtype": "mixed_bfloat16"}
    y = keras.layers.BatchNormalization(**settings)(inputs)
    y = keras.layers.Activation("relu", **settings)(y)
    each = [keras.layers.Conv2D(5, 3, **settings)(y), keras.layers.Conv2D(5, 3, **settings)(y)]
    model = keras.Model(inputs, keras.layers.Add(**settings)(each))
    model.layers[1].set_weights(np.random.default_rng(1).uniform(0.5, 1.5, (4, 6)))
    start, x = model.get_weights(), tf.cast(normal((16, 6, 6, 6), dtype="bfloat16"), "float32")

    def results(paths, *, xla):
        model.set_weights(start)
        received = tf.nest.flatten(traced(model, paths, xla=xla)(x))
        return numpy32([*received, *model.non_trainable_variables])

    paths = functools.partial(layer_paths, xla=True, all_reduce=None, on_gpu=on_gpu)
    wanted = results(contextlib.nullcontext, xla=False)
    for ours, theirs in zip(results(paths, xla=True), wanted, strict=True):
        # Of numbers near 0, the ReLU's gradient depends on the rounding.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.03 * np.abs(theirs).max())


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("mean", [0.5, 5.0])
def test_a_concatenation_is_normalized_as_by_keras(axis, mean):
    inputs = tf.cast(normal((32, 6, 6, 6), dtype="bfloat16", mean=mean), "float32")

    def results(dtype, paths):
        model = dense_block(dtype, axis)
        model.layers[1].moving_mean.assign(np.full(6, 0.9 * mean))
        received = tf.nest.flatten(traced(model, paths, xla=False)(inputs))
        return numpy32([*received, *model.non_trainable_variables])

    wanted = results("float32", contextlib.nullcontext)
    rounded = results("mixed_bfloat16", contextlib.nullcontext)
    for ours, theirs, exact in zip(results("mixed_bfloat16", in_xla), rounded, wanted, strict=True):
        # Keras's own in bfloat16 is as far from float32, up to a rounding.
        limit = 1.5 * np.abs(theirs - exact).max() + 4e-3 * np.abs(exact).max()
        assert np.abs(ours - exact).max() <= limit


def rectified(dtype):
    """A norm with a ReLU, and no number near 0, where a rounding would change the ReLU."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 6, 6))
    layer = LAYER(dtype=dtype)
    outputs = keras.layers.Activation("relu", dtype=dtype)(layer(inputs))
    model = keras.Model(inputs, keras.layers.Conv2D(5, 3, dtype=dtype)(outputs))
    gamma, beta = np.array([1, 0.5, 2, 1, 1, 1.5]), np.array([9, 9, -12, 9, 9, 9])
    layer.set_weights([gamma, beta, np.zeros(6), np.ones(6)])
    return model


@pytest.mark.parametrize(
    "make",
    [functools.partial(dense_block, "float32"), functools.partial(rectified, "float32")],
    ids=["concatenations", "ReLU"],
)
def test_a_gradient_of_gradients_depends_on_the_moments(monkeypatch, make):
    """As the gradient penalty of a GAN needs it, in float32, so that roundings hide nothing.

    It is compared with moments by tf.reduce_mean, because the variance of tf.nn.moments, which is
    Keras's, has a wrong second derivative (findings/tensorflow_moments_second_derivative.sh).
    """

    def by_means(self, inputs, mask):
        mean = tf.reduce_mean(inputs, self._reduction_axes)
        distance = inputs - tf.reduce_mean(inputs, self._reduction_axes, keepdims=True)
        return mean, tf.reduce_mean(distance**2, self._reduction_axes)

    monkeypatch.setattr(LAYER, "_moments", by_means)
    monkeypatch.setattr(batch_norm, "HALVES", {*batch_norm.HALVES, "float32"})
    inputs = normal((16, 6, 6, 6))
    model = make()

    def gradients(paths):
        @tf.function(autograph=False)
        def run(x):
            with paths(), tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(model(x, training=True) ** 2)
                first = inner.gradient(y, x)
                penalty = tf.reduce_sum(first**2)
            second = outer.gradient(
                penalty,
                [each.value for each in model.trainable_variables],
                unconnected_gradients="zero",
            )
            return [first, *second]

        start = model.get_weights()
        found = [each.numpy() for each in run(inputs)]
        model.set_weights(start)
        return found

    for ours, wanted in zip(gradients(in_xla), gradients(contextlib.nullcontext), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=2e-4 * np.abs(wanted).max())


def test_the_moments_of_each_part_are_computed_once():
    model = dense_block("mixed_bfloat16")

    run = traced(model, in_xla, xla=False).get_concrete_function(tf.zeros((4, 6, 6, 6)))
    squared = [each.inputs[0] for each in run.graph.get_operations() if each.type == "Square"]
    # Those of each part; the inputs are cast twice.
    assert [each.shape[-1] for each in squared if len(each.shape) == 4] == [6] * 5


def test_moments_of_a_branch_stay_in_it():
    """A tensor of a branch is unknown outside it, and a part outside it may be read in both."""
    layer = make_layer((4, 6), dtype="mixed_bfloat16")
    concatenations = {}
    one_pass = batch_norm.one_pass(unexpected, concatenations)
    join = concatenated(numpy.concatenate, concatenations)

    @tf.function(autograph=False)
    def run(x, takes):
        whole = join([x, x + 1], axis=-1)
        first = tf.cond(takes, lambda: one_pass(layer, whole, training=True), lambda: whole)
        return first, one_pass(layer, whole, training=True)

    x = normal((64, 3), dtype="bfloat16")
    first, second = run(x, tf.constant(True))
    np.testing.assert_allclose(*numpy32([first, second]), atol=0.1)  # by other moving means


def test_parts_of_unknown_size_are_no_parts():
    concatenations = {}
    join = concatenated(numpy.concatenate, concatenations)

    @tf.function(autograph=False)
    def run(x, y, z):
        join([x, y], axis=-1)
        return join([z, z], axis=-1), join([x, x[:, :2]], axis=-1)

    unknown = tf.TensorSpec(None), tf.TensorSpec((None, None))
    _, wanted = run.get_concrete_function(*unknown, tf.TensorSpec(None)).outputs
    assert not concatenations
    assert wanted.shape.rank is None


def test_moments_that_no_tape_recorded_are_computed_again():
    layer = make_layer((4, 6), dtype="mixed_bfloat16")
    concatenations = {}
    one_pass = batch_norm.one_pass(unexpected, concatenations)
    join = concatenated(numpy.concatenate, concatenations)

    def gradients(looks_before):
        @tf.function(autograph=False)
        def run(x):
            with tf.GradientTape() as outer, tf.GradientTape() as inner:
                outer.watch(x)
                inner.watch(x)
                whole = join([x, 2 * x], axis=-1)
                if looks_before:
                    with outer.stop_recording(), inner.stop_recording():
                        one_pass(layer, whole, training=True)
                y = one_pass(layer, whole, training=True)
                loss = tf.reduce_sum(tf.cast(y, "float32") ** 3)
                first = inner.gradient(loss, x)
                penalty = tf.reduce_sum(tf.cast(first, "float32") ** 2)
            return first, outer.gradient(penalty, x)

        return run(normal((16, 3), dtype="bfloat16"))

    layer.momentum = 1.0  # the moving mean, from which the mean is computed, stays
    for ours, wanted in zip(numpy32(gradients(True)), numpy32(gradients(False)), strict=True):
        # The second gradient has several roundings to bfloat16.
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())


def unexpected(*_args, **_kwargs):
    raise AssertionError("Keras's own was called")


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"dtype": "float32"}, {}),
        ({}, {"mask": tf.constant([True, True, False, True])}),
        ({"synchronized": True}, {}),
        ({"renorm": True}, {}),
        ({"trainable": False}, {}),
        ({}, {"training": False}),
    ],
    ids=["float32", "masked", "synchronized", "renorm", "frozen", "testing"],
)
def test_what_is_not_read_once_goes_to_keras(settings, given):
    layer = make_layer((4, 3), **{"dtype": "mixed_float16"} | settings)
    inputs, own = normal((4, 3), dtype=layer.compute_dtype), []
    given = {"training": True, "mask": None, "bias": None} | given
    batch_norm.one_pass(lambda *args, **kwargs: own.append((args, kwargs)))(layer, inputs, **given)
    assert own == [((layer, inputs), given)]


@pytest.mark.parametrize("way", ["one_pass", "fused"])
def test_a_layer_with_moments_of_its_own_goes_to_keras(way):
    class Ghost(LAYER):
        def _moments(self, inputs, mask):
            return super()._moments(inputs[:2], mask)

    layer, inputs, own = Ghost(dtype="mixed_float16"), normal((4, 3, 3, 2), dtype="float16"), []
    layer.build(inputs.shape)
    getattr(batch_norm, way)(lambda *args, **kwargs: own.append(args))(layer, inputs, training=True)
    assert own == [(layer, inputs)]


@pytest.mark.parametrize("way", ["unbiased", "one_pass", "fused"])
def test_a_bias_that_is_not_in_the_inputs_is_in_the_moving_mean_alone(way):
    """As if it were in the inputs: there it would be subtracted with their mean."""
    shape, bias = (8, 5, 4, 3), np.array([1.0, -20.0, 300.0], np.float32)
    layers = [make_layer(shape, dtype="mixed_float16") for _ in range(2)]
    for layer in layers:
        layer.moving_mean.assign(bias + 0.4)
    inputs = normal(shape, dtype="float16")
    call = batch_norm.unbiased(KERAS_CALL)
    call = call if way == "unbiased" else getattr(batch_norm, way)(call)
    ours = call(layers[0], inputs, training=True, bias=tf.constant(bias))
    theirs = KERAS_CALL(layers[1], tf.cast(inputs, tf.float32) + bias, training=True)
    assert_all_close([ours], [theirs], rtol=1e-3, atol=1e-3)
    weights = [[each.value for each in layer.weights] for layer in layers]
    assert_all_close(*weights, rtol=1e-4, atol=1e-5)


# One fused operation.


@pytest.fixture
def use_fused(monkeypatch):
    """Keras's layer takes the fused path; returns the list that calls of Keras's own go to."""
    own = []

    def call(self, inputs, training=None, mask=None):
        own.append(self)
        return KERAS_CALL(self, inputs, training=training, mask=mask)

    def use():
        monkeypatch.setattr(LAYER, "call", batch_norm.fused(batch_norm.unbiased(call)))
        return own

    return use


def run_layer(layer, inputs, *, training, steps=3):
    """Returns the outputs, the gradients and the weights after some steps of a dynamic batch."""
    weights = layer.trainable_variables

    @tf.function(
        input_signature=[tf.TensorSpec([None, *inputs.shape[1:]], inputs.dtype)], autograph=False
    )
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x, training=training)
            # Weighted: the gradient of a plain sum of normalized values is zero.
            loss = tf.reduce_sum(tf.cast(outputs, "float32") * normal(inputs.shape, seed=2))
        return outputs, tape.gradient(loss, [x, *(each.value for each in weights)])

    for index in range(steps):
        outputs, grads = step(inputs + tf.cast(index, inputs.dtype))
    return outputs, grads, [each.value for each in layer.weights]


def assert_fused_is_keras(use_fused, shape, dtype, *, training=True, **settings):
    inputs = normal(shape, dtype=dtype)
    settings.setdefault("dtype", f"mixed_{dtype}")
    theirs = run_layer(make_layer(shape, **settings), inputs, training=training)
    own = use_fused()
    ours = run_layer(make_layer(shape, **settings), inputs, training=training)
    assert own == []

    rounding = ROUNDING[dtype]
    assert ours[0].dtype == theirs[0].dtype == dtype
    assert [each.dtype for each in ours[1]] == [each.dtype for each in theirs[1]]
    assert_all_close([ours[0], ours[1][0]], [theirs[0], theirs[1][0]], rtol=rounding, atol=rounding)
    # The float32 sums over rows, of the same values in another order.
    assert_all_close(ours[1][1:], theirs[1][1:], rtol=1e-4, atol=1e-4)
    assert_all_close(ours[2], theirs[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "training"),
    [
        ("float16", True),
        ("float16", False),
        ("bfloat16", True),
        pytest.param("bfloat16", False, marks=pytest.mark.slow),
    ],
)
def test_fused_is_keras_own(use_fused, dtype, training):
    assert_fused_is_keras(use_fused, (4, 5, 3, 6), dtype, training=training)


FUSED = [
    {"scale": False},
    {"center": False},
    {"scale": False, "center": False},
    {"momentum": 0.5, "epsilon": 1e-5},
    {"epsilon": 0.5},
    {"axis": 3},
    {"trainable": False},
]


@pytest.mark.parametrize(
    ("settings", "training"),
    [
        *((each, True) for each in FUSED),
        *((each, False) for each in FUSED[2:4]),
        *(
            pytest.param(each, False, marks=pytest.mark.slow)
            for each in FUSED
            if each not in FUSED[2:4]
        ),
    ],
    ids=str,
)
def test_fused_obeys_the_layers_settings(use_fused, settings, training):
    assert_fused_is_keras(use_fused, (4, 5, 3, 6), "float16", training=training, **settings)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (2, 1, 1, 3), (1, 7, 1, 1), (3, 1, 5, 17)])
def test_fused_is_keras_own_in_odd_shapes(use_fused, shape, dtype):
    # Few rows: a Bessel correction left in would be a factor of 2, or of infinity.
    assert_fused_is_keras(use_fused, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (2, 1, 1, 3), (3, 1, 5, 17), (8, 14, 14, 64)])
def test_fused_is_keras_own_on_a_gpu(use_fused, shape, dtype, training):
    assert_fused_is_keras(use_fused, shape, dtype, training=training, epsilon=1e-6)


def test_weights_in_float16_are_kept_in_it(use_fused):
    shape = (4, 5, 3, 6)
    inputs = normal(shape, dtype="float16")
    theirs = run_layer(make_layer(shape, dtype="float16"), inputs, training=True)
    use_fused()
    ours = run_layer(make_layer(shape, dtype="float16"), inputs, training=True)
    for mine, wanted in zip(ours, theirs, strict=True):
        # Sums over 60 rows, then rounded: gradients of gamma and beta are near 100.
        assert_all_close(mine, wanted, rtol=2e-3, atol=2e-3)
    assert {each.dtype for each in ours[2]} == {tf.float16}


def test_moving_statistics_are_assigned_by_keras(use_fused):
    # In a stateless call, Keras keeps what its variables are assigned and returns it.
    shape = (4, 5, 3, 6)
    layer = make_layer(shape, dtype="mixed_float16")
    own = [each.numpy() for each in layer.non_trainable_variables]

    def updated():
        variables = layer.trainable_variables, layer.non_trainable_variables
        inputs = normal(shape, dtype="float16")
        return layer.stateless_call(*variables, inputs, training=True)[1]

    theirs = updated()
    use_fused()
    # Sums of 60 values in float32.
    assert_all_close(updated(), theirs, rtol=1e-5, atol=1e-6)
    assert_all_close(layer.non_trainable_variables, own, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_step_has_one_operation_and_no_float32_activations(use_fused, training):
    use_fused()
    layer = make_layer((4, 5, 3, 6), dtype="mixed_float16")

    @tf.function(autograph=False)
    def step(x):
        outputs = layer(x, training=training)
        return tf.gradients(outputs * outputs, [x, layer.gamma.value])

    graph = step.get_concrete_function(tf.TensorSpec((4, 5, 3, 6), "float16")).graph
    types = [each.type for each in graph.get_operations()]
    assert types.count("FusedBatchNormV3") == types.count("FusedBatchNormGradV3") == 1
    assert "SquaredDifference" not in types
    wide = [
        each.type
        for each in graph.get_operations()
        for output in each.outputs
        if output.shape.rank == 4 and output.dtype == tf.float32
    ]
    assert wide == []


@pytest.mark.parametrize(
    ("shape", "settings", "masked"),
    [
        ((4, 6), {}, False),
        ((4, 5, 6), {}, False),
        ((2, 2, 2, 2, 6), {}, False),
        ((4, 5, 3, 6), {}, True),
        ((4, 5, 3, 6), {"renorm": True}, False),
        ((4, 5, 3, 6), {"synchronized": True}, False),
        ((4, 5, 3, 6), {"dtype": "float32"}, False),
        ((4, 5, 3, 6), {"axis": 1}, False),
        # The result is asked for in float32, which a float16 operation would round.
        ((4, 5, 3, 6), {"dtype": "float32", "autocast": False}, False),
    ],
    ids=str,
)
def test_what_is_not_fused_is_keras_own(use_fused, shape, settings, masked):
    settings = {"dtype": "mixed_float16", **settings}
    inputs = normal(shape, dtype="float16")
    mask = tf.constant(np.random.default_rng(3).random(shape[:-1]) < 0.5) if masked else None
    reference, layer = make_layer(shape, **settings), make_layer(shape, **settings)
    theirs = [reference(inputs, training=True, mask=mask), *reference.weights]
    own = use_fused()
    ours = [layer(inputs, training=True, mask=mask), *layer.weights]
    assert own == [layer]
    assert_all_close(ours, theirs, rtol=0, atol=0)


# Statistics over all replicas.


def emulated(moments, layers, parts, masks):
    """Returns each replica's (mean, variance), with a sum over replicas that a tape sees through.

    `moments` of `all_reduce` is run twice: to see what each replica gives to the sum, and then with
    the sum of it.
    """
    given = [[] for _ in parts]
    for layer, part, mask, own in zip(layers, parts, masks, given, strict=True):
        moments(lambda value, own=own: own.append(value) or value)(layer, part, mask)
    assert [len(own) for own in given] == [1] * len(parts)  # one all-reduce a layer
    total = tf.add_n([own[0] for own in given])
    return [
        moments(lambda _: total)(layer, part, mask)
        for layer, part, mask in zip(layers, parts, masks, strict=True)
    ]


def synchronized_moments(all_reduce):
    return batch_norm.synchronized(KERAS_MOMENTS, all_reduce)


CASES = {
    "rows": ((5, 3), {}),
    "images": ((5, 4, 3, 6), {}),
    "channels first": ((5, 4, 3, 6), {"axis": 1}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [(2, 3), (1, 4), (5, 0), (1, 1, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_replicas_have_the_moments_of_one_device(case, rows, masked):
    shape, settings = CASES[case]
    inputs = normal(shape)
    mask = tf.constant(np.random.default_rng(3).random(shape[:-1]) < 0.6) if masked else None
    parts = tf.split(inputs, rows)
    masks = tf.split(mask, rows) if masked else [None] * len(rows)
    layer = make_layer(shape, synchronized=True, **settings)
    reference = make_layer(shape, **settings)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([inputs, *parts])
        ours = emulated(synchronized_moments, [layer] * len(rows), parts, masks)
        wanted = KERAS_MOMENTS(reference, inputs, mask)
        weights = normal((2, wanted[0].shape[0]), seed=2)
        # Each replica's loss is of the same moments: together, as often as there are replicas.
        loss = tf.add_n([tf.reduce_sum(tf.stack(each) * weights) for each in ours]) / len(rows)
        wanted_loss = tf.reduce_sum(tf.stack(wanted) * weights)
    for each in ours:
        # Float32 sums of up to 90 values; Keras adds 1e-7 to the count of a mask.
        assert_all_close(each, wanted, rtol=1e-5, atol=1e-6)
    gradient = tf.concat(tape.gradient(loss, parts), axis=0)
    assert_all_close([gradient], [tape.gradient(wanted_loss, inputs)], rtol=1e-5, atol=1e-6)


def test_a_large_mean_does_not_cancel_the_variance():
    # In float32, E[x^2] - E[x]^2 of mean 1e3 and variance 1 loses six of seven digits.
    shape = (64, 3)
    inputs = normal(shape, mean=1e3, std=1.0)
    layer = make_layer(shape, synchronized=True)
    layer.moving_mean.assign([999.0, 1000.0, 1002.0])
    parts = tf.split(inputs, (40, 24))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([inputs, *parts])
        (mean, variance), _ = emulated(synchronized_moments, [layer] * 2, parts, [None] * 2)
        wanted = KERAS_MOMENTS(make_layer(shape), inputs, None)
    assert_all_close([mean, variance], wanted, rtol=1e-5, atol=0)
    exact = inputs.numpy().astype("float64")
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6)
    naive = tf.reduce_mean(inputs**2, 0) - tf.reduce_mean(inputs, 0) ** 2
    assert np.abs(naive / exact.var(0) - 1).max() > 1e-3  # what this is about
    for index, value in enumerate((mean, variance)):
        gradient = tf.concat(tape.gradient(value, parts), axis=0)
        theirs = tape.gradient(wanted[index], inputs)
        # Of (x - mean) * 2/64, where float32 knows x to 6e-5.
        assert_all_close([gradient], [theirs], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_no_rows_anywhere_are_no_nan(masked):
    layer = make_layer((0, 3), synchronized=True)
    inputs = tf.ones((2, 3)) if masked else tf.ones((0, 3))
    mask = tf.zeros(2, tf.bool) if masked else None
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        mean, variance = synchronized_moments(tf.identity)(layer, inputs, mask)
    np.testing.assert_array_equal(mean, layer.moving_mean)
    np.testing.assert_array_equal(variance, np.zeros(3))
    np.testing.assert_array_equal(tape.gradient([mean, variance], inputs), tf.zeros_like(inputs))


def test_masked_values_may_be_anything():
    shape = (4, 3)
    inputs = normal(shape).numpy()
    inputs[1] = np.nan
    mask = tf.constant([True, False, True, True])
    layer = make_layer(shape, synchronized=True)
    inputs = tf.constant(inputs)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        mean, variance = synchronized_moments(tf.identity)(layer, inputs, mask)
    kept = inputs.numpy()[[0, 2, 3]]
    assert_all_close([mean, variance], [kept.mean(0), kept.var(0)], rtol=1e-5, atol=1e-6)
    assert np.isfinite(tape.gradient([mean, variance], inputs)).all()


def test_layers_that_are_not_synchronized_have_their_own_moments():
    def fail(_):
        raise AssertionError("all_reduce")

    layer = make_layer((4, 3))
    inputs = normal((4, 3))
    ours = batch_norm.synchronized(KERAS_MOMENTS, fail)(layer, inputs, None)
    assert_all_close(ours, KERAS_MOMENTS(layer, inputs, None), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [(3, 5), (8, 0)])
def test_two_replicas_train_as_one_device(monkeypatch, rows):
    shape = (8, 4, 3, 6)
    inputs, factors = normal(shape), normal(shape, seed=2)
    reference = make_layer(shape, momentum=0.9)
    theirs = one_step(reference, inputs, factors)

    sums = []

    def all_reduce(value):
        sums.append(value.shape)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    monkeypatch.setattr(LAYER, "_moments", synchronized_moments(all_reduce))
    strategy = tf.distribute.MirroredStrategy(("/cpu:0", "/cpu:1"))
    with strategy.scope():
        layer = make_layer(shape, momentum=0.9, synchronized=True)
    parts = [
        strategy.experimental_distribute_values_from_function(
            lambda context, value=value: tf.split(value, rows)[context.replica_id_in_sync_group]
        )
        for value in (inputs, factors)
    ]
    step = tf.function(lambda *args: strategy.run(one_step, (layer, *args)), autograph=False)
    outputs, grads = tf.nest.map_structure(strategy.experimental_local_results, step(*parts))

    assert len(sums) == 2  # once on each replica
    for mine, wanted in zip([outputs, grads[0]], [theirs[0], theirs[1][0]], strict=True):
        # Float32 sums of 96 values.
        assert_all_close([tf.concat(mine, axis=0)], [wanted], rtol=1e-5, atol=1e-5)
    # Each replica's gamma and beta have the gradient of its own rows.
    mine = [tf.add_n(each) for each in grads[1:]]
    # The terms of a sum are near 2 each; where they cancel, 96 roundings of 1e-7 stay.
    assert_all_close(mine, theirs[1][1:], rtol=1e-5, atol=1e-4)
    assert_all_close(layer.weights, reference.weights, rtol=1e-5, atol=1e-6)


def one_step(layer, inputs, factors):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(inputs, training=True)
        loss = tf.reduce_sum(outputs * factors)
    return outputs, tape.gradient(loss, [inputs, layer.gamma.value, layer.beta.value])


# A whole model.


def nested_model(**settings):
    inner = keras.Sequential([keras.Input((4,)), LAYER(name="inner", **settings)])
    return keras.Sequential([keras.Input((4,)), LAYER(name="outer"), inner, keras.layers.Dense(2)])


def test_convert_synchronizes_every_layer():
    model = nested_model()
    assert sorted(batch_norm.convert(model)) == ["inner", "outer"]
    assert model.get_layer("outer").synchronized
    assert model.layers[1].get_layer("inner").synchronized
    assert batch_norm.convert(keras.Sequential([keras.layers.Dense(2)])) == []


def test_convert_refuses_renorm_and_changes_nothing():
    model = nested_model(renorm=True)
    with pytest.raises(UserError, match="layer 'inner' has renorm=True"):
        batch_norm.convert(model)
    assert not model.get_layer("outer").synchronized
