"""An arm of tools/bench.py: MNIST from PNG files, with tf.data and Keras's own `fit`, on one GPU.

It talks to the driver through protocol.py. Network, batch, precision and optimizer are tfaccel's.
Settings:

    precision, jit_compile  the dtype policy, and the argument of `compile`
    steps_per_execution     a number, or "epoch"
    data                    "files": images are decoded in each epoch. The other values decode
                            images once. "cached": `Dataset.cache()` keeps them, and they are
                            shuffled one by one. "gathered": whole batches are gathered by shuffled
                            indices. "arrays": `fit` takes them as arrays.
    mnist                   a folder that tools/write_mnist_png.py wrote
    image_size, batch       height and width of all files, and the images of a step
    drop, steps, step_times see timed_fit.py
"""

import pathlib

import keras
import numpy as np
import tensorflow as tf

from bench_arms import protocol
from bench_arms.timed_fit import (
    fit_arm,
    gathered_whole,
    start_keras_alone,
    steps_in_execution,
)
from tfaccel.experiment import models

MANY = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": False}


def begin(settings: dict) -> protocol.Arm:
    """Makes the pipeline and the model, and trains the first steps."""
    start_keras_alone(settings["precision"])
    files = sorted((pathlib.Path(settings["mnist"]) / "training").glob("*/*.png"))
    epoch_steps = len(files) // settings["batch"]
    shape = (settings["image_size"], settings["image_size"], 1)
    body = models.build("mnist_cnn", image_shape=shape, num_outputs=10)
    first = keras.Input(shape, dtype="uint8")
    model = keras.Model(first, body(keras.layers.Rescaling(1 / 255)(first)))
    model.compile(
        keras.optimizers.AdamW(1e-3 * (settings["batch"] / 256) ** 0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=settings["jit_compile"],
        steps_per_execution=steps_in_execution(settings, epoch_steps),
    )
    data, fit_args = FED[settings["data"]](files, shape, settings["batch"])
    return fit_arm(
        model,
        data,
        settings,
        epoch_steps=epoch_steps,
        images_per_epoch=epoch_steps * settings["batch"],
        **fit_args,
    )


# Each of these functions returns the data for `fit`, and further arguments. A pipeline is endless,
# so that one pipeline serves all epochs, which is quicker.


def from_files(files: list[pathlib.Path], shape: tuple, batch: int) -> tuple:
    """Returns batches of images that are decoded in each epoch."""
    examples = paths(files).shuffle(len(files)).repeat().map(decoder(shape), **MANY)
    return batches(examples, batch), {"steps_per_epoch": len(files) // batch}


def cached(files: list[pathlib.Path], shape: tuple, batch: int) -> tuple:
    """Returns batches of images that `Dataset.cache()` keeps."""
    examples = paths(files).map(decoder(shape), **MANY).cache().shuffle(len(files)).repeat()
    return batches(examples, batch), {"steps_per_epoch": len(files) // batch}


def gathered(files: list[pathlib.Path], shape: tuple, batch: int) -> tuple:
    """Returns batches that are gathered by shuffled indices of images."""
    pixels, labels = decoded(files, shape)
    data = gathered_whole(pixels, labels, batch)
    return data.prefetch(tf.data.AUTOTUNE), {"steps_per_epoch": len(files) // batch}


def arrays(files: list[pathlib.Path], shape: tuple, batch: int) -> tuple:
    """Returns all images and labels as arrays, without those of a partial batch."""
    x, y = (each[: len(files) // batch * batch] for each in decoded(files, shape))
    return x, {"y": y, "batch_size": batch}


FED = {"files": from_files, "cached": cached, "gathered": gathered, "arrays": arrays}


def paths(files: list[pathlib.Path]) -> tf.data.Dataset:
    """Returns the path and the label of each file."""
    labels = [int(each.parent.name) for each in files]
    return tf.data.Dataset.from_tensor_slices(([str(each) for each in files], labels))


def decoder(shape: tuple):
    """Returns a function that takes a path and a label, and decodes the image."""

    def decode(path, label):
        return tf.ensure_shape(tf.io.decode_png(tf.io.read_file(path), channels=1), shape), label

    return decode


def decoded(files: list[pathlib.Path], shape: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Returns all images and labels."""
    examples = paths(files).map(decoder(shape), **MANY).batch(len(files))
    return next(examples.as_numpy_iterator())


def batches(examples: tf.data.Dataset, batch: int) -> tf.data.Dataset:
    """Returns full batches, which are prefetched."""
    return examples.batch(batch, drop_remainder=True, **MANY).prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    protocol.serve(begin)
