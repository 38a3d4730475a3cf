"""Checks that an export answers as the trained model does.

`about_images` and `about_inputs` take the trained model and its inputs, and return a `Question`.
Its `ask` runs the export on the CPU in a fresh process, without tfaccel and DALI. It returns a
`Parity`, in which every check has a value and a limit.

    parity = about_images(model, images, samples).ask(folder)
    if parity.failed: ...
"""

import dataclasses
import functools
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common import temporary
from tfaccel.common.disk_errors import from_tensorflow, not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.tables import cleaned, in_figures
from tfaccel.export import fresh_process
from tfaccel.export.answers import THRESHOLD
from tfaccel.export.samples import Samples
from tfaccel.export.saved_model import Images, input_names, outputs_by_name, structured
from tfaccel.keras_internals.layers import layers_of
from tfaccel.process import child
from tfaccel.process.out_of_memory import is_out_of_memory

# The largest difference between the exported and the trained model's outputs for the same inputs,
# relative to the largest output. Both run the same layers in the same precision, but other kernels
# may sum in another order: 2.7e-4 in float32 with TF32 on an H200 (2026-11-21). TF32 has float16's
# mantissa.
TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
# A smaller largest output counts as this, because float16 has fewer bits for it.
LEAST = 2.0**-14
# Limits for the same files with other decoders. These may differ by a few of 255 grey levels where
# colors change. The pipeline's pixels are also rounded to float16.
PIXEL_LIMIT = 2.0  # grey levels, the mean over an image, for the worst image
OUTPUT_LIMIT = 0.1  # relative to the largest output, or to 1, because logits near 0 mean little
DISAGREEMENT_LIMIT = 0.01  # of the images
# Limits of integers of 8 bits for the same files, by the end of a check's name.
INT8_LIMITS = {"answers": 0.5, "top-1": 0.05, "classes": 0.05}
INT8_IMAGE_LIMIT = 10.0  # grey levels, the mean over an image
NORMALISATION_LIMIT = 1e-4  # relative to the largest input
ROWS = 32  # in one call of the trained model
# The time limits of the fresh process: one to import TensorFlow and load the export, and one for
# each sample, which has up to four answers (pixels and files, ONNX). ResNet-50 takes 0.05 s for one
# answer on 2 cores with float16 (2026-11-22). Other cores are far slower in float16, and many large
# images take long.
START_LIMIT_S = 600.0
SAMPLE_LIMIT_S = 30.0

Arrays = dict[str, np.ndarray]


