"""Exports a trained model to files that need neither tfaccel nor DALI, and checks their answers.

`export_model` writes a SavedModel, `model.keras` and `tfaccel.json` to a folder. A fresh process
loads the SavedModel with plain TensorFlow, and its answers are compared with the trained model's
before the folder gets its name.

    export_model(model, "exported/1", config=ExportConfig(), runtime=run.runtime, loader=test)
"""

import contextlib
import os
import pathlib

import keras
import numpy as np

from tfaccel.common.errors import RunError
from tfaccel.common.literal_path import warn_servers
from tfaccel.common.run_log import summary
from tfaccel.common.tables import in_figures
from tfaccel.config import ExportConfig
from tfaccel.data.distribute import Loader
from tfaccel.export import card
from tfaccel.export.asked import Asked, affordable, ask, new_path
from tfaccel.export.parity import Parity
from tfaccel.export.parting import where_pixels_differ
from tfaccel.export.samples import take_samples
from tfaccel.export.unfinished import keep_rejected, whole_or_not_at_all
from tfaccel.process import progress, waits
from tfaccel.runtime.devices import Runtime
from tfaccel.training.callbacks.ema import averages_of


@progress.within("export")
@waits.on("preparing the export")
def export_model(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    config: ExportConfig,
    runtime: Runtime,
    loader: Loader | None = None,
    images=None,
) -> pathlib.Path:
    """Writes and checks the export. `path` appears only if both succeed. See `Run.export`."""
    path = new_path(path)
    asked = ask(model, config, loader=loader, images=images)
    for note in asked.notes:
        summary("export: %s", note)
    samples = None
    if loader is not None:
        most = affordable(config.samples, asked.model, loader.data.images)
        samples = take_samples(loader.data, runtime, most)
    averaged = averages_of(model) if config.weights == "average" else contextlib.nullcontext()
    with averaged, whole_or_not_at_all(path) as folder:
        waits.now("writing the export")
        question = asked.question(samples)
        served = asked.write(folder, question.inputs)
        waits.now("comparing the export's answers, in a process of its own")
        proof = question.ask(folder)
        for check in proof.checks:
            summary("export: %s: %s", check.name, check.words)
        by = loader.data.loader if loader else None
        card.write(
            folder, served, asked.images, proof, asked.config, precision=asked.precision, loader=by
        )
        if failed := proof.failed:
            kept = keep_rejected(folder, path)
            wrong = [
                f"{each.name}: {each.words} (limit {in_figures(each.limit)})" for each in failed
            ]
            raise RunError(
                f"the export does not answer as the trained model does: {'; '.join(wrong)}."
                f"{_first_difference(proof, samples, loader, asked, runtime)} It was not exported; "
                f"look at it in {kept}"
            )
    warn_servers(path)
    summary("export: %s, checked on %d samples without tfaccel and DALI", path, proof.num)
    return path


def _first_difference(proof: Parity, samples, loader, asked: Asked, runtime: Runtime) -> str:
    """Returns a sentence on the first step after which pixels differ; "" if they do not."""
    if all(each.name != "pixels" for each in proof.failed) or samples.source is None:
        return ""
    worst = samples.names[proof.worst]
    source, encoded = samples.source.taken(np.array([proof.worst])), samples.encoded[proof.worst]
    step = where_pixels_differ(source, encoded, loader.data, asked.images.preprocessing, runtime)
    return f" The {step} is the first step that differs; the worst image is {worst}."
