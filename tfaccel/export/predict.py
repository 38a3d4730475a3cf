"""Predicts the classes of image files, or numbers, with an export.

A `Predictor` takes the folder of an export, or of its versions. It yields a Prediction for each
path. A file that cannot be read gives a Prediction with an error. An `Export` gives any answer of
the export; predict_pictures.py writes masks and images by it.

    for each in Predictor(pathlib.Path("runs/a/export"))(paths):
        print(each.path, each.error or each.probabilities.argmax())
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.literal_path import literal
from tfaccel.common.regular_file import check_regular, read_regular
from tfaccel.common.report import in_lines
from tfaccel.common.tables import in_figures
from tfaccel.data import raster
from tfaccel.export import card
from tfaccel.export.asked_images import find_export
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.runtime import devices as runtime

ROWS = 32  # files in one request


@dataclasses.dataclass(frozen=True)
class Prediction:
    """An export's answer for one file.

    Attributes:
      path: the path as given.
      probabilities: [classes] float32, in the order of `class_names`; None after an error.
      error: why the file cannot be read or decoded; None if it can.
      numbers: [numbers] float32, in the order of `target_names`, or [0] after an error; None if
        classes are predicted.
    """

    path: str
    probabilities: np.ndarray | None = None
    error: str | None = None
    numbers: np.ndarray | None = None

    def as_dict(
        self, class_names: Sequence[str], most: int, *, threshold: float | None = None
    ) -> dict[str, object]:
        """Returns the prediction for JSON, with at most `most` classes, the likeliest first.

        Args:
          class_names: the names of the classes, or of the numbers, which are all returned.
          most: the most classes of an image with one class.
          threshold: the least probability of a class, if an image has any number of classes.
        """
        found = {"path": self.path, "error": self.error}
        if self.numbers is not None:
            named = zip(class_names, self.numbers.tolist(), strict=False)  # after an error, none
            return found | {"numbers": dict(named)}
        chances = self.probabilities
        order = [] if chances is None else np.argsort(-chances, kind="stable")
        if threshold is None:
            order = order[:most]
        else:
            order = [index for index in order if chances[index] >= threshold]
        classes = [
            {"class": class_names[index], "probability": float(chances[index])} for index in order
        ]
        return found | {"classes": classes}

    def line(self, class_names: Sequence[str], most: int, *, threshold: float | None = None) -> str:
        """Returns the same as text for people."""
        found = self.as_dict(class_names, most, threshold=threshold)
        if self.numbers is not None:
            said = [f"{name} {in_figures(each, 4)}" for name, each in found["numbers"].items()]
        else:
            said = [f"{each['class']} {each['probability']:.1%}" for each in found["classes"]]
        said = said or [f"no class of at least {threshold or 0:.0%}"]
        return in_lines(f"{self.path}: {self.error or ', '.join(said)}", rest="  ")


class Export:
    """A loaded export of a model of images.

    Attributes:
      folder: where it is.
      facts: what its card says.
      shapes: the shape of each answer to files, by name, with None for the rows; empty if the
        export takes no files.
    """

    def __init__(self, model: pathlib.Path):
        """Loads the export. A SavedModel is a program, so load only those that you trust.

        Args:
          model: the folder of an export; or of numbered versions, which means the last one; or a
            run's workdir.

        Raises:
          UserError: there is no export, or it cannot be loaded.
        """
        self.folder = folder = find_export(model)
        self.facts = card.read(folder)
        runtime.load_cuda_libraries()
        with contextlib.suppress(RuntimeError, ValueError):  # the process already uses the GPUs
            for gpu in tf.config.list_physical_devices("GPU"):
                tf.config.experimental.set_memory_growth(gpu, True)
        try:
            check_regular(folder.rglob("*"))  # TensorFlow would wait for a FIFO
            with literal(folder) as plain:
                self._loaded = tf.saved_model.load(plain)
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise UserError(f"{folder} cannot be loaded ({error}); export it again") from error
        signatures = self._loaded.signatures
        self._answer = signatures.get("predict_bytes")
        pixels = self.facts.get("preprocessing")
        self._reads = None  # what reads files that the export cannot decode
        if pixels and not pixels["formats"]:
            self._reads = Preprocessing.from_dict(pixels)
            self._answer = signatures.get("serving_default")
        given = self._answer.structured_outputs if self._answer else {}
        self.shapes = {name: tuple(each.shape) for name, each in given.items()}

    def ask(
        self, paths: Sequence[str], name: str, *, rows: int = ROWS
    ) -> Iterator[np.ndarray | str]:
        """Yields the answer of that name for each file, or why it cannot be read or decoded.

        Args:
          paths: the files.
          name: one of `shapes`.
          rows: the most files in one request.
        """
        for start in range(0, len(paths), rows):
            read = [_read(path) for path in paths[start : start + rows]]
            answers = iter(self._ask([each for each in read if isinstance(each, bytes)], name))
            for each in read:
                yield next(answers) if isinstance(each, bytes) else each

    def _ask(self, encoded: list[bytes], name: str) -> list[np.ndarray | str]:
        if not encoded:
            return []
        if self._reads is not None:
            return [self._of_raster(each, name) for each in encoded]
        try:
            return list(self._answer(image_bytes=tf.constant(encoded))[name].numpy())
        except tf.errors.OpError as error:
            if len(encoded) == 1:
                return [_in_words(error)]
            # One of the files failed. Ask for each alone, to find out which and why.
            return [answer for each in encoded for answer in self._ask([each], name)]

    def _of_raster(self, encoded: bytes, name: str) -> np.ndarray | str:
        """Returns the answer to a file that is read as it is stored."""
        try:
            pixels = raster.read_as(encoded, raster.form_of(self._reads.images))
        except raster.FAULTS as error:
            return raster.cause(error)
        taken = self._answer.structured_input_signature[1]["image"].dtype
        window = tf.cast(self._reads.window_of(tf.constant(pixels)), taken)
        return self._answer(image=window[None])[name].numpy()[0]


def refusal(export: Export, wanted: str) -> UserError:
    """Returns the error that an export does not predict what is wanted, such as "masks"."""
    shapes = export.shapes
    if len(shapes.get("image", shapes.get("probabilities", ()))) == 4:
        what = "an image" if "image" in shapes else "a mask"
        fix = f"it predicts {what} for each file: add --output=DIR, a new folder for them"
    elif len(shapes.get("numbers", shapes.get("probabilities", ()))) == 2:
        fix = "it predicts classes or numbers: use --output=FILE.csv, or no --output"
    else:
        fix = "expected an export made with a loader of images, as `tfaccel train` makes it"
    return UserError(f"{export.folder} does not predict {wanted}; {fix}")


class Predictor:
    """An export that answers with classes or numbers.

    Attributes:
      task: what it predicts: see `data.source.TASKS`.
      class_names: the names of its classes, in order, or of its numbers.
    """

    def __init__(self, model: pathlib.Path):
        """Loads the export, as `Export` does.

        Raises:
          UserError: there is no export, or it predicts neither classes of image files nor numbers.
        """
        self._export = export = Export(model)
        self._name = "numbers" if "numbers" in export.shapes else "probabilities"
        shape = export.shapes.get(self._name, ())
        self.task = export.facts.get("task") or "classes"  # which older exports do not say
        if len(shape) != 2:
            raise refusal(export, "the classes of image files")
        key = "target_names" if self._name == "numbers" else "class_names"
        named = [str(each) for each in export.facts.get(key, ())]
        self.class_names = list(card.completed(named, shape[1]))

    def __call__(self, paths: Sequence[str]) -> Iterator[Prediction]:
        """Yields a prediction for each path, in order."""
        for path, answer in zip(paths, self._export.ask(paths, self._name), strict=True):
            if not isinstance(answer, str):
                yield Prediction(path, **{self._name: answer})
            else:
                none = np.zeros(0) if self._name == "numbers" else None
                yield Prediction(path, error=answer, numbers=none)


def _read(path: str) -> bytes | str:
    """Returns a file's bytes, or why it cannot be read."""
    try:
        return read_regular(path)  # not expanded, because the shell has already expanded "~"
    except OSError as error:
        return error.strerror or str(error)


def _in_words(error: tf.errors.OpError) -> str:
    """Returns TensorFlow's reason why an image failed, without its place in the graph."""
    # The reason is between the place in the program and the place in the graph.
    cause = re.search(r"(?:unavailable>\n|^)([^\n]+)(?:\n\t)? *\[\[\{\{node", str(error), re.M)
    text = cause[1] if cause else str(error).splitlines()[0]
    if kind := re.search(r"Invalid (JPEG|PNG) data", text):
        return f"a damaged {kind[1]}, or a kind of {kind[1]} that TensorFlow cannot decode"
    return re.sub(r"assertion failed: |: image\] \[0\]$|[\[\]]", "", text)
