"""An arm of tools/bench.py: Keras's own `fit` of a network of images, on one GPU, no strategy.

Speaks as protocol.py says. Settings:

    precision, jit_compile  the dtype policy, and as for `compile`
    steps_per_execution     a number, or "epoch"
    data                    "device": all images are on the GPU, gathered there in the step;
                            "host": uint8 in the host's memory, gathered by tf.data, normalised by
                            the model's first layer; "host to device": as "host", with
                            tf.data's own copies to the GPU
    model, image_size       of keras.applications, and its images' height and width
    batch                   images of a step
    epoch_steps             of an epoch; "drop" where it is not given
    drop, steps, step_times as timed_fit.py says
"""

import keras
import numpy as np
import tensorflow as tf

from bench_arms import protocol
from bench_arms.timed_fit import (
    MEAN,
    NUM_CLASSES,
    STD,
    fit_arm,
    gathered_whole,
    random_images,
    start_keras_alone,
    steps_in_execution,
    steps_of_epoch,
)

MEAN, STD = (np.array(each, np.float32) for each in (MEAN, STD))


def begin(settings: dict) -> protocol.Arm:
    """Makes the images and the model, and trains its first steps."""
    start_keras_alone(settings["precision"])
    size, batch = settings["image_size"], settings["batch"]
    epoch_steps = steps_of_epoch(settings)
    images = random_images(epoch_steps * batch, size)
    labels = np.random.default_rng(0).integers(0, NUM_CLASSES, len(images)).astype(np.int32)
    model = network(images, settings)
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=settings["jit_compile"],
        steps_per_execution=steps_in_execution(settings, epoch_steps),
    )
    return fit_arm(
        model,
        dataset(images, labels, settings),
        settings,
        epoch_steps=epoch_steps,
        images_per_epoch=len(images),
        steps_per_epoch=epoch_steps,
    )


def network(images: np.ndarray, settings: dict) -> keras.Model:
    """Returns the network of keras.applications, with a float32 head, and its first layer."""
    shape = images.shape[1:]
    constructors = {name.lower(): each for name, each in vars(keras.applications).items()}
    options = {"include_top": False, "weights": None, "pooling": "avg", "input_shape": shape}
    body = constructors[settings["model"].lower()](**options)
    if settings["data"] == "device":
        first = keras.Input((), dtype="int64")
        x = normalised(OnDevice(images)(first))
    else:
        first = keras.Input(shape, dtype="uint8")
        x = normalised(first)
    return keras.Model(first, keras.layers.Dense(NUM_CLASSES, dtype="float32")(body(x)))


def normalised(images):
    """Returns uint8 images less the mean, by the deviation."""
    scale, offset = 1 / (255 * STD), -MEAN / STD
    return keras.layers.Rescaling(scale=scale.tolist(), offset=offset.tolist())(images)


class OnDevice(keras.layers.Layer):
    """Images that are on the GPU, by their numbers.

    TensorFlow gathers no uint8 on a GPU: four of them are taken for a float32, bit by bit.
    """

    def __init__(self, images: np.ndarray):
        """Takes all of them: [number, height, width, 3] uint8."""
        super().__init__(trainable=False)
        self._shape = images.shape[1:]
        rows = images.reshape(len(images), -1).view(np.float32)
        with tf.device(device()):
            self._rows = tf.identity(tf.constant(rows))

    def call(self, ids):
        """Returns [batch, height, width, 3] uint8."""
        return tf.reshape(tf.bitcast(tf.gather(self._rows, ids), tf.uint8), (-1, *self._shape))

    def compute_output_spec(self, ids):
        """Returns the shape and dtype of that, where autocasting would say another."""
        return keras.KerasTensor((None, *self._shape), dtype="uint8")


def device() -> str:
    """Returns the GPU, or the CPU where there is none."""
    return "/gpu:0" if tf.config.list_logical_devices("GPU") else "/cpu:0"


def dataset(images: np.ndarray, labels: np.ndarray, settings: dict) -> tf.data.Dataset:
    """Returns shuffled batches without end, gathered whole: quicker than image by image."""
    kind = settings["data"]
    x = np.arange(len(images)) if kind == "device" else images  # numbers, of what is there already
    batches = gathered_whole(x, labels, settings["batch"])
    if kind == "host to device":
        return batches.apply(tf.data.experimental.prefetch_to_device(device()))
    return batches.prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    protocol.serve(begin)
