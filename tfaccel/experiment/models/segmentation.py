"""Networks for masks: a decoder, "unet" or "deeplab", over the feature maps of any backbone.

build("unet", body_of, image_shape=(224, 224, 3), num_outputs=21)

The layers of the backbone keep their names, so that files of its weights fit. Those of the decoder
begin with "decoder_", and the last one is "logits".
"""

from collections.abc import Callable

import keras
from keras import layers

from tfaccel.common.run_log import summary
from tfaccel.experiment.models import deeplab, unet
from tfaccel.experiment.models.dilated import DilationError, dilated
from tfaccel.experiment.models.feature_maps import feature_maps
from tfaccel.keras_internals.bilinear import Bilinear

STRIDE = 32  # that of each architecture here: images are padded to multiples of it


def build(
    decoder: str,
    body_of: Callable[..., keras.Model],
    *,
    image_shape: tuple[int, int, int],
    num_outputs: int,
) -> keras.Model:
    """Returns the network; images are padded with zeros within it, and its output is cropped.

    Args:
      decoder: "unet" or "deeplab".
      body_of: takes an image [batch, height, width, channels] of sides that are multiples of 32;
        returns a functional model from the image's source to a feature map.
      image_shape: (height, width, channels), of any height and width that the backbone takes.
      num_outputs: the number of classes.

    Returns:
      A model. Input: [batch, height, width, channels] float. Output: [batch, height, width,
      num_outputs] float32 logits with any policy.

    Raises:
      ValueError: Keras's own, if the architecture does not take images of this shape.
    """
    *size, channels = image_shape
    edges = [_edges(side) for side in size]
    padded = tuple(side + sum(each) for side, each in zip(size, edges, strict=True))
    image = keras.Input(image_shape, name="image")
    x = image if padded == tuple(size) else layers.ZeroPadding2D(edges, name="image_pad")(image)
    body = body_of(x, image_shape=(*padded, channels))
    name = f"{decoder}_{body.name}"
    if decoder == "unet":
        x = unet.decode(feature_maps(body, padded), padded)
    else:
        body, output_stride = _finest(body, padded)
        x = deeplab.decode(feature_maps(body, padded), output_stride=output_stride)
    x = layers.Conv2D(num_outputs, 1, dtype="float32", name="logits")(x)
    if x.shape[1:3] != padded:
        x = Bilinear(*padded, dtype="float32", name="logits_resized")(x)
    if padded != tuple(size):
        x = layers.Cropping2D(edges, dtype="float32", name="logits_crop")(x)
    return keras.Model(body.inputs[0], x, name=name)


def _edges(side: int) -> tuple[int, int]:
    """Returns how many pixels to add before and behind a side."""
    missing = -side % STRIDE
    return missing // 2, missing - missing // 2


def _finest(body: keras.Model, size: tuple[int, int]) -> tuple[keras.Model, int]:
    """Returns the body with an output stride of 16 if that is right, and the output stride."""
    try:
        finer = dilated(body)
    except DilationError as reason:
        summary("model: %s keeps its output stride of 32, because %s", body.name, reason)
        return body, 32
    summary("model: %s has an output stride of 16, by dilating its last stage", body.name)
    return finer, size[0] // finer.output.shape[1]
