"""The words in a picture of runs: the heading, the labels of the runs, the names of metrics.

Takes workdirs; returns words that name the settings that differ and the settings that all share.

    words = run_words({"runs/a": pathlib.Path("runs/a"), "runs/b": pathlib.Path("runs/b")})
    words.heading      # "2 runs that differ in train.learning_rate"
    words.labels       # ("runs/a: train.learning_rate=0.1", "runs/b: train.learning_rate=0.01")
    metric_words("psnr")  # title "PSNR (higher is better)", unit "decibels"
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfaccel.common.redact import redacted, shown

LONGEST_NAME = 48  # letters of a run's name in a legend
LONGEST_VALUE = 40  # letters of a setting's value
MOST_SETTINGS = 6  # in a heading or a label; the table of an HTML page has all
# The settings that a reader wants to know first.
MAIN = (
    "model.name",
    "data.root",
    "data.global_batch_size",
    "train.optimizer",
    "train.learning_rate",
    "runtime.precision",
)


class Metric(NamedTuple):
    """The title of a chart, and the label of its vertical axis."""

    title: str
    unit: str


_ABSENT = {"data.root": "the embedded digits"}  # words for None; "none" for all other settings
_SHARE = "share of the images, 0 to 1"
_ACCURACY = Metric("Accuracy (higher is better)", _SHARE)
_IOU = Metric("Mean IoU (higher is better)", "intersection over union, 0 to 1")
_MAE = Metric("Mean absolute error (lower is better)", "in units of the target")
_MSE = Metric("Mean squared error (lower is better)", "in squared units of the target")
_METRICS = {
    "loss": Metric("Loss (lower is better)", "loss"),
    "accuracy": _ACCURACY,
    "top5": Metric("Top-5 accuracy (higher is better)", _SHARE),
    "sparse_categorical_accuracy": _ACCURACY,
    "categorical_accuracy": _ACCURACY,
    # Of several classes an image, each class of each image has an answer.
    "binary_accuracy": Metric("Accuracy (higher is better)", "share of the answers, 0 to 1"),
    "f1_score": Metric("F1 score (higher is better)", "F1, 0 to 1"),
    "mean_average_precision": Metric(
        "Mean average precision (higher is better)", "average precision, 0 to 1"
    ),
    "r2_score": Metric("R squared (higher is better)", "R squared, at most 1"),
    "precision": Metric("Precision (higher is better)", "precision, 0 to 1"),
    "recall": Metric("Recall (higher is better)", "recall, 0 to 1"),
    "auc": Metric("Area under the curve (higher is better)", "AUC, 0 to 1"),
    "mean_io_u": _IOU,
    "mean_iou": _IOU,
    "psnr": Metric("PSNR (higher is better)", "decibels"),
    "mae": _MAE,
    "mean_absolute_error": _MAE,
    "mse": _MSE,
    "mean_squared_error": _MSE,
    "images_per_second": Metric("Training speed (higher is better)", "images per second"),
    "gpu_memory_mib": Metric("GPU memory (lower is better)", "MiB in use on the fullest GPU"),
    "learning_rate": Metric("Learning rate", "learning rate"),
}


def metric_words(name: str) -> Metric:
    """Returns the words for a metric, given its name in the logs."""
    if name in _METRICS:
        return _METRICS[name]
    words = shown(name.replace("_", " "), keep="")
    return Metric(words[:1].upper() + words[1:], words)


def column_head(name: str) -> str:
    """Returns the head of a table's column, for a metric of training or of test images."""
    tested = name.startswith("val_")
    words = metric_words(name.removeprefix("val_")).title.partition(" (")[0]
    if name in ("epoch", "step", "images_per_second", "learning_rate", "input_wait"):
        return name.replace("_", " ")
    if name == "gpu_memory_mib":
        return "GPU memory, MiB"
    return f"{words}, {'test images' if tested else 'in training'}"


