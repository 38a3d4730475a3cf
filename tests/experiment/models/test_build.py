import math
import subprocess
import sys

import keras
import numpy as np
import pytest

from tfaccel import UserError
from tfaccel.experiment import models
from tfaccel.experiment.models import cifar_resnet

# Images of odd sides, after a pooling or before.
OWN_CLASSIFIERS = [("mnist_cnn", (12, 13, 1)), ("cifar_resnet", (10, 8, 3))]


@pytest.fixture(autouse=True)
def policy():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def narrow(monkeypatch):
    """The cifar_resnet has eight channels everywhere, and so few weights."""
    convolution = cifar_resnet._convolution
    few = lambda x, channels: convolution(x, min(channels, 8))  # noqa: E731
    monkeypatch.setattr(cifar_resnet, "_convolution", few)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mnist_cnn", (28, 28, 1)),
        ("mnist_cnn", (8, 8, 1)),
        ("MobileNetV3Small", (32, 32, 3)),
        pytest.param("resnet50", (32, 32, 3), marks=pytest.mark.slow),
        pytest.param("cifar_resnet", (32, 32, 3), marks=pytest.mark.slow),
        ("cifar_resnet", (9, 15, 1)),
    ],
)
def test_models_give_float32_logits_under_a_float16_policy(name, shape):
    model = models.build(name, image_shape=shape, num_outputs=7)
    logits = model(np.zeros((2, *shape), np.float32))
    assert logits.shape == (2, 7)
    assert logits.dtype == "float32"
    assert {weight.dtype for weight in model.weights} == {"float32"}


@pytest.mark.parametrize(("num_outputs", "channels"), [(3, 3), (1, 1), (7, 3)])
def test_the_restoration_cnn_gives_float32_for_every_pixel(num_outputs, channels):
    shape = (20, 12, channels)
    model = models.build("restoration_cnn", image_shape=shape, num_outputs=num_outputs)
    output = model(np.zeros((2, *shape), np.float32))
    assert output.shape == (2, 20, 12, num_outputs)
    assert output.dtype == "float32"
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_the_untrained_restoration_cnn_gives_its_input_to_the_last_bit():
    model = models.build("restoration_cnn", image_shape=(8, 8, 3), num_outputs=3)
    images = np.random.default_rng(0).random((2, 8, 8, 3), np.float32)
    np.testing.assert_array_equal(model(images), images)


@pytest.mark.parametrize(
    ("shape", "first_dense", "num_convolutions"),
    [
        ((28, 28, 1), 13 * 13, 2),  # the recipe's own
        ((8, 8, 1), 3 * 3, 2),
        ((30, 30, 1), 14 * 14, 2),
        ((64, 64, 3), 7 * 7, 4),  # 31, 15, 7
        ((224, 224, 3), 13 * 13, 5),  # 111, 55, 27, 13
        ((100, 6, 1), 12 * 2, 4),  # 49, 24, 12; the other side is small already
    ],
)
def test_the_mnist_cnn_pools_until_its_dense_layer_is_small(shape, first_dense, num_convolutions):
    model = models.build("mnist_cnn", image_shape=shape, num_outputs=3)
    dense = next(each for each in model.layers if isinstance(each, keras.layers.Dense))
    assert dense.kernel.shape == (first_dense * 64, 128)
    found = [each for each in model.layers if isinstance(each, keras.layers.Conv2D)]
    assert len(found) == num_convolutions
    assert model.count_params() < 2e6


def test_a_model_is_described_with_the_layer_that_holds_most():
    image, dense = keras.Input((28, 28, 1)), keras.layers.Dense
    x = dense(128, name="wide")(keras.layers.Flatten()(keras.layers.Conv2D(8, 3)(image)))
    model = keras.Model(image, dense(3, name="logits")(x), name="mine")
    wide = 26 * 26 * 8 * 128 + 128
    total = wide + (9 + 1) * 8 + (128 + 1) * 3
    expected = f"mine, {total:,} parameters, {wide / total:.0%} of them in layer wide"
    assert models.described(model) == expected
    even = [dense(8, name=f"dense{each}") for each in range(4)]
    model = keras.Sequential([keras.Input((8,)), *even], name="even")
    assert models.described(model) == "even, 288 parameters"


