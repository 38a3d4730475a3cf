"""What is learned from labels, target images and masks."""

import types

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel import UserError
from tfaccel.config import ImageConfig, ModelConfig, StepConfig
from tfaccel.data.source import Blobs
from tfaccel.experiment import models, tasks
from tfaccel.experiment.metrics import PSNR


def data_of(*, class_names=(), targets=None, **images):
    """What a loader's `.data` says."""
    source = types.SimpleNamespace(targets=targets)
    return types.SimpleNamespace(
        class_names=class_names,
        source=source,
        found=source,
        images=ImageConfig(image_size=(8, 6), **images),
    )


LABELS = data_of(class_names=("a", "b", "c"))
IMAGES = data_of(targets=np.full((5, 8, 6, 3), 255, np.uint8), std=(0.5, 0.25, 0.2))


def masks_of(targets):
    data = data_of(targets=targets)
    data.images = ImageConfig(image_size=(8, 6), targets="mask")
    return data


MASKS = masks_of(np.arange(5 * 8 * 6, dtype=np.uint8).reshape(5, 8, 6, 1) % 3)


def test_labels_make_a_classification():
    task = tasks.task_of(LABELS, ModelConfig(), StepConfig())
    assert (task.output_shape, task.num_outputs, task.metrics) == ((3,), 3, ["accuracy"])
    logits = np.array([[5.0, 0, 0], [0, 0, 0]], np.float32)
    expected = (np.log(1 + 2 * np.exp(-5)) + np.log(3)) / 2
    assert float(task.loss(np.array([0, 2]), logits)) == pytest.approx(expected, rel=1e-5)


def test_more_outputs_than_classes_can_be_asked_for():
    assert tasks.task_of(LABELS, ModelConfig(num_outputs=8), StepConfig()).num_outputs == 8


def test_labels_that_are_mixed_have_a_loss_of_probabilities():
    task = tasks.task_of(LABELS, ModelConfig(), StepConfig(label_smoothing=0.1))
    assert (task.output_shape, task.metrics) == ((3,), ["accuracy"])
    logits = np.array([[5.0, 0, 0], [0, 0, 0]], np.float32)
    expected = (np.log(1 + 2 * np.exp(-5)) + np.log(3)) / 2
    assert float(task.loss(np.eye(3)[[0, 2]], logits)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("xla", "smoothing"),
    [
        (False, 0.0),
        (True, 0.1),
        pytest.param(True, 0.0, marks=pytest.mark.slow),
        pytest.param(False, 0.1, marks=pytest.mark.slow),
    ],
)
def test_of_more_than_five_classes_the_top_five_are_measured(xla, smoothing):
    data, step = data_of(class_names=tuple("abcdefg")), StepConfig(label_smoothing=smoothing)
    task = tasks.task_of(data, ModelConfig(), step)
    image = keras.Input((7,))
    model = compiled(
        lambda: keras.Model(image, keras.layers.Identity()(image)),
        1,
        optimizer="sgd",
        xla=xla,
        config=step,
        loss=task.loss,
        metrics=task.metrics,
    )
    logits = np.random.default_rng(0).normal(size=(64, 7)).astype(np.float32)
    labels = np.arange(64) % 7
    ranks = (logits > logits[np.arange(64), labels][:, None]).sum(axis=1)
    result = model.test_on_batch(logits, labels, return_dict=True)
    assert result["accuracy"] == pytest.approx((ranks == 0).mean())
    assert result["top5"] == pytest.approx((ranks < 5).mean())


def test_target_images_make_a_restoration():
    task = tasks.task_of(IMAGES, ModelConfig(), StepConfig())
    assert (task.output_shape, task.num_outputs) == ((8, 6, 3), 3)
    assert isinstance(task.loss, keras.losses.MeanAbsoluteError)
    assert [each.name for each in task.metrics] == ["psnr"]


def test_masks_make_a_segmentation():
    task = tasks.task_of(MASKS, ModelConfig(num_outputs=4), StepConfig())
    assert (task.output_shape, task.metrics) == ((8, 6, 4), ["accuracy"])
    mask = np.random.default_rng(0).integers(0, 4, (2, 8, 6, 1))
    right = 100 * np.eye(4, dtype=np.float32)[mask[..., 0]]
    assert float(task.loss(mask, right)) == 0


