"""The networks of networks.py in Keras, as a user of Keras would write them.

    model = build(networks.find("vit_b16", tiny=False))

All logits are float32. Keras's own networks (keras.applications) have their usual settings;
torch_networks.py has the same dropout and the same stochastic depth.
"""

import inspect
from collections.abc import Callable

import keras
from keras import layers, ops

from bench_arms.networks import DROPOUT, Network

APPLICATIONS = {
    "resnet50": "ResNet50",
    "resnet152": "ResNet152",
    "efficientnetv2b0": "EfficientNetV2B0",
    "convnext_tiny": "ConvNeXtTiny",
    "mobilenetv3_large": "MobileNetV3Large",
    "densenet121": "DenseNet121",
}


def build(network: Network) -> keras.Model:
    """Builds a network."""
    if network.model in APPLICATIONS:
        return application(network)
    return OWN[network.model](network)


def application(network: Network) -> keras.Model:
    """Builds a network of keras.applications."""
    constructor = getattr(keras.applications, APPLICATIONS[network.model])
    settings = {
        "weights": None,
        "input_shape": (network.size, network.size, 3),
        "classes": network.num_classes,
        "classifier_activation": None,
    }
    if "include_preprocessing" in inspect.signature(constructor).parameters:
        settings["include_preprocessing"] = False  # its images would have to be 0..255
    body = constructor(**settings)
    return keras.Model(body.input, in_float32(body.output))


def in_float32(logits):
    """Returns logits as float32. What computes them keeps its dtype, which is quicker."""
    return layers.Activation("linear", dtype="float32")(logits)


