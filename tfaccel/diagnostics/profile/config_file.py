"""Writes a new config file that loads an experiment's config file and changes some fields.

write(path, base=pathlib.Path("configs/digits.py"), size="", config=config, said="2.1 times")
"""

import dataclasses
import os
import pathlib
import runpy

from tfaccel.config import Config, parse

FILE = '''\
"""{base} with the settings that `tfaccel profile --search` found: {said}.

    uv run tfaccel train --config={own}
"""

import pathlib
import runpy

import ml_collections

BASE = pathlib.Path(__file__).parent / {relative!r}


def get_config(size: str = {size!r}) -> ml_collections.ConfigDict:
    """Returns the experiment of BASE with these settings."""
    config = runpy.run_path(str(BASE))["get_config"](*([size] if size else []))
{lines}
    return config
'''


def write(path: pathlib.Path, *, base: pathlib.Path, size: str, config: Config, said: str) -> None:
    """Writes a config file for `tfaccel train --config=PATH`.

    Args:
      path: the path of the new file.
      base: the experiment's config file.
      size: the argument of the experiment's config, the part after the colon.
      config: the config that the new file shall give, including flags of the command line.
      said: a summary of the search, for the first line of the file.
    """
    text = FILE.format(
        base=base,
        own=path,
        said=said,
        relative=os.path.relpath(base.absolute(), path.absolute().parent),
        size=size,
        lines="\n".join(
            f"    config.{name} = {value!r}" for name, value in _changes(base, size, config)
        ),
    )
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def _changes(base: pathlib.Path, size: str, config: Config) -> list[tuple[str, object]]:
    """Returns the fields that differ from the base, as SECTION.FIELD and value."""
    values = runpy.run_path(str(base))["get_config"](*([size] if size else []))
    before, after = dataclasses.asdict(parse(values)), dataclasses.asdict(config)
    return [
        (f"{section}.{name}", value)
        for section, fields in after.items()
        for name, value in fields.items()
        if value != before[section][name]
    ]
