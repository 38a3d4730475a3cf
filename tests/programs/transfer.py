"""Programs of transfer learning: layers that are frozen and thawed, two rates, LoRA, KerasHub.

Batch normalization is in inference mode throughout. Trained, each replica would normalize by its
own rows: tests/step/test_transfer.py trains it with the statistics of all replicas.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from programs.program import Program, normal, numbers

NUM_ROWS, NUM_CLASSES, NUM_TOKENS, NUM_STEPS, DIM = 12, 3, 9, 5, 4


# Data.


def images(size: int = 6, seed: int = 0) -> tuple:
    """Returns [12, size, size, 3] images and classes 0..2."""
    return normal(seed, NUM_ROWS, size, size, 3), numbers(1, NUM_CLASSES, NUM_ROWS)


def sentences() -> tuple:
    """Returns [12, 5] tokens 0..8 and classes 0..2."""
    return numbers(0, NUM_TOKENS, NUM_ROWS, NUM_STEPS), numbers(1, NUM_CLASSES, NUM_ROWS)


def padded() -> tuple:
    """Returns [12, 5] tokens with 0 behind the end, and [12, 5] True where a token is."""
    lengths = 2 + numbers(2, NUM_STEPS - 1, NUM_ROWS)
    is_token = np.arange(NUM_STEPS) < lengths[:, None]
    words = 1 + numbers(0, NUM_TOKENS - 1, NUM_ROWS, NUM_STEPS)
    return np.where(is_token, words, 0).astype(np.int32), is_token


def for_bert() -> tuple:
    """Returns what a BERT of KerasHub reads, and classes 0..2."""
    words, is_token = padded()
    segments = numbers(3, 2, NUM_ROWS, NUM_STEPS)
    read = {"token_ids": words, "segment_ids": segments, "padding_mask": is_token}
    return read, numbers(1, NUM_CLASSES, NUM_ROWS)


def for_gpt() -> tuple:
    """Returns tokens, the next token of each, and a weight of 0 behind the end."""
    words, is_token = padded()
    read = {"token_ids": words, "padding_mask": is_token}
    return read, np.roll(words, -1, axis=1), np.roll(is_token, -1, axis=1).astype(np.float32)


# Models.


def body(**settings) -> keras.Model:
    """Returns a small pretrained network, with statistics of batch normalization that matter."""
    network = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(4, 3, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.Conv2D(4, 3, activation="tanh", name="second"),
            layers.GlobalAveragePooling2D(),
        ],
        name="body",
        **settings,
    )
    means, variances = normal(3, 4) / 4, np.exp(normal(4, 4))
    network.get_layer("norm").set_weights([np.exp(normal(2, 4)), means, means, variances])
    return network


def headed(*, trained: tuple[str, ...] = ("first", "second")) -> keras.Model:
    """Returns a body, of which these layers are trained, with a head."""
    backbone = body()
    for layer in backbone.layers:
        layer.trainable = layer.name in trained
    inputs = keras.Input((6, 6, 3))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="head")(backbone(inputs)))


def freeze(model: keras.Model) -> None:
    """Freezes the body."""
    model.get_layer("body").trainable = False


def thaw_last(model: keras.Model) -> None:
    """Thaws the last convolution of the body."""
    model.get_layer("body").get_layer("second").trainable = True


def load(model: keras.Model) -> None:
    """Gives the body other weights, as from a file, and freezes the first convolution."""
    backbone = model.get_layer("body")
    backbone.set_weights([0.9 * each for each in backbone.get_weights()])
    backbone.get_layer("first").trainable = False


def new_head(model: keras.Model) -> None:
    """Starts the head again."""
    head = model.get_layer("head")
    head.set_weights([np.zeros_like(each) for each in head.get_weights()])


class OwnLoop(keras.Model):
    """A body and a head without `call`, each with an optimizer and, frozen, with none."""

    def __init__(self):
        super().__init__()
        self.body, self.head = body(), keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        self.body.get_layer("norm").trainable = False
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    def compile(self, rates, loss_fn, *, penalty=0.0):
        """Takes the rates of body and head, a loss, and what the size of the head costs."""
        super().compile()
        self.rates = [keras.optimizers.SGD(each, momentum=0.5) for each in rates]
        self.loss_fn, self.penalty = loss_fn, penalty

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self.head(self.body(x, training=True), training=True)
            loss = self.loss_fn(y, logits)
            loss += self.penalty * tf.add_n([tf.nn.l2_loss(each) for each in self.head.weights])
        parts = [self.body.trainable_weights, self.head.trainable_weights]
        gradients = tape.gradient(loss, parts)
        for optimizer, grads, weights in zip(self.rates, gradients, parts, strict=True):
            optimizer.apply_gradients(zip(grads, weights, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        return {"loss": self.loss_tracker.result()}


BY_LAYER = {"first": 0.25, "second": 0.5}


def factor_of(path: str) -> float:
    """Returns what the learning rate of a weight is multiplied by."""
    return next((each for name, each in BY_LAYER.items() if f"{name}/" in path), 1.0)


class Scaled(keras.optimizers.SGD):
    """Multiplies each gradient by the number of its layer."""

    def apply(self, grads, trainable_variables=None):
        variables = trainable_variables or self._trainable_variables
        pairs = zip(grads, variables, strict=True)
        super().apply([grad * factor_of(each.path) for grad, each in pairs], trainable_variables)


class Slowed(keras.optimizers.Adam):
    """Multiplies each learning rate by the number of its layer. TensorFlow's name has the path."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * factor_of(variable.name))


