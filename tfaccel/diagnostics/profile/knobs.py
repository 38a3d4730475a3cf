"""What of an experiment's loader can be changed without changing a pixel, and how.

Takes what the loader and the machine are; gives the knobs of a search, and experiments with other
settings.

    knobs = make_knobs(placements=("tf_data", "memory"), cores=16)
    with_changes(config, {"dali.threads": 4})
"""

import dataclasses
from collections.abc import Mapping, Sequence

from tfaccel.common.errors import UserError
from tfaccel.config import LOADERS, Config
from tfaccel.data.choose import choose_loader
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.diagnostics.profile.search import Knob
from tfaccel.runtime.devices import Device

THREADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
QUEUE = (1, 2, 3, 5, 8)
DECODER = (0.0, 0.35, 0.65, 0.85, 0.99)  # the last is what MLPerf's entries set


def make_knobs(*, placements: Sequence[str], cores: int) -> list[Knob]:
    """Returns what a search turns, the most promising first.

    Args:
      placements: the loaders that these data can have.
      cores: for each replica: more threads would wait for each other.
    """
    dali = frozenset(("dali_gpu", "dali_cpu"))
    threads = sorted({*(each for each in THREADS if each < cores), cores})
    return [
        Knob("data.loader", tuple(placements)),
        Knob("dali.threads", tuple(threads)),
        Knob("dali.prefetch_batches", QUEUE, dali),
        Knob("dali.hw_decoder_load", DECODER, frozenset(("dali_gpu",))),
    ]


def placements_of(
    config: Config, source: ImageSource | ArraySource, *, device: Device, num_threads: int
) -> tuple[str, ...]:
    """Returns the loaders that give these data the same pixels, but for a decoder's rounding.

    "memory" alone where it fits, as `auto` finds it. Where a stored_size is set, which is part of
    what the pixels are, those that store.

    Args:
      config: the experiment.
      source: its training images.
      device: of a replica.
      num_threads: that read images' headers.
    """
    found = []
    for loader in (each for each in LOADERS if each != "auto"):
        try:
            images = dataclasses.replace(
                config.data, loader="auto" if loader == "memory" else loader
            )
            choice = choose_loader(
                source, images, config.train_images, device=device, num_threads=num_threads
            )
        except UserError:
            continue  # not for these data, or not on this device
        if choice.loader == loader:
            found.append(loader)
    return tuple(found)


def with_changes(config: Config, changes: Mapping[str, object]) -> Config:
    """Returns the experiment with other values of some fields, each named with its section."""
    for name, value in changes.items():
        section, _, field = name.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
