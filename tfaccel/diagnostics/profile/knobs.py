"""The loader settings that a search may change, because they do not change a pixel.

This module takes the possible loaders and the number of cores. It gives the knobs of a search, and
configs with other settings.

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
DECODER = (0.0, 0.35, 0.65, 0.85, 0.99)  # MLPerf submissions use 0.99


def make_knobs(*, placements: Sequence[str], cores: int) -> list[Knob]:
    """Returns the knobs that a search changes, the most promising first.

    Args:
      placements: the loaders that can read the data.
      cores: the CPU cores for each replica. More threads than cores would wait for each other.
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
    """Returns the loaders that give the same pixels, except for a decoder's rounding.

    "memory" is included only if the images fit, as the loader "auto" decides. If stored_size is
    set, only the loaders that store images are included, because stored_size changes the pixels.

    Args:
      config: the experiment.
      source: the training images.
      device: the device of one replica.
      num_threads: the number of threads that read the headers of images.
    """
    found, settings = [], {"device": device, "num_threads": num_threads}
    for loader in (each for each in LOADERS if each != "auto"):
        asked = "auto" if loader == "memory" else loader
        try:
            data = dataclasses.replace(config.data, loader=asked)
            choice = choose_loader(source, data, config.train_images, **settings)
        except UserError:
            continue  # this loader cannot read these data, or cannot run on this device
        if choice.loader == loader:
            found.append(loader)
    return tuple(found)


def with_changes(config: Config, changes: Mapping[str, object]) -> Config:
    """Returns the config with some fields changed; a name is SECTION.FIELD."""
    for name, value in changes.items():
        section, _, field = name.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