def test_the_cifar_resnet_has_the_size_of_its_description():
    model = models.build("cifar_resnet", image_shape=(32, 32, 3), num_outputs=10)
    assert model.count_params() == pytest.approx(22.4e6, rel=0.005)
    convolutions = [each for each in model.layers if isinstance(each, keras.layers.Conv2D)]
    assert len(convolutions) == 12
    products = [
        math.prod(each.output.shape[1:3]) * math.prod(each.kernel.shape) for each in convolutions
    ]
    assert sum(products) == pytest.approx(1.42e9, rel=0.01)


def test_the_cifar_resnet_averages_an_image_and_its_mirror_outside_training(narrow):
    keras.config.set_dtype_policy("float32")
    model = models.build("cifar_resnet", image_shape=(8, 8, 3), num_outputs=7)
    network = keras.Model(model.input, model.get_layer("logits").output)
    # Untrained logits are small, and grow as the images do.
    images = 1e4 * np.random.default_rng(0).standard_normal((5, 8, 8, 3), np.float32)
    alone, mirrored = np.split(network(images), 2)
    np.testing.assert_allclose(model(images), (alone + mirrored) / 2, rtol=0, atol=1e-4)
    np.testing.assert_allclose(model(images[:, :, ::-1]), model(images), rtol=0, atol=1e-4)
    assert np.abs(alone - mirrored).max() > 0.1
    in_training = model(images, training=True)
    assert in_training.shape == (5, 7)
    np.testing.assert_array_equal(in_training, network(images, training=True))


@pytest.mark.parametrize(("name", "shape"), OWN_CLASSIFIERS)
def test_a_model_is_read_again_from_its_file(name, shape, tmp_path, narrow):
    model = models.build(name, image_shape=shape, num_outputs=7)
    images = np.random.default_rng(0).random((2, *shape), np.float32)
    model.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")  # in Keras's safe mode
    np.testing.assert_array_equal(read(images), model(images))


@pytest.mark.slow
def test_a_file_of_the_cifar_resnet_is_read_after_setup(tmp_path):
    path = tmp_path / "model.keras"
    models.build("cifar_resnet", image_shape=(8, 8, 3), num_outputs=7).save(path)
    load = f"keras.models.load_model({str(path)!r})"
    program = f"import keras, tfaccel; tfaccel.setup(gpu_ids=()); print({load}.name)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "cifar_resnet\n", done.stderr


@pytest.mark.parametrize(
    ("name", "shape"),
    [OWN_CLASSIFIERS[0], pytest.param(*OWN_CLASSIFIERS[1], marks=pytest.mark.slow)],
)
def test_two_deterministic_runs_under_xla_give_the_same_bits(name, shape, setup):
    def trained():
        run = setup(deterministic=True)
        with run.scope():
            model = models.build(name, image_shape=shape, num_outputs=7)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        run.compile(model, optimizer="sgd", loss=loss)
        random = np.random.default_rng(0)
        for _ in range(2):
            images = random.normal(size=(4, *shape)).astype(np.float32)
            assert np.isfinite(model.train_on_batch(images, random.integers(0, 7, 4)))
        return model.get_weights()

    for one, other in zip(trained(), trained(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "name", ["MobileNetV3Small", pytest.param("efficientnetv2b0", marks=pytest.mark.slow)]
)
def test_no_model_rescales_what_the_loader_already_has_in_0_to_1(name):
    model = models.build(name, image_shape=(32, 32, 3), num_outputs=2)
    assert not [each for each in model.layers if isinstance(each, keras.layers.Rescaling)]


def test_every_keras_application_is_known_by_its_name():
    names = models.applications.architectures()
    assert {"resnet50", "vgg16", "convnexttiny", "efficientnetb0", "mobilenetv2"} <= set(names)
    assert len(names) >= 38


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("resnet5", (32, 32, 3), "there is no model 'resnet5'; did you mean 'resnet50"),
        ("minst_cnn", (28, 28, 1), "did you mean 'mnist_cnn'"),
        ("resnet50", (28, 28, 3), "resnet50 does not take images of 28x28 with 3 channel"),
        ("mnist_cnn", (3, 3, 1), "mnist_cnn does not take images of 3x3"),
        ("cifar_resnet", (32, 7, 3), "with 3 channel(s): images must be at least 8x8"),
        ("restoration", (64, 64, 3), "did you mean 'restoration_cnn'"),
    ],
)
def test_each_mistake_is_one_sentence(name, shape, words):
    with pytest.raises(UserError) as error:
        models.build(name, image_shape=shape, num_outputs=2)
    assert words in str(error.value)
