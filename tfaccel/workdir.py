"""The folder in which a run leaves what it did.

Takes the path; gives the folder, made once it is sure to hold no other run:

    DIR/config.json        the resolved config
    DIR/environment.json   versions and hardware
    DIR/metrics.csv        a line per epoch
    DIR/tensorboard/       the same for TensorBoard
    DIR/export/1/          SavedModel and model.keras
    DIR/result.json        what the command's last line says
"""

import json
import os
import pathlib
from typing import Any

from tfaccel.errors import UserError


def check_free(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute path of a workdir that may be written. Writes nothing.

    Raises:
      UserError: it already holds a run, whose files would be lost, or is not to be written.
    """
    path = path.expanduser().absolute()
    if (path / "config.json").exists():
        raise UserError(f"workdir {path} already holds a run; give another --workdir, or remove it")
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"workdir {path} cannot be written, because {there} cannot; give another --workdir"
        )
    return path


def create(path: pathlib.Path) -> pathlib.Path:
    """Makes the folder and returns its absolute path.

    Raises:
      UserError: as `check_free`, or it cannot be made.
    """
    path = check_free(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"workdir {path} cannot be written ({error.strerror}); give another --workdir"
        ) from error
    return path


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")
