"""Finds the largest global batch that fits in the GPUs' memory, or the cheapest way to keep one.

Takes an experiment; returns the number, or the settings. Each candidate runs in a child process,
whose end frees all of its memory. The child runs a few real steps of training and one of testing,
with DALI's pool.

    batch = auto_batch(config)      # 1920
    saving = auto_saving(config)    # Saving({"step.remat": "blocks"}, step_s=0.21, times=1.19)
    largest_batch(lambda batch: batch <= 1000, multiple=8, at_most=10**6, start=256)    # 1000

A candidate takes as long as a run takes to its first steps: about a minute for ResNet-50 with XLA.
There may be ten or twenty candidates.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable

import tensorflow as tf

from tfaccel.common import run_log
from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import in_figures
from tfaccel.config import Config
from tfaccel.diagnostics.profile.knobs import with_changes
from tfaccel.experiment.open_data import open_source
from tfaccel.experiment.thaw import stages_of
from tfaccel.experiment.train import enter_stage, prepare
from tfaccel.keras_internals.sharded_states import ELEMENTWISE
from tfaccel.process.isolate import IsolatedError, run_quietly
from tfaccel.run import Run
from tfaccel.runtime.cluster import find
from tfaccel.runtime.gpu_usage import GpuUsage
from tfaccel.training.memory_forecast import forecast_of
from tfaccel.training.memory_plan import Plan, saved_of
from tfaccel.training.memory_ways import WAYS, Situation, Way

# The share of a GPU's memory, or of its limit, that each candidate leaves free. A long run needs
# more than its first steps: DALI's pool grows with the largest images, and memory gets fragmented.
MARGIN = 0.05
NUM_EXECUTIONS = 3
NUM_TIMED = 10  # executions after those
TENSORS_MULTIPLE = 8  # rows that fill a tile of Tensor Cores


@dataclasses.dataclass(frozen=True)
class Tried:
    """What a candidate that fits has shown.

    Attributes:
      peak: the memory that it took, in words.
      step_s: the seconds of a step, with its batch from the loader.
      plan: the forecast of its memory; None if there is none.
    """

    peak: str
    step_s: float
    plan: Plan | None = None


@dataclasses.dataclass(frozen=True)
class Saving:
    """Settings with which a batch fits.

    Attributes:
      settings: values by field of the config, e.g. {"step.remat": "blocks"}; empty if the config
        fits as it is.
      step_s: the seconds of a step with them.
      times: the same, as a multiple of the plain step's seconds, which are those of the largest
        plain batch that was seen to fit, for as many rows; None if no plain batch fits.
    """

    settings: dict[str, object]
    step_s: float
    times: float | None

    @property
    def flags(self) -> str:
        """The settings as flags of the command."""
        return " ".join(f"--config.{field}={value}" for field, value in self.settings.items())

    def __str__(self):
        """Returns "step.remat=blocks: 0.2100 s a step, 1.19 times the plain step"."""
        said = ", ".join(f"{field}={value}" for field, value in self.settings.items())
        price = "" if self.times is None else f", {self.times:.2f} times the plain step"
        return f"{said}: {in_figures(self.step_s)} s a step{price}"


def largest_batch(
    fits: Callable[[int], bool], *, multiple: int, at_most: int, start: int | None = None
) -> int:
    """Returns the largest multiple that fits, or 0 if none does.

    The search doubles the batch from `start` while it fits, and then bisects. It tries each size
    once.

    Args:
      fits: returns whether a batch fits; if a batch fits, all smaller ones must fit.
      multiple: the batch is a multiple of this.
      at_most: the largest batch to try.
      start: the batch to try first; by default the smallest one.
    """
    fitting, least_unfit = 0, at_most // multiple + 1
    candidate = max(1, min((start or multiple) // multiple, least_unfit - 1))
    found_limit = False
    while least_unfit - fitting > 1:
        if fits(candidate * multiple):
            fitting = candidate
        else:
            least_unfit, found_limit = candidate, True
        middle = (fitting + least_unfit) // 2
        candidate = middle if found_limit else min(2 * fitting, least_unfit - 1)
    return fitting * multiple


def auto_batch(config: Config) -> int:
    """Returns the largest global batch that trains, a multiple of 8 and of the replicas.

    A share of the memory, `MARGIN`, stays free. The batch is not larger than the training data.

    Args:
      config: the experiment; the search starts with its batch.

    Raises:
      UserError: there is no GPU, even the smallest batch does not fit, or the config is wrong.
      IsolatedError: a candidate failed for another reason.
    """
    run_log.show()
    facts = run_quietly(describe, config)
    multiple = math.lcm(TENSORS_MULTIPLE, facts["num_replicas"])
    most = max(facts["num_examples"], multiple)
    batch = largest_batch(
        lambda each: _fits(with_batch(config, each), f"global_batch_size={each}"),
        multiple=multiple,
        at_most=most,
        start=config.data.whole_batch(facts["num_replicas"]),
    )
    if not batch:
        raise UserError(
            f"not even a global batch of {multiple} fits; use --config.step.remat=blocks, "
            "--config.runtime.precision=mixed_float16, smaller images or a smaller model"
        )
    reason = "all training images" if batch + multiple > most else f"{MARGIN:.0%} of memory left"
    summary("autobatch: global_batch_size=%d (%s)", batch, reason)
    return batch


def auto_saving(config: Config) -> Saving:
    """Returns the cheapest settings with which the config's own batch trains.

    Each way of tfaccel/training/memory_ways.py that keeps the result is tried alone, with the
    cheapest value that fits. If none fits alone, two are tried together. The one with the quickest
    step is returned. A share of the memory, `MARGIN`, stays free.

    Args:
      config: the experiment.

    Raises:
      UserError: there is no GPU, the batch does not fit in any way, or the config is wrong.
      IsolatedError: a candidate failed for another reason.
    """
    run_log.show()
    num_replicas = run_quietly(describe, config)["num_replicas"]
    batch = config.data.whole_batch(num_replicas)
    if plain := _tried(config, f"global_batch_size={batch}"):
        summary("autobatch: global_batch_size=%d fits as it is; nothing need be set", batch)
        return Saving({}, plain.step_s, 1.0)
    smaller, plain = _smaller_plain(config, batch, math.lcm(TENSORS_MULTIPLE, num_replicas))
    plain_s = plain.step_s * batch / smaller if plain else None
    plan = _scaled(plain.plan if plain else None, batch / smaller if plain else 1.0)
    known = {each.__name__.lower() for each in ELEMENTWISE}
    shards = config.train.optimizer in known and not config.step.shard_states
    situation = Situation(
        plan,
        batch,
        saved_by_slices=saved_of(plan.optimizer, plan.parameters, num_replicas) if shards else 0,
        num_replicas=num_replicas,
        step=config.step,
        half_precision=config.runtime.precision != "float32",
    )
    ways = [each for each in WAYS if each.keeps_result]
    found = [each for way in ways if (each := _fitting(config, situation, way))]
    for way in ways if not found else ():
        strongest = way.stronger(situation, None)
        if strongest is None:
            continue
        after, first = way.after(situation, strongest), {way.field: strongest}
        others = (other for other in ways if other is not way)
        found += [each for other in others if (each := _fitting(config, after, other, first))]
    if not found:
        raise UserError(
            f"global_batch_size={batch} does not fit in any way that keeps the result "
            f"({', '.join(way.name for way in ways)}); use a smaller batch, "
            "precision='mixed_float16', smaller images or a smaller model"
        )
    priced = [
        dataclasses.replace(each, times=each.step_s / plain_s if plain_s else None)
        for each in found
    ]
    priced.sort(key=lambda each: each.step_s)
    for each in priced:
        summary("autobatch: %s", each)
    summary(
        "autobatch: %s for global_batch_size=%d (the quickest of %d that fit, %s of memory left)",
        *(priced[0].flags, batch, len(priced), f"{MARGIN:.0%}"),
    )
    return priced[0]


def _smaller_plain(config: Config, batch: int, multiple: int) -> tuple[int, Tried | None]:
    """Returns the largest of a half, a quarter and so on of a batch that fits, and its trial."""
    size = batch // 2 // multiple * multiple
    while size:
        if tried := _tried(with_batch(config, size), f"global_batch_size={size}"):
            return size, tried
        size = size // 2 // multiple * multiple
    return 0, None


def _scaled(plan: Plan | None, factor: float) -> Plan:
    """Returns the plan for more rows; a plan that tells nothing if there is none."""
    if plan is None or plan.activations is None:
        return Plan(0, 0, 0)
    return dataclasses.replace(plan, activations=math.ceil(factor * plan.activations))


def _fitting(
    config: Config, situation: Situation, way: Way, already: dict[str, object] | None = None
) -> Saving | None:
    """Returns a way's cheapest value that fits, with what is set already; None if none fits."""
    already = already or {}
    guess = dataclasses.replace(situation, plan=Plan(0, 0, 0))
    value = way.value(situation)
    value = way.value(guess) if value is None else value  # the plan may be wrong
    while value is not None:
        settings = already | {way.field: value}
        said = ", ".join(f"{field}={each}" for field, each in settings.items())
        if tried := _tried(with_changes(config, settings), said):
            return Saving(settings, tried.step_s, None)
        value = way.stronger(situation, value)
    return None