class NoAnswerError(RunError):
    """An export does not answer in a process of its own.

    Attributes:
      may_pass: whether the machine may be the cause and not the export: it was slow, or it killed
        the process.
    """

    def __init__(self, said: str, *, may_pass: bool):
        """Takes the message and `may_pass`."""
        super().__init__(said)
        self.may_pass = may_pass


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
      name: what is compared.
      value: the difference.
      limit: the largest difference that passes.
      words: the value with its unit, for people.
    """

    name: str
    value: float
    limit: float
    words: str

    @property
    def failed(self) -> bool:
        """Whether the difference is above the limit. NaN fails."""
        return not self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Parity:
    """The result of all comparisons.

    Attributes:
      num: the number of images or inputs.
      checks: all comparisons.
      worst: the index of the image whose pixels differ most; None if there are no files.
    """

    num: int
    checks: tuple[Check, ...]
    worst: int | None = None

    @property
    def failed(self) -> list[Check]:
        """The checks that failed, in order."""
        return [each for each in self.checks if each.failed]

    def as_dict(self) -> dict[str, object]:
        """Returns the result for JSON."""
        return {
            "samples": self.num,
            "checks": [dataclasses.asdict(each) for each in self.checks],
        }


@dataclasses.dataclass(frozen=True)
class Question:
    """The inputs for an export, and the trained model's outputs for them.

    Attributes:
      inputs: the inputs of `serving_default`, by name.
      encoded: image files; empty for a model that takes its own inputs.
      expected: the trained model's outputs for `inputs`, by name.
      tolerance: the allowed difference for the same layers, relative to the largest output.
      compared: a function that makes a Parity from the export's answers.
    """

    inputs: Arrays
    encoded: Sequence[bytes]
    expected: Arrays
    tolerance: float
    compared: Callable[[Arrays], Parity]

    def ask(self, folder: pathlib.Path, stop: threading.Event | None = None) -> Parity:
        """Runs the export in a fresh process, and compares its answers.

        Args:
          folder: the export's folder.
          stop: ends the process when it is set.

        Raises:
          RunError: the export does not load, or does not answer.
          child.Stopped: `stop` was set.
        """
        return self.compared(_asked(folder, self.inputs, self.encoded, stop))


def about_inputs(
    model: keras.Model, inputs: list[np.ndarray], litert: str | None = None
) -> Question:
    """Returns the question for the export of a trained model that takes its own inputs.

    `inputs` has one array, [rows, ...], for each of the model's inputs. `litert` is how a file for
    LiteRT is written.
    """
    named = {
        name: _as_stored(each, own.dtype)
        for name, own, each in zip(input_names(model), model.inputs, inputs, strict=True)
    }
    expected, tolerance = _outputs(model, list(named.values())), _tolerance(model)

    def compared(answers: Arrays) -> Parity:
        served = _of("serving_default", answers)
        checks = [_same_inputs("model", expected, served, tolerance)]
        if onnx := _of("onnx", answers):
            checks.append(_same_inputs("ONNX", served, onnx, tolerance))
        if found := _of("litert", answers):
            limit = INT8_LIMITS["answers"] if litert == "int8" else _of_litert(litert, tolerance)
            checks.append(_same_inputs("LiteRT", served, found, limit))
        return Parity(len(next(iter(named.values()))), tuple(checks))

    return Question(named, (), expected, tolerance, compared)


def about_images(
    model: keras.Model, images: Images, samples: Samples, litert: str | None = None
) -> Question:
    """Returns the question for the export of a trained model of images: pixels, and files."""
    settings = images.preprocessing.images
    mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
    scale, dtype = np.float32(settings.pixel_scale), settings.pixel_dtype
    levels = scale * (samples.inputs.astype(np.float32) * std + mean)  # the pipeline's pixels
    pixels = levels if dtype == "float32" else np.clip(np.rint(levels), 0, scale).astype(dtype)
    of_pixels = _answers(model, images, (pixels / scale - mean) / std)
    of_samples = _answers(model, images, samples.inputs)
    tolerance = _tolerance(model)

    def compared(answers: Arrays) -> Parity:
        served, onnx, graph = (
            _of(name, answers) for name in ("serving_default", "onnx", "preprocess")
        )
        same_model = [_same_inputs("model", of_pixels, served, tolerance)]
        if onnx:
            same_model.append(_same_inputs("ONNX", served, onnx, tolerance))
        if litert in ("float32", "float16"):
            found, limit = _of("litert", answers), _of_litert(litert, tolerance)
            same_model.append(_same_inputs("LiteRT", served, found, limit))
        if not samples.encoded:  # the export takes no files
            return Parity(len(samples), tuple(same_model))
        normalised = (graph["pixels"][: len(graph["inputs"])] / scale - mean) / std
        decoded = np.delete(np.arange(len(samples)), answers["failed"])
        apart = np.abs(graph["pixels"] - levels[decoded]) * (255 / scale)
        of_each = apart.mean(axis=(1, 2, 3))
        of_files = {name: each[decoded] for name, each in of_samples.items()}
        labels = None if samples.labels is None else samples.labels[decoded]
        same_files = functools.partial(
            _same_files, expected=of_files, images=images, tolerance=tolerance, labels=labels
        )
        checks = [
            _decoded(answers["failed"], samples),
            _same_pixels(of_each, apart.max()),
            _relative(
                "normalisation", {"": normalised}, {"": graph["inputs"]}, NORMALISATION_LIMIT
            ),
            same_model[0],
            *same_files("", received=_of("predict_bytes", answers)),
            *same_model[1:],
        ]
        if onnx:
            of_onnx = _of("onnx_bytes", answers)
            checks += same_files("ONNX ", received=of_onnx)
        if litert:
            found = same_files("LiteRT ", received=_of("litert_bytes", answers))
            checks += map(functools.partial(_of_int8, images), found) if litert == "int8" else found
        return Parity(len(samples), tuple(checks), int(decoded[of_each.argmax()]))

    return Question({"image": pixels}, samples.encoded, of_pixels, tolerance, compared)


def _of_litert(litert: str, tolerance: float) -> float:
    """Returns the tolerance of LiteRT's answers to the same inputs."""
    return max(tolerance, TOLERANCE["float16"]) if litert == "float16" else tolerance


