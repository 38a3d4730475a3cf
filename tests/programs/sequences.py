"""Programs of sequences, masks, other losses and metrics, and transfer learning.

Most use Keras's own train_step. Rows have different numbers of masked positions, so that a mean
over positions is not a mean of the replicas' means.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import Program, normal, numbers

NUM_ROWS, NUM_STEPS, NUM_TOKENS, NUM_TAGS, DIM = 24, 6, 11, 4, 4


# Data.


def tokens(seed: int, num_steps: int = NUM_STEPS) -> np.ndarray:
    """Returns sequences of 2 tokens or more: [24, num_steps] int32 1..10, then 0 as padding."""
    lengths = numbers(seed + 100, num_steps - 1, NUM_ROWS) + 2
    words = numbers(seed, NUM_TOKENS - 1, NUM_ROWS, num_steps) + 1
    return np.where(np.arange(num_steps) < lengths[:, None], words, 0).astype(np.int32)


def tagged() -> tuple:
    """Returns padded sequences and a tag of each token, where 0 is the tag of padding."""
    words = tokens(0)
    return words, np.where(words > 0, 1 + numbers(1, NUM_TAGS - 1, *words.shape), 0)


def masked() -> tuple:
    """Returns sequences in which about a third of the tokens is 0, the labels, and their weights.

    The label is the token that was there, and -1 elsewhere. The weight is 1 where a label is.
    """
    words = numbers(0, NUM_TOKENS - 1, NUM_ROWS, NUM_STEPS) + 1
    hidden = normal(1, NUM_ROWS, NUM_STEPS) > 0.4
    hidden[:, 0] |= ~hidden.any(axis=1)
    return np.where(hidden, 0, words), np.where(hidden, words, -1), hidden.astype(np.float32)


def regression() -> tuple:
    """Returns [24, 4] inputs and [24, 2] outputs."""
    return normal(0, NUM_ROWS, 4), normal(1, NUM_ROWS, 2)


def weighted() -> tuple:
    """Returns the same with a positive weight of each row."""
    return (*regression(), np.exp(normal(2, NUM_ROWS)))


def missing() -> tuple:
    """Returns the same, where about a third of the outputs is NaN."""
    x, y = regression()
    y[normal(2, *y.shape) > 0.4] = np.nan
    return x, y


def labels(seed: int, *shape: int) -> np.ndarray:
    """Returns zeros and ones: float32."""
    return numbers(seed, 2, *shape).astype(np.float32)


def segmented(*, ignored: int | None = None) -> tuple:
    """Returns [24, 8, 8, 3] images and [24, 8, 8] classes 0..2, some of which are `ignored`."""
    classes = numbers(1, 3, NUM_ROWS, 8, 8)
    if ignored is not None:
        shares = np.linspace(0.1, 0.8, NUM_ROWS)[:, None, None]
        classes[np.random.default_rng(2).random(classes.shape) < shares] = ignored
    return normal(0, NUM_ROWS, 8, 8, 3), classes


def translated() -> tuple:
    """Returns source and target sequences, and the target's next tokens."""
    source, target = tokens(0), tokens(1, NUM_STEPS + 1)
    return {"encoder_inputs": source, "decoder_inputs": target[:, :-1]}, target[:, 1:]


# Models.


def dense(units: int = 2, activation: str | None = None) -> keras.Model:
    """Returns a small network of 4 inputs."""
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(units, activation)]
    )


def lstm_classifier() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((NUM_STEPS,), dtype="int32"),
            layers.Embedding(NUM_TOKENS, DIM, mask_zero=True),
            layers.LSTM(DIM, unroll=True),
            layers.Dense(1, "sigmoid"),
        ]
    )


def for_lstm() -> dict:
    """Returns the arguments of `compile`."""
    return {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": "binary_crossentropy",
        "metrics": ["accuracy"],
    }


def with_dense_gradients(model: keras.Model) -> dict:
    """Trains with stock Keras, and adds the gradients of a repeated token before the update."""
    model.compile(**for_lstm(), run_eagerly=True)
    apply = model.optimizer.apply
    model.optimizer.apply = lambda gradients, variables: apply(
        [tf.convert_to_tensor(each) for each in gradients], variables
    )
    data = tokens(0), labels(1, NUM_ROWS, 1)
    return model.fit(*data, batch_size=6, epochs=2, shuffle=False, verbose=0).history