def vit(network: Network) -> keras.Model:
    """Builds ViT: pre-norm, a class token, learned positions, no dropout."""
    inputs = keras.Input((network.size, network.size, 3))
    x = layers.Conv2D(network.width, 16, strides=16)(inputs)
    x = layers.Reshape(((network.size // 16) ** 2, network.width))(x)
    x = ClassTokenAndPositions()(x)
    for _ in range(network.blocks):
        x = pre_norm_block(x, network, epsilon=1e-6)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    return keras.Model(inputs, layers.Dense(network.num_classes, dtype="float32")(x[:, 0]))


def pre_norm_block(x, network: Network, *, epsilon: float, **call):
    """Adds a pre-norm block: attention, then an MLP with GELU; `call` is for the attention."""
    y = layers.LayerNormalization(epsilon=epsilon)(x)
    attention = layers.MultiHeadAttention(network.heads, network.width // network.heads)
    x = x + attention(y, y, **call)
    y = layers.LayerNormalization(epsilon=epsilon)(x)
    y = layers.Dense(network.mlp, activation="gelu")(y)
    return x + layers.Dense(network.width)(y)


class ClassTokenAndPositions(layers.Layer):
    """Puts the class token in front of the patches, and adds the positions."""

    def build(self, shape):
        """Creates the token and the positions."""
        _, number, width = shape
        self.token = self.add_weight(shape=(1, 1, width), initializer="zeros", name="token")
        self.positions = self.add_weight(
            shape=(1, number + 1, width), initializer=small(), name="positions"
        )

    def call(self, x):
        """Takes [batch, patches, width], and returns [batch, 1 + patches, width]."""
        batch, _, width = ops.shape(x)
        token = ops.broadcast_to(self.token, (batch, 1, width))
        return ops.concatenate([token, x], axis=1) + self.positions


def small() -> keras.initializers.Initializer:
    """Returns the initializer of embeddings, which is that of BERT, GPT-2 and ViT."""
    return keras.initializers.TruncatedNormal(stddev=0.02)


def unet(network: Network) -> keras.Model:
    """Builds a U-Net of four levels and a bottom, with two convolutions in each."""

    def twice(x, filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return x

    widths = [network.filters * 2**level for level in range(4)]
    inputs = x = keras.Input((network.size, network.size, 3))
    kept = []
    for width in widths:
        x = twice(x, width)
        kept.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = twice(x, network.filters * 16)
    for width, beside in zip(reversed(widths), reversed(kept), strict=True):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = twice(layers.Concatenate()([beside, x]), width)
    return keras.Model(inputs, in_float32(layers.Conv2D(network.num_classes, 1)(x)))


class Positions(layers.Layer):
    """Adds a learned embedding of each position."""

    def __init__(self, length: int):
        """Takes the number of positions."""
        super().__init__()
        self.length = length

    def build(self, shape):
        """Creates the embeddings."""
        self.positions = self.add_weight(
            shape=(self.length, shape[-1]), initializer=small(), name="positions"
        )

    def call(self, x):
        """Takes and returns [batch, tokens, width]."""
        return x + ops.cast(self.positions, x.dtype)[: x.shape[1]]  # a slice is not autocast


def bert(network: Network) -> keras.Model:
    """Builds BERT with its pooler and a head for classes: post-norm, dropout of 0.1."""

    def norm(x):
        return layers.LayerNormalization(epsilon=1e-12)(x)

    def dropped(x):
        return layers.Dropout(DROPOUT)(x)

    width = network.width
    ids = keras.Input((network.size,), dtype="int32")
    x = layers.Embedding(network.vocabulary, width, embeddings_initializer=small())(ids)
    x = dropped(norm(Positions(max(512, network.size))(x)))
    for _ in range(network.blocks):
        attention = layers.MultiHeadAttention(
            network.heads, width // network.heads, dropout=DROPOUT
        )
        x = norm(x + dropped(attention(x, x)))
        y = layers.Dense(network.mlp, activation="gelu")(x)
        x = norm(x + dropped(layers.Dense(width)(y)))
    x = dropped(layers.Dense(width, activation="tanh")(x[:, 0]))
    return keras.Model(ids, layers.Dense(network.num_classes, dtype="float32")(x))


def gpt2(network: Network) -> keras.Model:
    """Builds a causal decoder of GPT-2's shape: pre-norm, GELU, a tied head, no dropout."""
    ids = keras.Input((network.size,), dtype="int32")
    tokens = layers.ReversibleEmbedding(
        network.vocabulary,
        network.width,
        embeddings_initializer=small(),
        # Without it the head is in float32; torch.autocast computes its head in bfloat16 as well.
        reverse_dtype=keras.config.dtype_policy().compute_dtype,
    )
    x = Positions(network.size)(tokens(ids))
    for _ in range(network.blocks):
        x = pre_norm_block(x, network, epsilon=1e-5, use_causal_mask=True)
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(ids, in_float32(tokens(x, reverse=True)))


def lstm(network: Network) -> keras.Model:
    """Builds LSTMs over embedded tokens, with a head on the last state."""
    ids = keras.Input((network.size,), dtype="int32")
    x = layers.Embedding(network.vocabulary, network.width)(ids)
    for index in range(network.blocks):
        x = layers.LSTM(network.width, return_sequences=index + 1 < network.blocks)(x)
    return keras.Model(ids, layers.Dense(network.num_classes, dtype="float32")(x))


class Attention(layers.Layer):
    """Attention whose queries, keys and values are weights, so that it has all its gradients."""

    def __init__(self, network: Network):
        """Takes the sizes."""
        super().__init__()
        width = network.width // network.heads
        self.shape = (network.batch, network.size, network.heads, width)

    def build(self, shape):
        """Creates the queries, keys and values: [batch, tokens, heads, width of a head]."""
        self.inputs = [
            self.add_weight(shape=self.shape, initializer="random_normal", name=name)
            for name in ("query", "key", "value")
        ]

    def call(self, x):
        """Takes [1, 1], and returns the mean square of the attention, [1, 1] float32."""
        query, key, value = (ops.cast(each, self.compute_dtype) for each in self.inputs)
        y = ops.cast(ops.dot_product_attention(query, key, value), "float32")
        mean = ops.sum(ops.square(y)) / (self.shape[0] * self.shape[1])
        return ops.cast(x, "float32") + mean


def attention(network: Network) -> keras.Model:
    """Builds attention alone. Its input is a zero; its output is the loss."""
    inputs = keras.Input((1,))
    return keras.Model(inputs, in_float32(Attention(network)(inputs)))


OWN: dict[str, Callable[[Network], keras.Model]] = {
    "vit_b16": vit,
    "vit_l16": vit,
    "unet": unet,
    "bert": bert,
    "gpt2": gpt2,
    "lstm": lstm,
    "attention": attention,
}
