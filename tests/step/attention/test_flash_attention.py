"""Attention by cuDNN's modules, which a stand-in computes on the CPU, beside Keras's own."""

import dataclasses
import functools

import cudnn_stand_in
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import trained_in_bfloat16
from keras import layers, ops
from keras.src.backend.common import global_state
from stablehlo_parser import parsed

from tfaccel.keras_internals.attention import attention_by, obey_flash_attention
from tfaccel.step import in_xla
from tfaccel.step.attention import choose, cudnn_calls, flash, masks
from tfaccel.step.attention.choose import Attentions

B, T, S, N, H = 2, 6, 10, 4, 8


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(flash, "call_module", cudnn_stand_in.call_module)


def padding(*shape):
    return np.arange(shape[-1]) < np.arange(2, 2 + B).reshape(B, *[1] * (len(shape) - 1))


CASES = {
    "no mask": {},
    "causal": {"is_causal": True},
    "padding": {"mask": padding(B, 1, 1, S)},
    "causal and padding": {"is_causal": True, "mask": padding(B, 1, 1, S)},
    "padding at the start, causal": {"is_causal": True, "mask": ~padding(B, 1, 1, S)},
    "rows that see none": {"mask": padding(B, 1, 1, S) & padding(B, 1, T)[..., None]},
    "any": {"mask": np.random.default_rng(1).random((B, N, T, S)) < 0.5},
    "bias": {"bias": np.random.default_rng(2).normal(size=(1, N, T, S))},
    "bias and mask": {
        "bias": np.random.default_rng(2).normal(size=(1, N, T, S)),
        "mask": np.random.default_rng(3).random((1, 1, T, S)) < 0.5,
    },
    "scale": {"scale": 0.1},
}


def inputs(dtype, rows=T, key_rows=S, heads_of_key=N, seed=0):
    draw = np.random.default_rng(seed).normal
    shapes = (B, rows, N, H), (B, key_rows, heads_of_key, H), (B, key_rows, heads_of_key, H)
    return [tf.constant(draw(size=each), dtype) for each in shapes]


def with_gradients(compute, operands, bias, settings):
    @tf.function(autograph=False)
    def run(operands, bias):
        watched = operands + ([] if bias is None else [bias])
        with tf.GradientTape() as tape:
            tape.watch(watched)
            output = compute(*operands, bias=bias, **settings)
        weights = tf.cast(tf.reshape(tf.range(tf.size(output)) % 7, output.shape), output.dtype)
        return [output, *tape.gradient(output, watched, output_gradients=weights)]

    return [tf.cast(each, tf.float64).numpy() for each in run(operands, bias)]


def close(found, wanted, tolerance):
    assert len(found) == len(wanted)
    for each, other in zip(found, wanted, strict=True):
        assert np.isfinite(each).all()
        assert np.linalg.norm(each - other) <= tolerance * np.linalg.norm(other) + 1e-6


