"""Programs of text: recurrence, attention, masks, and batches of several lengths.

Sequences lie in buckets: a batch has sequences of like length, padded to the bucket's end. The data
are then a `tf.data.Dataset`, in which every epoch has the same order.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import Program, normal, numbers

NUM_ROWS, NUM_TOKENS, DIM = 66, 11, 4
ENDS = (4, 8, 12)  # the lengths that sequences are padded to


# Data.


def texts() -> list[np.ndarray]:
    """Returns 66 texts of 2 to 12 tokens 1..10: the buckets have 18, 24 and 24."""
    lengths = 2 + 5 * np.arange(NUM_ROWS) % 11
    return [1 + numbers(index, NUM_TOKENS - 1, each) for index, each in enumerate(lengths)]


def bucketed(examples: list[tuple], *, rows: int = 6) -> tf.data.Dataset:
    """Returns batches of examples of like length, each padded to the end of its bucket.

    Batches of 6 rows are all full. With 5 rows, each bucket ends with a batch of fewer.
    """
    spec = tuple(
        tf.TensorSpec([None] * np.ndim(each), np.asarray(each).dtype) for each in examples[0]
    )
    data = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=spec)
    return data.bucket_by_sequence_length(
        lambda words, *_: tf.shape(words)[0],
        bucket_boundaries=[each + 1 for each in ENDS],
        bucket_batch_sizes=[rows] * (len(ENDS) + 1),
        pad_to_bucket_boundary=True,
    )


def classified(rows: int = 6) -> tf.data.Dataset:
    """Returns batches (tokens [rows, 4, 8 or 12], class 0..1)."""
    return bucketed(list(zip(texts(), numbers(99, 2, NUM_ROWS), strict=True)), rows=rows)


def next_tokens() -> tf.data.Dataset:
    """Returns batches (tokens, the next token of each, a weight of 0 behind the end)."""
    examples = [(each[:-1], each[1:], np.ones(len(each) - 1, np.float32)) for each in texts()]
    return bucketed(examples)


def tagged() -> tf.data.Dataset:
    """Returns batches (tokens, a tag 1..3 of each, 0 behind the end)."""
    return bucketed([(each, 1 + each % 3) for each in texts()])


def padded() -> np.ndarray:
    """Returns the texts as an array: [66, 12] int32, 0 behind the end."""
    words = np.zeros((NUM_ROWS, ENDS[-1]), np.int32)
    for row, each in zip(words, texts(), strict=True):
        row[: len(each)] = each
    return words


# Models of any length.


def recurrent(*cells, mask_zero: bool = False) -> keras.Model:
    """Returns a classifier of sequences: an embedding, these layers, and a head."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, DIM, mask_zero=mask_zero)(inputs)
    for cell in cells:
        x = cell(x)
    return keras.Model(inputs, layers.Dense(2)(x))


class Positions(layers.Layer):
    """Adds the embedding of each position."""

    def build(self, shape):
        self.table = self.add_weight(shape=(ENDS[-1], DIM), initializer="uniform", name="table")

    def call(self, x):
        return x + self.table[: ops.shape(x)[1]]


def block(x, *, mask=None, causal: bool = False):
    """Returns x after a block of a transformer."""
    attend = layers.MultiHeadAttention(num_heads=2, key_dim=2)
    x = layers.LayerNormalization()(x + attend(x, x, attention_mask=mask, use_causal_mask=causal))
    return layers.LayerNormalization()(x + layers.Dense(DIM)(layers.Dense(6, "gelu")(x)))


class MeanOfTokens(layers.Layer):
    """The mean of the places where a token is."""

    def call(self, x, is_token):
        weights = ops.cast(is_token, x.dtype)[..., None]
        return ops.sum(x * weights, axis=1) / ops.sum(weights, axis=1)


class IsToken(layers.Layer):
    """True where a token is."""

    def call(self, words):
        return ops.not_equal(words, 0)


def encoder() -> keras.Model:
    """Returns a transformer that attends to tokens only, by a mask that is passed by hand."""
    inputs = keras.Input((None,), dtype="int32")
    is_token = IsToken()(inputs)
    x = Positions()(layers.Embedding(NUM_TOKENS, DIM)(inputs))
    x = block(x, mask=layers.Reshape((1, -1))(is_token))
    return keras.Model(inputs, layers.Dense(2)(MeanOfTokens()(x, is_token)))


