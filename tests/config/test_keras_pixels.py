"""The pixels of `keras.applications`, by what its own functions and layers make of a picture."""

import sys

import keras
import numpy as np
import pytest

from tfaccel.config.keras_pixels import trained_on
from tfaccel.experiment.models.applications import architectures

PICTURE = np.random.default_rng(0).integers(0, 256, (1, 8, 9, 3)).astype(np.float32)
CONSTRUCTORS = {name: each.args[0] for name, each in architectures().items()}
SCALE_INSIDE = ("efficientnetv2", "mobilenetv3", "convnext")


def as_the_loader(pixels):
    """[1, 8, 9, 3] float32, in the order of colours that the weights want."""
    normalised = (PICTURE / 255 - np.array(pixels.mean)) / np.array(pixels.std)
    return normalised[..., ::-1] if pixels.order == "bgr" else normalised


@pytest.mark.parametrize("name", sorted(CONSTRUCTORS))
def test_each_network_is_known_and_normalised_as_keras_does(name):
    pixels = trained_on(name)
    if name.startswith("efficientnetb"):
        assert pixels is None  # scales by itself, always
        return
    prepare = sys.modules[CONSTRUCTORS[name].__module__].preprocess_input
    truth = prepare(PICTURE.copy())
    if name.startswith(SCALE_INSIDE):
        np.testing.assert_array_equal(truth, PICTURE)  # by its layers: see the next test
        return
    np.testing.assert_allclose(as_the_loader(pixels), truth, rtol=0, atol=1e-4)


@pytest.mark.slow  # seconds to build them
@pytest.mark.parametrize(
    "name", ["efficientnetv2b0", "efficientnetv2b3", "efficientnetv2s", "mobilenetv3small"]
)
def test_layers_that_keras_puts_first_do_the_same(name):
    network = CONSTRUCTORS[name](include_top=False, weights=None, input_shape=(32, 32, 3))
    x = PICTURE
    for each in network.layers[1:3]:
        if isinstance(each, keras.layers.Rescaling | keras.layers.Normalization):
            x = each(x)
    np.testing.assert_allclose(as_the_loader(trained_on(name)), x, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_convnexts_normalization_does_the_same():
    network = CONSTRUCTORS["convnexttiny"](include_top=False, weights=None)
    first = next(each for each in network.layers if "normalization" in each.name)
    np.testing.assert_allclose(
        as_the_loader(trained_on("convnexttiny")), first(PICTURE), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "least"),
    [("mobilenetv2_1.00_224", -1), ("efficientnetv2-b0", -0.485 / 0.229), ("NASNet", -1)],
)
def test_a_model_is_known_by_the_name_that_keras_gives_it(name, least):
    assert trained_on(name).range[0] == pytest.approx(least)


@pytest.mark.parametrize("name", ["mine", "resnet", "myresnet50", "functional", "mnist_cnn"])
def test_others_are_not(name):
    assert trained_on(name) is None