@pytest.mark.parametrize(
    ("dtype", "tolerance", "rows", "key_rows", "heads_of_key"),
    [
        ("float16", 4e-3, T - 1, S - 1, N),
        ("float16", 4e-3, 1, S, 2),
        ("bfloat16", 3e-2, T, S, N),
        pytest.param("float16", 4e-3, T, S, N, marks=pytest.mark.slow),
        pytest.param("bfloat16", 3e-2, T - 1, S - 1, N, marks=pytest.mark.slow),
        pytest.param("bfloat16", 3e-2, 1, S, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_alike_keras(case, dtype, tolerance, rows, key_rows, heads_of_key):
    settings = {
        name: each[..., :key_rows] if each.shape[2] == 1 else each[:, :, :rows, :key_rows]
        for name, each in CASES[case].items()
        if isinstance(each, np.ndarray)
    } | {name: each for name, each in CASES[case].items() if not isinstance(each, np.ndarray)}
    bias = settings.pop("bias", None)
    operands = inputs(dtype, rows, key_rows, heads_of_key)
    if bias is not None:
        bias = tf.constant(bias, dtype)
    if "mask" in settings:
        settings["mask"] = tf.constant(settings["mask"])
    attend = Attentions()
    direct = keras.ops.dot_product_attention
    found = with_gradients(lambda *a, **k: attend(direct, *a, **k), operands, bias, settings)
    wanted = with_gradients(direct, operands, bias, settings)
    close(found, wanted, tolerance)
    (said,) = attend._said
    assert "flash kernels compute" in said


def test_gradient_of_gradient():
    """Of a gradient penalty, which cuDNN has no call for: the plain attention gives it."""
    operands = inputs("bfloat16")

    def penalty(attend):
        @tf.function(autograph=False)
        def run(operands):
            with tf.GradientTape() as outer:
                outer.watch(operands)
                with tf.GradientTape() as inner:
                    inner.watch(operands)
                    output = attend(*operands, is_causal=True) ** 2
                first = inner.gradient(output, operands)
                norm = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in first])
            return outer.gradient(norm, operands)

        return [tf.cast(each, tf.float64).numpy() for each in run(operands)]

    attend, direct = Attentions(), keras.ops.dot_product_attention
    close(penalty(lambda *a, **k: attend(direct, *a, **k)), penalty(direct), 5e-2)


def test_recomputed():
    """Under `tf.recompute_grad`, as Keras's RematScope has it."""
    operands = inputs("bfloat16")
    attend, direct = Attentions(), keras.ops.dot_product_attention

    def again(compute):
        return lambda *a, bias, **k: tf.recompute_grad(lambda *x: compute(*x, **k))(*a)

    found = with_gradients(again(lambda *a, **k: attend(direct, *a, **k)), operands, None, {})
    close(found, with_gradients(direct, operands, None, {}), 3e-2)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"dtype": "float32"}, "its dtype is float32, not float16 or bfloat16"),
        ({"key_rows": 1}, "its key has one row"),
        ({"heads_of_key": 3}, "4 heads do not share 3"),
    ],
)
def test_says_why_not(of, reason):
    attend = Attentions()
    operands = inputs(**{"dtype": "bfloat16"} | of)
    direct = lambda *a, **k: "plain"  # noqa: E731
    assert attend(direct, *operands) == attend(direct, *operands) == "plain"
    (said,) = attend._said
    assert reason in said


def test_bias_with_a_gradient_that_cudnn_lacks():
    attend, operands = Attentions(), inputs("bfloat16")
    plain = object()
    direct = lambda *a, **k: plain  # noqa: E731
    bias = tf.Variable(tf.zeros((B, N, T, S), tf.bfloat16))
    with tf.GradientTape():
        assert attend(direct, *operands, bias=bias) is plain
    assert attend(direct, *operands, bias=bias) is not plain


TEXTS = [
    {},
    {"is_causal": True},
    {"dtype": tf.float16},
    {"key": (2, 12, 2, 16)},
    {"bias": (2, 1, 8, 12)},
    {"bias": (1, 4, 8, 12), "is_causal": True},
]


@pytest.mark.parametrize("changes", TEXTS)
def test_xla_reads_the_modules(changes):
    """XLA's parser takes the texts, and their shapes agree with the operands and results."""
    of = cudnn_calls.Attention((2, 8, 4, 16), (2, 12, 4, 16), tf.bfloat16, 0.25)
    of = dataclasses.replace(of, **changes)
    output, key = tf.TensorSpec(of.query, of.dtype), tf.TensorSpec(of.key, of.dtype)
    statistics = tf.TensorSpec(of.statistics, tf.float32)
    bias = [tf.TensorSpec(of.bias, of.dtype)] if of.bias else []
    own = bias if of.has_gradient_of_bias else []
    modules = [
        (cudnn_calls.forward(of), [output, key, key, *bias], [output, statistics]),
        (
            cudnn_calls.backward(of),
            [output, key, key, statistics, output, output, *bias],
            [output, key, key, *own],
        ),
    ]
    for text, given, results in modules:
        made = parsed(text, given, results)
        assert made.count('custom_call_target="__cudnn$fmha') == 1


def parts_of(make_mask, rows=T, key_rows=S):
    found = []

    @tf.function(autograph=False)
    def run(ids):
        is_causal, rest = masks.causal_and_rest(make_mask(ids), rows=rows, key_rows=key_rows)
        found[:] = is_causal, len(rest)
        return rest

    return found, run(tf.constant(np.tri(B, key_rows), tf.int32))


def triangle(rows=T, key_rows=S):
    return ops.greater_equal(ops.arange(rows)[:, None], ops.arange(key_rows)[None])


def padded(ids):
    return ops.not_equal(ids, 0)[:, None, None]