def _of_int8(images: Images, check: "Check") -> "Check":
    """Returns the check with the limit of integers of 8 bits."""
    limit = INT8_LIMITS[check.name.rpartition(" ")[2]]
    limit = INT8_IMAGE_LIMIT if images.answers.kind == "image" else max(limit, check.limit)
    return dataclasses.replace(check, limit=limit)


# The comparisons.


def _decoded(failed: np.ndarray, samples: Samples) -> Check:
    num = len(samples)
    words = f"{num - len(failed):,} of {num:,} files"
    if len(failed):
        words += f", all but {samples.names[failed[0]]}"
        words += f" and {len(failed) - 1} others" if len(failed) > 1 else ""
        words += "; left out of the checks below"
    return Check("decoded", len(failed) / num, max(DISAGREEMENT_LIMIT, 1 / num), words)


def _same_pixels(of_each: np.ndarray, most: float) -> Check:
    words = (
        f"the worst image differs by {of_each.max():.2f} of 255 grey levels, the average image by "
        f"{of_each.mean():.2f}, one pixel by up to {most:.0f}"
    )
    return Check("pixels", float(of_each.max()), PIXEL_LIMIT, words)


def _same_inputs(name: str, expected: Arrays, received: Arrays, tolerance: float) -> Check:
    return _relative(name, expected, received, tolerance, "from the same inputs")


def _same_files(
    prefix: str,
    *,
    expected: Arrays,
    received: Arrays,
    images: Images,
    tolerance: float,
    labels: np.ndarray | None,
) -> list[Check]:
    kind = images.answers.kind
    if kind == "image":
        apart = np.abs(expected[kind] - received[kind]).mean(axis=(1, 2, 3))
        apart = float(apart.max() * 255 / images.answers.scale)
        words = f"the worst image differs by {apart:.2f} of 255 grey levels, from the same files"
        return [Check(f"{prefix}answers", apart, PIXEL_LIMIT, words)]
    if kind == "numbers":
        what = "from the same files"
        return [_relative(f"{prefix}answers", expected, received, OUTPUT_LIMIT, what)]
    chances = (each["probabilities"] for each in (expected, received))
    if images.answers.several:
        how = {"limit": OUTPUT_LIMIT, "what": "from the same files", "least": 1.0}
        answers = _relative(f"{prefix}answers", {kind: expected[kind]}, received, **how)
        return [answers, _same_classes(f"{prefix}classes", *chances, tolerance, labels)]
    top_1 = _same_best(f"{prefix}top-1", *chances, tolerance, labels)
    if expected[kind].ndim > 2:
        return [top_1]  # with millions of pixels in a mask, the worst one says little
    how = {"limit": OUTPUT_LIMIT, "what": "from the same files", "least": 1.0}
    return [_relative(f"{prefix}answers", {kind: expected[kind]}, received, **how), top_1]


