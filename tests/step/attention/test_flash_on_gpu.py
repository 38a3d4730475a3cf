"""Attention by cuDNN itself, beside float64 and Keras's own attention of the same dtype."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccel
from tfaccel.step.attention.choose import Attentions, attentions_on

pytestmark = pytest.mark.gpu

B, N, H = 2, 4, 64
SIZES = [(128, 128, N), (197, 197, N)]  # rows of the query and of the key, and the key's heads
OTHER_SIZES = [(1, 77, N), (77, 1, N), (1, 1, N), (96, 200, 2), (3, 5, 1)]
OTHER_MASKS = ("none", "causal", "padding and causal", "bias")
MASKS = {
    "none": lambda t, s: {},
    "causal": lambda t, s: {"is_causal": True},
    "padding": lambda t, s: {"mask": first(t, s)},
    "padding and causal": lambda t, s: {"mask": first(t, s), "is_causal": True},
    "rows that see none": lambda t, s: {"mask": first(t, s) & rows_of_query(t)},
    "any": lambda t, s: {"mask": np.random.default_rng(1).random((B, N, t, s)) < 0.5},
    "bias": lambda t, s: {"bias": np.random.default_rng(2).normal(size=(1, N, t, s))},
    "bias of a batch": lambda t, s: {"bias": np.random.default_rng(2).normal(size=(B, 1, t, s))},
    "bias and mask": lambda t, s: {
        "bias": np.random.default_rng(2).normal(size=(1, N, t, s)),
        "mask": np.random.default_rng(3).random((1, 1, t, s)) < 0.7,
    },
}
# Of the norm of the difference to float64; bfloat16 keeps 8 bits, float16 11.
TOLERANCE = {"bfloat16": 6e-3, "float16": 8e-4}
CASES = [(mask, size, dtype) for mask in MASKS for size in SIZES for dtype in TOLERANCE]
CASES += [(mask, size, "bfloat16") for mask in OTHER_MASKS for size in OTHER_SIZES]


def first(t, s):
    """All rows of the key in the first example, a third and one more in the others."""
    counts = np.array([s] + [s // 3 + 1] * (B - 1))
    return (np.arange(s) < counts[:, None])[:, None, None]


def rows_of_query(t):
    counts = np.array([t] + [(t + 1) // 2] * (B - 1))
    return (np.arange(t) < counts[:, None])[:, None, :, None]


def gradients_of(compute, operands, settings, dtype, *, xla, watched):
    """Returns the output and the gradients of query, key and value, and the bias's if watched."""
    operands = [tf.cast(each, dtype) for each in operands]
    more = {}
    for name, each in settings.items():
        more[name] = each if isinstance(each, bool) else tf.constant(each)
    if "bias" in more:
        more["bias"] = tf.cast(more["bias"], dtype)

    @tf.function(jit_compile=xla)
    def run(operands, more):
        inputs = list(operands) + ([more["bias"]] if watched and "bias" in more else [])
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = compute(*operands, **more)
        weights = tf.sin(tf.range(tf.size(output), dtype=tf.float32))
        weights = tf.cast(tf.reshape(weights, output.shape), output.dtype)
        return [output, *tape.gradient(output, inputs, output_gradients=weights)]

    return [tf.cast(each, tf.float64) for each in run(operands, more)]


def repeated(query, key, value, **settings):
    """Computes Keras's own attention, which takes no grouped heads: repeats those of the key."""
    times = query.shape[2] // key.shape[2]
    key, value = (tf.repeat(each, times, axis=2) for each in (key, value))
    return keras.ops.dot_product_attention(query, key, value, **settings)


def error(found, exact):
    return float(tf.norm(found - exact) / tf.norm(exact))