@pytest.mark.parametrize(
    ("make_mask", "is_causal", "num_rest"),
    [
        (lambda ids: triangle()[None, None], True, 0),
        (lambda ids: ops.logical_and(padded(ids), triangle()[None, None]), True, 1),
        (padded, False, 1),
        (lambda ids: ops.ones((1, 1, T, S), bool), False, 0),
        (lambda ids: ops.logical_not(triangle())[None, None], False, 1),
        (  # as in KerasHub, whose padding mask is an input of whole numbers
            lambda ids: ops.cast(
                ops.minimum(ops.expand_dims(ids, 1)[:, None], ops.cast(triangle(), "int32")), bool
            ),
            True,
            1,
        ),
        (lambda ids: ops.cast(ops.multiply(ids[:, None, None], triangle()), bool), True, 1),
        (  # fractions may become zero
            lambda ids: ops.cast(
                ops.cast(ops.minimum(ids[:, None, None] / 2, ops.cast(triangle(), "float32")), int),
                bool,
            ),
            False,
            1,
        ),
        (lambda ids: ops.logical_or(padded(ids), triangle()[None, None]), False, 1),
        (
            lambda ids: ops.cast(
                ops.expand_dims(
                    ops.minimum(
                        ops.cast(padded(ids), "int32")[:, 0], ops.cast(triangle(), "int32")[None]
                    ),
                    1,
                ),
                "bool",
            ),
            True,
            1,
        ),
    ],
)
def test_parts_of_a_mask(make_mask, is_causal, num_rest):
    found, rest = parts_of(make_mask)
    assert found == [is_causal, num_rest]
    ids = tf.constant(np.tri(B, S), tf.int32)
    joined = ops.ones((1, 1, T, S), bool)
    for each in [*rest, *([triangle()[None, None]] if is_causal else [])]:
        joined = ops.logical_and(joined, each)
    np.testing.assert_array_equal(
        np.broadcast_to(joined, (B, 1, T, S)), np.broadcast_to(make_mask(ids), (B, 1, T, S))
    )


@pytest.mark.parametrize("is_masked", [False, True])
def test_mask_of_a_layer(is_masked):
    """The layers of Keras join a causal mask and the padding, which are told apart again."""
    seen = []

    class Attend(Attentions):
        def __call__(self, direct, *args, mask=None, is_causal=False, **kwargs):
            found = masks.causal_and_rest(mask, rows=S, key_rows=S) if mask is not None else (0, [])
            seen.append((is_causal or found[0], len(found[1])))
            return direct(*args, mask=mask, is_causal=is_causal, **kwargs)

    embed = layers.Embedding(9, 8, mask_zero=is_masked)
    layer = layers.MultiHeadAttention(2, 4)

    @tf.function(autograph=False)
    def run(ids):
        x = embed(ids)
        with attention_by(Attend()):
            return layer(x, x, use_causal_mask=True)

    run(tf.constant(np.tri(B, S), tf.int32))
    assert set(seen) == {(True, 2 if is_masked else 0)}


class Counted(Attentions):
    """Counts the attentions that cuDNN gets."""

    count = 0

    def _why_not(self, *args, **kwargs):
        why = super()._why_not(*args, **kwargs)
        Counted.count += why is None
        return why


def classifier():
    x = inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 16, mask_zero=True)(x)
    x = x + layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))


def trained(monkeypatch, num_replicas, *, flash_on, **step):
    """Returns the losses of three epochs and the predictions."""
    attend = Counted() if flash_on else None
    monkeypatch.setattr("tfaccel.step.functions.attentions_on", lambda *a, **k: attend)
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(1, 20, (24, 8)), rng.integers(0, 3, 24)
    ids[np.arange(8) >= rng.integers(3, 9, 24)[:, None]] = 0
    model, losses = trained_in_bfloat16(classifier, ids, labels, num_replicas, rate=0.5, **step)
    return losses, model.predict(ids, batch_size=12, verbose=0)


