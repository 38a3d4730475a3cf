"""Attention with dropout by tfaccel's kernels, which a stand-in computes on the CPU."""

import dataclasses
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import triton_stand_in
from conftest import trained_in_bfloat16
from keras import layers
from stablehlo_parser import parsed

from tfaccel.keras_internals.attention import attention_by
from tfaccel.step import in_xla, triton_calls
from tfaccel.step.attention import choose, dropout, dropout_calls
from tfaccel.step.attention.choose import Attentions

B, T, S, N, H = 2, 6, 10, 4, 8
OF = dropout_calls.Attention(
    query=(B, T, N, H),
    key=(B, S, N, H),
    dtype=tf.bfloat16,
    scale=0.3,
    rate=0.25,
    is_causal=False,
    bias=(B, S),
)
CASES = {
    "no mask": {},
    "causal": {"is_causal": True},
    "one bias of all": {"bias": (1, S)},
    "shared heads": {"key": (B, S, 2, H)},
    "float16": {"dtype": tf.float16},
    "half": {"rate": 0.5},
    "nine tenths": {"rate": 0.9},
    "nothing": {"rate": 0.0},
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(dropout, "call_module", triton_stand_in.call_module)


def inputs(of, seed=0):
    draw = np.random.default_rng(seed)
    shapes = of.query, of.key, of.key
    arrays = [tf.constant(draw.normal(size=each), of.dtype) for each in shapes]
    bias = np.where(draw.random(of.bias) < 0.3, -np.inf, 0).astype("f4")
    bias[:, 0] = 0
    keys = dropout.keys_of(of, tf.constant([3_000_000_000, 7], tf.uint32))
    return *arrays, tf.constant(bias), keys


def with_gradients(compute, operands):
    query, key, value, *rest = operands

    @tf.function(autograph=False)
    def run(query, key, value):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = compute(query, key, value, *rest)
        weights = tf.cast(tf.reshape(tf.range(tf.size(output)) % 7, output.shape), output.dtype)
        gradients = tape.gradient(output, [query, key, value], output_gradients=weights)
        return [output, *gradients]

    return [tf.cast(each, tf.float64).numpy() for each in run(query, key, value)]


def close(found, wanted, tolerance):
    for each, other in zip(found, wanted, strict=True):
        assert np.isfinite(each).all()
        assert np.linalg.norm(each - other) <= tolerance * np.linalg.norm(other) + 1e-6


@pytest.mark.parametrize("case", CASES)
def test_alike_plain(case):
    """The modules' numbers and the gradient; 2e-2 is two roundings of bfloat16."""
    of = dataclasses.replace(OF, **CASES[case])
    operands = inputs(of)
    exact = [tf.cast(each, tf.float64) for each in operands[:3]] + list(operands[3:])
    found = with_gradients(functools.partial(dropout.attend, of), operands)
    close(found, with_gradients(functools.partial(dropout.plain, of), exact), 2e-2)


def test_same_bits():
    """The mask of the plain form is that of the kernels' source, as NumPy computes it."""
    seed = tf.constant([4_000_000_000, 9], tf.uint32)
    keys = dropout.keys_of(OF, seed)
    np.testing.assert_array_equal(keys, triton_stand_in.keys_of(seed.numpy(), B, N, T))
    bits = triton_stand_in.bits_of(keys.numpy(), S)
    np.testing.assert_array_equal(dropout.keeps(OF, keys), bits >= 2**14)


def mask_of(seed, rate=0.1):
    of = dataclasses.replace(OF, query=(4, 256, 4, H), key=(4, 256, 4, H), rate=rate)
    keys = dropout.keys_of(of, tf.constant(seed, tf.uint32))
    return dropout.keeps(of, keys).numpy().astype("f4")


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_share_that_is_kept(rate):
    """Of all scores, of each row and of each column: within 5 standard deviations."""
    kept = mask_of([1, 0], rate)
    for axes in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3), (3,)):
        means = kept.mean(axes)
        deviation = (rate * (1 - rate) / (kept.size / means.size)) ** 0.5
        assert np.abs(means - (1 - rate)).max() <= 5.5 * deviation


