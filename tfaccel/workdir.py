"""The folder in which a run leaves what it did.

DIR/config.json        the resolved config
DIR/environment.json   versions and hardware
DIR/metrics.csv        a line per epoch
DIR/tensorboard/       the same for TensorBoard
DIR/export/1/          SavedModel and model.keras
DIR/result.json        what the command's last line says
"""

import json
import pathlib
from typing import Any

from tfaccel.errors import UserError


def create(path: pathlib.Path) -> pathlib.Path:
    """Makes the folder and returns its absolute path.

    Raises:
      UserError: it cannot be made, or already holds a run, whose files would be lost.
    """
    path = path.expanduser().absolute()
    if (path / "config.json").exists():
        raise UserError(f"workdir {path} already holds a run; give another --workdir, or remove it")
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "config.json", {})  # unwritable folders are found out now, not at the end
    except OSError as error:
        raise UserError(
            f"workdir {path} cannot be written ({error.strerror}); give another --workdir"
        ) from error
    return path


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")
