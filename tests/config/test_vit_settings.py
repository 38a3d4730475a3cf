"""The fields of config.vit: their checks, those with other fields, and what a resume compares."""

import pytest

from tfaccel import UserError
from tfaccel.config import (
    Config,
    DataConfig,
    ModelConfig,
    VitConfig,
    deciding,
    default_config,
    parse,
    sized,
)
from tfaccel.config.vit import Sizes, sizes_of


def config_of(changes):
    config = default_config()
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    return parse(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vit.patch_size": 0}, "patch_size=0; expected a whole number of at least 1"),
        ({"vit.depth": 0}, "depth=0; expected a whole number of at least 1"),
        ({"vit.heads": 2.5}, "heads=2.5; expected a whole number"),
        ({"vit.pooling": "cls"}, "pooling='cls'; expected one of: class_token, mean"),
        ({"vit.dropout": 1.0}, "dropout=1.0; expected a number at least 0 and below 1"),
        ({"vit.stochastic_depth": -0.1}, "stochastic_depth=-0.1; expected a number at least 0 and"),
        (
            {"data.image_size": (224, 100)},
            "vit.patch_size=16 does not divide image_size=224,100; use images whose sides are "
            "multiples of 16, such as image_size=224,96, or another patch_size",
        ),
        (
            {"data.image_size": (3, 30)},
            "such as image_size=16,32, or another patch_size",
        ),
        (
            {"vit.width": 200},
            "VIT_small has a width of 200 and 6 heads, which cannot divide it evenly; set "
            "vit.width to a multiple of vit.heads (a head of 64 values is usual)",
        ),
        (
            {"model.name": "resnet50", "vit.dropout": 0.5},
            "vit.dropout=0.5 with model.name='resnet50', which has no such setting; remove it, or "
            "set model.name to one of vit_tiny, vit_small, vit_base, vit_large",
        ),
    ],
)
def test_each_mistake_is_one_sentence(changes, words):
    with pytest.raises(UserError) as error:
        config_of({"model.name": "VIT_small"} | changes)
    assert words in str(error.value)


def test_a_name_has_sizes_of_which_each_can_be_changed():
    assert sizes_of("vit_base", VitConfig()) == Sizes(768, 12, 12, 3072)
    assert sizes_of("ViT_Tiny", VitConfig(depth=6, heads=6)) == Sizes(192, 6, 6, 768)


def test_other_models_take_images_of_any_size():
    data = DataConfig(image_size=(30, 33))
    assert Config(data=data, model=ModelConfig(name="resnet50")).vit == VitConfig()


def test_a_resume_compares_the_settings_of_a_vit_alone():
    facts = deciding(config_of({"model.name": "vit_tiny", "vit.dropout": 0.1}))
    assert facts["vit.dropout"] == 0.1
    assert facts["vit.patch_size"] == 16
    # Checkpoints of other models are as before there were any such settings.
    assert not [each for each in deciding(Config()) if each.startswith("vit.")]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", ("tiny", False)),
        ("small", ("small", False)),
        ("smoke", ("tiny", True)),
        ("small_smoke", ("small", True)),
    ],
)
def test_a_config_file_has_several_sizes(given, found):
    assert sized(given, ("tiny", "small")) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("smal", "there is no size 'smal'; did you mean 'small'?"),
        ("tinysmoke", "there is no size 'tinysmoke'; did you mean 'tiny_smoke'?"),
        ("_smoke", "there is no size '_smoke'; did you mean 'smoke'?"),
        ("xxl", "there is no size 'xxl'; expected one of: small, small_smoke, smoke, tiny, tiny_"),
    ],
)
def test_an_unknown_size_is_one_sentence(given, words):
    with pytest.raises(UserError) as error:
        sized(given, ("tiny", "small"))
    assert words in str(error.value)