def _same_best(
    name: str,
    expected: np.ndarray,
    received: np.ndarray,
    tolerance: float,
    labels: np.ndarray | None = None,
) -> Check:
    """Compares which class is likeliest. Classes that are equal within the tolerance count as one.

    Both models may agree and be wrong, so the words also say how many classes are right.

    Args:
      name: the name of the check.
      expected: the trained model's probabilities, [num, ..., classes].
      received: the export's probabilities, [num, ..., classes].
      tolerance: the tolerance of a probability in the trained model's precision.
      labels: the right classes, [num]; None if they are not known.
    """
    best, theirs = expected.argmax(axis=-1), received.argmax(axis=-1)
    lead = expected.max(axis=-1) - np.take_along_axis(expected, theirs[..., None], -1)[..., 0]
    same, tie = best == theirs, lead <= tolerance
    num = same.size
    what = "images" if best.ndim == 1 else "pixels"
    words = (
        f"the export and the trained model give the same class for {int(same.sum()):,} of {num:,} "
        f"{what}, {same.mean():.2%}"
    )
    if ties := int((tie & ~same).sum()):
        words += f"; ties among the others: {ties:,}"
    if labels is not None and labels.shape == theirs.shape:
        right = theirs == labels
        words += f"; the export's class is right for {int(right.sum()):,} of {num:,}, "
        words += f"{right.mean():.0%}"
    wrong = float((~same & ~tie).mean())
    return Check(name, wrong, max(DISAGREEMENT_LIMIT, 1 / num), words)


def _same_classes(
    name: str,
    expected: np.ndarray,
    received: np.ndarray,
    tolerance: float,
    labels: np.ndarray | None,
) -> Check:
    """Compares which classes are at least as likely as THRESHOLD: see `_same_best`.

    Args:
      name: the name of the check.
      expected: the trained model's probabilities, [num, classes].
      received: the export's probabilities, [num, classes].
      tolerance: a probability that is as near to the threshold as this may fall on either side.
      labels: 1 for the right classes, [num, classes]; None if they are not known.
    """
    has, theirs = expected >= THRESHOLD, received >= THRESHOLD
    same, tie = has == theirs, np.abs(expected - THRESHOLD) <= tolerance
    num = same.size
    words = (
        f"the export and the trained model agree on {int(same.sum()):,} of {num:,} classes of the "
        f"images, {same.mean():.2%}"
    )
    if ties := int((tie & ~same).sum()):
        words += f"; ties among the others: {ties:,}"
    if labels is not None and labels.shape == theirs.shape:
        words += f"; the export is right on {(theirs == (labels > THRESHOLD)).mean():.0%}"
    return Check(name, float((~same & ~tie).mean()), max(DISAGREEMENT_LIMIT, 1 / num), words)


def _relative(
    name: str,
    expected: Arrays,
    received: Arrays,
    limit: float,
    what: str = "",
    *,
    least: float = LEAST,
) -> Check:
    """Compares by the largest difference of any output, relative to the output's largest value.

    Args:
      name: the name of the check.
      expected: the trained model's outputs.
      received: the export's outputs.
      limit: the limit of the check.
      what: the basis of the comparison, in words.
      least: a smaller largest value counts as this.
    """
    worst = 0.0
    for key, want in expected.items():
        want, got = want.astype(np.float64), received[key].astype(np.float64)
        difference = float(np.abs(want - got).max() / max(least, np.abs(want).max()))
        worst = max(worst, difference if np.isfinite(difference) else np.inf)
    words = f"differs by {in_figures(worst, 2)} of the largest value"
    words += "" if least == LEAST else f" (or of {in_figures(least)} if larger)"
    return Check(name, worst, limit, f"{words}, {what}" if what else words)


def lowest_precision(model: keras.Model) -> str:
    """Returns the layers' compute dtype with the shortest mantissa."""
    dtypes = {each.compute_dtype for each in layers_of(model)}
    return max(dtypes & TOLERANCE.keys(), key=TOLERANCE.get, default="float32")


def _tolerance(model) -> float:
    precision = lowest_precision(model)
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    return TOLERANCE["tf32" if precision == "float32" and tf32 and on_gpu else precision]


# The trained model's outputs, and the export's.


