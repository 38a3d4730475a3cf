"""What is learned from labels, target images and masks."""

import types

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel import UserError
from tfaccel.config import ImageConfig, ModelConfig, StepConfig, TrainConfig
from tfaccel.data.source import Blobs
from tfaccel.experiment import models, tasks
from tfaccel.experiment.metrics import PSNR, MeanIoU, PixelAccuracy
from tfaccel.training.losses import BinaryCrossentropy, Crossentropy, Dice, Sum


def data_of(*, class_names=(), target_names=(), targets=None, **images):
    """What a loader's `.data` says."""
    task = "classes" if targets is None else None
    source = types.SimpleNamespace(targets=targets, task=task, target_names=target_names)
    return types.SimpleNamespace(
        class_names=class_names,
        source=source,
        found=source,
        images=ImageConfig(image_size=(8, 6), **images),
    )


LABELS = data_of(class_names=("a", "b", "c"))
IMAGES = data_of(targets=np.full((5, 8, 6, 3), 255, np.uint8), std=(0.5, 0.25, 0.2))


def masks_of(targets, names=()):
    data = data_of(targets=targets, target_names=names)
    data.images = ImageConfig(image_size=(8, 6), targets="mask")
    return data


MASKS = masks_of(np.arange(5 * 8 * 6, dtype=np.uint8).reshape(5, 8, 6, 1) % 3)


def test_labels_make_a_classification():
    task = tasks.task_of(LABELS, ModelConfig(), StepConfig(), TrainConfig())
    assert (task.output_shape, task.num_outputs, task.metrics) == ((3,), 3, ["accuracy"])
    logits = np.array([[5.0, 0, 0], [0, 0, 0]], np.float32)
    expected = (np.log(1 + 2 * np.exp(-5)) + np.log(3)) / 2
    assert float(task.loss(np.array([0, 2]), logits)) == pytest.approx(expected, rel=1e-5)


def test_more_outputs_than_classes_can_be_asked_for():
    assert (
        tasks.task_of(LABELS, ModelConfig(num_outputs=8), StepConfig(), TrainConfig()).num_outputs
        == 8
    )


def test_labels_that_are_mixed_have_a_loss_of_probabilities():
    task = tasks.task_of(LABELS, ModelConfig(), StepConfig(label_smoothing=0.1), TrainConfig())
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
    task = tasks.task_of(data, ModelConfig(), step, TrainConfig())
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
    task = tasks.task_of(IMAGES, ModelConfig(), StepConfig(), TrainConfig())
    assert (task.output_shape, task.num_outputs) == ((8, 6, 3), 3)
    assert isinstance(task.loss, keras.losses.MeanAbsoluteError)
    assert [each.name for each in task.metrics] == ["psnr"]


def test_masks_make_a_segmentation():
    task = tasks.task_of(MASKS, ModelConfig(num_outputs=4), StepConfig(), TrainConfig())
    assert task.output_shape == (8, 6, 4)
    assert [getattr(each, "name", each) for each in task.metrics] == ["accuracy", "mean_iou"]
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
        assert (
            tasks.task_of(data, ModelConfig(num_outputs=4), StepConfig(), TrainConfig()).num_outputs
            == 4
        )
        with pytest.raises(
            UserError, match=r"mask .* has the value 3, but num_outputs=3 allows 0 to 2"
        ):
            tasks.task_of(data, ModelConfig(num_outputs=3), StepConfig(), TrainConfig())
    PIL.Image.fromarray(masks[-1] | 255).save(paths[-1])  # a value to ignore, as VOC has
    with pytest.raises(
        UserError,
        match=r"299.png has the value 255, but .*ignore_class=255, or use .*outputs=256 or m",
    ):
        tasks.task_of(masks_of(files), ModelConfig(num_outputs=4), StepConfig(), TrainConfig())


# Data, outputs asked for, and words of the one sentence that says what is wrong.
WRONG = [
    (LABELS, 2, "num_outputs=2, but the data have 3 classes; use at least as many"),
    (IMAGES, 1, "num_outputs=1, but target images have 3 channel(s); remove num_outputs"),
    (MASKS, None, "num_outputs=None with targets='mask'; set it to the number of values"),
]