@dataclasses.dataclass(frozen=True)
class Words:
    """The words for some runs.

    Attributes:
      heading: the heading of the picture.
      alike: the main settings that all runs share; "" if none is known.
      labels: each run's label in the legend: its name and its values of the settings that differ.
      differing: the settings that differ, each as section.field.
      settings: each run's values of these settings, in the same order.
    """

    heading: str
    alike: str
    labels: tuple[str, ...]
    differing: tuple[str, ...]
    settings: tuple[tuple[str, ...], ...]


def run_words(workdirs: Mapping[str, pathlib.Path]) -> Words:
    """Returns the words for runs, by their names. A run without a config.json has no settings."""
    configs = [settings_of(each) for each in workdirs.values()]
    known = [each for each in configs if each]
    names = list(dict.fromkeys(name for each in known for name in each))
    differing = tuple(
        name for name in names if len({each.get(name) for each in known}) > 1 and len(known) > 1
    )
    same = known[0] if known else {}
    alike = [f"{name}={same[name]}" for name in MAIN if name in same and name not in differing]
    settings = tuple(tuple(each.get(name, "") for name in differing) for each in configs)
    labels = zip(_shortened(list(workdirs)), configs, settings, strict=True)
    return Words(
        heading=_heading(list(workdirs), differing, has_all=len(known) == len(configs)),
        alike=", ".join(alike),
        labels=tuple(_label(name, differing, values) for name, _, values in labels),
        differing=differing,
        settings=settings,
    )


def _heading(names: Sequence[str], differing: Sequence[str], *, has_all: bool) -> str:
    if len(names) == 1:
        return f"Training run {_shortened(names)[0]}"
    if differing:
        return f"{len(names)} runs that differ in {_list_names(differing)}"
    return f"{len(names)} runs{' with the same settings' if has_all else ''}"


def _list_names(names: Sequence[str]) -> str:
    if len(names) > MOST_SETTINGS:
        rest = len(names) - MOST_SETTINGS
        return f"{', '.join(names[:MOST_SETTINGS])} and {rest} other settings"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _label(name: str, differing: Sequence[str], values: Sequence[str]) -> str:
    pairs = [f"{each}={value}" for each, value in zip(differing, values, strict=True) if value]
    more = len(pairs) - MOST_SETTINGS
    said = ", ".join(pairs[:MOST_SETTINGS]) + (f" and {more} more" if more > 0 else "")
    return f"{name}: {said}" if said else name


def settings_of(workdir: pathlib.Path) -> dict[str, str]:
    """Returns a run's settings by section.field, or {} if there is no valid config."""
    try:
        written = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        sections = {name: dict(fields) for name, fields in written.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        f"{section}.{name}": _shortened_value(_ABSENT.get(f"{section}.{name}", "none"))
        if value is None
        else _shortened_value(_value(redacted(value, name)))
        for section, fields in sections.items()
        for name, value in fields.items()
    }


def _value(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(_value, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return shown(f"{value:.6g}" if isinstance(value, float) else str(value), keep="")


def _shortened_value(text: str) -> str:
    """Shortens a value to LONGEST_VALUE. The middle goes, because paths differ at both ends."""
    half = LONGEST_VALUE // 2 - 2
    return text if len(text) <= LONGEST_VALUE else f"{text[:half]}...{text[-half:]}"


def _shortened(names: Sequence[str]) -> list[str]:
    """Shortens names to LONGEST_NAME. Of long names, the folder that all share goes first."""
    if max(map(len, names)) <= LONGEST_NAME:
        return list(names)
    if len(names) > 1:
        with contextlib.suppress(ValueError):  # absolute and relative paths share no folder
            folder = os.path.commonpath([os.path.dirname(each) for each in names])
            if all(each.startswith(f"{folder}/") for each in names):
                names = [each[len(folder) + 1 :] for each in names]
    half = LONGEST_NAME // 2 - 2
    return [
        each if len(each) <= LONGEST_NAME else f"{each[:half]}...{each[-half:]}" for each in names
    ]