def test_scores_are_dropped_independently():
    """Neighbours, rows, columns, heads and steps: no correlation beyond 5 standard deviations."""
    first, second = mask_of([1, 0]) - 0.9, mask_of([1, 1]) - 0.9
    other, above = mask_of([2, 0]) - 0.9, np.tri(256, k=-1) > 0
    pairs = {
        "halves of a number": (first[..., 8:], first[..., :-8]),
        "columns": (first[..., 1:], first[..., :-1]),
        "far columns": (first[..., 64:], first[..., :-64]),
        "rows": (first[..., 1:, :], first[..., :-1, :]),
        "far rows": (first[..., 128:, :], first[..., :-128, :]),
        "diagonals": (first[..., 1:, 1:], first[..., :-1, :-1]),
        "transposed": (first[..., above], np.swapaxes(first, 2, 3)[..., above]),
        "heads": (first[:, 1:], first[:, :-1]),
        "examples": (first[1:], first[:-1]),
        "next step": (first, second),
        "next seed": (first, other),
        "four corners": (
            first[..., 1:, 1:] * first[..., :-1, :-1],
            first[..., 1:, :-1] * first[..., :-1, 1:],
        ),
    }
    for name, (one, two) in pairs.items():
        found = np.corrcoef(one.ravel(), two.ravel())[0, 1]
        assert abs(found) < 5 / one.size**0.5, (name, found)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
@pytest.mark.parametrize("size", [8, 64, 96, 128])
@pytest.mark.parametrize("rows", [1, 77, 512])
def test_text_is_whole(dtype, size, rows):
    """Each text has no placeholder left, one type of two bytes, and each name once."""
    shape = 2, rows, 2, size
    of = dataclasses.replace(OF, query=shape, key=shape, dtype=dtype, bias=(2, rows))
    other = {"bf16": r"\bf16\b|xf16", "f16": "bf16"}[triton_calls.TYPES[dtype]]
    for name in ("forward", "of_query", "of_key"):
        text = dropout_calls.kernel(name, of, dropout_calls.blocks_of(name, of))
        assert not re.search(r"\{[a-z_]+\}", text)
        assert not re.search(other, text)
        arguments = re.findall(r"%arg\d+(?=: !tt.ptr| = arith)", text)
        assert len(arguments) == len(set(arguments)) == text.count("!tt.ptr<", 0, 900) + 11
        top = re.findall(r"^    (%\S+?)(?::\d+)? = ", text, re.MULTILINE)
        assert len(top) == len(set(top))


@pytest.mark.parametrize("changes", [{}, {"is_causal": True, "bias": (1, 10)}])
def test_xla_parses_the_modules(changes):
    """XLA's own parser takes the text and the configuration; only a GPU runs the kernels."""

    of = dataclasses.replace(OF, key=(2, 10, 2, 8), **changes)
    query, key = tf.TensorSpec(of.query, of.dtype), tf.TensorSpec(of.key, of.dtype)
    sums, bias = tf.TensorSpec(of.sums, tf.float32), tf.TensorSpec(of.bias, tf.float32)
    part = tf.TensorSpec(of.gradient_of_key, of.dtype)
    given = [query, key, key, bias, tf.TensorSpec(of.keys, tf.uint32)]
    modules = [
        (dropout_calls.forward(of), given, [query, sums]),
        (dropout_calls.of_query(of), [*given, query, sums, query], [query, sums]),
        (dropout_calls.of_key(of), [*given, sums, query, sums], [part, part]),
    ]
    for text, arguments, results in modules:
        made = parsed(text, arguments, results)
        assert made.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
        assert "tt.func public @" in made


