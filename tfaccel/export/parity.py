"""Whether an export answers as the trained model does, and if not, where the two part.

Takes the written export, the trained model and samples of the evaluation; runs the export in a
fresh process, without tfaccel and DALI, on the CPU; gives a Parity, of which every check has a
figure and a limit.

    parity = of_images(folder, model, images, samples)
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
from tfaccel.export.samples import Samples
from tfaccel.export.saved_model import Images, input_names, outputs_by_name, structured
from tfaccel.keras_internals.layers import layers_of
from tfaccel.process import child
from tfaccel.process.out_of_memory import is_out_of_memory

# Largest difference between exported and trained outputs from the same inputs, relative to the
# largest output. Both run the same layers in the same precision, but other kernels may be picked
# for them, whose sums differ: by 2.7e-4 in float32 with TF32 on an H200 (2026-11-21). TF32 has
# float16's mantissa.
TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
# A largest output that is smaller counts as this: float16 has fewer bits for it.
LEAST = 2.0**-14
# From the same files, by other decoders, which may be off by a few of 255 grey levels where colours
# change; the pipeline's pixels are rounded to float16 as well.
PIXEL_LIMIT = 2.0  # grey levels, the mean over an image, of the worst image
OUTPUT_LIMIT = 0.1  # relative to the largest output, or to 1: logits near 0 say nothing yet
DISAGREEMENT_LIMIT = 0.01  # of the images
NORMALISATION_LIMIT = 1e-4  # relative to the largest input
ROWS = 32  # that the trained model takes at a time
# For the fresh process to import TensorFlow and load the export, and for each sample, of which it
# has up to four answers (pixels and files, ONNX). ResNet-50 takes 0.05 s for one of them on 2 cores
# that have float16 (2026-11-22); others compute that by far slower, and so do many large images.
START_LIMIT_S = 600.0
SAMPLE_LIMIT_S = 30.0

Arrays = dict[str, np.ndarray]


class NoAnswerError(RunError):
    """An export does not answer in a process of its own.

    Attributes:
      may_pass: whether the machine, not the export, may be to blame: it is slow, or ended it.
    """

    def __init__(self, said: str, *, may_pass: bool):
        """Takes the sentence."""
        super().__init__(said)
        self.may_pass = may_pass


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
      name: what is compared.
      value: how far apart the two are.
      limit: up to which they are alike.
      words: the value, and what it is of, for people.
    """

    name: str
    value: float
    limit: float
    words: str

    @property
    def failed(self) -> bool:
        """Whether they are further apart; NaN is."""
        return not self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Parity:
    """What was compared.

    Attributes:
      num: of the images, or of the inputs.
      checks: each comparison.
      worst: the index of the image whose pixels are furthest apart; None where there are no files.
    """

    num: int
    checks: tuple[Check, ...]
    worst: int | None = None

    @property
    def failed(self) -> list[Check]:
        """The checks whose limit is passed, in order."""
        return [each for each in self.checks if each.failed]

    def as_dict(self) -> dict[str, object]:
        """Returns it for JSON."""
        return {
            "samples": self.num,
            "checks": [dataclasses.asdict(each) for each in self.checks],
        }


@dataclasses.dataclass(frozen=True)
class Question:
    """What an export is asked, and what the trained model answers to the same.

    Attributes:
      inputs: of `serving_default`, by name.
      encoded: image files; none for a model that takes its own inputs.
      expected: the trained model's outputs from these inputs, by name.
      tolerance: how far apart the same layers may be, relative to the largest output.
      compared: makes a Parity of the export's answers.
    """

    inputs: Arrays
    encoded: Sequence[bytes]
    expected: Arrays
    tolerance: float
    compared: Callable[[Arrays], Parity]

    def ask(self, folder: pathlib.Path, stop: threading.Event | None = None) -> Parity:
        """Asks the export in a fresh process, and compares its answers.

        Args:
          folder: of the export.
          stop: ends the process once it is set.

        Raises:
          RunError: the export does not load, or does not answer.
          child.Stopped: `stop` was set.
        """
        return self.compared(_asked(folder, self.inputs, self.encoded, stop))


def of_inputs(folder: pathlib.Path, model: keras.Model, inputs: list[np.ndarray]) -> Parity:
    """Compares a model that takes its own inputs: see `about_inputs`.

    Raises:
      RunError: the export does not load, or does not answer.
    """
    return about_inputs(model, inputs).ask(folder)