def reader() -> keras.Model:
    """Returns a classifier of tokens whose layers all take LoRA."""
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, DIM, name="embedding")(inputs)
    x = layers.EinsumDense("bsd,de->bse", (None, 6), bias_axes="e", name="mixed")(x)
    x = layers.Dense(6, "tanh", name="hidden")(x)
    return keras.Model(
        inputs, layers.Dense(NUM_CLASSES, name="head")(layers.GlobalAveragePooling1D()(x))
    )


def wear_lora(model: keras.Model) -> None:
    """Adds LoRA to three layers, outside any scope, as a script does after a first fit."""
    for name in ("embedding", "mixed", "hidden"):
        model.get_layer(name).enable_lora(2)


def wearing_lora() -> keras.Model:
    model = reader()
    wear_lora(model)
    return model


def attending() -> keras.Model:
    """Returns self-attention whose queries and values wear LoRA, and nothing else is trained."""
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, DIM, name="embedding")(inputs)
    attention = layers.MultiHeadAttention(2, 2, name="attention")
    x = layers.GlobalAveragePooling1D()(attention(x, x))
    model = keras.Model(inputs, layers.Dense(NUM_CLASSES)(x))
    for layer in model.layers[:-1]:
        layer.trainable = False
    attention.trainable = True
    for part in attention._flatten_layers(include_self=False):
        part.trainable = part.name in ("query", "value")
        if part.trainable:
            part.enable_lora(2)
    return model


def extractor() -> keras.Model:
    """Returns a head on a whole network of keras.applications, which is frozen."""
    network = keras.applications.MobileNet(
        input_shape=(32, 32, 3), alpha=0.25, include_top=False, pooling="avg", weights=None
    )
    network.trainable = False
    inputs = keras.Input((32, 32, 3))
    features = network(inputs, training=False)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(features))


def thaw_end(model: keras.Model) -> None:
    """Thaws the last block of a network of keras.applications, except batch normalization."""
    network = model.layers[1]
    network.trainable = True
    for index, layer in enumerate(network.layers):
        is_norm = isinstance(layer, layers.BatchNormalization)
        layer.trainable = index > len(network.layers) - 8 and not is_norm


# Models of KerasHub, with weights of their own making.


def hub():
    """Returns KerasHub's models; skips the test if KerasHub is not installed."""
    needed = "needs KerasHub: uv sync --group dev"
    return pytest.importorskip("keras_hub", reason=needed).models


def vit() -> keras.Model:
    backbone = hub().ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=DIM,
        mlp_dim=6,
    )
    return hub().ViTImageClassifier(backbone, NUM_CLASSES)


def resnet() -> keras.Model:
    backbone = hub().ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],  # as KerasHub wants its first stack
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(8, 8, 3),
    )
    backbone.trainable = False
    return hub().ResNetImageClassifier(backbone, NUM_CLASSES)


def thaw_convolutions(model: keras.Model) -> None:
    """Thaws a backbone of KerasHub, except batch normalization."""
    model.backbone.trainable = True
    for layer in model.backbone.layers:
        layer.trainable = not isinstance(layer, layers.BatchNormalization)


def bert() -> keras.Model:
    backbone = hub().BertBackbone(
        vocabulary_size=NUM_TOKENS,
        num_layers=2,
        num_heads=2,
        hidden_dim=DIM,
        intermediate_dim=6,
        dropout=0.0,
        max_sequence_length=NUM_STEPS,
    )
    return hub().BertTextClassifier(backbone, NUM_CLASSES, dropout=0.0)


def gpt() -> keras.Model:
    backbone = hub().GPT2Backbone(
        vocabulary_size=NUM_TOKENS,
        num_layers=2,
        num_heads=2,
        hidden_dim=DIM,
        intermediate_dim=6,
        dropout=0.0,
        max_sequence_length=NUM_STEPS,
    )
    return hub().GPT2CausalLM(backbone)