def test_gradient_of_gradient():
    """Of a gradient penalty: the plain form gives it, with the same mask."""
    operands = inputs(OF)

    def penalty(attend, operands):
        query, key, value, bias, keys = operands

        @tf.function(autograph=False)
        def run(query, key, value):
            with tf.GradientTape() as outer:
                outer.watch([query, key, value])
                with tf.GradientTape() as inner:
                    inner.watch(query)
                    output = attend(OF, query, key, value, bias, keys) ** 2
                first = tf.cast(inner.gradient(output, query), tf.float32)
                norm = tf.reduce_sum(first**2)
            return outer.gradient(norm, [query, key, value])

        return [tf.cast(each, tf.float64).numpy() for each in run(query, key, value)]

    exact = [tf.cast(each, tf.float64) for each in operands[:3]] + list(operands[3:])
    close(penalty(dropout.attend, operands), penalty(dropout.plain, exact), 8e-2)


def drop_as_the_kernels(monkeypatch):
    """Lets Keras's layers drop the scores that the kernels drop; returns the seeds they draw."""
    drawn = []

    def own_dropout(scores, rate, noise_shape=None, seed=None):
        drawn.append(tf.cast(seed.next(), tf.uint32))
        batch, heads, rows, key_rows = scores.shape
        shapes = {"query": (batch, rows, heads, H), "key": (batch, key_rows, heads, H)}
        of = dataclasses.replace(OF, **shapes, rate=rate)
        kept = dropout.keeps(of, dropout.keys_of(of, drawn[-1]))
        return tf.where(kept, scores / of.kept, 0)

    monkeypatch.setattr(keras.src.backend.random, "dropout", own_dropout)
    return drawn


ATTENTIONS = {
    "MultiHeadAttention": lambda **k: layers.MultiHeadAttention(2, 8, **k),
    "GroupQueryAttention": lambda **k: layers.GroupQueryAttention(8, 4, 2, **k),
}


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layer", ATTENTIONS)
def test_layers(layer, is_causal, is_masked, monkeypatch):
    """A layer's output is that of its own code with the kernels' mask in place of Keras's."""
    embed = layers.Embedding(9, 16, mask_zero=is_masked)
    layer = ATTENTIONS[layer](dropout=0.25, seed=5, dtype="bfloat16")
    ids = tf.constant(np.tri(B, S, 4), tf.int32)
    layer(embed(ids), embed(ids))
    generator = layer._dropout_layer.seed_generator
    before = generator.state.value.numpy()

    @tf.function(autograph=False)
    def run(attend, ids):
        x = embed(ids)
        if attend is None:
            return layer(x, x, use_causal_mask=is_causal, training=True)
        with attention_by(attend):
            return layer(x, x, use_causal_mask=is_causal, training=True)

    attend = Attentions()
    found = run(attend, ids)
    after = generator.state.value.numpy()
    (said,) = attend._said
    assert "flash kernels compute" in said
    generator.state.assign(before)
    drawn = drop_as_the_kernels(monkeypatch)
    wanted = run(None, ids)
    assert len(drawn) == 1
    np.testing.assert_array_equal(after, generator.state.value)  # the next step is alike, too
    wanted, found = (tf.cast(each, tf.float32) for each in (wanted, found))
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-2)


def test_rows_that_see_none():
    """They get zeros, as from Keras's layers with dropout."""
    draw = np.random.default_rng(0).normal
    query, key, value = (tf.constant(draw(size=(B, S, N, H)), tf.bfloat16) for _ in range(3))
    padding = tf.constant(np.arange(S) >= 3)[None, None, None]  # at the start, and causal
    found = dropout.dropout_attention(
        query, key, value, rate=0.1, seed=tf.constant([1, 2], tf.int64), scale=0.3,
        is_causal=True, mask=padding,
    )  # fmt: skip
    assert not np.any(found[:, :3])
    assert np.any(found[:, 3:])
    assert np.isfinite(tf.cast(found, tf.float32)).all()


