"""Architectures by name: the toolkit's own, one per file, and all of `keras.applications`.

model = build("resnet50", image_shape=(224, 224, 3), num_classes=1000)    # in run.scope()
"""

import keras

from tfaccel.errors import UserError, did_you_mean
from tfaccel.models import applications, mnist_cnn

OWN = {"mnist_cnn": mnist_cnn.build}


def build(name: str, *, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Returns the model named `name`, unless there is none.

    Args:
      name: "mnist_cnn", or an architecture of `keras.applications` in any case.
      image_shape: (height, width, channels).
      num_classes: outputs; float32 logits.

    Raises:
      UserError: no such architecture, or the images are too small for it.
    """
    if name in OWN:
        return OWN[name](image_shape=image_shape, num_classes=num_classes)
    constructors = applications.constructors()
    if name.lower() not in constructors:
        raise UserError(f"there is no model '{name}'{did_you_mean(name, [*OWN, *constructors])}")
    return applications.build(
        constructors[name.lower()], image_shape=image_shape, num_classes=num_classes
    )