def decoder() -> keras.Model:
    """Returns a transformer that attends to what came before."""
    inputs = keras.Input((None,), dtype="int32")
    x = block(Positions()(layers.Embedding(NUM_TOKENS, DIM)(inputs)), causal=True)
    return keras.Model(inputs, layers.Dense(NUM_TOKENS)(block(x, causal=True)))


def masked_encoder() -> keras.Model:
    """Returns a transformer whose attention and pooling see the mask of the embedding."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, DIM, mask_zero=True)(inputs)
    x = x + layers.MultiHeadAttention(num_heads=2, key_dim=2)(x, x)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def tagger() -> keras.Model:
    """Returns a bidirectional tagger, whose mask comes as far as the loss."""
    cell = layers.Bidirectional(layers.LSTM(3, return_sequences=True))
    inputs = keras.Input((None,), dtype="int32")
    x = cell(layers.Embedding(NUM_TOKENS, DIM, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(4)(x))


def attentive() -> keras.Model:
    """Returns what reads with a GRU and looks back by attention."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, DIM)(inputs)
    states, last = layers.GRU(DIM, return_sequences=True, return_state=True)(x)
    seen = layers.Attention()([layers.Reshape((1, DIM))(last), states])
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(seen)))


def convolving() -> keras.Model:
    return recurrent(
        layers.Conv1D(6, 3, padding="causal", activation="relu"), layers.GlobalMaxPooling1D()
    )


# The programs.


def of_classes(rate: float = 0.1, **others) -> dict:
    """Returns arguments of `compile`."""
    return {
        "optimizer": keras.optimizers.SGD(rate, momentum=0.5),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **others,
    }


PROGRAMS = [
    Program(
        "LSTM over buckets",
        "bidirectional LSTM on IMDB, keras.io, with tf.data's bucket_by_sequence_length",
        lambda: recurrent(layers.LSTM(DIM)),
        classified,
        lambda: of_classes(metrics=["accuracy"]),
    ),
    Program(
        "stacked LSTM, mask_zero",
        "the guide of masking and padding, keras.io",
        lambda: recurrent(layers.LSTM(DIM, return_sequences=True), layers.LSTM(3), mask_zero=True),
        classified,
        lambda: of_classes(metrics=["accuracy"]),
    ),
    Program(
        "bidirectional GRU, mask_zero",
        "text classification with an RNN, tensorflow.org",
        lambda: recurrent(layers.Bidirectional(layers.GRU(3)), mask_zero=True),
        lambda: (padded(), numbers(99, 2, NUM_ROWS)),
        lambda: of_classes(metrics=["accuracy"]),
    ),
    Program(
        "transformer over buckets",
        "text classification with a transformer, keras.io, with a mask of padding",
        encoder,
        classified,
        lambda: of_classes(metrics=["accuracy"]),
    ),
    Program(
        "transformer, mask_zero",
        "text classification with a transformer, keras.io; the mask of the embedding",
        masked_encoder,
        classified,
        lambda: of_classes(metrics=["accuracy"]),
    ),
    Program(
        "causal language model over buckets",
        "text generation with a miniature GPT, keras.io; each token has a weight",
        decoder,
        next_tokens,
        lambda: of_classes(weighted_metrics=["accuracy"]),
    ),
    Program(
        "tagging over buckets, mask_zero",
        "named entity recognition, keras.io; a mask that comes as far as the loss",
        tagger,
        tagged,
        lambda: of_classes(metrics=["accuracy"]),
    ),
    Program(
        "tagging, the padding ignored",
        "token classification; ignore_class",
        decoder,
        tagged,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        },
    ),
    Program(
        "GRU with attention",
        "neural machine translation with attention, tensorflow.org",
        attentive,
        classified,
        of_classes,
    ),
    Program(
        "convolution over buckets",
        "text classification from scratch, keras.io",
        convolving,
        lambda: classified(rows=5),
        of_classes,
    ),
    Program(
        "weights of whole texts",
        "bucketed, with a weight of each text",
        lambda: recurrent(layers.GRU(DIM)),
        lambda: bucketed(
            list(zip(texts(), numbers(99, 2, NUM_ROWS), np.exp(normal(98, NUM_ROWS)), strict=True))
        ),
        lambda: of_classes(weighted_metrics=["accuracy"]),
    ),
]
