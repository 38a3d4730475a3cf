"""An arm of tools/bench.py: MNIST from PNG files by tf.data and Keras's own `fit`, on one GPU.

Speaks as protocol.py says. The network is tfaccel's, as are batch, precision and optimizer.
Settings:

    precision, jit_compile  the dtype policy, and as for `compile`
    steps_per_execution     a number, or "epoch"
    cache                   whether decoded images are kept in memory, by `Dataset.cache()`
    mnist                   the folder, as tools/write_mnist_png.py makes it
    image_size, batch       height and width of all files, and the images of a step
    drop, steps, step_times as timed_fit.py says
"""

import pathlib

import keras
import tensorflow as tf

from bench_arms import protocol
from bench_arms.timed_fit import fit_arm, start_keras_alone, steps_in_execution
from tfaccel import models


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
    return fit_arm(
        model,
        dataset(files, shape, settings),
        settings,
        epoch_steps=epoch_steps,
        images_per_epoch=epoch_steps * settings["batch"],
        steps_per_epoch=epoch_steps,
    )


def dataset(files: list[pathlib.Path], shape: tuple, settings: dict) -> tf.data.Dataset:
    """Returns shuffled batches without end: one pipeline for all epochs, which is quicker."""
    labels = [int(each.parent.name) for each in files]
    examples = tf.data.Dataset.from_tensor_slices(([str(each) for each in files], labels))

    def decode(path, label):
        return tf.ensure_shape(tf.io.decode_png(tf.io.read_file(path), channels=1), shape), label

    many = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": False}
    if settings["cache"]:
        examples = examples.map(decode, **many).cache().shuffle(len(files)).repeat()
    else:
        examples = examples.shuffle(len(files)).repeat().map(decode, **many)
    return examples.batch(settings["batch"], drop_remainder=True, **many).prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    protocol.serve(begin)
