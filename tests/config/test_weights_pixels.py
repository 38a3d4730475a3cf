"""Which pixels a config takes for a file of weights, and what it leaves as it was set."""

import json
import sys

import keras
import numpy as np
import pytest

from tfaccel.common.version import KERAS
from tfaccel.config import default_config, parse
from tfaccel.config.weights_pixels import class_names_of, of_file

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def parsed(name, weights, **data):
    config = default_config()
    config.model.name, config.model.weights = name, str(weights)
    config.data.update(data)
    return parse(config)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("resnet50", "resnet"),
        ("VGG16", "vgg16"),
        ("densenet121", "densenet"),
        ("mobilenet", "mobilenet"),
        ("mobilenetv2", "mobilenet_v2"),
        ("inceptionv3", "inception_v3"),
        ("xception", "xception"),
        ("resnet50v2", "resnet_v2"),
    ],
)
def test_kerass_own_file_gets_the_pixels_of_preprocess_input(name, module):
    config = parsed(name, f"{name}_weights_notop.h5")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 4, 5, 3)).astype(np.float32)
    ours = (pixels / 255 - config.data.mean) / config.data.std
    if config.model.weights_order == "bgr":  # the model's first convolution is turned around
        ours = ours[..., ::-1]
    prepare = sys.modules[f"keras.applications.{module}"].preprocess_input
    np.testing.assert_allclose(ours, prepare(pixels.copy()), rtol=0, atol=1e-4)
    assert keras.__version__.startswith(KERAS), "compare the table with this version of Keras"


def test_a_model_that_scales_pixels_gets_0_to_255():
    config = parsed("efficientnetb0", "efficientnetb0_notop.h5")
    assert config.data.mean == (0,) * 3
    assert config.data.std == (1 / 255,) * 3


@pytest.mark.parametrize("given", [{"mean": 0.25}, {"std": 0.5}, {"mean": 0.0, "std": 1.0}])
def test_a_config_that_sets_pixels_keeps_them(given):
    config = parsed("resnet50", "resnet50.h5", **given)
    assert config.data.mean == (given.get("mean", 0.0),) * 3
    assert config.data.std == (given.get("std", 1.0),) * 3
    assert config.model.weights_order == "rgb"


@pytest.mark.parametrize(
    ("name", "weights", "data"),
    [
        ("mnist_cnn", "a.h5", {}),
        ("resnet50", "a.keras", {}),  # of Keras or of an own run
        ("resnet50", "a.weights.h5", {}),
        ("resnet50", "a.h5", {"channels": 1}),
        ("vit_base", "a.safetensors", {}),
    ],
)
def test_of_other_files_nothing_is_set(name, weights, data):
    config = parsed(name, weights, **data)
    assert set(config.data.mean) == {0.0}
    assert set(config.data.std) == {1.0}
    assert config.model.weights_order == "rgb"


def test_torchvisions_files_get_its_pixels():
    for name in ("resnet50_v1_5", "vgg16", "densenet121", "convnexttiny"):
        config = parsed(name, "model.safetensors")
        assert (config.data.mean, config.data.std) == IMAGENET
        assert config.model.weights_order == "rgb"


@pytest.mark.parametrize(
    ("file", "content", "mean", "std"),
    [
        (
            "tfaccel.json",
            {"preprocessing": {"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]}},
            None,
            None,
        ),
        ("config.json", {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}, 0.5, 0.5),
        (
            "image_converter.json",
            {"config": {"scale": [1 / 127.5] * 3, "offset": [-1.0] * 3}},
            0.5,
            0.5,
        ),
        ("image_converter.json", {"config": {"scale": 1 / 255, "offset": None}}, 0.0, 1.0),
    ],
)
def test_a_description_beside_the_weights_decides(tmp_path, file, content, mean, std):
    (tmp_path / file).write_text(json.dumps(content))
    config = parsed("resnet50", tmp_path / "model.weights.h5")
    wanted = ((0.1, 0.2, 0.3), (1, 2, 3)) if mean is None else ((mean,) * 3, (std,) * 3)
    np.testing.assert_allclose((config.data.mean, config.data.std), wanted, atol=1e-12)
    assert of_file(str(tmp_path / "a.keras"), "resnet50").source == f"{file} beside the weights"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"mean": 1}', '{"mean": [1, 2], "std": [1, 1]}', '{"pretrained_cfg": 3}'],
)
def test_a_file_that_describes_nothing_is_passed_over(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert of_file(str(tmp_path / "model.safetensors"), "vit_base") is None
    assert of_file(str(tmp_path / "a.h5"), "mnist_cnn") is None


def export(folder, *, mean, names):
    """Writes as much of an export's folder as is read here."""
    folder.mkdir(parents=True)
    (folder / "model.keras").touch()
    card = {"preprocessing": {"mean": [mean] * 3, "std": [1] * 3}, "class_names": names}
    (folder / "tfaccel.json").write_text(json.dumps(card))


def test_a_folder_stands_for_its_newest_export(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, mean in ((2, 0.25), (10, 0.5), (9, 0.75)):
        export(tmp_path / f"run/export/{number}", mean=mean, names=["cat", str(number)])
    (tmp_path / "run/export/11").mkdir()  # not complete
    for given in ("run", "run/export", "run/export/10", "run/export/10/model.keras"):
        for path in (tmp_path / given, f"~/{given}"):
            assert parsed("mnist_cnn", path).data.mean == (0.5,) * 3
            assert class_names_of(str(path)) == ("cat", "10")


@pytest.mark.parametrize("names", [None, [], "cat", [1, 2], ["cat", None]])
def test_what_names_no_classes_is_passed_over(tmp_path, names):
    export(tmp_path / "export/1", mean=0.5, names=names)
    assert class_names_of(str(tmp_path)) == ()
    assert class_names_of(str(tmp_path / "none.keras")) == ()