def wear_lora_of_hub(model: keras.Model) -> None:
    """Freezes a backbone of KerasHub, and adds LoRA to its queries and values."""
    model.backbone.enable_lora(2)


# The programs.


def of_classes(optimizer=None, **others) -> dict:
    """Returns arguments of `compile`."""
    return {
        "optimizer": optimizer or keras.optimizers.SGD(0.1, momentum=0.5),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **others,
    }


def by_map() -> keras.optimizers.Optimizer:
    """Returns Adam, and SGD for the head."""
    rates = {"head/.*": keras.optimizers.SGD(0.1)}
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), rates)
    )


PROGRAMS = [
    Program(
        "frozen after a first fit",
        "linear probing behind fine-tuning, Kumar et al. 2022, arXiv:2202.10054, reversed",
        headed,
        images,
        of_classes,
        again=freeze,
    ),
    Program(
        "thawed from the end",
        "gradual unfreezing, Howard and Ruder 2018, arXiv:1801.06146",
        lambda: headed(trained=()),
        images,
        of_classes,
        again=thaw_last,
    ),
    Program(
        "weights loaded between fits",
        "transfer learning and fine-tuning, keras.io",
        headed,
        images,
        lambda: of_classes(keras.optimizers.Adam(0.01)),
        again=load,
    ),
    Program(
        "a new head",
        "transfer learning and fine-tuning, keras.io",
        headed,
        images,
        of_classes,
        again=new_head,
    ),
    Program(
        "two rates by compile's own arguments",
        "the guide of train_step, keras.io; a model without `call`",
        OwnLoop,
        images,
        lambda: {
            "rates": (0.01, 0.1),
            "loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "penalty": 0.01,
        },
    ),
    Program(
        "MultiOptimizer",
        "keras.optimizers.MultiOptimizer",
        headed,
        images,
        lambda: of_classes(by_map()),
    ),
    Program(
        "rates by layer",
        "Bao et al. 2021, arXiv:2106.08254: layer-wise decay, as an optimizer of one's own",
        headed,
        images,
        lambda: of_classes(Scaled(0.1, momentum=0.5)),
    ),
    Program(
        "rates by layer, in update_step",
        "the same for Adam, which does not feel the size of a gradient",
        headed,
        images,
        lambda: of_classes(Slowed(0.01)),
    ),
    Program(
        "LoRA of EinsumDense",
        "Hu et al. 2021, arXiv:2106.09685; enable_lora before compile",
        wearing_lora,
        sentences,
        lambda: of_classes(keras.optimizers.AdamW(0.01)),
    ),
    Program(
        "LoRA after a first fit",
        "parameter-efficient fine-tuning with LoRA, keras.io",
        reader,
        sentences,
        of_classes,
        again=wear_lora,
    ),
    Program(
        "LoRA of attention",
        "parameter-efficient fine-tuning of GPT-2 with LoRA, keras.io: query and value",
        attending,
        sentences,
        lambda: of_classes(keras.optimizers.AdamW(0.01)),
    ),
    Program(
        "keras.applications as an extractor",
        "transfer learning and fine-tuning, keras.io; then the last block is thawed",
        extractor,
        lambda: images(32),
        lambda: of_classes(keras.optimizers.SGD(0.01)),
        epochs=1,
        again=thaw_end,
    ),
    Program(
        "KerasHub: ViT",
        "image classification with keras_hub.models.ViTImageClassifier",
        vit,
        lambda: images(8),
        of_classes,
    ),
    Program(
        "KerasHub: ResNet",
        "keras_hub.models.ResNetImageClassifier, frozen, then thawed",
        resnet,
        # With seed 0 and XLA, 14 weights of one filter end up to 6e-5 away, on one replica as on
        # three: probably a ReLU near 0. Without XLA they are equal.
        lambda: images(8, seed=5),
        lambda: of_classes(keras.optimizers.SGD(0.01)),
        again=thaw_convolutions,
    ),
    Program(
        "KerasHub: BERT",
        "keras_hub.models.BertTextClassifier",
        bert,
        for_bert,
        of_classes,
    ),
    Program(
        "KerasHub: GPT-2",
        "keras_hub.models.GPT2CausalLM, whose compile takes a sampler",
        gpt,
        for_gpt,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "weighted_metrics": ["accuracy"],
            "sampler": "greedy",
        },
    ),
    Program(
        "KerasHub: GPT-2 with LoRA",
        "parameter-efficient fine-tuning of GPT-2 with LoRA, keras.io",
        gpt,
        for_gpt,
        lambda: {
            "optimizer": keras.optimizers.AdamW(0.01),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "weighted_metrics": ["accuracy"],
        },
        epochs=1,
        again=wear_lora_of_hub,
    ),
]
