"""Augmentations by name. Start from one and change any of its fields.

preset("imagenet", crop_area=(0.25, 1.0))    # an AugmentConfig
"""

import dataclasses
from typing import Any

from tfaccel.common.checks import check_choice, check_names
from tfaccel.config import AugmentConfig


def _timm(*, magnitude: float, **others) -> AugmentConfig:
    """Returns timm's rand-mMAGNITUDE-mstd0.5-inc1, after a random resized crop and a flip."""
    return AugmentConfig(
        window="random_resized_crop",
        horizontal_flip=True,
        policy="randaugment_timm",
        policy_magnitude=float(magnitude),
        policy_magnitude_std=0.5,
        policy_fill="mean",
        **others,
    )


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
    # TrivialAugment has nothing to tune (Müller and Hutter 2021, arXiv:2103.10158).
    "imagenet_trivialaugment": AugmentConfig(
        window="random_resized_crop", horizontal_flip=True, policy="trivialaugment"
    ),
    # ResNet strikes back (Wightman et al. 2021, arXiv:2110.00476, table 2): RandAugment 7 / 0.5 for
    # its procedures A1 and A2, and 6 / 0.5 for A3. The window is their test crop of 0.95.
    "resnet_a1": _timm(magnitude=7),
    "resnet_a2": _timm(magnitude=7),
    "resnet_a3": _timm(magnitude=6),
    "resnet_eval": AugmentConfig(window="resized_center_crop", center_fraction=0.95),
    # DeiT (Touvron et al. 2021, arXiv:2012.12877, table 9): RandAugment 9 / 0.5, erasing 0.25.
    "deit": _timm(magnitude=9, erase_probability=0.25, erase_fill="random"),
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