def test_a_mask_of_a_value_beyond_the_outputs_is_named(tmp_path):
    masks = np.random.default_rng(0).integers(0, 4, (300, 8, 6)).astype(np.uint8)
    paths = [tmp_path / f"{index:03d}.png" for index in range(len(masks))]
    for path, mask in zip(paths, masks, strict=True):
        PIL.Image.fromarray(mask).save(path)
    paths[0].write_bytes(b"no image")  # the loader answers for it
    files = Blobs(tuple(map(str, paths)))
    for data in (masks_of(files), masks_of(masks[..., None])):
        assert tasks.task_of(data, ModelConfig(num_outputs=4), StepConfig()).num_outputs == 4
        with pytest.raises(
            UserError, match=r"mask .* has the value 3, but num_outputs=3 allows 0 to 2"
        ):
            tasks.task_of(data, ModelConfig(num_outputs=3), StepConfig())
    PIL.Image.fromarray(masks[-1] | 255).save(paths[-1])  # a value to ignore, as VOC has
    with pytest.raises(
        UserError, match=r"299.png has the value 255, but .*num_outputs=256 or more"
    ):
        tasks.task_of(masks_of(files), ModelConfig(num_outputs=4), StepConfig())


# Data, outputs asked for, and words of the one sentence that says what is wrong.
WRONG = [
    (LABELS, 2, "num_outputs=2, but the data have 3 classes; use at least as many"),
    (IMAGES, 1, "num_outputs=1, but target images have 3 channel(s); remove num_outputs"),
    (MASKS, None, "num_outputs=None with targets='mask'; set it to the number of values"),
]


@pytest.mark.parametrize(("data", "num_outputs", "words"), WRONG, ids=[each[2] for each in WRONG])
def test_each_mistake_is_one_sentence(data, num_outputs, words):
    with pytest.raises(UserError) as error:
        tasks.task_of(data, ModelConfig(num_outputs=num_outputs), StepConfig())
    assert words in str(error.value)


@pytest.mark.parametrize("data", [IMAGES, MASKS], ids=["images", "masks"])
def test_target_images_are_not_smoothed(data):
    with pytest.raises(UserError, match="mixup or cutmix with target images; they are for classes"):
        tasks.task_of(data, ModelConfig(num_outputs=3), StepConfig(label_smoothing=0.1))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (
            "mnist_cnn",
            IMAGES,
            "gives (3,) for an image, but the targets of these data need (8, 6, 3)",
        ),
        ("restoration_cnn", LABELS, "the targets of these data need (3,); use a model"),
    ],
)
def test_a_model_that_gives_something_else_is_refused(name, data, words):
    task = tasks.task_of(data, ModelConfig(), StepConfig())
    model = models.build(name, image_shape=(8, 6, 3), num_outputs=task.num_outputs)
    with pytest.raises(UserError) as error:
        tasks.check_model(model, task)
    assert words in str(error.value)


def test_the_right_model_is_not():
    wanted = ModelConfig(num_outputs=3)
    for name, data in (
        ("mnist_cnn", LABELS),
        ("restoration_cnn", IMAGES),
        ("restoration_cnn", MASKS),
    ):
        task = tasks.task_of(data, wanted if data is MASKS else ModelConfig(), StepConfig())
        model = models.build(name, image_shape=(8, 6, 3), num_outputs=task.num_outputs)
        tasks.check_model(model, task)


# PSNR.


def images(num_rows):
    """Targets, and noisy outputs of them, normalised by IMAGES' std; and each row's ratio."""
    random = np.random.default_rng(0)
    target = random.random((num_rows, 8, 6, 3))
    noise = random.normal(0, np.linspace(0.01, 0.3, num_rows)[:, None, None, None], target.shape)
    ratios = [tf.image.psnr(a, b, max_val=1.0) for a, b in zip(target, target + noise, strict=True)]
    std = np.array(IMAGES.images.std)
    return (target - 0.3) / std, (target + noise - 0.3) / std, np.array(ratios)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_psnr_is_the_mean_over_images_of_pixels_in_0_to_1(dtype):
    target, output, ratios = images(7)
    psnr = PSNR(IMAGES.images.std)
    psnr.update_state(target[:4].astype(dtype), output[:4].astype(dtype))
    psnr.update_state(target[4:].astype(dtype), output[4:].astype(dtype))
    # float16 keeps 11 bits of a normalised pixel: noise of 70 dB below the images'.
    assert float(psnr.result()) == pytest.approx(
        ratios.mean(), abs=1e-3 if dtype == "float32" else 0.02
    )


