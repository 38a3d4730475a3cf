"""An arm of tools/bench.py: tfaccel, with data on the device, JPEG files, or MNIST's PNG files.

It talks to the driver through protocol.py. If `tfaccel launch` starts it, it is one of several
ranks. Settings:

    precision, xla, setup   for tfaccel.setup: the dtype policy, XLA on or off, other arguments
    step                    arguments for tfaccel.StepConfig
    data                    "random": this program makes images; "jpegs", "mnist": it reads files
    jpegs, mnist            a folder of JPEG files; a folder that tools/write_mnist_png.py wrote
    loader, augment, dali   arguments for run.loader
    model, image_size       the network; height and width of its images
    batch                   images of a step on each GPU
    epoch_steps             steps of an epoch of "random" and "jpegs"; by default "drop"
    steps_per_execution     a number, or "epoch"
    drop, steps, step_times, trace, trace_after
                            see timed_fit.py
"""

import itertools
import pathlib

import keras
import numpy as np

import tfaccel
from bench_arms import protocol
from bench_arms.machine import JPEG_SUFFIXES, files_below
from bench_arms.timed_fit import (
    MEAN,
    NUM_CLASSES,
    STD,
    fit_arm,
    random_images,
    steps_in_execution,
    steps_of_epoch,
)
from tfaccel import sources
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.experiment import models


def begin(settings: dict) -> protocol.Arm:
    """Sets up the run and trains its first steps."""
    run = tfaccel.setup(
        precision=settings["precision"], xla=settings["xla"], **settings.get("setup", {})
    )
    is_mnist = settings["data"] == "mnist"
    train = (mnist if is_mnist else photographs)(run, settings)
    size, channels = (settings["image_size"],) * 2, 1 if is_mnist else 3
    with run.scope():
        model = models.build(
            settings["model"],
            image_shape=(*size, channels),
            num_outputs=10 if is_mnist else NUM_CLASSES,
        )
    run.compile(
        model,
        optimizer(settings),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        step=tfaccel.StepConfig(**settings.get("step", {})),
        steps_per_execution=steps_in_execution(settings, len(train)),
    )
    return fit_arm(
        model,
        train,
        settings,
        epoch_steps=len(train),
        images_per_epoch=train.num_examples,
        speaks=run.cluster.is_chief,
    )


def mnist(run, settings: dict):
    """Returns the loader of configs/mnist.py, without its rotation."""
    return run.image_folder(
        pathlib.Path(settings["mnist"]) / "training",
        image_size=(settings["image_size"],) * 2,
        channels=1,
        global_batch_size=settings["batch"],
        loader=settings["loader"],
        shuffle=True,
    )


def photographs(run, settings: dict):
    """Returns a loader of colour images with 1,000 classes, as in ImageNet."""
    batch = settings["batch"] * run.strategy.num_replicas_in_sync
    number = batch * steps_of_epoch(settings)
    labels = np.random.default_rng(0).integers(0, NUM_CLASSES, number).astype(np.int32)
    if settings["data"] == "jpegs":
        source = repeated(settings["jpegs"], labels)
    else:
        source = sources.arrays(random_images(number, settings["image_size"]), labels)
    return run.loader(
        source,
        image_size=(settings["image_size"],) * 2,
        mean=MEAN,
        std=STD,
        global_batch_size=batch,
        loader=settings["loader"],
        augment=settings.get("augment", "none"),
        dali=tfaccel.DaliConfig(**settings.get("dali", {})),
        shuffle=True,
    )


def repeated(folder: str, labels: np.ndarray) -> ImageSource:
    """Returns the JPEG files of a folder, repeated until there is one for each label."""
    files = files_below(pathlib.Path(folder), JPEG_SUFFIXES)
    return ImageSource(Blobs(tuple(itertools.islice(itertools.cycle(files), len(labels)))), labels)


def optimizer(settings: dict) -> keras.optimizers.Optimizer:
    """Returns the optimizer of the network's config, with a rate that is safe for random labels."""
    if settings["data"] == "mnist":
        return keras.optimizers.AdamW(1e-3 * (settings["batch"] / 256) ** 0.5)
    return keras.optimizers.SGD(1e-3, momentum=0.9)


if __name__ == "__main__":
    protocol.serve(begin)