def of_images(folder: pathlib.Path, model: keras.Model, images: Images, samples: Samples) -> Parity:
    """Compares a model of images, from the same pixels and the same files: see `about_images`.

    Raises:
      RunError: the export does not load, or does not answer.
    """
    return about_images(model, images, samples).ask(folder)


def about_inputs(model: keras.Model, inputs: list[np.ndarray]) -> Question:
    """Returns what an export of a model is asked that takes its own inputs.

    Args:
      model: the trained one.
      inputs: for each of the model's inputs an array, [rows, ...].
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
        return Parity(len(next(iter(named.values()))), tuple(checks))

    return Question(named, (), expected, tolerance, compared)


def about_images(model: keras.Model, images: Images, samples: Samples) -> Question:
    """Returns what an export of a model of images is asked: pixels, and files.

    Args:
      model: the trained one.
      images: what surrounds it in the export.
      samples: of the evaluation pipeline.
    """
    settings = images.preprocessing.images
    mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
    levels = 255 * (samples.inputs.astype(np.float32) * std + mean)  # what the pipeline made
    pixels = np.clip(np.rint(levels), 0, 255).astype(np.uint8)
    of_pixels = _answers(model, images, (pixels / np.float32(255) - mean) / std)
    of_samples = _answers(model, images, samples.inputs)
    tolerance = _tolerance(model)

    def compared(answers: Arrays) -> Parity:
        served, onnx, graph = (
            _of(name, answers) for name in ("serving_default", "onnx", "preprocess")
        )
        normalised = (graph["pixels"][: len(graph["inputs"])] / np.float32(255) - mean) / std
        decoded = np.delete(np.arange(len(samples)), answers["failed"])
        apart = np.abs(graph["pixels"] - levels[decoded])
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
            _same_inputs("model", of_pixels, served, tolerance),
            *same_files("", received=_of("predict_bytes", answers)),
        ]
        if onnx:
            checks.append(_same_inputs("ONNX", served, onnx, tolerance))
            of_onnx = _of("onnx_bytes", answers)
            checks += same_files("ONNX ", received=of_onnx)
        return Parity(len(samples), tuple(checks), int(decoded[of_each.argmax()]))

    return Question({"image": pixels}, samples.encoded, of_pixels, tolerance, compared)


# The comparisons.


def _decoded(failed: np.ndarray, samples: Samples) -> Check:
    num = len(samples)
    words = f"{num - len(failed):,} of {num:,} files"
    if len(failed):
        words += f", not {samples.names[failed[0]]}: left out of what follows"
    return Check("decoded", len(failed) / num, max(DISAGREEMENT_LIMIT, 1 / num), words)


def _same_pixels(of_each: np.ndarray, most: float) -> Check:
    words = (
        f"{of_each.max():.2f} of 255 grey levels apart in the worst image, {of_each.mean():.2f} in "
        f"the mean, {most:.0f} at most"
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
        apart = float(np.abs(expected[kind] - received[kind]).mean(axis=(1, 2, 3)).max())
        words = f"{apart:.2f} of 255 grey levels apart in the worst image, from the same files"
        return [Check(f"{prefix}answers", apart, PIXEL_LIMIT, words)]
    chances = (each["probabilities"] for each in (expected, received))
    top_1 = _same_best(f"{prefix}top-1", *chances, tolerance, labels)
    if expected[kind].ndim > 2:
        return [top_1]  # of a mask's pixels, the worst of millions says little
    alike, what = {kind: expected[kind]}, "or of 1, from the same files"
    return [
        _relative(f"{prefix}answers", alike, received, OUTPUT_LIMIT, what, least=1.0),
        top_1,
    ]


def _same_best(
    name: str,
    expected: np.ndarray,
    received: np.ndarray,
    tolerance: float,
    labels: np.ndarray | None = None,
) -> Check:
    """Compares which class is likeliest; what is as likely, within the precision, is no other.

    Both may be alike and wrong, so that it is also said how many classes are right.

    Args:
      name: of the check.
      expected: [num, ..., classes] probabilities of the trained model.
      received: likewise, of the export.
      tolerance: of a probability, by the trained model's precision.
      labels: [num] of the right classes; None where they are not known.
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
        words += f", and in {ties:,} two are as likely"
    if labels is not None and labels.shape == theirs.shape:
        right = theirs == labels
        words += f"; the export's class is right for {int(right.sum()):,} of {num:,}, "
        words += f"{right.mean():.0%}"
    wrong = float((~same & ~tie).mean())
    return Check(name, wrong, max(DISAGREEMENT_LIMIT, 1 / num), words)


