"""An arm of tools/bench.py: tfaccel trains a network of networks.py, on one device or several.

It talks to the driver through protocol.py. Images are uint8 in the memory of the device, and the
step gathers and normalises its batch. Batches of tokens come from tf.data, which keeps them. All
steps of an epoch are one execution. Settings:

    network, tiny           a key of networks.NETWORKS; true for its tiny size
    precision, xla, setup   for tfaccel.setup: the dtype policy, XLA on or off, other arguments
    step                    arguments for tfaccel.StepConfig
    batch, size             rows of a step on each device; height and width of images, or tokens of
                            a text
    epoch_steps             steps of an epoch; by default "drop"
    steps_per_execution     a number, or "epoch"
    drop, steps, trace, trace_after
    first_steps, steps_of_mark
                            see timed_fit.py
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import tfaccel
from bench_arms import keras_networks, networks, protocol
from bench_arms.networks import Network
from bench_arms.timed_fit import (
    MEAN,
    STD,
    fit_arm,
    random_images,
    steps_in_execution,
    steps_of_epoch,
)


def begin(settings: dict) -> protocol.Arm:
    """Sets up the run and trains its first steps."""
    network = networks.of_settings(settings)
    run = tfaccel.setup(
        precision=settings["precision"], xla=settings["xla"], **settings.get("setup", {})
    )
    # Each replica has the rows of one device.
    batch = network.batch * run.strategy.num_replicas_in_sync
    network = dataclasses.replace(network, batch=batch)
    epoch_steps = steps_of_epoch(settings)
    with run.scope():
        model = keras_networks.build(network)
    run.compile(
        model,
        optimizer(network),
        loss(network),
        step=tfaccel.StepConfig(**settings.get("step", {})),
        steps_per_execution=steps_in_execution(settings, epoch_steps),
    )
    data, num_bytes, fit_args = make_data(network, run, epoch_steps)
    arm = fit_arm(
        model,
        data,
        settings,
        epoch_steps=epoch_steps,
        images_per_epoch=epoch_steps * network.batch,
        **fit_args,
    )

    def stretch():
        found = arm.stretch()
        del found["images_per_second"]  # a row need not be an image
        timed = networks.rates(network, steps=found["timed_steps"], seconds=found["seconds"])
        return timed | found | {"data_mib": num_bytes / 2**20}

    facts = {"parameters": sum(int(np.prod(each.shape)) for each in model.trainable_variables)}
    return dataclasses.replace(arm, ready=arm.ready | facts, stretch=stretch)


def optimizer(network: Network) -> keras.optimizers.Optimizer:
    """Returns the optimizer of the network."""
    own = dict(networks.OPTIMIZERS[network.optimizer])
    rate = own.pop("lr")
    return (keras.optimizers.SGD if "momentum" in own else keras.optimizers.AdamW)(rate, **own)


def loss(network: Network) -> keras.losses.Loss:
    """Returns the loss; attention alone computes its own, which is compared with 0."""
    if network.kind == "weights":
        return keras.losses.MeanAbsoluteError()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_data(network: Network, run: tfaccel.Run, epoch_steps: int) -> tuple:
    """Returns data for `fit`, its bytes on the device, and arguments for `fit`."""
    number = epoch_steps * network.batch
    if network.kind == "image":
        images = random_images(number, network.size)
        source = tfaccel.sources.arrays(images, labels(network, number))
        return loader(network, run, source), images.nbytes, {}
    if network.kind == "mask":
        images = random_images(number, network.size)
        targets = masks(network, number)
        source = tfaccel.sources.arrays(images, targets=targets)
        num_bytes = images.nbytes + targets.nbytes
        return loader(network, run, source, targets="mask"), num_bytes, {}
    batches = tf.data.Dataset.from_tensor_slices(texts(network, epoch_steps))
    return batches.cache().repeat().prefetch(4), 0, {"steps_per_epoch": epoch_steps}


def labels(network: Network, number: int) -> np.ndarray:
    """Returns random labels, [number] int32, of which every class has one if there are enough."""
    found = np.random.default_rng(0).integers(0, network.num_classes, number).astype(np.int32)
    found[: network.num_classes] = np.arange(network.num_classes)[:number]
    return found


def masks(network: Network, number: int) -> np.ndarray:
    """Returns [number, size, size, 1] uint8: 64 random masks of classes repeated, to be quick."""
    some = np.random.default_rng(0).integers(
        0, network.num_classes, (64, network.size, network.size, 1), dtype=np.uint8
    )
    return np.resize(some, (number, *some.shape[1:]))


def loader(network: Network, run: tfaccel.Run, source, **settings):
    """Returns a loader with all images in the memory of the device."""
    return run.loader(
        source,
        image_size=(network.size, network.size),
        mean=MEAN,
        std=STD,
        global_batch_size=network.batch,
        loader="memory",
        shuffle=True,
        **settings,
    )


def texts(network: Network, num_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets: [batches, rows, ...]."""
    if network.kind == "weights":  # the inputs are weights of the model
        zeros = np.zeros((num_batches, 1, 1), np.float32)
        return zeros, zeros
    rng = np.random.default_rng(0)
    rows, length = (num_batches, network.batch), network.size
    if network.kind == "next":
        ids = rng.integers(0, network.vocabulary, (*rows, length + 1)).astype(np.int32)
        return ids[..., :-1], ids[..., 1:]
    ids = rng.integers(0, network.vocabulary, (*rows, length)).astype(np.int32)
    return ids, rng.integers(0, network.num_classes, rows).astype(np.int32)


if __name__ == "__main__":
    protocol.serve(begin)
