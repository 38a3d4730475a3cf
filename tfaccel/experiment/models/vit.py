"""The Vision Transformer of Dosovitskiy et al. (2021, arXiv:2010.11929), of Keras's own layers.

An image is cut into square patches. A dense layer makes a token of each, and blocks of attention
and MLP follow, with a layer norm before each (pre-norm). There are no layers of tfaccel's own, so
every program reads a `.keras` file of it. Three things are done in a form that Keras's layers have,
with the same functions as results:

  - A dense layer over the cut patches is the paper's convolution of patch_size and equal stride.
  - That layer's bias is one for each token: the learned positions. So the recipe lets neither
    decay.
  - The class token begins as a patch of zeros, so the bias of its place is what is learned.

Weights begin as in the paper's code (github.com/google-research/vision_transformer), of which
Keras's attention would differ: its kernels have three axes, from which Keras computes a deviation
several times too small. The last layer begins at 0, so the first loss is that of equal
probabilities.
"""

import math

import keras
from keras import layers

from tfaccel.config.vit import Sizes, VitConfig, sizes_of

EPSILON = 1e-6  # of layer norms, as in the paper's code


def build(
    name: str, *, image_shape: tuple[int, int, int], num_outputs: int, vit: VitConfig
) -> keras.Model:
    """Returns the Vision Transformer of that name: 22 M parameters for "vit_small", 1,000 classes.

    Input: [batch, height, width, channels] float, with a mean near 0 and a deviation near 1.
    Output: [batch, num_outputs] float32 logits.

    Args:
      name: a name in `tfaccel.config.vit.VITS`.
      image_shape: (height, width, channels).
      num_outputs: the number of classes.
      vit: the settings, which `check_vit` has found to suit the name and the image.
    """
    sizes = sizes_of(name, vit)
    image = keras.Input(image_shape, name="image")
    x = _tokens(image, sizes.width, vit)
    for index in range(sizes.depth):
        rate = vit.stochastic_depth * index / max(sizes.depth - 1, 1)
        x = _block(x, sizes, vit, skip_rate=rate, name=f"block{index + 1}")
    if vit.pooling == "class_token":
        x = layers.Cropping1D((0, x.shape[1] - 1), name="class_token")(x)
    x = layers.LayerNormalization(epsilon=EPSILON, name="norm")(x)
    x = layers.GlobalAveragePooling1D(dtype="float32", name="pool")(x)
    logits = layers.Dense(num_outputs, kernel_initializer="zeros", dtype="float32", name="logits")(
        x
    )
    return keras.Model(image, logits, name=name)


def _tokens(image, width: int, vit: VitConfig):
    """Returns [batch, tokens, width]: each patch of the image with its position."""
    size = vit.patch_size
    rows, columns, channels = image.shape[1] // size, image.shape[2] // size, image.shape[3]
    x = layers.Reshape((rows, size, columns, size, channels), name="cut")(image)
    x = layers.Permute((1, 3, 2, 4, 5), name="by_patch")(x)
    x = layers.Reshape((rows * columns, size * size * channels), name="patches")(x)
    if vit.pooling == "class_token":
        x = layers.ZeroPadding1D((1, 0), name="with_class_token")(x)
    x = layers.EinsumDense(
        "btp,pw->btw",
        output_shape=(x.shape[1], width),
        bias_axes="tw",  # the positions
        kernel_initializer="lecun_normal",
        bias_initializer=keras.initializers.RandomNormal(stddev=0.02),
        name="tokens",
    )(x)
    return _dropped(x, vit, name="tokens")


def _block(x, sizes: Sizes, vit: VitConfig, *, skip_rate: float, name: str):
    """Returns the tokens after an attention and an MLP, each added to what it begins from."""
    y = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}_attention_norm")(x)
    y = layers.MultiHeadAttention(
        sizes.heads,
        sizes.width // sizes.heads,
        # Glorot's uniform values for kernels of width x width, as all four are.
        kernel_initializer=_uniform(math.sqrt(3 / sizes.width)),
        name=f"{name}_attention",
    )(y, y)
    y = _dropped(y, vit, name=f"{name}_attention")
    x = layers.Add(name=f"{name}_attention_sum")([x, _skipped(y, skip_rate, f"{name}_attention")])
    y = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}_mlp_norm")(x)
    y = _dense(sizes.mlp_width, name=f"{name}_mlp_hidden", activation="gelu")(y)
    y = _dropped(y, vit, name=f"{name}_mlp_hidden")
    y = _dense(sizes.width, name=f"{name}_mlp")(y)
    y = _dropped(y, vit, name=f"{name}_mlp")
    return layers.Add(name=f"{name}_mlp_sum")([x, _skipped(y, skip_rate, f"{name}_mlp")])


def _dense(units: int, **settings) -> layers.Dense:
    tiny = keras.initializers.RandomNormal(stddev=1e-6)
    return layers.Dense(units, bias_initializer=tiny, **settings)


def _uniform(limit: float) -> keras.initializers.Initializer:
    return keras.initializers.RandomUniform(-limit, limit)


def _dropped(x, vit: VitConfig, *, name: str):
    return layers.Dropout(vit.dropout, name=f"{name}_dropout")(x) if vit.dropout else x


def _skipped(y, rate: float, name: str):
    """Returns the branch, which training leaves out for a random part of the images.

    The others have it 1 / (1 - rate) times, so that its mean stays.
    """
    return layers.Dropout(rate, noise_shape=(None, 1, 1), name=f"{name}_skip")(y) if rate else y