def gru_classifier() -> keras.Model:
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, DIM)(inputs)
    x = layers.Bidirectional(layers.GRU(3))(x)
    return keras.Model(inputs, layers.Dense(2, "softmax")(x))


def tagger() -> keras.Model:
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, DIM, mask_zero=True)(inputs)
    x = layers.LSTM(DIM, return_sequences=True)(x)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(NUM_TAGS, "softmax"))(x))


class TokenAndPositionEmbedding(layers.Layer):
    """The sum of a token's embedding and of its position's."""

    def __init__(self, num_steps, num_tokens, dim, mask_zero=False):
        super().__init__()
        self.token_emb = layers.Embedding(num_tokens, dim, mask_zero=mask_zero)
        self.pos_emb = layers.Embedding(num_steps, dim)

    def build(self, shape):
        self.token_emb.build(shape)
        self.pos_emb.build(shape[1:])

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.token_emb(x) + self.pos_emb(positions)

    def compute_mask(self, inputs, mask=None):
        return self.token_emb.compute_mask(inputs)


def transformer(x, *, causal=False, context=None):
    """Returns x after a block of a transformer, which also attends to `context`.

    Attention sees the mask of x, and takes it away: it does not come as far as the loss.
    """
    attend = layers.MultiHeadAttention(num_heads=2, key_dim=2)
    x = layers.LayerNormalization()(x + attend(x, x, use_causal_mask=causal))
    if context is not None:
        cross = layers.MultiHeadAttention(num_heads=2, key_dim=2)
        x = layers.LayerNormalization()(x + cross(x, context))
    return layers.LayerNormalization()(x + layers.Dense(DIM)(layers.Dense(6, "relu")(x)))


def entity_recognizer() -> keras.Model:
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    x = transformer(TokenAndPositionEmbedding(NUM_STEPS, NUM_TOKENS, DIM)(inputs))
    return keras.Model(inputs, layers.Dense(NUM_TAGS, "softmax")(x))


def bert(model=keras.Model, activation=None) -> keras.Model:
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    x = transformer(TokenAndPositionEmbedding(NUM_STEPS, NUM_TOKENS, DIM)(inputs))
    return model(inputs, layers.Dense(NUM_TOKENS, activation)(x))


def gpt() -> keras.Model:
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    x = TokenAndPositionEmbedding(NUM_STEPS, NUM_TOKENS, DIM)(inputs)
    x = transformer(x, causal=True)
    return keras.Model(inputs, [layers.Dense(NUM_TOKENS)(x), x])


def padded_gpt() -> keras.Model:
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    x = TokenAndPositionEmbedding(NUM_STEPS, NUM_TOKENS, DIM, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(NUM_TOKENS)(transformer(x, causal=True)))


def translator() -> keras.Model:
    sources = keras.Input((NUM_STEPS,), dtype="int32", name="encoder_inputs")
    targets = keras.Input((NUM_STEPS,), dtype="int32", name="decoder_inputs")
    encoded = transformer(
        TokenAndPositionEmbedding(NUM_STEPS, NUM_TOKENS, DIM, mask_zero=True)(sources)
    )
    x = TokenAndPositionEmbedding(NUM_STEPS, NUM_TOKENS, DIM, mask_zero=True)(targets)
    x = transformer(x, causal=True, context=encoded)
    return keras.Model([sources, targets], layers.Dense(NUM_TOKENS, "softmax")(x))


def reader() -> keras.Model:
    """Returns what reads 8 columns of 3 numbers, such as those of a spectrogram."""
    inputs = keras.Input((8, 3))
    x = layers.Bidirectional(layers.GRU(DIM, return_sequences=True))(inputs)
    return keras.Model(inputs, layers.Dense(6)(x))


class CTCLayer(layers.Layer):
    """Adds the loss in the model, of which the labels are an input."""

    def call(self, y_true, y_pred):
        rows = ops.shape(y_true)[0]
        loss = ops.ctc_loss(
            y_true,
            y_pred,
            ops.shape(y_true)[1] * ops.ones((rows,), "int32"),
            ops.shape(y_pred)[1] * ops.ones((rows,), "int32"),
        )
        self.add_loss(loss)
        return y_pred


