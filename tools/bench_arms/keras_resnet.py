"""An arm of tools/bench.py: an image network with Keras's own `fit`, on one GPU, no strategy.

It talks to the driver through protocol.py. Settings:

    precision, jit_compile  the dtype policy, and the argument of `compile`
    steps_per_execution     a number, or "epoch"
    data                    "device": all images are in GPU memory, and the step gathers its batch.
                            "host": images are uint8 in host memory, tf.data gathers batches, and
                            the first layer of the model normalises them. "host to device": the same
                            as "host", but tf.data copies the batches to the GPU.
    model, image_size       a model of keras.applications; height and width of its images
    batch                   images of a step
    epoch_steps             steps of an epoch; by default the value of "drop"
    drop, steps, step_times see timed_fit.py
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
    """Makes the images and the model, and trains the first steps."""
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
    """Returns a network of keras.applications, with layers for its input and a float32 head."""
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
    """Normalises uint8 images: subtracts the mean, and divides by the standard deviation."""
    scale, offset = 1 / (255 * STD), -MEAN / STD
    return keras.layers.Rescaling(scale=scale.tolist(), offset=offset.tolist())(images)


class OnDevice(keras.layers.Layer):
    """Keeps images on the GPU, and returns them by index.

    TensorFlow cannot gather uint8 values on a GPU, so four bytes are stored as one float32.
    """

    def __init__(self, images: np.ndarray):
        """Takes all images: [number, height, width, 3] uint8."""
        super().__init__(trainable=False)
        self._shape = images.shape[1:]
        rows = images.reshape(len(images), -1).view(np.float32)
        with tf.device(device()):
            self._rows = tf.identity(tf.constant(rows))

    def call(self, ids):
        """Returns [batch, height, width, 3] uint8."""
        return tf.reshape(tf.bitcast(tf.gather(self._rows, ids), tf.uint8), (-1, *self._shape))

    def compute_output_spec(self, ids):
        """Returns the output's shape and dtype; Keras would assume the autocast dtype."""
        return keras.KerasTensor((None, *self._shape), dtype="uint8")


def device() -> str:
    """Returns the name of the GPU, or of the CPU if there is no GPU."""
    return "/gpu:0" if tf.config.list_logical_devices("GPU") else "/cpu:0"


def dataset(images: np.ndarray, labels: np.ndarray, settings: dict) -> tf.data.Dataset:
    """Returns endless shuffled batches for the setting "data"."""
    kind = settings["data"]
    x = np.arange(len(images)) if kind == "device" else images  # indices, for images on the GPU
    batches = gathered_whole(x, labels, settings["batch"])
    if kind == "host to device":
        return batches.apply(tf.data.experimental.prefetch_to_device(device()))
    return batches.prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    protocol.serve(begin)