def with_batch(config: Config, global_batch_size: int) -> Config:
    """Returns the experiment with another global batch size."""
    data = dataclasses.replace(
        config.data, global_batch_size=global_batch_size, batch_per_replica=None
    )
    return dataclasses.replace(config, data=data)


def _fits(config: Config, what: str) -> bool:
    return _tried(config, what) is not None


def _tried(config: Config, what: str) -> Tried | None:
    """Returns what a candidate has shown; None if it does not fit."""
    try:
        tried = run_quietly(train_briefly, config)  # hides pages of log about full memory
    except IsolatedError as error:
        if not error.out_of_memory:
            raise
        error.log.unlink(missing_ok=True)
        summary("autobatch: %s does not fit", what)
        return None
    summary("autobatch: %s fits, %s, %s s a step", what, tried.peak, in_figures(tried.step_s))
    return tried


# The functions below run in the child.


def describe(config: Config) -> dict[str, int]:
    """Returns the number of replicas and of training images. Starts the devices.

    Raises:
      UserError: there is no GPU, or there are several workers.
    """
    cluster = find(os.environ)
    if cluster.num_workers > 1:
        raise UserError(
            f"autobatch does not work with several workers ({cluster.source}); run it as one "
            "process, without TF_CONFIG, and multiply its batch by the number of workers"
        )
    run = Run(config.runtime)
    if run.runtime.devices[0].cuda_ordinal is None:
        raise UserError(
            "autobatch needs a GPU, because memory does not limit the batch on the CPU; run it on "
            "a machine with a GPU"
        )
    source = open_source(config.data, "train")
    return {"num_replicas": run.strategy.num_replicas_in_sync, "num_examples": len(source)}