def captcha() -> keras.Model:
    image = keras.Input((8, 4, 1), name="image")
    label = keras.Input((3,), dtype="int32", name="label")
    x = layers.Conv2D(2, 3, activation="relu", padding="same")(image)
    x = layers.Dense(4, "relu")(layers.Reshape((8, 8))(x))
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    return keras.Model([image, label], CTCLayer()(label, layers.Dense(6)(x)))


def unet(classes: int = 3, activation: str | None = None) -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    fine = layers.Conv2D(4, 3, activation="tanh", padding="same")(inputs)
    x = layers.Conv2D(4, 3, activation="tanh", padding="same")(layers.MaxPooling2D()(fine))
    x = layers.Concatenate()([fine, layers.UpSampling2D()(x)])
    return keras.Model(inputs, layers.Conv2D(classes, 3, padding="same", activation=activation)(x))


def wearing_lora() -> keras.Model:
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    embedding, hidden = layers.Embedding(NUM_TOKENS, DIM), layers.Dense(6, "tanh")
    x = layers.GlobalAveragePooling1D()(hidden(embedding(inputs)))
    model = keras.Model(inputs, layers.Dense(2)(x))
    embedding.enable_lora(2)
    hidden.enable_lora(2)
    return model


def frozen_backbone() -> keras.Model:
    """Returns a head on a frozen body, of which batch normalization is in inference mode."""
    body = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ],
        name="body",
    )
    body.layers[1].set_weights([np.exp(normal(2, 4)), *normal(3, 2, 4), np.exp(normal(4, 4))])
    body.trainable = False
    inputs = keras.Input((6, 6, 3))
    x = layers.GlobalAveragePooling2D()(body(inputs, training=False))
    return keras.Model(inputs, layers.Dense(3)(x))


def thaw(model: keras.Model) -> None:
    """Makes the body trainable, except batch normalization, which stays in inference mode.

    Keras 3.15 trains it in spite of the `training=False` with which the model was made.
    """
    body = model.get_layer("body")
    body.trainable = True
    body.layers[1].trainable = False


def stateful() -> keras.Model:
    """Returns a recurrent network that goes on with its rows from batch to batch."""
    inputs = keras.Input(batch_shape=(6, 3, 2))
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(3, stateful=True)(inputs)))


# Losses.


class NonPaddingLoss(keras.losses.Loss):
    """The mean over all tokens that are no padding."""

    def __init__(self, name="custom_ner_loss"):
        super().__init__(name=name)

    def call(self, y_true, y_pred):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
        loss = loss_fn(y_true, y_pred)
        mask = ops.cast(y_true > 0, "float32")
        return ops.sum(loss * mask) / ops.sum(mask)


def masked_accuracy(label, pred):
    """The share of tokens that are right, as a metric function of one number."""
    match = ops.cast(label == ops.cast(ops.argmax(pred, axis=2), label.dtype), "float32")
    mask = ops.cast(label != 0, "float32")
    return ops.sum(match * mask) / ops.sum(mask)


def dice_loss(y_true, y_pred, smooth=1.0):
    """One number for the batch."""
    y_true, y_pred = ops.reshape(y_true, (-1,)), ops.reshape(y_pred, (-1,))
    intersection = ops.sum(y_true * y_pred)
    return 1 - (2 * intersection + smooth) / (ops.sum(y_true) + ops.sum(y_pred) + smooth)


class HandMasked(keras.Sequential):
    """Leaves out missing outputs, in a compute_loss of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mask = tf.cast(~tf.math.is_nan(y), tf.float32)
        errors = tf.square(tf.where(tf.math.is_nan(y), 0.0, y) - y_pred) * mask
        return tf.reduce_sum(errors) / tf.reduce_sum(mask)


class MaskedLanguageModel(keras.Model):
    """Takes the gradient of a loss of all positions, which is that of their sum."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, inputs):
        features, labels, sample_weight = inputs
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = self.loss_fn(labels, predictions, sample_weight=sample_weight)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