@pytest.mark.parametrize(
    ("num_replicas", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (1, {"accumulation_steps": 2}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"accumulation_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_steps(monkeypatch, num_replicas, settings):
    """Steps with flash attention equal those without it; bfloat16 keeps 8 bits, so 2e-2."""
    Counted.count = 0
    losses, predicted = trained(monkeypatch, num_replicas, flash_on=True, **settings)
    assert Counted.count >= 2  # of the training step, and of prediction
    own_losses, own_predicted = trained(monkeypatch, num_replicas, flash_on=False, **settings)
    np.testing.assert_allclose(losses, own_losses, rtol=2e-2)
    np.testing.assert_allclose(predicted, own_predicted, atol=5e-2)
    assert losses[-1] < losses[0]


def test_flash_attention_of_a_layer():
    """True raises nothing on TensorFlow, whatever computes it; False is kept, and obeyed."""
    obey_flash_attention()
    x = tf.constant(np.random.default_rng(0).normal(size=(B, T, 16)), tf.bfloat16)
    outputs, counts = [], []
    for wanted in (True, None, False):
        keras.utils.set_random_seed(0)
        layer = layers.MultiHeadAttention(2, 8, flash_attention=wanted, dtype="bfloat16")
        outputs.append(layer(x, x).numpy())  # not in a compiled step
        Counted.count = 0

        @tf.function(autograph=False)
        def run(x, layer=layer):
            with attention_by(Counted()):
                return layer(x, x)

        run(x)
        counts.append(Counted.count)
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])
    assert counts == [1, 1, 0]
    keras.config.disable_flash_attention()
    try:
        Counted.count = 0
        with attention_by(Counted()):
            keras.ops.dot_product_attention(*inputs("bfloat16"))
        assert Counted.count == 0
    finally:
        global_state.set_global_attribute("flash_attention", None)


def test_what_cudnn_refuses_is_plain():
    """An error of cuDNN, which comes while XLA compiles, turns flash attention off."""
    attend, direct = Attentions(), keras.ops.dot_product_attention
    forgotten, calls = [], []
    message = "hidden_dim is wrong\nin external/xla/xla/stream_executor/cuda/cuda_dnn.cc(6842)"

    def step():
        attend(direct, *inputs("bfloat16"))
        calls.append(attend._off)
        if attend._off is None:
            raise tf.errors.InternalError(None, None, message)
        return "trained"

    choice = in_xla.Choice(keras.Sequential(), wanted=True, kernels=[attend])
    run = functools.partial(choice.run, step, (), forget=lambda: forgotten.append(True))
    assert run() == run() == "trained"
    assert (len(calls), forgotten, choice.on) == (3, [True], True)
    assert any("cuDNN refused one: hidden_dim is wrong" in each for each in attend._said)
    other = Attentions()
    choice = in_xla.Choice(keras.Sequential(), wanted=True, kernels=[other])
    with pytest.raises(tf.errors.InternalError):  # it is not of an attention
        choice.run(lambda: calls.append(1) or step_that_fails(), (), forget=forgotten.clear)


def step_that_fails():
    raise tf.errors.InternalError(None, None, "cuda_dnn.cc")


def test_no_gpu_no_flash():
    assert choose.attentions_on(["/cpu:0"], wanted=True) is None
    assert choose.attentions_on(["/cpu:0"], wanted=False) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_models_of_keras_hub(monkeypatch, name):
    """Their attentions are computed by cuDNN, and the causal part of their masks is found."""
    hub = pytest.importorskip("keras_hub").models
    sizes = {"vocabulary_size": 20, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
    make = {
        "llama": lambda: hub.LlamaBackbone(num_query_heads=4, num_key_value_heads=2, **sizes),
        "gpt2": lambda: hub.GPT2Backbone(num_heads=4, max_sequence_length=8, dropout=0, **sizes),
        "bert": lambda: hub.BertBackbone(num_heads=4, max_sequence_length=8, dropout=0, **sizes),
    }[name]
    found = []

    class Noted(Counted):
        def __call__(self, direct, query, key, value, mask=None, **kwargs):
            parts = masks.causal_and_rest(mask, rows=8, key_rows=8)
            found.append((parts[0], len(parts[1])))
            return super().__call__(direct, query, key, value, mask=mask, **kwargs)

    backbone = None

    def model():
        nonlocal backbone
        backbone = make()
        x = backbone.output["sequence_output"] if name == "bert" else backbone.output
        outputs = layers.Dense(3, dtype="float32")(x)
        return keras.Model(backbone.input, outputs)

    rng = np.random.default_rng(0)
    x = {"token_ids": rng.integers(1, 20, (8, 8)), "padding_mask": np.ones((8, 8), int)}
    x["padding_mask"][::2, 5:] = 0
    if name == "bert":
        x["segment_ids"] = np.zeros((8, 8), int)
    losses = {}
    for on in (True, False):
        attend = Noted() if on else None
        monkeypatch.setattr("tfaccel.step.functions.attentions_on", lambda *a, e=attend, **k: e)
        settings = {"rate": 0.1, "epochs": 2, "batch_size": 4}
        _, losses[on] = trained_in_bfloat16(model, x, x["token_ids"] % 3, **settings)
    assert set(found) == {(name != "bert", 1)}
    np.testing.assert_allclose(losses[True], losses[False], rtol=2e-2)