@pytest.mark.parametrize(("mask", "size", "dtype"), CASES)
def test_near_float64(mask, size, dtype):
    rows, key_rows, heads = size
    settings = MASKS[mask](rows, key_rows)
    draw = np.random.default_rng(0).normal
    shapes = (B, rows, N, H), (B, key_rows, heads, H), (B, key_rows, heads, H)
    # The same numbers in every dtype.
    operands = [tf.cast(tf.constant(draw(size=each)), dtype) for each in shapes]
    attend, direct = Attentions(), keras.ops.dot_product_attention
    flash = lambda *a, **k: attend(direct, *a, **k)  # noqa: E731
    watched = mask != "bias of a batch"
    found = gradients_of(flash, operands, settings, dtype, xla=True, watched=watched)
    exact = gradients_of(repeated, operands, settings, "float64", xla=False, watched=watched)
    plain = gradients_of(repeated, operands, settings, dtype, xla=True, watched=watched)
    for each, own, true in zip(found, plain, exact, strict=True):
        assert np.isfinite(each).all()
        if tf.norm(true) > 1e-3 * tf.norm(exact[0]):
            # cuDNN's error is no larger than that of the plain attention, but for a little.
            errors = error(each, true), error(own, true)
            assert errors[0] < max(TOLERANCE[dtype], 1.2 * errors[1]), errors
        else:
            assert tf.norm(each - true) < 1e-2 * tf.norm(exact[0])  # rounding of a zero
    (said,) = attend._said
    assert ("flash kernels compute" in said) == (key_rows > 1)


@pytest.mark.parametrize("size", [8, 24, 72, 128, 192, 256])
def test_sizes_of_heads(size):
    draw = np.random.default_rng(0).normal
    operands = [tf.cast(tf.constant(draw(size=(1, 50, 2, size))), "bfloat16") for _ in range(3)]
    attend, direct = attentions_on(["/gpu:0"], wanted=True), keras.ops.dot_product_attention
    if size > attend._largest_head:
        pytest.skip("not on this GPU")
    flash = lambda *a, **k: attend(direct, *a, **k)  # noqa: E731
    found = gradients_of(flash, operands, {}, "bfloat16", xla=True, watched=False)
    exact = gradients_of(direct, operands, {}, "float64", xla=False, watched=False)
    for each, true in zip(found, exact, strict=True):
        assert error(each, true) < TOLERANCE["bfloat16"]


def test_memory_is_linear():
    """The plain attention would keep 8,192 x 8,192 scores a head: 1.6 GB of bfloat16 for these."""
    operands = [tf.random.normal((1, 8192, 12, 64), dtype=tf.bfloat16) for _ in range(3)]
    attend, direct = Attentions(), keras.ops.dot_product_attention
    flash = lambda *a, **k: attend(direct, *a, **k)  # noqa: E731
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    gradients_of(flash, operands, {"is_causal": True}, "bfloat16", xla=True, watched=False)
    after = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    assert after - before < 500e6


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("num_gpus", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}], ids=str)
def test_training(settings, num_gpus, precision, tmp_path):
    """Training with flash attention equals training without; the export runs on a CPU."""
    losses, found = {}, {}
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(1, 50, (64, 33)).astype(np.int32), rng.integers(0, 3, 64)
    ids[np.arange(33) >= rng.integers(3, 34, 64)[:, None]] = 0
    for on in (True, False):
        run = tfaccel.setup(
            precision=precision, gpu_ids=range(num_gpus), flash_attention=on, seed=1
        )
        with run.scope():
            x = inputs = keras.Input((33,), dtype="int32")
            x = keras.layers.Embedding(50, 64, mask_zero=True)(x)
            for _ in range(2):
                attend = keras.layers.MultiHeadAttention(4, 16, flash_attention=True)
                x = keras.layers.LayerNormalization()(x + attend(x, x, use_causal_mask=True))
            x = keras.layers.GlobalAveragePooling1D()(x)
            model = keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(x))
        run.compile(
            model,
            keras.optimizers.SGD(0.03),  # a larger one makes the rounding of a step grow
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            step=tfaccel.StepConfig(**settings),
        )
        history = model.fit(ids, labels, batch_size=32, epochs=4, shuffle=False, verbose=0)
        losses[on], found[on] = history.history["loss"], model.predict(ids, verbose=0)
        if on:
            run.export(model, tmp_path / "model")
            with tf.device("/cpu:0"):
                served = tf.saved_model.load(str(tmp_path / "model"))
            text = (tmp_path / "model" / "saved_model.pb").read_bytes()
            assert b"XlaCallModule" not in text
            assert served is not None
    np.testing.assert_allclose(losses[True], losses[False], rtol=2e-2)
    np.testing.assert_allclose(found[True], found[False], atol=5e-2)
