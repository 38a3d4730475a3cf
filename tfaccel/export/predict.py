"""Predicts the classes of image files, or numbers, with an export.

A `Predictor` takes the folder of an export, or of its versions. It yields a Prediction for each
path. A file that cannot be read gives a Prediction with an error.

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


class Predictor:
    """A loaded export.

    Attributes:
      task: what it predicts: see `data.source.TASKS`.
      class_names: the names of its classes, in order, or of its numbers.
    """

    def __init__(self, model: pathlib.Path):
        """Loads the export. A SavedModel is a program, so load only those that you trust.

        Args:
          model: the folder of an export; or of numbered versions, which means the last one; or a
            run's workdir.

        Raises:
          UserError: there is no export, or it predicts neither classes of image files nor numbers.
        """
        folder = find_export(model)
        facts = card.read(folder)
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
        pixels = facts.get("preprocessing")
        self._reads = None  # what reads files that the export cannot decode
        if pixels and not pixels["formats"]:
            self._reads = Preprocessing.from_dict(pixels)
            self._answer = signatures.get("serving_default")
        given = self._answer.structured_outputs if self._answer else {}
        self._name = "numbers" if "numbers" in given else "probabilities"
        shape = given.get(self._name)
        self.task = facts.get("task") or "classes"  # which older exports do not say
        if shape is None or len(shape.shape) != 2:
            raise UserError(
                f"{folder} does not predict the classes of image files; expected an export "
                "made with a loader of labelled images, as `tfaccel train` makes it"
            )
        key = "target_names" if self._name == "numbers" else "class_names"
        named = [str(each) for each in facts.get(key, ())]
        self.class_names = list(card.completed(named, shape.shape[1]))

    def __call__(self, paths: Sequence[str]) -> Iterator[Prediction]:
        """Yields a prediction for each path, in order."""
        for start in range(0, len(paths), ROWS):
            yield from self._of_some(paths[start : start + ROWS])

    def _of_some(self, paths: Sequence[str]) -> Iterator[Prediction]:
        read = [_read(path) for path in paths]
        answers = iter(self._ask([each for each in read if isinstance(each, bytes)]))
        for path, each in zip(paths, read, strict=True):
            answer = next(answers) if isinstance(each, bytes) else each
            is_error = isinstance(answer, str)
            if not is_error:
                yield Prediction(path, **{self._name: answer})
            else:
                none = np.zeros(0) if self._name == "numbers" else None
                yield Prediction(path, error=answer, numbers=none)

    def _ask(self, encoded: list[bytes]) -> list[np.ndarray | str]:
        """Returns each file's probabilities or numbers, or why it cannot be decoded."""
        if not encoded:
            return []
        if self._reads is not None:
            return [self._of_raster(each) for each in encoded]
        try:
            return list(self._answer(image_bytes=tf.constant(encoded))[self._name].numpy())
        except tf.errors.OpError as error:
            if len(encoded) == 1:
                return [_in_words(error)]
            # One of the files failed. Ask for each alone, to find out which and why.
            return [answer for each in encoded for answer in self._ask([each])]

    def _of_raster(self, encoded: bytes) -> np.ndarray | str:
        """Returns the probabilities or numbers of a file that is read as it is stored."""
        try:
            pixels = raster.read_as(encoded, raster.form_of(self._reads.images))
        except raster.FAULTS as error:
            return raster.cause(error)
        taken = self._answer.structured_input_signature[1]["image"].dtype
        window = tf.cast(self._reads.window_of(tf.constant(pixels)), taken)
        return self._answer(image=window[None])[self._name].numpy()[0]


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