def _relative(
    name: str,
    expected: Arrays,
    received: Arrays,
    limit: float,
    what: str = "",
    *,
    least: float = LEAST,
) -> Check:
    """Compares by the largest difference of any output, relative to its largest value.

    Args:
      name: of the check.
      expected: of the trained model.
      received: of the export.
      limit: of the check.
      what: it is compared on, in words.
      least: what a largest value that is smaller counts as.
    """
    worst = 0.0
    for key, want in expected.items():
        want, got = want.astype(np.float64), received[key].astype(np.float64)
        difference = float(np.abs(want - got).max() / max(least, np.abs(want).max()))
        worst = max(worst, difference if np.isfinite(difference) else np.inf)
    words = f"{in_figures(worst, 2)} of the largest value apart"
    return Check(name, worst, limit, f"{words}, {what}" if what else words)


def lowest_precision(model: keras.Model) -> str:
    """Returns the dtype, of those that its layers compute in, with the shortest mantissa."""
    dtypes = {each.compute_dtype for each in layers_of(model)}
    return max(dtypes & TOLERANCE.keys(), key=TOLERANCE.get, default="float32")


def _tolerance(model) -> float:
    precision = lowest_precision(model)
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    return TOLERANCE["tf32" if precision == "float32" and tf32 and on_gpu else precision]


# What is compared.


def _answers(model, images: Images, inputs: np.ndarray) -> Arrays:
    """Returns the trained model's answers to normalised images, by name."""
    parts = [images.answers(each) for each in _called(model, [inputs])]
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def _outputs(model, inputs: list[np.ndarray]) -> Arrays:
    """Returns the trained model's outputs, float32, by the names that a signature gives them."""
    parts = []
    for outputs in _called(model, inputs):
        named = outputs_by_name(outputs)
        parts.append({name: tf.cast(each, tf.float32) for name, each in named.items()})
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def _as_stored(array, dtype: str) -> np.ndarray:
    """Returns an input as a file of arrays holds it: text as bytes of one length."""
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
                "has to; give images= that it takes, or build it of layers that run here without "
                "XLA"
            ) from error


def _asked(
    folder: pathlib.Path, inputs: Arrays, encoded: Sequence[bytes], stop: threading.Event | None
) -> Arrays:
    """Returns what the export answers in a fresh process, by "SIGNATURE/NAME"."""
    with temporary.folder("export") as shared:
        try:
            _write_questions(shared, inputs, encoded)
        except (OSError, tf.errors.OpError) as error:
            cause = error if isinstance(error, OSError) else from_tensorflow(error, shared)
            raise RunError(
                f"the samples that the export is asked, in {shared}, {not_written(cause, shared)}, "
                "or set TMPDIR to another folder; nothing is exported"
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
    """Runs the program, on the CPU: any server has one, and the GPU is the trainer's."""
    # -P: nothing of the program's folder may be taken for a package.
    command = [sys.executable, "-P", fresh_process.__file__, str(folder), str(shared)]
    own = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    limit_s = START_LIMIT_S + SAMPLE_LIMIT_S * num_samples
    try:
        code, said = child.run(command, environment=os.environ | own, limit_s=limit_s, stop=stop)
    except TimeoutError as error:
        raise NoAnswerError(
            f"the export did not answer {num_samples:,} samples on the CPU within {limit_s:,.0f} s "
            "in a process of its own, which was ended; nothing is exported: compare fewer samples, "
            "or let it compute in float32 (computes_in), as a CPU may be very slow in float16",
            may_pass=True,
        ) from error
    if code:
        how = f", which {child.how_it_ended(code)}" if code < 0 else f" ({_last_line(said)})"
        raise NoAnswerError(
            f"the export does not answer in a process of its own{how}; nothing is exported",
            may_pass=code < 0,
        )


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["no word"])[-1]


def _of(signature: str, answers: Arrays) -> Arrays:
    """Returns a signature's answers by name."""
    prefix = f"{signature}/"
    return {key[len(prefix) :]: each for key, each in answers.items() if key.startswith(prefix)}
