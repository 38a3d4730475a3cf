import pytest

from tfaccel import UserError
from tfaccel.config import AugmentConfig
from tfaccel.config.presets import PRESETS, preset


def test_presets_by_name_with_any_field_changed():
    assert preset("none") == AugmentConfig()
    changed = preset("imagenet", crop_area=(0.25, 1.0), vertical_flip=True)
    assert changed.crop_area == (0.25, 1.0)
    assert (changed.window, changed.horizontal_flip) == ("random_resized_crop", True)
    assert PRESETS["imagenet"].crop_area == (0.08, 1.0)


def test_the_text_in_checkpoints_is_that_of_earlier_versions_without_newer_operations():
    assert repr(preset("cifar")) == (
        "AugmentConfig(window='stretch', center_fraction=0.875, crop_area=(0.08, 1.0), "
        "crop_ratio=(0.75, 1.3333333333333333), horizontal_flip=True, vertical_flip=False, "
        "rotation_degrees=0.0, shift_pixels=4, brightness=0.0, contrast=0.0, saturation=0.0, "
        "hue_degrees=0.0)"
    )
    text = repr(preset("deit"))
    assert text.endswith(
        ", hue_degrees=0.0, policy='randaugment_timm', policy_magnitude_std=0.5, "
        "policy_fill='mean', erase_probability=0.25, erase_fill='random')"
    )


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("imagnet", {}, "augment='imagnet'; did you mean 'imagenet'?"),
        ("cifar", {"flip": True}, "augment has no field 'flip'; did you mean 'horizontal_flip'?"),
        ("cifar", {"shift_pixels": -1}, "shift_pixels=-1; expected a whole number"),
    ],
)
def test_mistakes_are_one_sentence(name, changes, words):
    with pytest.raises(UserError) as error:
        preset(name, **changes)
    assert words in str(error.value)