class AverageLoss(keras.Model):
    """Divides by the rows of the global batch, as TensorFlow's guides of distribution do."""

    def __init__(self):
        super().__init__()
        self.network = dense()
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            per_example = keras.losses.mean_squared_error(y, self(x, training=True))
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=6)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class UncertaintyWeights(keras.Model):
    """Two tasks; the logarithm of each one's variance is trained."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(5, "tanh")
        self.heads = [layers.Dense(1), layers.Dense(1, "sigmoid")]
        self.log_vars = self.add_weight(shape=(2,), initializer="zeros", name="log_vars")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self(np.zeros((1, 4), "float32"))

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        features = self.body(x)
        return [head(features) for head in self.heads]

    def train_step(self, data):
        x, (depth, kind) = data
        with tf.GradientTape() as tape:
            depth_pred, kind_pred = self(x, training=True)
            losses = tf.stack(
                [
                    tf.reduce_mean(keras.losses.mean_squared_error(depth, depth_pred)),
                    tf.reduce_mean(keras.losses.binary_crossentropy(kind, kind_pred)),
                ]
            )
            loss = tf.reduce_sum(tf.exp(-self.log_vars) * losses + self.log_vars)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class MultiLossLayer(layers.Layer):
    """Likewise as a layer, which adds the loss of its inputs to the model's."""

    def build(self, shape):
        self.log_vars = [
            self.add_weight(name=f"log_var{index}", shape=(1,), initializer="zeros")
            for index in range(2)
        ]

    def call(self, inputs):
        loss = 0
        for y_true, y_pred, log_var in zip(inputs[:2], inputs[2:], self.log_vars, strict=True):
            loss += ops.sum(ops.exp(-log_var) * (y_true - y_pred) ** 2 + log_var, -1)
        self.add_loss(ops.mean(loss))
        return ops.concatenate(inputs, -1)


def two_tasks() -> keras.Model:
    inputs, first, second = keras.Input((4,)), keras.Input((1,)), keras.Input((1,))
    features = layers.Dense(5, "tanh")(inputs)
    answers = [layers.Dense(1)(features), layers.Dense(1)(features)]
    return keras.Model([inputs, first, second], MultiLossLayer()([first, second, *answers]))


