"""Architectures by name: the toolkit's own, one per file, and all of `keras.applications`.

model = build("resnet50", image_shape=(224, 224, 3), num_classes=1000)    # in run.scope()
"""

import keras

from tfaccel.errors import UserError, did_you_mean
from tfaccel.models import applications, mnist_cnn

OWN = {"mnist_cnn": mnist_cnn.build}


def build(name: str, *, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Returns the model of that name, with random weights: pretrained ones would be a download.

    Args:
      name: "mnist_cnn", or an architecture of `keras.applications`; in any case.
      image_shape: (height, width, channels).
      num_classes: outputs.

    Returns:
      Input: [batch, height, width, channels] float, 0..1. Output: [batch, num_classes] logits,
      float32 whatever the policy.

    Raises:
      UserError: no such architecture, or it does not take images of this shape.
    """
    known = {**OWN, **applications.architectures()}
    if name.lower() not in known:
        raise UserError(f"there is no model '{name}'{did_you_mean(name, known)}")
    try:
        return known[name.lower()](image_shape=image_shape, num_classes=num_classes)
    except ValueError as error:
        height, width, channels = image_shape
        raise UserError(
            f"{name} does not take images of {height}x{width} with {channels} channel(s): {error}; "
            "change image_size, channels or the model"
        ) from error