@pytest.mark.parametrize(("data", "num_outputs", "words"), WRONG, ids=[each[2] for each in WRONG])
def test_each_mistake_is_one_sentence(data, num_outputs, words):
    with pytest.raises(UserError) as error:
        tasks.task_of(data, ModelConfig(num_outputs=num_outputs), StepConfig(), TrainConfig())
    assert words in str(error.value)


def test_names_of_a_masks_values_give_their_number():
    data = masks_of(MASKS.source.targets, ("road", "sky", "tree"))

    def num_outputs(asked):
        model = ModelConfig(num_outputs=asked)
        return tasks.task_of(data, model, StepConfig(), TrainConfig()).num_outputs

    assert (num_outputs(None), num_outputs(5)) == (3, 5)
    with pytest.raises(UserError, match="num_outputs=2, but classes has 3 names of a mask's"):
        num_outputs(2)


def test_masks_with_fewer_names_than_outputs_are_not_trained():
    data = masks_of(MASKS.source.targets, ("road", "sky", "tree"))
    with pytest.raises(
        UserError,
        match=r"names 3 classes of the masks \(road, sky, tree\), but model.num_outputs=11; set "
        "--config.model.num_outputs=3 if these are all classes, or name all 11 in data.classes",
    ):
        tasks.check_names(data, ModelConfig(num_outputs=11))
    for outputs in (None, 3):
        tasks.check_names(data, ModelConfig(num_outputs=outputs))
    tasks.check_names(MASKS, ModelConfig(num_outputs=11))  # without names
    tasks.check_names(LABELS, ModelConfig(num_outputs=11))


@pytest.mark.parametrize("data", [IMAGES, MASKS], ids=["images", "masks"])
def test_target_images_are_not_smoothed(data):
    with pytest.raises(UserError, match=r"^label_smoothing=0.1 with target images, but it is for"):
        tasks.task_of(
            data, ModelConfig(num_outputs=3), StepConfig(label_smoothing=0.1), TrainConfig()
        )


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
    task = tasks.task_of(data, ModelConfig(), StepConfig(), TrainConfig())
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
        task = tasks.task_of(
            data, wanted if data is MASKS else ModelConfig(), StepConfig(), TrainConfig()
        )
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
    task = tasks.task_of(IMAGES, ModelConfig(), StepConfig(), TrainConfig())

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
    task = tasks.task_of(MASKS, ModelConfig(num_outputs=3), StepConfig(), TrainConfig())
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


# Losses by name, ignored pixels and weights of classes.


def numpy_crossentropy(logits, labels, *, gamma=0.0, ignore_class=None, class_weights=None):
    """The weighted mean, in float64."""
    logits = logits.astype(np.float64)
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    valid = np.ones(labels.shape) if ignore_class is None else labels != ignore_class
    safe = np.where(valid, labels, 0)
    right = np.take_along_axis(log, safe[..., None], -1)[..., 0]
    weight = valid * (1.0 if class_weights is None else np.array(class_weights)[safe])
    return (-((1 - np.exp(right)) ** gamma) * right * weight).sum() / weight.sum()


def numpy_dice(logits, labels, *, ignore_class=None):
    logits = logits.astype(np.float64)
    found = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.eye(256)[labels][..., : logits.shape[-1]]
    valid = np.ones(labels.shape) if ignore_class is None else labels != ignore_class
    both, one, other = (
        (each * valid[..., None]).sum((1, 2)) for each in (found * wanted, found, wanted)
    )
    return 1 - ((2 * both + 1) / (one + other + 1)).mean()


