"""The fields of a config as `--help` shows them: those that most runs change, or all by topic."""

import dataclasses
import textwrap

import ml_collections

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.config import Config
from tfaccel.config.documented import first_sentence, meanings

# What most runs change. Of each, `tfaccel train --help` shows the first sentence.
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
    "--help=TOPIC shows the other fields and each meaning in full. Topics: all, or a section: "
    f"{', '.join(SECTIONS)}. With --config=FILE, the values are the file's.",
    80,
    initial_indent="  ",
    subsequent_indent="  ",
)
SPLIT = """
  Photographs that are not split yet, photos/CLASS/IMAGE: these lines make
  photos-split/training and photos-split/testing, of links, with every fifth
  image of each class in testing. Then give --config.data.root=photos-split.

    old="$PWD/photos" new="$PWD/photos-split"
    for class in "$old"/*/; do
      n=0
      for image in "$class"*; do
        n=$((n+1)); [ $((n%5)) -eq 0 ] && part=testing || part=training
        folder="$new/$part/$(basename "$class")"
        mkdir -p "$folder"
        ln -s "$image" "$folder"
      done
    done
"""


def check_topic(topic: str, valid: tuple[str, ...] = TOPICS) -> None:
    """Raises UserError for a --help=TOPIC that there is not."""
    if topic and topic not in valid:
        raise UserError(f"there is no help on '{topic}'{did_you_mean(topic, valid)}")


def common(values: ml_collections.ConfigDict, source: str) -> str:
    """Returns the fields that most runs change, each with a few words, and how to see the others.

    Args:
      values: what to show of each field.
      source: in words, where the values come from.
    """
    kinds = {each.name: each.default_factory for each in dataclasses.fields(Config)}
    lines = [f"The fields that are changed most, as {source}:"]
    for name in COMMON:
        section, _, field = name.partition(".")
        flag = f"  --config.{name}={_shown(values[section][field])}"
        meaning = first_sentence(meanings(kinds[section])[field])
        apart = len(flag) > 42
        lines += [flag, f"{'':44}{meaning}"] if apart else [f"{flag:<44}{meaning}"]
    return "\n".join([*lines, "", TOPICS_TEXT]) + "\n"


def every(values: ml_collections.ConfigDict, only: str | None = None) -> str:
    """Returns every field with its text, or those of one section."""
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
