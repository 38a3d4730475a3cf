"""Augmentations by name. Start from one and change any of its fields.

preset("imagenet", crop_area=(0.25, 1.0))    # an AugmentConfig
"""

import dataclasses
from typing import Any

from tfaccel.common.checks import check_choice, check_names
from tfaccel.config import AugmentConfig

# For training, except those that end in "_eval".
PRESETS = {
    "none": AugmentConfig(),
    "mnist": AugmentConfig(rotation_degrees=10.0),
    "cifar": AugmentConfig(horizontal_flip=True, shift_pixels=4),
    "imagenet": AugmentConfig(window="random_resized_crop", horizontal_flip=True),
    "imagenet_color": AugmentConfig(
        window="random_resized_crop",
        horizontal_flip=True,
        brightness=0.4,
        contrast=0.4,
        saturation=0.4,
    ),
    "imagenet_eval": AugmentConfig(window="resized_center_crop"),
    "restoration": AugmentConfig(window="random_crop", horizontal_flip=True, vertical_flip=True),
    "restoration_eval": AugmentConfig(window="center_crop"),
}


def preset(name: str, **changes) -> AugmentConfig:
    """Returns the augmentation of that name, with some fields changed.

    Raises:
      UserError: there is no such preset or field, or a value is wrong.
    """
    check_choice("augment", name, PRESETS)
    check_names("augment", changes, [field.name for field in dataclasses.fields(AugmentConfig)])
    return dataclasses.replace(PRESETS[name], **changes)


def preset_fields(name: str, **changes) -> dict[str, Any]:
    """Returns `preset` as plain values, for a config file.

    config.train_images.update(preset_fields("imagenet", crop_area=(0.25, 1.0)))
    """
    return dataclasses.asdict(preset(name, **changes))