def drawn_masks(rows=8, ignored=True):
    """Logits of five classes, and masks in which some rows have few or no pixels that count."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(rows, 8, 6, 5)).astype(np.float32)
    masks = draw.integers(0, 5, (rows, 8, 6, 1)).astype(np.uint8)
    if ignored:
        masks[:2] = 255
        masks[2, 1:] = 255
        masks[3:][draw.random((rows - 3, 8, 6, 1)) < 0.2] = 255
    return logits, masks


WEIGHTS = (0.5, 1.0, 2.0, 0.1, 3.0)


@pytest.mark.parametrize("ignore_class", [None, 255])
@pytest.mark.parametrize("class_weights", [None, WEIGHTS])
@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_cross_entropy_is_that_of_numpy(gamma, class_weights, ignore_class):
    logits, masks = drawn_masks(ignored=ignore_class is not None)
    settings = {"gamma": gamma, "class_weights": class_weights, "ignore_class": ignore_class}
    loss = Crossentropy(**settings)
    expected = numpy_crossentropy(logits, masks[..., 0].astype(int), **settings)
    assert float(loss(masks, logits)) == pytest.approx(expected, rel=1e-5)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert float(again(masks, logits)) == pytest.approx(expected, rel=1e-5)
    if ignore_class is None:  # labels of images, and their probabilities
        rows, labels = logits[:, 0, 0], masks[:, 0, 0, 0].astype(int)
        expected = numpy_crossentropy(rows, labels, gamma=gamma, class_weights=class_weights)
        assert float(loss(labels, rows)) == pytest.approx(expected, rel=1e-5)
        mixed = Crossentropy(gamma=gamma, class_weights=class_weights, of_probabilities=True)
        one_hot = np.eye(5, dtype=np.float32)[labels]
        assert float(mixed(one_hot, rows)) == pytest.approx(expected, rel=1e-5)


def test_focal_loss_without_weights_is_that_of_keras():
    logits, masks = drawn_masks(ignored=False)
    rows, labels = logits[:, 0, 0], masks[:, 0, 0, 0]
    theirs = keras.losses.CategoricalFocalCrossentropy(alpha=1.0, gamma=1.5, from_logits=True)
    ours = Crossentropy(gamma=1.5)
    assert float(ours(labels, rows)) == pytest.approx(
        float(theirs(np.eye(5)[labels], rows)), rel=1e-4
    )


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_binary_cross_entropy_is_that_of_keras_for_each_class(threshold):
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(6, 5)).astype(np.float32), np.array([0, 1, 2, 3, 4, 0])
    one_hot, share = np.eye(5, dtype=np.float32)[labels], np.float32([0, 0.1, 0.3, 0.5, 0.7, 1])
    mixed = one_hot * (1 - share[:, None]) + one_hot[::-1] * share[:, None]
    keras_loss = keras.losses.BinaryCrossentropy(from_logits=True)
    of_labels = BinaryCrossentropy(target_threshold=threshold)
    expected = float(keras_loss(one_hot, logits))
    for given in (labels, labels[:, None]):
        assert float(of_labels(given, logits)) == pytest.approx(expected, rel=1e-5)
    loss = BinaryCrossentropy(target_threshold=threshold, of_probabilities=True)
    targets = mixed if threshold is None else (mixed > threshold).astype(np.float32)
    assert round(float(targets.sum()), 4) == (6 if threshold is None else 9)
    expected = float(keras_loss(targets, logits))
    for each in (loss, keras.losses.deserialize(keras.losses.serialize(loss))):
        assert float(each(mixed, logits)) == pytest.approx(expected, rel=1e-5)


def test_a_config_chooses_binary_cross_entropy():
    train = TrainConfig(loss="binary_cross_entropy", bce_target_threshold=0.2)
    for step in (StepConfig(), StepConfig(mixup_alpha=0.1)):
        loss = tasks.task_of(LABELS, ModelConfig(), step, train).loss
        assert isinstance(loss, BinaryCrossentropy)
        assert (loss.target_threshold, loss.of_probabilities) == (0.2, step.mixes_labels)
    with pytest.raises(UserError, match="which makes each target 0 or 1 again; remove one"):
        tasks.task_of(LABELS, ModelConfig(), StepConfig(label_smoothing=0.1), train)
    with pytest.raises(UserError, match="'binary_cross_entropy' with masks; it is for labelled"):
        tasks.task_of(MASKS, ModelConfig(num_outputs=3), StepConfig(), train)


@pytest.mark.parametrize("ignore_class", [None, 255])
def test_dice_is_that_of_numpy(ignore_class):
    logits, masks = drawn_masks(ignored=ignore_class is not None)
    labels = masks[..., 0].astype(int)
    dice = numpy_dice(logits, labels, ignore_class=ignore_class)
    own = Dice(ignore_class=ignore_class)
    assert float(own(masks, logits)) == pytest.approx(dice, rel=1e-5)
    both = Sum([Crossentropy(ignore_class=ignore_class), own])
    expected = dice + numpy_crossentropy(logits, labels, ignore_class=ignore_class)
    for loss in (both, keras.losses.deserialize(keras.losses.serialize(both))):
        assert float(loss(masks, logits)) == pytest.approx(expected, rel=1e-5)


def test_mean_iou_is_that_of_keras_over_batches():
    logits, masks = drawn_masks()
    ours = MeanIoU(6, ignore_class=255)  # the last class has no pixel
    theirs = keras.metrics.MeanIoU(6, ignore_class=255, sparse_y_pred=False)
    logits = np.pad(logits, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=-99)
    for rows in (slice(0, 5), slice(5, 8)):
        for metric in (ours, theirs):
            metric.update_state(masks[rows], logits[rows])
    assert float(ours.result()) == pytest.approx(float(theirs.result()), rel=1e-5)
    labels, found, there = masks[..., 0], logits.argmax(-1), masks[..., 0] != 255
    for index, each in enumerate(ours.of_classes().numpy()[:5]):
        both = ((labels == index) & (found == index) & there).sum()
        either = (((labels == index) | (found == index)) & there).sum()
        assert each == pytest.approx(both / either)
    assert np.isnan(ours.of_classes().numpy()[5])
    accuracy = PixelAccuracy(ignore_class=255)
    accuracy.update_state(masks, logits)
    assert float(accuracy.result()) == pytest.approx((labels == found)[there].mean())


def test_an_image_of_weight_0_does_not_count():
    logits, masks = drawn_masks()
    weight = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
    for metric in (MeanIoU(5, ignore_class=255), PixelAccuracy(ignore_class=255)):
        metric.update_state(masks[:6], logits[:6])
        expected = float(metric.result())
        metric.reset_state()
        metric.update_state(masks, logits, sample_weight=weight)
        assert float(metric.result()) == pytest.approx(expected)


SEGMENTATIONS = [
    ("focal", "balanced", 2, 1, False),
    ("cross_entropy_dice", "none", 2, 1, True),
    pytest.param("dice", "none", 2, 1, False, marks=pytest.mark.slow),
    pytest.param("cross_entropy", "balanced", 1, 2, True, marks=pytest.mark.slow),
    pytest.param("focal_dice", "balanced", 3, 2, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("loss", "weights", "num_replicas", "parts", "xla"), SEGMENTATIONS)
def test_replicas_segment_as_one_device_with_stock_keras(loss, weights, num_replicas, parts, xla):
    _, masks = drawn_masks(10)  # whole replicas have few pixels that count
    x = np.random.default_rng(1).normal(size=(10, 8, 6, 3)).astype(np.float32)
    padding = np.array([1] * 9 + [0], np.float32)
    data = masks_of(masks)
    data.images = ImageConfig(image_size=(8, 6), targets="mask", ignore_class=255)
    train = TrainConfig(loss=loss, class_weights=weights)

    def task():
        return tasks.task_of(data, ModelConfig(num_outputs=5), StepConfig(), train)

    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((8, 6, 3)), keras.layers.Conv2D(5, 3, padding="same")])

    stock = make()
    stock.compile(keras.optimizers.SGD(0.5), task().loss, metrics=task().metrics)
    wanted = [stock.train_on_batch(x[:9], masks[:9], return_dict=True) for _ in range(2)]
    config = StepConfig(zero_weight_is_padding=True, accumulation_steps=parts)
    ours = compiled(
        make,
        num_replicas,
        optimizer=keras.optimizers.SGD(0.5),
        xla=xla,
        config=config,
        loss=task().loss,
        metrics=task().metrics,
    )
    for each in wanted:
        logs = ours.train_on_batch(x, masks, padding, return_dict=True)
        for name in ("loss", "accuracy", "mean_iou"):
            assert float(logs[name]) == pytest.approx(float(each[name]), rel=1e-4), name
        ours.reset_metrics()
        stock.reset_metrics()
    for mine, theirs in zip(ours.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weight", [[1, 1, 1, 1, 1, 1, 0, 0], [2, 1, 1, 0.5, 1, 1, 0, 3]])
@pytest.mark.parametrize("settings", [{}, {"gamma": 2.0}, {"ignore_class": 255}])
def test_a_weight_of_each_image_is_one_of_all_its_pixels(settings, weight):
    logits, masks = drawn_masks(ignored="ignore_class" in settings)
    valid = (masks[..., 0] != 255) * np.array(weight)[:, None, None]
    of_pixels = [
        numpy_crossentropy(logits[row : row + 1, y : y + 1, x : x + 1], labels, **settings)
        if valid[row, y, x]
        else 0.0
        for (row, y, x) in np.ndindex(valid.shape)
        for labels in [masks[row : row + 1, y : y + 1, x : x + 1, 0].astype(int)]
    ]
    expected = np.sum(of_pixels * valid.ravel()) / valid.sum()
    found = Crossentropy(**settings)(masks, logits, np.array(weight, np.float32))
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_images_of_padding_leave_the_loss_of_masks_as_it_is(num_replicas):
    logits, masks = drawn_masks(10, ignored=False)
    padding = np.array([1] * 9 + [0], np.float32)
    data = masks_of(masks)
    data.images = ImageConfig(image_size=(8, 6), targets="mask")

    def task():
        train = TrainConfig(loss="cross_entropy_dice")
        return tasks.task_of(data, ModelConfig(num_outputs=5), StepConfig(), train)

    def make():
        return keras.Sequential([keras.Input((8, 6, 5)), keras.layers.Activation("linear")])

    stock = make()
    stock.compile(loss=task().loss)
    wanted = stock.test_on_batch(logits[:9], masks[:9])
    labels = masks[:9, ..., 0].astype(int)
    expected = numpy_crossentropy(logits[:9], labels) + numpy_dice(logits[:9], labels)
    assert float(wanted) == pytest.approx(expected, rel=1e-5)
    ours = compiled(
        make,
        num_replicas,
        optimizer=keras.optimizers.SGD(0.5),
        config=StepConfig(zero_weight_is_padding=True),
        loss=task().loss,
    )
    assert float(ours.test_on_batch(logits, masks, padding)) == pytest.approx(expected, rel=1e-5)


def test_balanced_weights_are_those_of_scikit_learn(caplog):
    caplog.set_level("INFO", "tfaccel")
    data = data_of(class_names=("a", "b", "c"))
    data.source.labels = np.array([0] * 6 + [1] * 3 + [2] * 1)
    train = TrainConfig(class_weights="balanced")
    task = tasks.task_of(data, ModelConfig(), StepConfig(), train)
    assert task.loss.class_weights == pytest.approx((10 / 18, 10 / 9, 10 / 3))
    assert "0.556 for the most frequent class to 3.33 for the rarest" in caplog.text
    mixed = tasks.task_of(data, ModelConfig(), StepConfig(mixup_alpha=0.2), train)
    assert mixed.loss.of_probabilities
    # A class without a row has the weight of the rarest one.
    task = tasks.task_of(data, ModelConfig(num_outputs=4), StepConfig(), train)
    assert task.loss.class_weights[3] == task.loss.class_weights[2]


@pytest.mark.parametrize(
    ("data", "train", "words"),
    [
        (LABELS, {"loss": "dice"}, "loss='dice' with labelled images; it is for masks"),
        (IMAGES, {"loss": "focal"}, "loss='focal' with target images, but it is for classes or "),
        (IMAGES, {"class_weights": "balanced"}, "class_weights='balanced' with target images, "),
    ],
)
def test_a_loss_for_other_data_is_refused(data, train, words):
    with pytest.raises(UserError) as error:
        tasks.task_of(data, ModelConfig(), StepConfig(), TrainConfig(**train))
    assert words in str(error.value)


def test_an_ignored_value_that_is_a_class_is_refused():
    data = masks_of(MASKS.source.targets)
    data.images = ImageConfig(image_size=(8, 6), targets="mask", ignore_class=2)
    with pytest.raises(UserError, match="ignore_class=2 is one of the classes 0 to 2"):
        tasks.task_of(data, ModelConfig(num_outputs=3), StepConfig(), TrainConfig())
    # The value 2 is ignored, so two classes are left.
    task = tasks.task_of(data, ModelConfig(num_outputs=2), StepConfig(), TrainConfig())
    assert task.num_outputs == 2
