"""A trained model to files that need neither tfaccel nor DALI, and proof that they answer alike.

Takes a Keras model and a folder; gives, in that folder, a SavedModel, `model.keras` and
`tfaccel.json`. A fresh process loads the SavedModel with plain TensorFlow and answers what the
trained model is asked as well, before the folder appears.

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
from tfaccel.export import card, parity
from tfaccel.export.asked import affordable, ask, new_path
from tfaccel.export.parting import where_pixels_part
from tfaccel.export.samples import take_samples
from tfaccel.export.unfinished import keep_rejected, whole_or_not_at_all
from tfaccel.process import progress
from tfaccel.runtime.devices import Runtime
from tfaccel.training.callbacks.ema import averages_of


@progress.within("export")
def export_model(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    config: ExportConfig,
    runtime: Runtime,
    loader: Loader | None = None,
    images=None,
) -> pathlib.Path:
    """Writes `path` whole or not at all, and proves it before it appears: see `Run.export`."""
    path = new_path(path)
    asked = ask(model, config, loader=loader, images=images)
    for note in asked.notes:
        summary("export: %s", note)
    surrounded, samples = asked.images, None
    if loader is not None:
        most = affordable(config.samples, asked.model, loader.data.images)
        samples = take_samples(loader.data, runtime, most)
    with _weights(model, config.weights), whole_or_not_at_all(path) as folder:
        served = asked.write(folder)
        if surrounded:
            proof = parity.of_images(folder, asked.model, surrounded, samples)
        else:
            proof = parity.of_inputs(folder, asked.model, asked.given)
        for check in proof.checks:
            summary("export: %s: %s", check.name, check.words)
        by = loader.data.loader if loader else None
        card.write(
            folder, served, surrounded, proof, asked.config, precision=asked.precision, loader=by
        )
        if proof.failed:
            kept = keep_rejected(folder, path)
            _reject(proof, kept, _parted(proof, samples, loader, surrounded, runtime))
    warn_servers(path)
    summary("export: %s, by %d samples in a process without tfaccel and DALI", path, proof.num)
    return path


def _weights(model: keras.Model, which: str) -> contextlib.AbstractContextManager:
    return averages_of(model) if which == "average" else contextlib.nullcontext()


def _reject(proof: parity.Parity, kept: pathlib.Path, parted: str) -> None:
    """Raises RunError: what is wrong with an export, and where it is kept."""
    wrong = "; ".join(
        f"{each.name}: {each.words} (limit {in_figures(each.limit)})" for each in proof.failed
    )
    raise RunError(
        f"the export does not answer as the trained model does: {wrong}.{parted} It is not "
        f"exported, but kept in {kept}"
    )


def _parted(proof: parity.Parity, samples, loader, surrounded, runtime: Runtime) -> str:
    """Returns where the pixels part, in a sentence; nothing where they do not."""
    if all(each.name != "pixels" for each in proof.failed) or samples.source is None:
        return ""
    source, encoded = samples.source.taken(np.array([proof.worst])), samples.encoded[proof.worst]
    step = where_pixels_part(source, encoded, loader.data, surrounded.preprocessing, runtime)
    return f" They part in the {step}; the worst image is {samples.names[proof.worst]}."
