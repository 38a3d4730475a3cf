"""The fields of a config as `--help` shows them: the most common ones, or all of a section."""

import dataclasses
import textwrap

import ml_collections

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.config import Config
from tfaccel.config.documented import first_sentence, meanings

# The fields that most runs change. `tfaccel train --help` shows the first sentence of each.
COMMON = (
    "data.root",
    "data.source",
    "data.train",
    "data.test",
    "data.image_size",
    "data.channels",
    "data.global_batch_size",
    "data.loader",
    "data.bad_files",
    "train_images.horizontal_flip",
    "train_images.policy",
    "model.name",
    "model.weights",
    "train.epochs",
    "train.optimizer",
    "train.learning_rate",
    "train.warmup_epochs",
    "train.decay",
    "train.weight_decay",
    "train.early_stopping_epochs",
    "train.monitor",
    "step.label_smoothing",
    "step.mixup_alpha",
    "step.accumulation_steps",
    "checkpoint.every_steps",
    "runtime.gpu_ids",
    "runtime.precision",
    "runtime.xla",
    "runtime.seed",
    "runtime.deterministic",
)
SECTIONS = tuple(each.name for each in dataclasses.fields(Config))
TOPICS = ("all", *SECTIONS)
TOPICS_TEXT = textwrap.fill(
    "--help=TOPIC shows all fields and their full meaning. TOPIC is all, or a section: "
    f"{', '.join(SECTIONS)}. With --config=FILE, it shows the values of that file.",
    80,
    initial_indent="  ",
    subsequent_indent="  ",
)
SPLIT = """
  If your photographs photos/CLASS/IMAGE are not split yet, test on a fifth of
  them: --config.data.root=photos --config.data.train=.
  --config.data.validation_split=0.2
"""


def check_topic(topic: str, valid: tuple[str, ...] = TOPICS) -> None:
    """Raises UserError if --help=TOPIC names a topic that does not exist."""
    if topic and topic not in valid:
        raise UserError(f"there is no help on '{topic}'{did_you_mean(topic, valid)}")


def common(values: ml_collections.ConfigDict, source: str) -> str:
    """Returns the most common fields with their values, which come from `source`, in words."""
    kinds = {each.name: each.default_factory for each in dataclasses.fields(Config)}
    lines = [f"The most common fields, {source}:"]
    for name in COMMON:
        section, _, field = name.partition(".")
        flag = f"  --config.{name}={_shown(values[section][field])}"
        meaning = first_sentence(meanings(kinds[section])[field])
        apart = len(flag) > 42
        lines += [flag, f"{'':44}{meaning}"] if apart else [f"{flag:<44}{meaning}"]
    return "\n".join([*lines, "", TOPICS_TEXT]) + "\n"


def every(values: ml_collections.ConfigDict, only: str | None = None) -> str:
    """Returns every field with its full text, or the fields of section `only`."""
    lines = []
    for section in dataclasses.fields(Config):
        if only not in (None, section.name):
            continue
        texts = meanings(section.default_factory)
        for field in dataclasses.fields(section.default_factory):
            value = _shown(values[section.name][field.name])
            lines.append(f"  --config.{section.name}.{field.name}={value}")
            lines.append(textwrap.indent(textwrap.fill(texts[field.name], 72), " " * 8))
    return "\n".join(lines) + "\n" + (SPLIT if only == "data" else "")


def _shown(value) -> object:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
