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
import fcntl
import io
import json
import os
import pathlib
from collections.abc import Iterator, Mapping

import PIL.Image

from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.own_files import open_own, replace
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
        with self._errors_in_words():
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            if not is_new and not is_begun(self.path):
                raise UserError(f"output {self.path} exists; give a new folder")
            lock = open_own(file, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"another process writes to {self.path}; wait for it, or give another output"
                ) from None
            self._check(read_regular(file))
            with self._errors_in_words():
                os.pwrite(lock, json.dumps(self._settings).encode(), 0)
            yield
        finally:
            os.close(lock)

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
        with self._errors_in_words():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, encoded.getvalue())
        return path

    def finish(self) -> None:
        """Notes that all pictures are there. The folder is an ordinary one from then on."""
        with self._errors_in_words():
            os.unlink(self.path / SETTINGS)

    def _check(self, written: bytes) -> None:
        if not written:  # by a process that was killed before it wrote them
            return
        try:
            before = json.loads(written)
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise UserError(f"{self.path / SETTINGS} is damaged; remove {self.path}")
        names = [name for name in self._settings if before.get(name) != self._settings[name]]
        if names:
            raise UserError(
                f"{self.path} has the first part of another output: its {', '.join(names)} differ; "
                "give the same files and flags to continue it, or remove it to start again"
            )

    @contextlib.contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"output {self.path} {not_written(error, self.path.parent)}; then run the same "
                "command again, which continues"
            ) from error
