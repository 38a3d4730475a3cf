"""A config as a Python file that needs no other file: `tfaccel train --config=FILE` takes it.

write(folder / "config.py", parse(config), said="trial 7 of a search")
"""

import dataclasses
import pathlib

from tfaccel.common.own_files import replace
from tfaccel.common.tables import cleaned
from tfaccel.config import Config

FILE = '''\
"""{said}.

    tfaccel train --config={path}
"""

import ml_collections

from tfaccel.config import default_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = default_config()
{lines}
    return config
'''


def write(path: pathlib.Path, config: Config, *, said: str) -> None:
    """Writes the fields that differ from their defaults, in place of an older file.

    Args:
      path: of the file.
      config: a checked config.
      said: the first line of the file, without a full stop.

    Raises:
      OSError: the file cannot be written.
    """
    before, after = dataclasses.asdict(Config()), dataclasses.asdict(config)
    lines = [
        f"    config.{section}.{name} = {value!r}"
        for section, fields in after.items()
        for name, value in fields.items()
        if value != before[section][name]
    ]
    text = FILE.format(said=_in_docstring(said), path=path, lines="\n".join(lines))
    replace(path, text.encode())


def copy(source: pathlib.Path, path: pathlib.Path, *, said: str) -> None:
    """Writes the experiment of a file that `write` has written to another file.

    Raises:
      OSError: a file cannot be read or written.
    """
    begins = source.read_text().index("import ml_collections")
    new = FILE.format(said=_in_docstring(said), path=path, lines="")
    replace(
        path, (new[: new.index("import ml_collections")] + source.read_text()[begins:]).encode()
    )


def _in_docstring(said: str) -> str:
    return cleaned(said).replace('"', "'").replace("\\", "/")
