"""Layer normalization by tfaccel's kernels on any device: what they are given, and where."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from norm_stand_in import call_module
from own_kernels_cases import check_refusal, check_training, labelled_rows, uses
from stablehlo_parser import parsed

from tfaccel.keras_internals import layer_norm
from tfaccel.keras_internals.product_bias import with_bias
from tfaccel.step.gelu.choose import Gelus
from tfaccel.step.layer_norm import calls, choose
from tfaccel.step.layer_norm import norm as norm_lib
from tfaccel.step.layer_norm.calls import LayerNorm
from tfaccel.step.layer_norm.choose import LayerNorms
from tfaccel.step.layer_norm.norm import normalized, normalized_sum

TOLERANCE = {tf.bfloat16: 2**-8, tf.float16: 2**-11}  # of one rounding


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(norm_lib, "call_module", call_module)


@pytest.mark.parametrize("is_of_sum", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 1000, 25_216, 401_408])
@pytest.mark.parametrize("columns", [8, 96, 768, 1000, 8192])
def test_programs_compute_each_row_once(rows, columns, is_of_sum):
    of = LayerNorm(rows, columns, tf.bfloat16, 1e-6, is_of_sum)
    wide = of.block_columns
    assert wide >= columns > wide // 2 or wide == columns == 8
    for name, text in (("forward", calls.forward(of)), ("backward", calls.backward(of))):
        turns = of.turns if name == "backward" else 1
        programs, each = of.programs(name, turns), turns * of.block_rows(name)
        assert programs * each >= rows > (programs - 1) * each
        assert f"grid_x = {programs} : i32" in text
        assert f"num_warps = {of.warps(name)} : i32" in text
        assert f"tensor<{of.block_rows(name)}x{wide}xf32>" in text
        assert of.warps(name) in (4, 8, 16)
    assert of.parts == (programs, 2 + is_of_sum, columns)
    assert programs <= (264 if is_of_sum else 396)


@pytest.mark.parametrize("epsilon", [1e-6, 1.5e-5, 1e-3, 0.1])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("is_of_sum", "arrays"), [(False, (6, 7)), (True, (9, 8))])
def test_text_is_whole(is_of_sum, arrays, dtype, epsilon):
    of = LayerNorm(100, 384, dtype, epsilon, is_of_sum)
    other = {tf.bfloat16: r"\bf16\b|xf16", tf.float16: "bf16"}[dtype]
    for name, num_arrays in zip(("forward", "backward"), arrays, strict=True):
        text = calls.kernel(name, of, 4 if name == "backward" else epsilon)
        assert not re.search(r"\{[a-z_]+\}", text)
        assert not re.search(other, text)
        numbers = re.findall(r"%arg\d+ = arith.constant (\S+) : ([if])32\n", text)
        assert len(numbers) == 4
        assert all("." in number for number, kind in numbers if kind == "f")
        assert text.count("!tt.ptr<", 0, text.index("{\n", 10)) == num_arrays
    assert float(numbers[2][0]) == 1 / 384


@pytest.mark.parametrize("is_of_sum", [False, True])
def test_xla_parses_the_modules(is_of_sum):
    """XLA's own parser takes the text and the configuration; only a GPU runs the kernels."""
    of = LayerNorm(100, 384, tf.bfloat16, 1e-6, is_of_sum)
    x, bias = tf.TensorSpec((100, 384), of.dtype), tf.TensorSpec((384,), of.dtype)
    weight, moment = tf.TensorSpec((384,), tf.float32), tf.TensorSpec((100,), tf.float32)
    parts = tf.TensorSpec(of.parts, tf.float32)
    terms, total = ([x, x, bias], [x]) if is_of_sum else ([x], [])
    modules = [
        (calls.forward(of), [*terms, weight, weight], [*total, x, moment, moment]),
        (calls.backward(of), [x, weight, *total, x, moment, moment], [x, parts]),
    ]
    for text, arguments, results in modules:
        made = parsed(text, arguments, results)
        assert made.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
        assert "tt.func public @layer_norm_" in made