def _answers(model, images: Images, inputs: np.ndarray) -> Arrays:
    """Returns the trained model's answers to normalized images, by name."""
    parts = [images.answers(each) for each in _called(model, [inputs])]
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def _outputs(model, inputs: list[np.ndarray]) -> Arrays:
    """Returns the trained model's float32 outputs, by their names in a signature."""
    parts = []
    for outputs in _called(model, inputs):
        named = outputs_by_name(outputs)
        parts.append({name: tf.cast(each, tf.float32) for name, each in named.items()})
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def _as_stored(array, dtype: str) -> np.ndarray:
    """Returns an input as `np.savez` can store it: text becomes bytes of one length."""
    if dtype == "string":
        return tf.constant(array, tf.string).numpy().astype(bytes)
    return np.asarray(array).astype(dtype)


def _called(model, inputs: list[np.ndarray]) -> Iterator:
    for start in range(0, len(inputs[0]), ROWS):
        rows = [tf.constant(each[start : start + ROWS]) for each in inputs]
        try:
            yield model(structured(model, rows), training=False)
        except tf.errors.OpError as error:
            if is_out_of_memory(str(error)):
                raise
            why = cleaned(error.message.partition("[Op:")[0])
            raise UserError(
                f"model {model.name} does not answer outside a training step ({why}), as an export "
                "must; use images= that it accepts, or build it from layers that run here without "
                "XLA"
            ) from error


def _asked(
    folder: pathlib.Path, inputs: Arrays, encoded: Sequence[bytes], stop: threading.Event | None
) -> Arrays:
    """Returns the answers of the export from a fresh process, by "SIGNATURE/NAME"."""
    with temporary.folder("export") as shared:
        try:
            _write_questions(shared, inputs, encoded)
        except (OSError, tf.errors.OpError) as error:
            cause = error if isinstance(error, OSError) else from_tensorflow(error, shared)
            raise RunError(
                "the samples for the check of the export, in "
                f"{shared}, {not_written(cause, shared)}, or set TMPDIR to another folder; nothing "
                "was exported"
            ) from error
        _run(folder, shared, num_samples=len(next(iter(inputs.values()))), stop=stop)
        with np.load(shared / "answers.npz") as stored:
            return dict(stored)


def _write_questions(shared: pathlib.Path, inputs: Arrays, encoded: Sequence[bytes]) -> None:
    np.savez(shared / "inputs.npz", **inputs)
    if encoded:
        with tf.io.TFRecordWriter(str(shared / "encoded.tfrecord")) as writer:
            for each in encoded:
                writer.write(each)


def _run(
    folder: pathlib.Path,
    shared: pathlib.Path,
    *,
    num_samples: int,
    stop: threading.Event | None = None,
) -> None:
    """Runs the program on the CPU, which any server has; the GPU is in use by this process."""
    # -P: Python must not import packages from the program's folder.
    command = [sys.executable, "-P", fresh_process.__file__, str(folder), str(shared)]
    own = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    limit_s = START_LIMIT_S + SAMPLE_LIMIT_S * num_samples
    try:
        code, said = child.run(command, environment=os.environ | own, limit_s=limit_s, stop=stop)
    except TimeoutError as error:
        raise NoAnswerError(
            f"the export did not answer {num_samples:,} samples on the CPU within {limit_s:,.0f} s "
            "in a process of its own, which was killed; nothing was exported: compare fewer "
            "samples, or use computes_in='float32', because a CPU may be very slow in float16",
            may_pass=True,
        ) from error
    if code:
        how = f", which {child.how_it_ended(code)}" if code < 0 else f" ({_last_line(said)})"
        raise NoAnswerError(
            f"the export does not answer in a process of its own{how}; nothing was exported",
            may_pass=code < 0,
        )


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["no message"])[-1]


def _of(signature: str, answers: Arrays) -> Arrays:
    """Returns a signature's answers by name."""
    prefix = f"{signature}/"
    return {key[len(prefix) :]: each for key, each in answers.items() if key.startswith(prefix)}
