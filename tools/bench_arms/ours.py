"""An arm of tools/bench.py: tfaccel, from data on the device, from JPEG files, or MNIST's PNGs.

Speaks as protocol.py says. By `tfaccel launch` it is one rank of several. Settings:

    precision, xla, setup   for tfaccel.setup: the dtype policy, whether XLA, and anything else
    step                    for tfaccel.StepConfig
    data                    "random": made here; "jpegs" or "mnist": from the folder below
    jpegs, mnist            of JPEG files; as tools/write_mnist_png.py makes it
    loader, augment, dali   for run.loader
    model, image_size       the network, and its images' height and width
    batch                   images of a step, on each GPU
    epoch_steps             of an epoch of "random" and "jpegs"; "drop" where it is not given
    steps_per_execution     a number, or "epoch"
    drop, steps, step_times, trace
                            as timed_fit.py says
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
    """Returns a loader of ImageNet's kind of images."""
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
    """Returns the folder's JPEG files, at any depth, again and again until all labels have one."""
    files = files_below(pathlib.Path(folder), JPEG_SUFFIXES)
    return ImageSource(Blobs(tuple(itertools.islice(itertools.cycle(files), len(labels)))), labels)


def optimizer(settings: dict) -> keras.optimizers.Optimizer:
    """Returns the one of the network's config; a rate at which random labels do no harm."""
    if settings["data"] == "mnist":
        return keras.optimizers.AdamW(1e-3 * (settings["batch"] / 256) ** 0.5)
    return keras.optimizers.SGD(1e-3, momentum=0.9)


if __name__ == "__main__":
    protocol.serve(begin)
