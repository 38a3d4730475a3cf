"""Finds the largest global batch that fits in the GPUs' memory, or the fewest parts that fit.

Takes an experiment; returns the number. Each candidate runs in a child process, whose end frees all
of its memory. The child runs a few real steps of training and one of testing, with DALI's pool.

    batch = auto_batch(config)      # 1920
    parts = auto_parts(config)      # 4: accumulation_steps, for the config's own batch
    largest_batch(lambda batch: batch <= 1000, multiple=8, at_most=10**6, start=256)    # 1000

A candidate takes as long as a run takes to its first steps: about a minute for ResNet-50 with XLA.
There may be ten or twenty candidates.
"""

import dataclasses
import math
import os
from collections.abc import Callable

import tensorflow as tf

from tfaccel.common import run_log
from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.config import Config
from tfaccel.experiment.open_data import open_source
from tfaccel.experiment.thaw import stages_of
from tfaccel.experiment.train import enter_stage, prepare
from tfaccel.process.isolate import IsolatedError, run_quietly
from tfaccel.run import Run
from tfaccel.runtime.cluster import find
from tfaccel.runtime.gpu_usage import GpuUsage

# The share of a GPU's memory, or of its limit, that each candidate leaves free. A long run needs
# more than its first steps: DALI's pool grows with the largest images, and memory gets fragmented.
MARGIN = 0.05
NUM_EXECUTIONS = 3
TENSORS_MULTIPLE = 8  # rows that fill a tile of Tensor Cores


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
            f"not even a global batch of {multiple} fits; use precision='mixed_float16', smaller "
            "images or a smaller model"
        )
    reason = "all training images" if batch + multiple > most else f"{MARGIN:.0%} of memory left"
    summary("autobatch: global_batch_size=%d (%s)", batch, reason)
    return batch


def auto_parts(config: Config) -> int:
    """Returns the first number of parts (`accumulation_steps`) with which the batch trains.

    Parts do not change the result, except that batch norm sees one part at a time. A share of the
    memory, `MARGIN`, stays free. The search starts with the config's number and doubles it.

    Args:
      config: the experiment.

    Raises:
      UserError: there is no GPU, the batch does not fit even row by row, or the config is wrong.
      IsolatedError: a candidate failed for another reason.
    """
    run_log.show()
    num_replicas = run_quietly(describe, config)["num_replicas"]
    batch = config.data.whole_batch(num_replicas)
    rows, parts = math.ceil(batch / num_replicas), config.step.accumulation_steps
    while not _fits(with_parts(config, parts), f"accumulation_steps={parts}"):
        if parts >= rows:
            raise UserError(
                f"global_batch_size={batch} does not fit even row by row; use "
                "precision='mixed_float16', smaller images or a smaller model"
            )
        parts = min(2 * parts, rows)
    found = f"accumulation_steps={parts} for global_batch_size={batch}"
    summary("autobatch: %s (%s)", found, f"{MARGIN:.0%} of memory left")
    return parts


def with_batch(config: Config, global_batch_size: int) -> Config:
    """Returns the experiment with another global batch size."""
    data = dataclasses.replace(
        config.data, global_batch_size=global_batch_size, batch_per_replica=None
    )
    return dataclasses.replace(config, data=data)


def with_parts(config: Config, accumulation_steps: int) -> Config:
    """Returns the experiment with another number of parts."""
    step = dataclasses.replace(config.step, accumulation_steps=accumulation_steps)
    return dataclasses.replace(config, step=step)


def _fits(config: Config, what: str) -> bool:
    try:
        peak = run_quietly(train_briefly, config)  # hides pages of log about full memory
    except IsolatedError as error:
        if not error.out_of_memory:
            raise
        error.log.unlink(missing_ok=True)
        summary("autobatch: %s does not fit", what)
        return False
    summary("autobatch: %s fits, %s", what, peak)
    return True


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


def train_briefly(config: Config) -> str:
    """Trains and tests for a few steps and returns the memory that this took, in words.

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
    return _describe_peak(usage, sum(map(len, held[:1])))


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
