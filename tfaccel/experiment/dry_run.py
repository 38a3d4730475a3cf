"""Describes this process's part of a run, and trains two steps of it. It writes nothing.

With several replicas it also trains some steps to time them, and times the gradients' all-reduce.

`dry_run` takes the config, the workdir and the cluster, and returns a block of text.

    print(dry_run(config, workdir=pathlib.Path("runs/a"), cluster=find(os.environ)))
"""

import math
import pathlib
import time

import keras

from tfaccel.common.tables import in_figures
from tfaccel.config import Config
from tfaccel.data.distribute import Loader
from tfaccel.experiment.scaling import Scaling, time_all_reduce
from tfaccel.experiment.step_times import StepTimes, most_epochs
from tfaccel.experiment.train import prepare, rehearse
from tfaccel.process import waits
from tfaccel.run import Run
from tfaccel.runtime.agreement import slowest, together
from tfaccel.runtime.cluster import Cluster
from tfaccel.step.gradient_sum import GradientSum
from tfaccel.training.memory_forecast import forecast_of

NUM_STEPS = 2  # the second step shows that the first left the model in a good state

BLOCK = """\
worker {index} of {num_workers}, counted from 0{chief}
  source     {source}
  address    {address}
  devices    {devices}
  replicas   {replicas} of {num_replicas}, counted from 0 over all workers
  batch      {rows} rows on each replica, {batch} in all; {steps} steps an epoch
  workdir    {workdir}
  export     {exported}
  memory     {memory}
  trained    {trained}, loss {loss}, in {seconds:.1f} s, most of it compilation; nothing written
"""


def dry_run(config: Config, *, workdir: pathlib.Path, cluster: Cluster) -> str:
    """Trains two steps as the run would, and returns a description of this process.

    With several replicas, the chief's description ends with the expected scaling. With several
    workers, call it in all of them.

    Args:
      config: a checked config.
      workdir: the folder that the run would write to.
      cluster: the job's workers, and this process's index among them.

    Raises:
      UserError: as for `tfaccel.experiment.train.run`.
    """
    this_run = Run(config.runtime, cluster)
    train, test, model = prepare(this_run, config)
    exported = "by worker 0"
    with together(this_run.strategy, "cannot be exported"):
        if cluster.is_chief:
            exported = _rehearse(this_run, config, (train, test, model), workdir)
    times = StepTimes(train, this_run.strategy)
    trained = _train(this_run, model, train, times)
    block = BLOCK.format(
        **_describe(this_run, train),
        workdir=workdir,
        exported=exported,
        memory=forecast_of(model) or "not forecast, because the step ran as Python",
        **trained,
    )
    if this_run.strategy.num_replicas_in_sync > 1:
        scaling = _measure(this_run, model, config, step_s=times.step_s)
        block += str(scaling) if cluster.is_chief else ""
    return block


def _train(this_run: Run, model: keras.Model, train: Loader, times: StepTimes) -> dict[str, object]:
    """Trains two steps, or one execution if that has more; returns the block's values for them.

    Several replicas train more, because `times` needs warm steps. The values leave these out.
    """
    per_execution = model.steps_per_execution
    num_executions = min(math.ceil(NUM_STEPS / per_execution), train.num_batches)
    several = this_run.strategy.num_replicas_in_sync > 1
    history = model.fit(
        train,
        steps_per_epoch=1,  # one execution
        epochs=most_epochs(train.num_batches, per_execution) if several else num_executions,
        callbacks=[times],
        verbose=0,
    ).history
    return {
        "trained": f"{times.num_steps[num_executions - 1]} step(s)",
        "loss": in_figures(history["loss"][num_executions - 1], 4),
        "seconds": times.seconds[num_executions - 1],
    }


def _measure(this_run: Run, model: keras.Model, config: Config, *, step_s: float) -> Scaling:
    """Measures the all-reduce; returns the times of the slowest worker, on every worker."""
    with this_run.watchdog.guard(), waits.on("measuring the all-reduce of the gradients"):
        gradient_sum = GradientSum(model, gradients_as=config.step.gradients_as)
        return Scaling(
            num_replicas=gradient_sum.num_replicas,
            num_bytes=gradient_sum.num_bytes,
            all_reduce_s=time_all_reduce(gradient_sum, this_run.strategy),
            step_s=slowest(step_s, this_run.strategy),
        )


def _rehearse(this_run: Run, config: Config, prepared: tuple, workdir: pathlib.Path) -> str:
    """Tries the export as a run does at its start, waits for the result, and describes it."""
    began, (train, test, model) = time.perf_counter(), prepared
    with rehearse(this_run, config, model, train, test, workdir=workdir) as rehearsal:
        rehearsal.wait()
    return f"tested with the untrained model in {time.perf_counter() - began:.1f} s; not kept"


def _describe(this_run: Run, train: Loader) -> dict[str, object]:
    """Returns the block's values for the process and its part of the data."""
    cluster, devices = this_run.cluster, this_run.runtime.devices
    first = this_run.first_replica
    return {
        "index": cluster.worker_index,
        "num_workers": cluster.num_workers,
        "chief": ": the chief, which writes the workdir" if cluster.is_chief else "",
        "source": cluster.source,
        "address": cluster.addresses[cluster.worker_index] if cluster.addresses else "none needed",
        "devices": ", ".join(
            each.name if each.cuda_ordinal is None else f"GPU {each.cuda_ordinal}"
            for each in devices
        ),
        "replicas": ", ".join(str(first + index) for index in range(len(devices))),
        "num_replicas": this_run.strategy.num_replicas_in_sync,
        "rows": train.data.plan.rows_per_replica,
        "batch": train.global_batch_size,
        "steps": train.num_batches,
    }
