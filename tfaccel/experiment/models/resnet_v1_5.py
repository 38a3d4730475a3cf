"""ResNet-50, 101 and 152 as torchvision, timm and KerasHub have them ("v1.5").

`keras.applications.ResNet50` is the first version (He et al. 2016, arXiv:1512.03385): a block that
halves the image does so in its first convolution, of 1x1. Here the 3x3 convolution halves it, which
gives about 0.5% more accuracy on ImageNet (NVIDIA DeepLearningExamples, "ResNet50 v1.5"). Weights
of one version do not suit the other. Convolutions have no bias, and padding is on both sides, so
that torchvision's weights give torchvision's answers. Layers have the names of Keras's ResNet50.
"""

import functools

import keras
from keras import layers

BLOCKS = {
    "resnet50_v1_5": (3, 4, 6, 3),
    "resnet101_v1_5": (3, 4, 23, 3),
    "resnet152_v1_5": (3, 8, 36, 3),
}
# As in torchvision: epsilon is PyTorch's default, and its momentum of 0.1 is Keras's 0.9.
_norm = functools.partial(layers.BatchNormalization, epsilon=1e-5, momentum=0.9)


def build(name: str, *, image_shape: tuple[int, int, int], num_outputs: int) -> keras.Model:
    """Returns the model: 25.6 M parameters for "resnet50_v1_5" and 1,000 classes.

    Input: [batch, height, width, channels] float. Output: [batch, num_outputs] float32 logits.

    Raises:
      ValueError: an image is smaller than 32 x 32.
    """
    if min(image_shape[:2]) < 32:
        raise ValueError("images must be at least 32x32")
    image = keras.Input(image_shape, name="image")
    x = _stages(name, image)
    x = layers.GlobalAveragePooling2D(dtype="float32", name="avg_pool")(x)
    return keras.Model(
        image, layers.Dense(num_outputs, dtype="float32", name="logits")(x), name=name
    )


def body(name: str, image: keras.KerasTensor, *, image_shape: tuple[int, int, int]) -> keras.Model:
    """Returns the model from the source of `image` to the last map, [batch, h / 32, w / 32, 2048].

    `image_shape` is that of `image`, [batch, height, width, channels] float.
    """
    del image_shape  # the architectures of keras.applications need it
    return keras.Model(keras.utils.get_source_inputs(image), _stages(name, image), name=name)


def _stages(name: str, image: keras.KerasTensor):
    """Returns the feature map of the last stage, 1 / 32 of the image's sides."""
    x = _convolution(image, 64, 7, strides=2, name="conv1")
    x = layers.ReLU(name="conv1_relu")(x)
    x = layers.ZeroPadding2D(1, name="pool1_pad")(x)  # as good as -inf after ReLU
    x = layers.MaxPooling2D(3, strides=2, name="pool1_pool")(x)
    for stage, blocks in enumerate(BLOCKS[name]):
        for block in range(blocks):
            strides = 2 if stage > 0 and block == 0 else 1
            x = _block(x, 64 * 2**stage, strides, name=f"conv{stage + 2}_block{block + 1}")
    return x


def _block(x, channels: int, strides: int, *, name: str):
    """Returns the sum of a bottleneck of `channels` and its shortcut, after ReLU."""
    shortcut = x
    if strides > 1 or x.shape[-1] != 4 * channels:
        shortcut = _convolution(x, 4 * channels, 1, strides=strides, name=f"{name}_0")
    x = layers.ReLU(name=f"{name}_1_relu")(_convolution(x, channels, 1, name=f"{name}_1"))
    x = _convolution(x, channels, 3, strides=strides, name=f"{name}_2")
    x = layers.ReLU(name=f"{name}_2_relu")(x)
    x = _convolution(x, 4 * channels, 1, name=f"{name}_3")
    return layers.ReLU(name=f"{name}_out")(layers.Add(name=f"{name}_add")([shortcut, x]))


def _convolution(x, channels: int, size: int, *, name: str, strides: int = 1):
    """Returns batch norm of a convolution with size // 2 zeros on every side."""
    padding = "same"
    if strides > 1 and size > 1:  # "same" would put the odd row at the end
        x, padding = layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x), "valid"
    begin = keras.initializers.VarianceScaling(
        2.0, mode="fan_out", distribution="untruncated_normal"
    )
    settings = {"padding": padding, "use_bias": False, "kernel_initializer": begin}
    x = layers.Conv2D(channels, size, strides, name=f"{name}_conv", **settings)(x)
    return _norm(name=f"{name}_bn")(x)
