"""A new folder of PNG files, so that a stopped program continues where it was.

folder = PictureFolder(pathlib.Path("masks"), settings={...})
with folder.held():
    if not folder.has("a/1.png"):
        folder.save(picture, "a/1.png")
    folder.finish()

masks/a/1.png         a picture, which is written completely or not at all
masks/.predict.json   what the pictures were computed from; it is there until all are written,
                      and held by the process that writes
"""

import contextlib
import io
import json
import os
import pathlib
from collections.abc import Iterator, Mapping

import PIL.Image

from tfaccel.common.continued_output import check_settings, errors_in_words, locked
from tfaccel.common.errors import UserError
from tfaccel.common.own_files import replace
from tfaccel.common.regular_file import read_regular

SETTINGS = ".predict.json"


def is_begun(path: pathlib.Path) -> bool:
    """Returns whether the folder has a part of the pictures, and waits for the others."""
    return (path / SETTINGS).is_file()


class PictureFolder:
    """A folder that one program fills, in one or several runs.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: pathlib.Path, *, settings: Mapping[str, object]):
        """Touches nothing on the disk; `held` does.

        Args:
          path: a folder that does not exist, or that `is_begun`.
          settings: JSON-ready facts that decide the pictures. A folder with other ones is not
            continued.
        """
        self.path = path
        self._settings = json.loads(json.dumps(dict(settings)))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Creates the folder or continues in it, and keeps other processes out within the context.

        Raises:
          UserError: the folder has pictures of other settings, or is not ours.
          RunError: another process writes there, or the folder cannot be written.
        """
        file = self.path / SETTINGS
        with errors_in_words(self.path):
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
        if not is_new and not is_begun(self.path):
            raise UserError(f"output {self.path} exists; give a new folder")
        with locked(file, folder=self.path, output=self.path) as lock:
            if written := read_regular(file):  # else killed before it wrote them
                check_settings(file, written, self._settings, folder=self.path)
            with errors_in_words(self.path):
                os.pwrite(lock, json.dumps(self._settings).encode(), 0)
            yield

    def has(self, name: str) -> bool:
        """Returns whether a picture is there already."""
        return (self.path / name).is_file()

    def save(self, picture: PIL.Image.Image, name: str) -> pathlib.Path:
        """Writes a picture, and returns its path.

        Raises:
          RunError: it cannot be written, for example because the disk is full.
        """
        path, encoded = self.path / name, io.BytesIO()
        picture.save(encoded, format="PNG")
        with errors_in_words(self.path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, encoded.getvalue())
        return path

    def finish(self) -> None:
        """Notes that all pictures are there. The folder is an ordinary one from then on."""
        with errors_in_words(self.path):
            os.unlink(self.path / SETTINGS)