def exact(x, gamma, beta, *, epsilon):
    """In the dtype of x."""
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    gamma, beta = (tf.cast(each, x.dtype) for each in (gamma, beta))
    return (x - mean) / tf.sqrt(variance + epsilon) * gamma + beta


def with_gradients(function, x, gamma, beta, gradient):
    """Returns the output, the gradients, and those of a penalty on the gradient of x."""
    with tf.GradientTape() as outer:
        outer.watch([x, gamma, beta])
        with tf.GradientTape() as inner:
            inner.watch([x, gamma, beta])
            y = function(x, gamma, beta, epsilon=1e-3)
        first = inner.gradient(y, [x, gamma, beta], output_gradients=gradient)
        penalty = tf.reduce_sum(tf.cast(first[0], tf.float32) ** 2)
    return [y, *first, *outer.gradient(penalty, [x, gamma])]


@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("shape", [(6, 24), (2, 37, 24), (1, 3, 3, 8), (7, 1, 40)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients(stand_in, dtype, shape, mean):
    """The output and the gradients beside float64, and the gradient's gradient."""
    draw = np.random.default_rng(0)
    x, gradient = (tf.cast(tf.constant(draw.normal(e, size=shape)), dtype) for e in (mean, 0.0))
    weights = [tf.constant(draw.normal(size=shape[-1]), tf.float32) for _ in range(2)]
    made = tf.function(lambda *given: with_gradients(normalized, *given), autograph=False)(
        x, *weights, gradient
    )
    wide = [tf.cast(each, tf.float64) for each in (x, *weights, gradient)]
    wanted = with_gradients(exact, *wide)
    for each, other, factor in zip(made, wanted, (1, 2, 2, 2, 8, 8), strict=True):
        # Sums have the errors of their terms.
        error = np.abs(tf.cast(each, tf.float64) - other).max() / np.abs(other).max()
        assert error <= factor * TOLERANCE[dtype]
    assert [each.dtype for each in made] == [dtype, dtype, *[tf.float32] * 2, dtype, tf.float32]


@pytest.mark.parametrize("use_total", [False, True])
@pytest.mark.parametrize("shape", [(6, 24), (2, 37, 24)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_of_a_sum(stand_in, dtype, shape, use_total):
    """The sum, the output and all gradients beside float64, and the gradient's gradient."""
    draw = np.random.default_rng(0)
    arrays = [tf.cast(tf.constant(draw.normal(size=shape)), dtype) for _ in range(4)]
    residual, product, *gradients = arrays
    bias = tf.cast(tf.constant(draw.normal(size=shape[-1])), dtype)
    weights = [tf.constant(draw.normal(size=shape[-1]), tf.float32) for _ in range(2)]

    def own(residual, product, bias, gamma, beta):
        x = residual + with_bias(product, bias)
        return normalized_sum(x, (residual, product, bias), gamma, beta, epsilon=1e-3)

    def plain(residual, product, bias, gamma, beta):
        total = residual + product + bias
        return total, exact(total, gamma, beta, epsilon=1e-3)

    def found(function, given, gradients):
        with tf.GradientTape() as outer:
            outer.watch(given)
            with tf.GradientTape() as inner:
                inner.watch(given)
                total, y = function(*given)
            outputs, of_outputs = ([total, y], gradients) if use_total else (y, gradients[1])
            first = inner.gradient(outputs, given, output_gradients=of_outputs)
            penalty = sum(tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in first[:2])
        return [total, y, *first, *outer.gradient(penalty, given[:4])]

    given = [residual, product, bias, *weights]
    made = tf.function(lambda *e: found(own, list(e[:5]), list(e[5:])), autograph=False)(
        *given, *gradients
    )
    wide = [tf.cast(each, tf.float64) for each in (*given, *gradients)]
    wanted = found(plain, wide[:5], wide[5:])
    limits = [TOLERANCE[dtype] * 3] * 7 + [5e-2] * 4  # the last ones are differences
    for each, other, limit in zip(made, wanted, limits, strict=True):
        error = np.abs(tf.cast(each, tf.float64) - other).max() / np.abs(other).max()
        assert error <= limit
    assert [each.dtype for each in made[2:7]] == [dtype] * 3 + [tf.float32] * 2


def half(**settings):
    return layers.LayerNormalization(dtype="mixed_bfloat16", **settings)


WIDE = tf.constant(np.random.default_rng(0).normal(3, 2, size=(2, 5, 16)), tf.float32)
X = tf.cast(WIDE, tf.bfloat16)  # the layer does not cast its inputs
CASES = {
    "a layer": (half, X, 1),
    "another epsilon": (lambda: half(epsilon=1e-6), X, 1),
    "no gamma": (lambda: half(scale=False), X, 1),
    "no beta": (lambda: half(center=False), X, 1),
    "a matrix": (half, X[0], 1),
    "four axes": (half, X[None], 1),
    "float32": (layers.LayerNormalization, WIDE, 0),
    "float32 in a half layer": (half, WIDE, 0),
    "another axis": (lambda: half(axis=1), X, 0),
    "two axes": (lambda: half(axis=(1, 2)), X, 0),
    "odd columns": (half, X[..., :12], 0),
    "no rows": (half, X[:0], 0),
    "RMS": (lambda: layers.RMSNormalization(dtype="mixed_bfloat16"), X, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_where_it_is_used(stand_in, monkeypatch, case):
    make, x, wanted = CASES[case]
    layer = make()
    layer.build(x.shape)
    for each in layer.weights:
        each.assign(np.random.default_rng(1).normal(size=each.shape))
    used, found = uses(monkeypatch, choose, "normalized", layer, x, norm_kernels=LayerNorms())
    assert used == wanted
    other = layer(x)
    assert found.dtype == other.dtype
    np.testing.assert_allclose(
        tf.cast(found, tf.float32), tf.cast(other, tf.float32), rtol=2**-6, atol=2**-5
    )


def block(*, dropout=0.0, use_bias=True, second="add", einsum=False):
    """Returns a pre-norm block in half precision, after whose first sum there is a norm."""
    policy = {"dtype": "mixed_bfloat16"}
    inputs = x = keras.Input((5, 16), dtype="bfloat16")
    if einsum:
        y = layers.EinsumDense("abc,cd->abd", (None, 16), bias_axes="d", **policy)(x)
    else:
        y = layers.Dense(16, use_bias=use_bias, **policy)(x)
    x = layers.Add(**policy)([x, layers.Dropout(dropout, **policy)(y)])
    y = half()(x)
    y = layers.Dense(16, **policy)(y)
    outputs = layers.Add(**policy)([x, y]) if second == "add" else [x, y]
    model = keras.Model(inputs, outputs)
    draw = np.random.default_rng(1)
    model.set_weights([draw.normal(0, 0.4, each.shape) for each in model.get_weights()])
    return model


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, 1),
        ({"einsum": True}, 1),
        ({"second": "output"}, 1),
        ({"use_bias": False}, 0),
        ({"dropout": 0.5}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_gelus", [False, True])
def test_sums_that_are_normalized(stand_in, monkeypatch, settings, wanted, with_gelus):
    """A residual, a product and its bias are added where they are normalized, and only there."""
    monkeypatch.setattr(layer_norm, "in_order", tf.identity)  # a call for GPUs
    model, is_random = block(**settings), "dropout" in settings

    def with_gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.nest.flatten(model(x, training=is_random))
            value = sum(tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in outputs)
        weights = [each.value for each in model.trainable_variables]
        return outputs, tape.gradient(value, [x, *weights])

    kernels = {"norm_kernels": LayerNorms(), "gelu": Gelus() if with_gelus else None}
    used, found = uses(
        monkeypatch, choose, "normalized_sum", with_gradients, X, on_gpu=True, **kernels
    )
    assert used == wanted
    if is_random:
        return
    for each, other in zip(tf.nest.flatten(found), tf.nest.flatten(with_gradients(X)), strict=True):
        each, other = (tf.cast(e, tf.float64).numpy() for e in (each, other))
        np.testing.assert_allclose(each, other, rtol=0, atol=3e-2 * np.abs(other).max())


def operations_behind(outputs):
    """Returns the operations that tensors are computed by, without what an IdentityN passes by."""
    left, found = list(outputs), {}
    while left:
        op = left[-1].op
        index = left.pop().value_index
        left += (
            [op.inputs[index]] if op.type == "IdentityN" else op.inputs if op not in found else []
        )
        found[op] = True
    return list(found)


def test_a_sum_is_computed_once(stand_in, monkeypatch):
    """What is added to the sum later reads what the kernel wrote."""
    monkeypatch.setattr(layer_norm, "in_order", lambda x: x)
    model, found = block(), []

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found.append(model(x, training=False))
        return found[0]

    uses(monkeypatch, choose, "normalized_sum", function, X, on_gpu=True, norm_kernels=LayerNorms())
    names = [op.name for op in operations_behind(found)]
    assert len([name for name in names if re.search(r"/add_[^/]*/AddV2$", name)]) == 1


def test_a_sum_that_two_layers_normalize_is_computed_once(stand_in, monkeypatch):
    """As in a block whose attention and dense layers stand side by side."""
    monkeypatch.setattr(layer_norm, "in_order", lambda x: x)
    inputs = keras.Input((5, 16), dtype="bfloat16")
    x = layers.Add(dtype="mixed_bfloat16")(
        [inputs, layers.Dense(16, dtype="mixed_bfloat16")(inputs)]
    )
    model = keras.Model(inputs, [half()(x), half(epsilon=0.1)(x)])
    used = {}

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            return model(x)

    for name in ("normalized_sum", "normalized"):
        used[name], found = uses(
            monkeypatch, choose, name, function, X, on_gpu=True, norm_kernels=LayerNorms()
        )
        for each, other in zip(found, model(X), strict=True):
            each, other = (tf.cast(e, tf.float64).numpy() for e in (each, other))
            np.testing.assert_allclose(each, other, rtol=0, atol=3e-2 * np.abs(other).max())
    assert used == {"normalized_sum": 1, "normalized": 1}


class Parts:
    """The layers of a pre-norm block in half precision: a sum, its norm and a second sum."""

    def __init__(self):
        policy = {"dtype": "mixed_bfloat16"}
        self.first, self.second = (layers.Dense(16, **policy) for _ in range(2))
        self.norm, self.add = half(), layers.Add(**policy)
        self.weights = []
        draw = np.random.default_rng(1)
        for each in (self.first, self.norm, self.second):
            each.build((None, 5, 16))
            self.weights += each.weights
        for each in self.weights:
            each.assign(draw.normal(0, 0.4, each.shape))

    def __call__(self, x):
        total = self.add([x, self.first(x)])
        return self.add([total, self.second(self.norm(total))])


def squares(x):
    return tf.reduce_sum(tf.cast(x, tf.float32) ** 2)


def errors_beside_xla(monkeypatch, function):
    """Returns how often the kernel of a sum was used, and `function`'s errors beside XLA's.

    `function` is of (Parts, x) and returns tensors. An error is the largest one of a tensor, as a
    part of its largest value.
    """
    monkeypatch.setattr(layer_norm, "in_order", tf.identity)  # a call for GPUs
    parts = Parts()
    kernels = {"norm_kernels": LayerNorms(), "gelu": Gelus()}
    used, found = uses(
        monkeypatch,
        choose,
        "normalized_sum",
        lambda x: function(parts, x),
        X,
        on_gpu=True,
        **kernels,
    )
    errors = []
    for each, other in zip(found, tf.function(function, autograph=False)(parts, X), strict=True):
        each, other = (tf.cast(e, tf.float64).numpy() for e in (each, other))
        errors.append(np.abs(each - other).max() / np.abs(other).max())
    return used, errors


def normalized_once_more(parts, total, tape):
    """By a function that is computed again in the gradient."""
    return tf.recompute_grad(lambda z: parts.norm(total) * z)(tf.ones([], total.dtype))


def normalized_unseen(parts, total, tape):
    with tape.stop_recording():
        return parts.norm(total)


@pytest.mark.parametrize("normalize", [normalized_once_more, normalized_unseen])
def test_a_sum_that_is_normalized_while_no_tape_records(stand_in, monkeypatch, normalize):
    """What is added to the sum later has a gradient, as has what the sum was made from."""

    def function(parts, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = parts.add([x, parts.first(x)])
            y = normalize(parts, total, tape)
            value = squares(parts.add([total, parts.second(y)]))
        return [value, *tape.gradient(value, [x, *(w.value for w in parts.first.weights)])]

    used, errors = errors_beside_xla(monkeypatch, function)
    assert used == 0
    assert max(errors) < 3e-2


def test_a_block_that_is_computed_again(stand_in, monkeypatch):
    def function(parts, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.recompute_grad(parts)(x)
            value = squares(parts(y))
        return [value, *tape.gradient(value, [x, *(w.value for w in parts.weights)])]

    used, errors = errors_beside_xla(monkeypatch, function)
    assert used == 2  # computed again, and the second block
    assert max(errors) < 5e-2


@pytest.mark.parametrize("late", ["no", "watched", "a tape", "an accumulator"])
def test_gradients_of_a_sum_and_of_its_product(stand_in, monkeypatch, late):
    """Each is given, whether the tape begins before the normalization or after it."""

    def function(parts, x):
        product = parts.first(x)
        with tf.GradientTape(persistent=True) as tape:
            if late == "no":
                tape.watch([x, product])
            else:
                tape.watch(x)
            total = parts.add([x, product])
            normed = parts.norm(total)
            if late == "watched":
                tape.watch(product)
            given = [x, product] if late == "no" else [x]
            if late == "an accumulator":
                with tf.autodiff.ForwardAccumulator(total, tf.ones_like(total)) as along:
                    y = parts.add([total, parts.second(normed)])
                return [y, along.jvp(y)]
            with tf.GradientTape() as inner:
                if late == "a tape":
                    inner.watch(total)
                y = parts.add([total, parts.second(normed)])
                value = squares(y)
        found = tape.gradient(value, [*given, total, normed])
        if late == "a tape":
            found.append(inner.gradient(value, total))
        return [y, *found]

    used, errors = errors_beside_xla(monkeypatch, function)
    assert used == 1
    assert max(errors) < 3e-2


def test_the_gradient_of_a_sums_bias_is_computed_by_the_kernel(stand_in, monkeypatch):
    """No sum over the rows is left for XLA, but that of the second layer's bias."""
    monkeypatch.setattr(layer_norm, "in_order", lambda x: x)
    parts, graphs = Parts(), []

    def function(x):
        with tf.GradientTape() as tape:
            y = parts(x)
            value = squares(y)
        graphs.append(y.graph)
        return tape.gradient(value, [w.value for w in parts.weights])

    kernels = {"norm_kernels": LayerNorms(), "gelu": Gelus()}
    uses(monkeypatch, choose, "normalized_sum", function, X, on_gpu=True, **kernels)
    types = [op.type for op in graphs[0].get_operations()]
    assert types.count("BiasAddGrad") == 1


@pytest.mark.parametrize("kind", ["of another axis", "of one value", "of some columns"])
def test_other_biases_of_a_sum(stand_in, monkeypatch, kind):
    """A bias that is not one of all columns is added by XLA."""
    draw = np.random.default_rng(2)
    weight = tf.constant(draw.normal(size=(16, 16)), tf.bfloat16)
    size = {"of another axis": 5, "of one value": 1, "of some columns": 4}[kind]
    bias = tf.constant(draw.normal(size=size), tf.bfloat16)

    def function(parts, x):
        product = tf.matmul(tf.reshape(x, [10, 16]), weight)
        if kind == "of another axis":
            product = tf.nn.bias_add(tf.reshape(product, [2, 5, 16]), bias, data_format="NCHW")
        elif kind == "of one value":
            product = tf.reshape(product + bias, [2, 5, 16])
        else:
            product = tf.reshape(tf.reshape(product, [10, 4, 4]) + bias, [2, 5, 16])
        return [parts.norm(x + product)]

    used, errors = errors_beside_xla(monkeypatch, function)
    assert used == 0
    assert max(errors) < 3e-2


@pytest.mark.parametrize("of_sum", [False, True])
@pytest.mark.parametrize("epsilon", [np.float32(1e-3), 0, np.float64(0.25)], ids=repr)
def test_numbers_of_other_kinds_as_epsilon(stand_in, monkeypatch, epsilon, of_sum):
    def function(parts, x):
        gamma, beta = parts.norm.gamma.value, parts.norm.beta.value
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = parts.add([x, parts.first(x)]) if of_sum else x
            y = keras.ops.layer_normalization(y, gamma, beta, epsilon=epsilon)
        return [y, tape.gradient(y, x, output_gradients=tf.cast(gamma, x.dtype) * x)]

    used, errors = errors_beside_xla(monkeypatch, function)
    assert used == of_sum
    assert max(errors) < 3e-2


@pytest.mark.parametrize("kind", ["gamma of all", "a tensor as epsilon"])
def test_forms_that_xla_computes(stand_in, monkeypatch, kind):
    def function(parts, x):
        gamma, beta, epsilon = parts.norm.gamma.value, parts.norm.beta.value, 1e-3
        if kind == "gamma of all":
            gamma = tf.tile(gamma[None, None], [2, 5, 1])
        else:
            epsilon = tf.reduce_mean(gamma**2)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = parts.add([x, parts.first(x)])
            y = keras.ops.layer_normalization(total, gamma, beta, epsilon=epsilon)
        return [y, tape.gradient(y, x)]

    used, errors = errors_beside_xla(monkeypatch, function)
    assert used == 0
    assert max(errors) < 3e-2


def test_rows_of_unknown_number(stand_in, monkeypatch):
    layer = half()
    layer.build((None, 16))

    def function(x):
        return layer(tf.ensure_shape(tf.boolean_mask(x, x[:, 0] > -99), [None, 16]))

    used, found = uses(monkeypatch, choose, "normalized", function, X[0], norm_kernels=LayerNorms())
    assert used == 0
    assert found.shape == (5, 16)


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    [((2, 8192), True), ((2, 8200), False), ((2**20, 2**12), True), ((2**31, 8), False)],
)
def test_limits(shape, is_taken):
    taken = []

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.bfloat16)], autograph=False)
    def run(x):
        taken.append(choose._is_taken(x))

    run.get_concrete_function()
    assert taken == [is_taken]


def test_refusal_of_a_kernel(stand_in, monkeypatch, caplog):
    norms, layer = LayerNorms(), half()

    def use():
        return uses(monkeypatch, choose, "normalized", layer, X, norm_kernels=norms)[0]

    check_refusal(norms, use, caplog)


def classifier():
    inputs = keras.Input((8,))
    x = layers.LayerNormalization()(layers.Dense(16)(inputs))
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dense(16, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))


@pytest.mark.parametrize(
    ("num_replicas", "accumulation_steps"),
    [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_training(stand_in, monkeypatch, num_replicas, accumulation_steps):
    settings = {"num_replicas": num_replicas, "accumulation_steps": accumulation_steps}
    check_training(monkeypatch, LayerNorms, classifier, *labelled_rows(), rtol=3e-2, **settings)