class TwoLearningRates(keras.Model):
    """A head and a pretrained body, each with an optimizer."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh")])
        self.head = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
        self.built = True

    def compile(self, body_optimizer, head_optimizer, **kwargs):
        super().compile(**kwargs)
        self.body_optimizer, self.head_optimizer = body_optimizer, head_optimizer

    def call(self, x):
        return self.head(self.body(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        body, head = self.body.trainable_weights, self.head.trainable_weights
        gradients = tape.gradient(loss, body + head)
        self.body_optimizer.apply_gradients(zip(gradients[: len(body)], body, strict=True))
        self.head_optimizer.apply_gradients(zip(gradients[len(body) :], head, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {each.name: each.result() for each in self.metrics}


class LargestError(keras.metrics.Metric):
    """The largest error of any output: a state that may not be added."""

    def __init__(self, name="largest_error", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.max(ops.abs(y_true - y_pred))
        self.largest.assign(ops.maximum(self.largest, error))

    def result(self):
        return self.largest


# The programs.


def sgd(learning_rate: float = 0.1, **others) -> dict:
    """Returns arguments of `compile`."""
    return {"optimizer": keras.optimizers.SGD(learning_rate), **others}


def of_classes(**settings) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(**settings)


PROGRAMS = [
    Program(
        "text classification, LSTM",
        "the guide of masking and padding, keras.io",
        lstm_classifier,
        lambda: (tokens(0), labels(1, NUM_ROWS, 1)),
        for_lstm,
        stock_fails="its Adam squares the gradients of a repeated token one by one "
        "(findings/keras_adam_repeated_ids.sh)",
        reference=with_dense_gradients,
    ),
    Program(
        "text classification, GRU",
        "bidirectional LSTM on IMDB, keras.io",
        gru_classifier,
        lambda: (tokens(0), numbers(1, 2, NUM_ROWS)),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
        },
    ),
    Program(
        "sequence tagging",
        "the guide of masking and padding, keras.io; a mask that comes as far as the loss",
        tagger,
        tagged,
        lambda: sgd(loss="sparse_categorical_crossentropy", metrics=["accuracy"]),
    ),
    Program(
        "sequence tagging, weighted metrics",
        "the same, with a weight of each word",
        tagger,
        lambda: (*tagged(), np.exp(normal(2, *tagged()[0].shape))),
        lambda: sgd(loss="sparse_categorical_crossentropy", weighted_metrics=["accuracy"]),
    ),
    Program(
        "named entity recognition",
        "named entity recognition with a transformer, keras.io",
        entity_recognizer,
        tagged,
        lambda: sgd(loss=NonPaddingLoss()),
    ),
    Program(
        "masked language model",
        "Devlin et al. 2018, arXiv:1810.04805; ignore_class",
        bert,
        lambda: masked()[:2],
        lambda: sgd(loss=of_classes(from_logits=True, ignore_class=-1)),
    ),
    Program(
        "masked language model, own train_step",
        "end-to-end masked language modeling with BERT, keras.io",
        lambda: bert(MaskedLanguageModel, "softmax"),
        lambda: (masked()[0], np.maximum(masked()[1], 0), masked()[2]),
        lambda: sgd(0.01),
    ),
    Program(
        "causal language model",
        "text generation with a miniature GPT, keras.io",
        gpt,
        lambda: (translated()[0]["decoder_inputs"], translated()[1]),
        lambda: sgd(loss=[of_classes(from_logits=True), None]),
    ),
    Program(
        "causal language model, mask_zero",
        "GPT text generation from scratch, keras.io",
        padded_gpt,
        lambda: (translated()[0]["decoder_inputs"], translated()[1]),
        lambda: sgd(loss=of_classes(from_logits=True)),
    ),
    Program(
        "translation transformer",
        "English-to-Spanish translation with a transformer, keras.io",
        translator,
        translated,
        lambda: sgd(loss=of_classes(ignore_class=0), metrics=["accuracy"]),
    ),
    Program(
        "translation transformer, own loss and metric",
        "transformer tutorial of TensorFlow Text: masked_loss, masked_accuracy",
        translator,
        translated,
        lambda: sgd(loss=NonPaddingLoss(), metrics=[masked_accuracy]),
    ),
    Program(
        "CTC",
        "automatic speech recognition using CTC, keras.io",
        reader,
        lambda: (normal(0, NUM_ROWS, 8, 3), numbers(1, 5, NUM_ROWS, 3) + 1),
        lambda: sgd(0.01, loss=keras.losses.CTC()),
    ),
    Program(
        "CTC in a layer",
        "OCR model for reading captchas, keras.io; add_loss of one number a row, which Keras sums",
        captcha,
        lambda: (
            {
                "image": normal(0, NUM_ROWS, 8, 4, 1),
                "label": numbers(1, 5, NUM_ROWS, 3) + 1,
            },
        ),
        lambda: sgd(0.01),
    ),
    Program(
        "U-Net with ignore_class",
        "image segmentation with a U-Net-like architecture, keras.io",
        unet,
        lambda: segmented(ignored=-1),
        lambda: sgd(loss=of_classes(from_logits=True, ignore_class=-1)),
    ),
    Program(
        "uncertainty weights",
        "Kendall et al. 2017, arXiv:1705.07115",
        UncertaintyWeights,
        lambda: (normal(0, NUM_ROWS, 4), [normal(1, NUM_ROWS, 1), labels(2, NUM_ROWS, 1)]),
        sgd,
    ),
    Program(
        "uncertainty weights in a layer",
        "Kendall et al. 2017, arXiv:1705.07115, as their notebook does it: add_loss",
        two_tasks,
        lambda: ([normal(0, NUM_ROWS, 4), normal(1, NUM_ROWS, 1), normal(2, NUM_ROWS, 1)],),
        sgd,
    ),
    Program(
        "loss summed",
        'reduction="sum", as guides of distributed training have it',
        dense,
        regression,
        lambda: sgd(0.01, loss=keras.losses.MeanSquaredError(reduction="sum")),
    ),
    Program(
        "loss by the sum of the weights",
        'reduction="mean_with_sample_weight", keras.losses',
        dense,
        weighted,
        lambda: sgd(loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")),
    ),
    Program(
        "hand-masked loss",
        "missing labels; compute_loss of one's own, the guide of Model.fit, keras.io",
        lambda: HandMasked([keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)]),
        missing,
        sgd,
    ),
    Program(
        "Dice loss by hand",
        "Milletari et al. 2016, arXiv:1606.04797, over the batch",
        lambda: unet(1, "sigmoid"),
        lambda: (segmented()[0], labels(1, NUM_ROWS, 8, 8, 1)),
        lambda: sgd(loss=dice_loss),
    ),
    Program(
        "Dice loss of Keras",
        "keras.losses.Dice, over the batch as it is by default",
        lambda: unet(1, "sigmoid"),
        lambda: (segmented()[0], labels(1, NUM_ROWS, 8, 8, 1)),
        lambda: sgd(loss=keras.losses.Dice()),
    ),
    Program(
        "compute_average_loss",
        "custom training with tf.distribute.Strategy, tensorflow.org",
        AverageLoss,
        regression,
        sgd,
    ),
    Program(
        "sample weights",
        "training and evaluation with the built-in methods, keras.io",
        dense,
        weighted,
        lambda: sgd(loss="mse", metrics=["mae"], weighted_metrics=["mse"]),
    ),
    Program(
        "class weights",
        "imbalanced classification, keras.io",
        lambda: dense(1, "sigmoid"),
        lambda: (normal(0, NUM_ROWS, 4), labels(1, NUM_ROWS, 1)),
        lambda: sgd(loss="binary_crossentropy", metrics=["accuracy"]),
        fit={"class_weight": {0: 0.3, 1: 2.5}},
    ),
    Program(
        "AUC and F1",
        "imbalanced classification, keras.io, with several labels a row",
        lambda: dense(3, "sigmoid"),
        lambda: (normal(0, NUM_ROWS, 4), labels(1, NUM_ROWS, 3)),
        lambda: sgd(
            loss="binary_crossentropy",
            metrics=[
                keras.metrics.AUC(name="auc"),
                keras.metrics.AUC(name="auc_by_label", multi_label=True, num_labels=3),
                keras.metrics.F1Score(average="macro", threshold=0.5),
                keras.metrics.Precision(name="precision"),
                keras.metrics.Recall(name="recall"),
            ],
        ),
    ),
    Program(
        "mean IoU",
        "multiclass segmentation with DeepLabV3+, keras.io",
        unet,
        segmented,
        lambda: sgd(
            loss=of_classes(from_logits=True),
            metrics=[keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")],
        ),
    ),
    Program(
        "R2",
        "structured data regression; keras.metrics.R2Score",
        dense,
        regression,
        lambda: sgd(loss="mse", metrics=[keras.metrics.R2Score()]),
    ),
    Program(
        "largest error as a metric",
        "a metric of one's own, with a state that may not be added",
        dense,
        regression,
        lambda: sgd(loss="mse", metrics=[LargestError()]),
    ),
    Program(
        "frozen backbone",
        "transfer learning and fine-tuning, keras.io, the first part",
        frozen_backbone,
        lambda: (normal(0, NUM_ROWS, 6, 6, 3), numbers(1, 3, NUM_ROWS)),
        lambda: sgd(loss=of_classes(from_logits=True), metrics=["accuracy"]),
    ),
    Program(
        "fine-tuning",
        "fine-tuning of EfficientNet, keras.io: the body is trained in the second fit",
        frozen_backbone,
        lambda: (normal(0, NUM_ROWS, 6, 6, 3), numbers(1, 3, NUM_ROWS)),
        lambda: sgd(0.01, loss=of_classes(from_logits=True), metrics=["accuracy"]),
        again=thaw,
    ),
    Program(
        "two learning rates",
        "Howard and Ruder 2018, arXiv:1801.06146, with an optimizer each for body and head",
        TwoLearningRates,
        regression,
        lambda: {
            "body_optimizer": keras.optimizers.SGD(0.01),
            "head_optimizer": keras.optimizers.Adam(0.01),
            "loss": "mse",
            "metrics": ["mae"],
        },
    ),
    Program(
        "LoRA",
        "Hu et al. 2021, arXiv:2106.09685; enable_lora of Dense and Embedding, keras.io",
        wearing_lora,
        lambda: (tokens(0), numbers(1, 2, NUM_ROWS)),
        lambda: {
            "optimizer": keras.optimizers.AdamW(0.01),
            "loss": of_classes(from_logits=True),
            "metrics": ["accuracy"],
        },
    ),
    Program(
        "stateful LSTM",
        "the guide of RNNs, keras.io: state across batches",
        stateful,
        lambda: (normal(0, NUM_ROWS, 3, 2), normal(1, NUM_ROWS, 1)),
        lambda: sgd(loss="mse"),
    ),
]
