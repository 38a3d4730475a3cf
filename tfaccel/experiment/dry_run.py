"""Describes this process's part of a run, and trains two steps of it. It writes nothing.

`dry_run` takes the config, the workdir and the cluster, and returns a block of text.

    print(dry_run(config, workdir=pathlib.Path("runs/a"), cluster=find(os.environ)))
"""

import pathlib
import time

from tfaccel.common.tables import in_figures
from tfaccel.config import Config
from tfaccel.data.distribute import Loader
from tfaccel.experiment.train import prepare, rehearse
from tfaccel.run import Run
from tfaccel.runtime.agreement import together
from tfaccel.runtime.cluster import Cluster

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
  trained    {trained}, loss {loss}, in {seconds:.1f} s, most of it compilation; nothing written
"""


def dry_run(config: Config, *, workdir: pathlib.Path, cluster: Cluster) -> str:
    """Trains two steps as the run would, and returns a description of this process.

    With several workers, call it in all of them.

    Args:
      config: a checked config.
      workdir: the folder that the run would write to.
      cluster: the job's workers, and this process's index among them.

    Raises:
      UserError: as for `tfaccel.experiment.train.run`.
    """
    this_run = Run(config.runtime, cluster)
    train, test, model = prepare(this_run, config)
    num_steps = min(NUM_STEPS, train.num_batches)
    exported = "by worker 0"
    with together(this_run.strategy, "cannot be exported"):
        if cluster.is_chief:
            exported = _rehearse(this_run, config, (train, test, model), workdir)
    began = time.perf_counter()
    history = model.fit(train, steps_per_epoch=num_steps, verbose=0).history
    return BLOCK.format(
        **_describe(this_run, train),
        workdir=workdir,
        exported=exported,
        trained=f"{num_steps} step(s)",
        loss=in_figures(history["loss"][-1], 4),
        seconds=time.perf_counter() - began,
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
