"""Exports a run from its workdir, after it has ended or while it is still training.

Model, data and precision are those of the workdir's `config.json`; the weights are those of a
checkpoint.

    export_run(pathlib.Path("runs/a"), pathlib.Path("served/a"), ExportConfig(onnx=True))
"""

import dataclasses
import os
import pathlib

import numpy as np
import tensorflow as tf

from tfaccel.common.local_path import local_path
from tfaccel.common.run_log import summary
from tfaccel.config import Config, ExportConfig
from tfaccel.data.choose import choose_loader
from tfaccel.data.distribute import Loader
from tfaccel.data.source import spread
from tfaccel.experiment.open_data import open_loader, open_sources
from tfaccel.experiment.trained import model_of, snapshot_of
from tfaccel.run import Run
from tfaccel.runtime import devices as runtime
from tfaccel.runtime.cluster import check_one_process, find
from tfaccel.training import workdir as workdir_lib
from tfaccel.training.checkpoint.store import Snapshot


def export_run(
    workdir: pathlib.Path,
    out: pathlib.Path,
    export: ExportConfig,
    *,
    checkpoint: str | None = None,
    root: str | None = None,
    loader: str | None = None,
) -> pathlib.Path:
    """Exports a checkpoint of a run to the next version below `out`.

    Args:
      workdir: a workdir of `tfaccel train`.
      out: a folder of versions, 1, 2, 3 and so on. It is created if it does not exist.
      export: how to export.
      checkpoint: "newest", or "best" according to the run's monitor. None exports what training
        would: the newest checkpoint; or, if the run may stop early and does not average weights,
        the weights of the best epoch, which are in the newest checkpoint.
      root: the data's folder, if it has moved since config.json was written.
      loader: another loader for the images to compare on.

    Returns:
      The export's absolute path.

    Raises:
      UserError: the workdir has no run or no checkpoint, the environment makes this process one of
        several workers, or as for `Run.export`.
      RunError: as for `Run.export`.
    """
    config = workdir_lib.read_config(workdir)
    changes = {name: each for name, each in (("root", root), ("loader", loader)) if each}
    data = dataclasses.replace(config.data, **changes)
    config = dataclasses.replace(config, data=data)
    snapshot = snapshot_of(workdir, config, checkpoint or "newest")
    run = _run(config)
    summary("export: the checkpoint of step %d", snapshot.step)
    test = _evaluation(run, config, export.samples)
    model = model_of(run, config, test.data, snapshot)
    if checkpoint is None and (best := _best_weights(snapshot)):
        summary("export: with the weights of the best epoch, as at the end of training")
        model.set_weights(best)
    version = workdir_lib.next_version(local_path(out).absolute())
    return run.export(model, version, loader=test, **dataclasses.asdict(export))


def _best_weights(snapshot: Snapshot) -> list[np.ndarray]:
    """Returns the weights that early stopping would restore, in Keras's order; [] without it."""
    callbacks = [each["class"] for each in snapshot.state["callbacks"]]
    if "EarlyStopping" not in callbacks:
        return []
    prefix = f"callback/{callbacks.index('EarlyStopping'):05d}/best_weights/"
    return [snapshot.arrays[name] for name in sorted(snapshot.arrays) if name.startswith(prefix)]


def _run(config: Config) -> Run:
    """Returns the run, prepared as for training, but on one device."""
    cluster = find(os.environ)
    check_one_process(cluster, "export")
    runtime.load_cuda_libraries()  # before TensorFlow looks for GPUs
    gpu_ids = (0,) if tf.config.list_physical_devices("GPU") else ()
    return Run(dataclasses.replace(config.runtime, gpu_ids=gpu_ids), cluster)


def _evaluation(run: Run, config: Config, most: int) -> Loader:
    """Returns the test loader over only as many images as are compared."""
    train, source = open_sources(config.data)
    if names := train.class_names:  # the test images may lack classes that the model has
        source = dataclasses.replace(source, class_names=names)
    # Choose the loader for all images: a few may fit in memory although all of them do not.
    choice = choose_loader(
        source,
        config.data,
        config.test_images,
        device=run.runtime.devices[0],
        num_threads=run.runtime.loader_threads,
    )
    stored = {} if config.data.stored_size is None else {"stored_size": choice.stored_size}
    source = source.taken(spread(len(source), most))
    # There may be fewer images than a batch, so pad it.
    return open_loader(
        run, config, "test", source=source, loader=choice.loader, last_batch="pad", **stored
    )