REFUSED = {
    "no multiple of 8": {"key_dim": 4},
    "its dtype is float32": {"dtype": "float32"},
    "neither causal nor the padding": {"mask": np.random.default_rng(0).random((B, T, T)) < 0.7},
    "of 8 and of 16 values differ": {"value_dim": 16},
    "its key has one row": {"key_rows": 1},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_is_plain(reason):
    """The layer computes it itself, and a line says why, once."""
    settings = {"key_dim": 8, "dtype": "bfloat16"} | REFUSED[reason]
    mask, key_rows = settings.pop("mask", None), settings.pop("key_rows", T)
    x = tf.constant(np.random.default_rng(0).normal(size=(B, T, 16)), settings["dtype"])
    attend, outputs = Attentions(), []
    for own in (attend, None):
        layer = layers.MultiHeadAttention(2, dropout=0.5, seed=3, **settings)
        keras.utils.set_random_seed(1)
        layer.build(x.shape, x.shape)

        @tf.function(autograph=False)
        def run(x, own=own, layer=layer):
            call = functools.partial(layer, x, x[:, :key_rows], attention_mask=mask, training=True)
            if own is None:
                return call()
            with attention_by(own):
                return call()

        outputs.append(run(x))
    np.testing.assert_array_equal(*outputs)
    (said,) = attend._said
    assert reason in said


def test_a_layer_may_refuse():
    x = tf.ones((B, T, 16), tf.bfloat16)
    layer = layers.MultiHeadAttention(2, 8, dropout=0.5, dtype="bfloat16")
    layer._flash_attention = False  # as tfaccel keeps it
    attend = Attentions()

    @tf.function(autograph=False)
    def run(x):
        with attention_by(attend):
            return layer(x, x, training=True)

    run(x)
    assert not attend._said


def classifier():
    x = inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 16, mask_zero=True)(x)
    x = x + layers.MultiHeadAttention(2, 8, dropout=0.1, seed=7)(x, x, use_causal_mask=True)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))


def trained(monkeypatch, attend, num_replicas=1, accumulation_steps=1):
    monkeypatch.setattr("tfaccel.step.functions.attentions_on", lambda *a, **k: attend)
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(1, 20, (24, 8)), rng.integers(0, 3, 24)
    ids[np.arange(8) >= rng.integers(3, 9, 24)[:, None]] = 0
    settings = {"rate": 0.5, "accumulation_steps": accumulation_steps}
    _, losses = trained_in_bfloat16(classifier, ids, labels, num_replicas, **settings)
    return losses


@pytest.mark.parametrize(
    ("num_replicas", "accumulation_steps"),
    [
        (1, 1),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_steps(monkeypatch, num_replicas, accumulation_steps):
    """Steps with the kernels equal those of Keras that drops the same; 2e-2 as bfloat16."""
    attend, settings = Attentions(), (num_replicas, accumulation_steps)
    losses = trained(monkeypatch, attend, *settings)
    assert attend._drops
    assert losses[-1] < losses[0]
    drawn = drop_as_the_kernels(monkeypatch)
    np.testing.assert_allclose(losses, trained(monkeypatch, None, *settings), rtol=2e-2)
    assert drawn


def test_refused_kernel_is_plain():
    """An error of a kernel, which comes while XLA compiles, turns these kernels off."""
    attend, forgotten, states = Attentions(), [], []
    layer = layers.MultiHeadAttention(2, 8, dropout=0.5, dtype="bfloat16")
    x = tf.ones((B, T, 16), tf.bfloat16)
    layer.build(x.shape, x.shape)

    @tf.function(autograph=False)
    def traced():
        with attention_by(attend):
            return layer(x, x, training=True)

    def step():
        traced.get_concrete_function()
        states.append(attend._drops_off)
        if attend._drops_off is None:
            raise tf.errors.InternalError(None, None, "Failed to compile Triton kernel.")
        return "trained"

    choice = in_xla.Choice(keras.Sequential(), wanted=True, kernels=[attend])
    assert choice.run(step, (), forget=lambda: forgotten.append(True)) == "trained"
    assert (len(states), forgotten, choice.on) == (2, [True], True)
    assert any("XLA refused a kernel: Failed to compile" in each for each in attend._said)


def test_no_gpu_no_kernels():
    assert choose.attentions_on(["/cpu:0"], wanted=True) is None
