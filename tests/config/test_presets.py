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