def train_briefly(config: Config) -> Tried:
    """Trains and tests for a few steps, and returns the memory and the time that these took.

    It makes everything that `train.run` makes, except for the workdir and its files.
    """
    run = Run(config.runtime)
    usage = GpuUsage(run.runtime.devices)
    held = [_hold_back(index, each) for index, each in enumerate(usage.read())]
    train, test, model = prepare(run, config)
    if last := stages_of(config)[1:]:  # the last stage trains most weights
        enter_stage(run, config, model, train, last[-1])
    steps = NUM_EXECUTIONS * model.steps_per_execution  # until all prefetched batches exist
    model.fit(train, steps_per_epoch=min(steps, train.num_batches), verbose=0)
    model.evaluate(test, steps=1, verbose=0)
    peak, forecast = _describe_peak(usage, sum(map(len, held[:1]))), forecast_of(model)
    num_timed = min(NUM_TIMED * model.steps_per_execution, train.num_batches)
    began = time.perf_counter()
    model.fit(train, steps_per_epoch=num_timed, verbose=0)  # its end waits for the device
    step_s = (time.perf_counter() - began) / num_timed
    return Tried(peak, step_s, forecast.plan if forecast else None)


def _hold_back(gpu_index: int, usage) -> list[tf.Tensor]:
    """Returns tensors of 1 MiB each that hold the margin of a GPU until they are deleted."""
    gpu = tf.config.get_visible_devices("GPU")[gpu_index]
    limits = tf.config.get_logical_device_configuration(gpu)
    memory_mib = limits[0].memory_limit if limits else None
    num_tensors = int(MARGIN * (memory_mib or usage.memory_total_mib))
    with tf.device(f"/gpu:{gpu_index}"):
        return [tf.zeros(2**20 // 4) for _ in range(num_tensors)]


def _describe_peak(usage: GpuUsage, held_mib: int) -> str:
    """Returns the largest peak of the replicas, and the used memory of the fullest GPU."""
    read = usage.read()
    if not read:
        return "peak not known"
    peaks = [
        tf.config.experimental.get_memory_info(f"GPU:{index}")["peak"] for index in range(len(read))
    ]
    fullest = max(read, key=lambda each: each.memory_mib)
    return (
        f"TensorFlow's peak {(max(peaks) >> 20) - held_mib:,} MiB, "
        f"{fullest.memory_mib - held_mib:,} of {fullest.memory_total_mib:,} MiB used with DALI"
    )