def test_psnr_leaves_out_padding_that_is_perfect():
    target, output, ratios = images(4)
    output[3] = target[3]
    psnr = PSNR(IMAGES.images.std)
    psnr.update_state(target, output, sample_weight=np.array([1, 1, 1, 0], np.float32))
    assert float(psnr.result()) == pytest.approx(ratios[:3].mean(), abs=1e-3)


def test_psnr_of_a_perfect_image_is_finite():
    psnr = PSNR()
    psnr.update_state(np.ones((1, 4, 4, 1)), np.ones((1, 4, 4, 1)))
    assert float(psnr.result()) == 100


def test_psnr_is_written_with_a_model_and_read_again(tmp_path):
    model = keras.Sequential([keras.Input((8, 6, 3)), keras.layers.Activation("linear")])
    model.compile(loss="mae", metrics=[PSNR((0.5, 0.25, 0.2))], jit_compile=False)
    target, output, ratios = images(3)
    model.test_on_batch(output, target)
    model.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")
    result = read.test_on_batch(output, target, return_dict=True)
    assert result["psnr"] == pytest.approx(ratios.mean(), abs=1e-3)


# Steps, on padded batches. Stock Keras's losses multiply values of [rows, height, width] by weights
# of [rows]: an error, or, where there are as many rows as pixels across, a wrong loss.


@pytest.mark.parametrize(
    ("num_replicas", "width"), [(1, 6), pytest.param(1, 4, marks=pytest.mark.slow), (2, 4)]
)
def test_loss_and_psnr_count_the_images_that_are_not_padding(num_replicas, width):
    target, output, _ = images(8)
    target, output = (each[:, :, :width].astype(np.float32) for each in (target, output))
    weight = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
    task = tasks.task_of(IMAGES, ModelConfig(), StepConfig())

    def make():
        """A model that gives its input until it is trained."""
        inputs = keras.Input((8, width, 3))
        change = keras.layers.Conv2D(3, 1, kernel_initializer="zeros")(inputs)
        return keras.Model(inputs, keras.layers.Add()([inputs, change]))

    model = compiled(
        make,
        num_replicas,
        optimizer="sgd",
        xla=False,
        config=StepConfig(zero_weight_is_padding=True),
        loss=task.loss,
        metrics=task.metrics,
    )
    batches = tf.data.Dataset.from_tensor_slices((output, target, weight)).batch(4 * num_replicas)
    result = model.evaluate(batches, verbose=0, return_dict=True)
    expected = PSNR(IMAGES.images.std)
    expected.update_state(target[:6], output[:6])
    assert result["loss"] == pytest.approx(np.abs(target[:6] - output[:6]).mean(), rel=1e-5)
    assert result["psnr"] == pytest.approx(float(expected.result()), rel=1e-5)
    logs = model.train_on_batch(output, target, weight, return_dict=True)
    assert np.isfinite(logs["loss"])


def test_masks_are_learned():
    random = np.random.default_rng(0)
    mask = np.repeat(random.integers(0, 3, (8, 2, 2, 1)), 4, axis=1).repeat(3, axis=2)
    task = tasks.task_of(MASKS, ModelConfig(num_outputs=3), StepConfig())
    keras.utils.set_random_seed(0)
    parts = [keras.layers.Conv2D(16, 1, activation="relu"), keras.layers.Conv2D(3, 1)]
    model = compiled(
        lambda: keras.Sequential([keras.Input((8, 6, 1)), *parts]),
        1,
        optimizer=keras.optimizers.Adam(0.05),
        xla=False,
        config=StepConfig(zero_weight_is_padding=True),
        loss=task.loss,
        metrics=task.metrics,
    )
    weight = np.array([1] * 7 + [0], np.float32)
    batch = tf.data.Dataset.from_tensors(
        ((mask / 2).astype(np.float32), mask.astype(np.int32), weight)
    )
    model.fit(batch.repeat(40), verbose=0)
    tested = model.test_on_batch(*next(iter(batch)), return_dict=True)
    assert tested["accuracy"] > 0.95
