"""Networks for masks: their feature maps, dilation, shapes, weights and gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfaccel import UserError
from tfaccel.config.keras_pixels import trained_on
from tfaccel.config.names import check_model
from tfaccel.config.segmentation import DECODERS
from tfaccel.config.weights_pixels import of_file
from tfaccel.experiment import models
from tfaccel.experiment.models import applications, resnet_v1_5, segmentation
from tfaccel.experiment.models.dilated import DilationError, dilated
from tfaccel.experiment.models.feature_maps import feature_maps
from tfaccel.experiment.models.frozen import backbone_of, freeze
from tfaccel.experiment.models.weights import begin_from

layers = keras.layers


def body_of(name, size):
    if name in resnet_v1_5.BLOCKS:
        return resnet_v1_5.body(name, keras.Input((*size, 3)), image_shape=(*size, 3))
    return applications.bodies()[name](keras.Input((*size, 3)), image_shape=(*size, 3))


def names_of(body, maps):
    makers = {id(each.output): each.name for each in body.operations if not is_many(each)}
    return [None if each is None else makers[id(each)] for each in maps]


def is_many(step):
    return isinstance(step.output, list | tuple)


# Feature maps.


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("vgg16", ["block1_conv2", "block2_conv2", "block3_conv3", "block4_conv3", "block5_conv3"]),
        (
            "mobilenetv2",
            [None, *(f"block_{each}_expand_relu" for each in (1, 3, 6, 13))],
        ),
        (
            "resnet50",
            [None, "conv1_relu", "conv2_block3_out", "conv3_block4_out", "conv4_block6_out"],
        ),
        pytest.param(
            "resnet50v2",  # whose last block of a stage halves, with a shortcut beside it
            [None, "conv1_conv", "conv2_block2_out", "conv3_block3_out", "conv4_block5_out"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "densenet121",
            [None, "conv1_relu", "pool2_conv", "pool3_conv", "pool4_conv"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_maps_are_the_last_layers_of_each_resolution(name, names):
    body = body_of(name, (64, 96))
    maps = feature_maps(body, (64, 96))
    assert names_of(body, maps[:-1]) == names
    assert maps[-1] is body.output
    for level, each in enumerate(maps):
        assert each is None or each.shape[1:3] == (64 // 2**level, 96 // 2**level)


def test_a_convnext_begins_at_a_quarter_of_the_sides():
    maps = feature_maps(body_of("convnexttiny", (64, 64)), (64, 64))
    assert maps[:2] == [None, None]
    sizes = [(16, 16, 96), (8, 8, 192), (4, 4, 384), (2, 2, 768)]
    assert [each.shape[1:] for each in maps[2:]] == sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inceptionv3", "xception", "nasnetmobile"])
def test_backbones_without_padding_have_five_halvings(name):
    maps = feature_maps(body_of(name, (160, 192)), (160, 192))
    assert len(maps) == 6
    for level, each in enumerate(maps[1:], 1):
        for side, whole in zip(each.shape[1:3], (160, 192), strict=True):
            assert 0.55 * whole / 2**level < side <= whole / 2**level


def test_a_branch_beside_a_shortcut_is_no_map():
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", name="before")(image)
    branch = layers.Conv2D(4, 3, padding="same", name="branch")(x)
    branch = layers.Conv2D(4, 3, strides=2, padding="same", name="half")(branch)
    short = layers.MaxPooling2D(name="shortcut")(x)
    body = keras.Model(image, layers.Add(name="sum")([branch, short]))
    assert names_of(body, feature_maps(body, (8, 8))) == ["before", "sum"]


# Dilation.


def tiny(kind):
    """A body of sides of 8 to 4, which halves in each way that backbones do, and goes on."""
    image = keras.Input((8, 8, 3))
    before = layers.Conv2D(4, 3, padding="same", activation="relu", name="first")(image)
    if kind == "same":
        x = layers.Conv2D(5, 3, strides=2, padding="same", name="half")(before)
    elif kind == "odd pad":  # as in MobileNetV2
        x = layers.ZeroPadding2D(((0, 1), (0, 1)), name="pad")(before)
        x = layers.DepthwiseConv2D(3, strides=2, name="half")(x)
    elif kind == "odd pad of 5":  # as in EfficientNetB0
        x = layers.ZeroPadding2D(((1, 2), (1, 2)), name="pad")(before)
        x = layers.DepthwiseConv2D(5, strides=2, name="half")(x)
    elif kind == "even pad":  # as in ResNet v1.5, with its shortcut
        x = layers.ZeroPadding2D(1, name="pad")(before)
        x = layers.Conv2D(5, 3, strides=2, name="half")(x)
        x = layers.Add()([x, layers.Conv2D(5, 1, strides=2, name="short")(before)])
    elif kind == "pool":  # as in DenseNet
        x = layers.AveragePooling2D(2, strides=2, name="half")(before)
    else:  # as in Xception: the branch keeps odd pixels, and the shortcut even ones
        x = layers.MaxPooling2D(3, strides=2, padding="same", name="half")(before)
        x = layers.Add()([x, layers.Conv2D(4, 1, strides=2, name="short")(before)])
    x = layers.BatchNormalization(name="norm")(x)
    y = layers.ZeroPadding2D(1, name="pad_2")(layers.ReLU()(x))  # as in ResNetV2
    y = layers.Conv2D(6, 3, name="second")(y)
    y = layers.DepthwiseConv2D(5, padding="same", name="third")(y)
    return keras.Model(image, layers.Concatenate()([x, y]), name="tiny")


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("same", 1), ("odd pad", 1), ("odd pad of 5", 1), ("even pad", 0), ("pool", 0)],
)
def test_every_second_pixel_of_a_dilated_body_is_the_bodys(kind, phase):
    keras.utils.set_random_seed(0)
    body = tiny(kind)
    fine = dilated(body)
    fine.set_weights(body.get_weights())
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    coarse, whole = np.asarray(body(images)), np.asarray(fine(images))
    assert whole.shape == (2, 8, 8, coarse.shape[-1])
    np.testing.assert_allclose(whole[:, phase::2, phase::2], coarse, rtol=0, atol=2e-6)
    assert np.abs(whole[:, 1 - phase :: 2, 1 - phase :: 2] - coarse).max() > 1e-2


@pytest.mark.parametrize("name", ["mobilenetv2", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_a_whole_backbone_keeps_its_answers(name):
    keras.utils.set_random_seed(0)
    body = body_of(name, (64, 64))
    fine = dilated(body)
    fine.set_weights(body.get_weights())
    assert [each.path for each in fine.weights] == [each.path for each in body.weights]
    images = np.random.default_rng(0).normal(size=(1, 64, 64, 3)).astype(np.float32)
    phase = int(name == "mobilenetv2")
    coarse, whole = np.asarray(body(images)), np.asarray(fine(images))
    np.testing.assert_allclose(
        whole[:, phase::2, phase::2], coarse, rtol=1e-4, atol=1e-5 * np.abs(coarse).max()
    )


def test_what_cannot_be_dilated_rightly_is_refused_with_the_reason():
    with pytest.raises(DilationError, match="the layers that halve last keep different pixels"):
        dilated(tiny("as Xception"))
    with pytest.raises(DilationError, match=r"downsampling_block_2 \(Sequential\) halves in anoth"):
        dilated(body_of("convnexttiny", (32, 32)))


# Networks.


@pytest.fixture
def mixed():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


NAMES = ["unet_MobileNetV2", "deeplab_mobilenetv2"]
MANY = ["resnet50", "resnet50v2", "resnet50_v1_5", "efficientnetv2b0", "efficientnetb0", "xception"]
MANY += ["densenet121", "convnexttiny", "vgg16", "inceptionv3", "nasnetmobile", "mobilenetv3large"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (NAMES[0], (64, 32, 3)),
        (NAMES[0], (45, 70, 3)),
        (NAMES[1], (33, 50, 1)),
        *(
            pytest.param(f"{decoder}_{name}", (100, 77, 3), marks=pytest.mark.slow)
            for name in MANY
            for decoder in ("unet", "deeplab")
        ),
    ],
)
def test_the_output_has_the_images_size_in_float32(name, shape, mixed):
    model = models.build(name, image_shape=shape, num_outputs=7)
    assert model.name.startswith(name.partition("_")[0])
    logits = model(np.ones((2, *shape), np.float32))
    assert (logits.shape, logits.dtype) == ((2, *shape[:2], 7), "float32")
    assert {weight.dtype for weight in model.trainable_weights} == {"float32"}


def small_body(image, *, image_shape):
    """Five halvings of eight channels each, in little time."""
    x = image
    for level in range(5):
        x = layers.Conv2D(8, 3, strides=2, padding="same", name=f"half_{level}")(x)
        x = layers.ReLU()(layers.BatchNormalization(name=f"norm_{level}")(x))
    return keras.Model(keras.utils.get_source_inputs(image)[0], x, name="small")


def network_of(name, image_shape):
    """The named network; "unet" and "deeplab" alone have the small body."""
    if name in DECODERS:
        return segmentation.build(name, small_body, image_shape=image_shape, num_outputs=3)
    return models.build(name, image_shape=image_shape, num_outputs=3)


WHOLE = [*DECODERS, *(pytest.param(each, marks=pytest.mark.slow) for each in NAMES)]


@pytest.mark.parametrize("name", WHOLE)
def test_padding_moves_no_pixel(name):
    """An image of 48 x 40 is padded by 8 pixels above and 12 left: the larger image's center."""
    small, large = (network_of(name, shape) for shape in ((48, 40, 3), (64, 64, 3)))
    large.set_weights(small.get_weights())
    image = np.random.default_rng(0).normal(size=(1, 48, 40, 3)).astype(np.float32)
    around = np.pad(image, ((0, 0), (8, 8), (12, 12), (0, 0)))
    np.testing.assert_allclose(small(image), large(around)[:, 8:56, 12:52], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", WHOLE)
def test_a_gradient_reaches_every_trainable_weight(name):
    keras.utils.set_random_seed(0)
    model = network_of(name, (50, 64, 3))
    draw = np.random.default_rng(0)
    images = draw.normal(size=(2, 50, 64, 3)).astype(np.float32)
    masks = draw.integers(0, 3, (2, 50, 64, 1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = model.trainable_weights
    with tf.GradientTape() as tape:
        value = loss(masks, model(images, training=True))
    gradients = tape.gradient(value, [each.value for each in weights])
    for weight, gradient in zip(weights, gradients, strict=True):
        assert gradient is not None, weight.path
        assert np.isfinite(gradient).all(), weight.path
        assert np.abs(gradient).max() > 0, weight.path


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (NAMES[0], ["mobilenet.weights.h5"]),
        pytest.param(NAMES[0], ["notop.h5", "body.keras"], marks=pytest.mark.slow),
        pytest.param(NAMES[1], ["mobilenet.weights.h5", "notop.h5"], marks=pytest.mark.slow),
    ],
)
def test_weights_of_the_backbone_fit_by_name_and_backbone_freezes_them_alone(name, files, tmp_path):
    keras.utils.set_random_seed(1)
    arguments = {"weights": None, "include_top": False, "input_shape": (64, 64, 3)}
    body = keras.applications.MobileNetV2(**arguments)
    for file in files:
        path = tmp_path / file
        body.save_weights(path) if file.endswith("weights.h5") else body.save(path)
        model = models.build(name, image_shape=(50, 40, 3), num_outputs=3)
        begin_from(str(path), model)
        for layer in body.layers:
            mine = model.get_layer(layer.name).weights if layer.weights else []
            for one, other in zip(mine, layer.weights, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{file} {layer.name}")
    names = {each.name for each in body.layers if each.weights}
    assert {each.name for each in backbone_of(model)} == names
    freeze(model, ("backbone",))
    trained = {each.path.split("/")[-2] for each in model.trainable_weights}
    assert "logits" in trained
    assert all(each == "logits" or each.startswith("decoder_") for each in trained)


def test_the_pixels_of_the_weights_are_the_backbones():
    assert trained_on("unet_resnet50") == trained_on("resnet50")
    assert trained_on("deeplab_mobilenetv2_1.00_224") == trained_on("mobilenetv2")
    assert of_file("a.h5", "unet_vgg16").pixels == trained_on("vgg16")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unet_resnet5", "there is no model 'unet_resnet5'; did you mean 'unet_resnet50"),
        ("unet_mobilnetv2", "did you mean 'unet_mobilenetv2'"),
        ("deplab_resnet50", "did you mean 'deeplab_resnet50'"),
        ("unet_vit_base", "there is no model 'unet_vit_base'"),
        ("unet", "did you mean 'unet_"),
    ],
)
def test_mistakes_in_a_name_are_one_sentence(name, words):
    for check in (check_model, models.find):
        with pytest.raises(UserError) as error:
            check(name)
        assert words in str(error.value)
