"""Runs in a variant's process: trains the variant stretch by stretch, on request.

This module takes the variant's config. It answers through the files of protocol.py with the time of
the first step, images per second, losses and peak memory.

One `fit` runs for the whole life of the process, so no input pipeline is restarted. A callback
makes it wait between stretches. Keras reads the logs after each execution, as in `tfaccel train`,
so the device has finished its work when the callback is called. There is no validation, checkpoint
or export.
"""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable

import keras
import psutil
import tensorflow as tf

from tfaccel.config import Config
from tfaccel.data.choose import choose_loader
from tfaccel.data.distribute import Loader
from tfaccel.data.source import ArraySource
from tfaccel.diagnostics.compare.pace import LEARNING, Pace, Settings, fitted, warm_up_steps
from tfaccel.diagnostics.compare.protocol import POLL_S, write
from tfaccel.diagnostics.compare.variants import CEILING, Facts
from tfaccel.experiment.open_data import open_source
from tfaccel.experiment.train import prepare
from tfaccel.run import Run
from tfaccel.runtime.cluster import check_one_process, find
from tfaccel.runtime.devices import describe_environment
from tfaccel.training.callbacks.throughput import images_until


def serve(config: Config, settings: Settings, folder: pathlib.Path) -> None:
    """Trains until the parent ends this process."""
    train, _, model = prepare(Run(config.runtime), config)
    if config.runtime.precision == CEILING:
        # Float16 weights can become infinite, which would end the training. Only the speed of this
        # variant is wanted, so the function is wrapped to hide that check.
        model.train_function = functools.partial(model.train_function)
    model.fit(train, epochs=10**9, callbacks=[Stretches(train, settings, folder)], verbose=0)


class Stretches(keras.callbacks.Callback):
    """Times a stretch on each request, and waits between requests."""

    def __init__(
        self,
        loader: Loader,
        settings: Settings,
        folder: pathlib.Path,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Takes the loader of `fit`, the settings, the folder of protocol.py and a clock."""
        super().__init__()
        self._loader, self._settings, self._folder, self._clock = loader, settings, folder, clock
        self._number = -1  # of the stretch; -1 during the first steps, which are not timed
        self._losses, self._position = [], 0
        self._timed_from = None
        self._ready, self._pace = None, None

    def on_epoch_begin(self, epoch, logs=None):
        """Notes where the epoch begins: the loss in Keras's logs is the mean since then."""
        self._epoch_begins, self._sum = images_until(self._loader, self._loader.next_position), 0.0

    def on_train_batch_end(self, batch, logs=None):
        """Notes the loss of the execution, and begins or ends a stretch if its turn has come."""
        now, position = self._clock(), self._loader.position
        if self._ready is None:
            self._ready = {"first_step_s": time.time() - psutil.Process().create_time()}
            write(self._folder / "first.json", self._ready)
            self._began, self._executions = (now, position), 0
        self._take_loss(position, logs["loss"])
        self._executions += 1
        if self._executions < 2 or position < LEARNING:
            return
        if self._pace is None:
            self._learn(now, position)
        if position < self._until:
            return
        if self._number < 0:
            self._answer("ready.json", self._ready)
        elif self._timed_from is None:
            self._timed_from = (now, position, self._loader.waited_s)
            self._until = position + self._settings.steps
            return
        else:
            self._answer(f"result-{self._number}.json", self._rate(now, position))
        self._wait_for_request(position)

    def _learn(self, now: float, position: int) -> None:
        """Measures how long a step takes, and chooses the length of stretches and warm-up."""
        began, first = self._began
        self._pace = Pace(
            start_s=self._ready["first_step_s"],
            step_s=(now - began) / (position - first),
            epoch_steps=self._loader.num_batches,
            execution_steps=self.model.steps_per_execution,
        )
        self._ready["pace"] = dataclasses.asdict(self._pace)
        write(self._folder / "pace.json", self._ready["pace"])
        self._settings = fitted(self._settings, self._pace)
        self._until = warm_up_steps(self._settings, self._pace)

    def _take_loss(self, position: int, mean: float) -> None:
        """Appends the execution's own loss once for each of its steps.

        Keras logs the mean since the start of the epoch. The execution's own loss is the growth of
        the sum, divided by the execution's images.
        """
        images = images_until(self._loader, position) - self._epoch_begins
        before = images_until(self._loader, max(self._position, 0)) - self._epoch_begins
        total = mean * images
        own = (total - self._sum) / max(1, images - max(0, before))
        self._losses += [own] * (position - self._position)
        self._sum, self._position = total, position

    def _rate(self, now: float, position: int) -> dict:
        began, first, waited_s = self._timed_from
        images = images_until(self._loader, position) - images_until(self._loader, first)
        return {
            "images_per_second": images / (now - began),
            "waited": (self._loader.waited_s - waited_s) / (now - began),
        }

    def _answer(self, name: str, answer: dict) -> None:
        write(self._folder / name, answer | {"losses": self._losses, "peak_mib": peaks_mib()})
        self._losses = []

    def _wait_for_request(self, position: int) -> None:
        self._number += 1
        while not (self._folder / f"go-{self._number}").exists():
            time.sleep(POLL_S)
        self._timed_from = None
        self._until = position + self._settings.lead_in


def peaks_mib() -> list[int]:
    """Returns the peak memory, in MiB, of this process's tensors on each of its GPUs."""
    gpus = range(len(tf.config.list_logical_devices("GPU")))
    return [tf.config.experimental.get_memory_info(f"GPU:{each}")["peak"] >> 20 for each in gpus]


def describe(config: Config) -> Facts:
    """Returns the facts that decide which variants exist.

    This starts the devices, so it runs in a child.

    Raises:
      UserError: there are several workers, or the data set has a fault.
    """
    check_one_process(find(os.environ), "compare")
    devices = Run(config.runtime).runtime.devices
    gpu_ids = tuple(each.cuda_ordinal for each in devices if each.cuda_ordinal is not None)
    source = open_source(config.data, "train")
    choice = choose_loader(source, config.data, config.train_images, device=devices[0])
    return Facts(
        loaders=_loaders(config, source, choice.loader, device=devices[0]),
        gpu_ids=gpu_ids,
        num_examples=len(source),
        global_batch_size=config.data.whole_batch(len(devices)),
        environment=describe_environment(),
    )


def _loaders(config: Config, source, own: str, *, device) -> tuple[str, ...]:
    """Returns the loaders that can read the data here, the plain variant's loader first."""
    if isinstance(source, ArraySource):
        return ("cache", "memory")  # mapped arrays are already decoded
    names = ["tf_data", "dali_cpu" if device.cuda_ordinal is None else "dali_gpu"]
    auto = dataclasses.replace(config.data, loader="auto")
    if (
        own == "memory"
        or config.data.stored_size is not None
        or choose_loader(source, auto, config.train_images, device=device).loader == "memory"
    ):
        names.append("memory")
    return tuple(dict.fromkeys([*names, own]))
