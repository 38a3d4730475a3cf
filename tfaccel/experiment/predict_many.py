"""Predicts classes or numbers of very many image files with an export, and writes a file.

The files go through a loader, which decodes in threads or on the GPU, and the network runs on all
replicas. The file is CSV or Parquet, and is written in pieces: the same call continues what a
stopped one has begun, and the result has the same bytes as that of an uninterrupted call on the
same devices.

    num_errors = predict_many(folder_of_export, files, pathlib.Path("answers.csv"), top=3)
"""

import collections
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence

import keras
import numpy as np
from keras import ops

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.config import AugmentConfig, ImageConfig, RuntimeConfig
from tfaccel.data.distribute import Loader
from tfaccel.data.scan.examine import BAD
from tfaccel.data.scan.files import scan_files, smallest_window
from tfaccel.data.shards import Plan
from tfaccel.data.source import Blobs, ImageSource, UnreadableError, as_stored
from tfaccel.experiment.pieces import Pieces
from tfaccel.experiment.row_files import Column, form_of
from tfaccel.experiment.scored import scored
from tfaccel.export import card
from tfaccel.export.answers import Answers
from tfaccel.export.preprocessing import Preprocessing
from tfaccel.process import waits
from tfaccel.run import Run
from tfaccel.runtime.cluster import check_one_process, find

BATCH = 256  # images of a step over all replicas, about
ROWS_PER_PIECE = 4096  # a second of work on a fast GPU, and 0.4 MB
LATE = 2  # executions that the devices may be ahead of the file
PRECISIONS = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
NOT_FINITE = "the model's outputs are infinite or NaN"


def predict_many(
    folder: pathlib.Path,
    files: Sequence[str],
    output: pathlib.Path,
    *,
    top: int,
    loader: str | None = None,
    gpu_ids: Sequence[int] | None = None,
    global_batch_size: int | None = None,
) -> int:
    """Writes a row for each file and returns how many files have an error in place of an answer.

    A row has the likeliest classes. If an image may have several classes, it has the probability of
    each class instead, and for a regression each number, in columns by name.

    Args:
      folder: the folder of an export of classes or numbers, with its model.keras.
      files: the paths of the images, each once.
      output: a new .csv or .parquet file.
      top: the likeliest classes in a row, for images with one class.
      loader: "dali_gpu", "dali_cpu" or "tf_data"; None for DALI on the device, or for "tf_data" if
        DALI does not read images of this kind.
      gpu_ids: indices of the GPUs; () for the CPU; None for all GPUs.
      global_batch_size: images of a step over all replicas; None for about `BATCH`.

    Raises:
      UserError: the export does not suit, the output belongs to other files or flags, or it
        cannot have these names.
      RunError: the output cannot be written.
    """
    export, form = _Export.read(folder), form_of(output)
    asked = export.asked(top)
    columns = [Column("image", str), *asked.columns, Column("error", str)]
    form.check(columns, (*export.names, *files))
    paths = [os.path.abspath(each) for each in files]
    cluster = find(os.environ)
    check_one_process(cluster, "predict --output")
    run = Run(RuntimeConfig(gpu_ids=gpu_ids, precision=export.precision), cluster)
    num_replicas, device = run.strategy.num_replicas_in_sync, run.runtime.devices[0]
    source = ImageSource(Blobs(paths), np.zeros(len(paths), np.int32), ("unknown",))
    source = as_stored(source, export.images)
    if loader is None:
        loader = "dali_cpu" if device.cuda_ordinal is None else "dali_gpu"
        if source.images.form is not None:  # DALI does not read such files
            loader = "tf_data"
    batch = global_batch_size or max(1, BATCH // num_replicas) * num_replicas
    pieces = Pieces(
        output,
        columns,
        form,
        num_rows=len(files),
        rows_per_piece=ROWS_PER_PIECE,
        settings={
            "files": _digest(map(os.fsencode, paths)),
            "model": _digest([export.file.read_bytes()]),
            "classes": list(export.names),
            # Others would round differently.
            "computed by": [num_replicas, device.cuda_ordinal is not None, loader, batch],
        },
    )
    with pieces.held():
        if pieces.start:
            summary("predict: continues after %s", counted(pieces.start, "image"))
        report = scan_files(
            source,
            num_workers=run.runtime.loader_threads * num_replicas,
            progress=True,
            smallest=smallest_window(export.images, export.augment),
        )
        faults = {each.id: each for each in report.faults if each.severity == BAD}
        reasons = {number: f"{each.kind}: {each.cause}" for number, each in faults.items()}
        good = np.delete(np.arange(len(paths)), report.bad_ids)
        rows = _Rows(pieces, files, reasons, good, asked)
        if rows.next_good < len(good):
            images = run.loader(
                source.taken(good),
                augment=export.augment,
                **dataclasses.asdict(export.images)
                | {"loader": loader, "global_batch_size": batch, "batch_per_replica": None},
            )
            _predict(run, export, images, rows, asked)
        rows.finish()
        num_errors = pieces.count(len(columns) - 1)
        pieces.join()
    summary("predict: %s in %s, %d with an error", counted(len(files), "row"), output, num_errors)
    return num_errors


def _predict(run: Run, export: "_Export", images: Loader, rows: "_Rows", asked) -> None:
    """Runs the network from the first batch that has a missing row on."""
    with run.scope():
        model = export.load()
    step = rows.next_good // images.data.plan.global_batch_size
    images.start_at(epoch=0, step=step)
    rows.skip_before(step * images.data.plan.global_batch_size)
    with waits.on("predicting the images"):
        named = scored(run, model, asked)
        collect = _Collect(rows.take, images.data.plan, step)
        try:
            named.predict(images, steps=images.num_batches - step, callbacks=[collect], verbose=0)
        except UnreadableError as error:  # it could be read when all files were checked
            raise UserError(
                f"{error} (the rows so far are kept; run the same command again, which continues "
                "and writes an error into the row of such a file)"
            ) from error


@dataclasses.dataclass(frozen=True)
class _Export:
    """What the card of an export says of its model.

    Attributes:
      file: model.keras.
      names: of the classes or the numbers of all outputs, in order.
      answers: from outputs to probabilities or numbers.
      images: size, channels and normalization.
      augment: the window.
      precision: the dtype policy.
    """

    file: pathlib.Path
    names: tuple[str, ...]
    answers: Answers
    images: ImageConfig
    augment: AugmentConfig
    precision: str

    @classmethod
    def read(cls, folder: pathlib.Path) -> "_Export":
        """Reads the card.

        Raises:
          UserError: the export predicts neither classes of images nor numbers, has no model.keras,
            or resizes images twice.
        """
        facts, file = card.read(folder), folder / "model.keras"
        kind = facts.get("answers")
        names = facts.get("target_names" if kind == "numbers" else "class_names")
        if kind not in ("logits", "probabilities", "numbers") or not names:
            raise UserError(
                f"{folder} does not predict the classes of image files, or numbers, which a CSV "
                "file could hold; for masks or restored images give --output=DIR, a new folder, "
                "else an export made with a loader of labelled images, as `tfaccel train` makes it"
            )
        if not file.is_file():
            raise UserError(
                f"{folder} has no model.keras, because Keras cannot rebuild its model; predict "
                "without --output, which asks the SavedModel"
            )
        pixels = facts["preprocessing"]
        if pixels["stored_size"]:
            raise UserError(
                f"{folder} resizes images to {pixels['stored_size']} before it takes the window "
                "(data.stored_size), which a loader of files does not; predict without --output"
            )
        how = Preprocessing.from_dict(pixels)
        return cls(
            file,
            tuple(map(str, names)),
            # Earlier exports do not say it. Each of them has one class an image: several outputs
            # are made probabilities by softmax, and one output, in either case, by the sigmoid.
            Answers(
                kind,
                exclusive=facts.get("exclusive", True),
                several=facts.get("task") == "multilabel",
            ),
            how.images,
            how.augment,
            PRECISIONS.get(facts["computes_in"], "float32"),
        )

    def asked(self, top: int) -> "_Likeliest | _All":
        """Returns what a row has: the `top` likeliest classes, or all classes or numbers."""
        if self.answers.task == "classes":
            return _Likeliest(self.answers, self.names, min(top, len(self.names)))
        return _All(self.answers, self.names)

    def load(self) -> keras.Model:
        """Returns the model, in the current scope."""
        try:
            return keras.saving.load_model(self.file, compile=False)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{self.file} cannot be loaded ({error}); export it again") from error


@dataclasses.dataclass(frozen=True)
class _Likeliest:
    """The likeliest classes of an image: on its replica, and in its row of the file."""

    answers: Answers
    names: tuple[str, ...]
    top: int

    @property
    def columns(self) -> list[Column]:
        """The columns of a row."""
        pair = (("class", str), ("probability", float))
        places = range(1, self.top + 1)
        return [Column(f"{name}_{each}", kind) for each in places for name, kind in pair]

    def __call__(self, inputs, targets, outputs) -> tuple:
        """Returns classes and probabilities of the rows of a batch, and whether all are finite.

        They are [rows, top] int32, [rows, top] float32, and [rows] bool.
        """
        chances = self.answers(outputs)["probabilities"]
        values, classes = ops.top_k(chances, self.top)
        is_finite = ops.all(ops.isfinite(chances), axis=-1)
        # A tuple, because Keras makes numbers of what a dict passes to callbacks.
        return ops.cast(classes, "int32"), values, is_finite

    def cells(self, classes: list[int], chances: list[float]) -> list[str | float]:
        """Returns the cells of an image."""
        pairs = zip(classes, chances, strict=True)
        return [each for one, chance in pairs for each in (self.names[one], chance)]


@dataclasses.dataclass(frozen=True)
class _All:
    """The probability of each class of an image, or each number, in columns by name."""

    answers: Answers
    names: tuple[str, ...]

    @property
    def columns(self) -> list[Column]:
        """The columns of a row, with names as in the images.csv of `tfaccel evaluate`."""
        # Without the first word, a class may have the name of another column, such as "error".
        kind = "predicted" if self.answers.kind == "numbers" else "probability"
        return [Column(f"{kind}_{each}", float) for each in self.names]

    def __call__(self, inputs, targets, outputs) -> tuple:
        """Returns values of the rows of a batch, and whether all of a row are finite.

        They are [rows, classes or numbers] float32, and [rows] bool.
        """
        name = "numbers" if self.answers.kind == "numbers" else "probabilities"
        values = self.answers(outputs)[name]
        # An infinite logit has a finite probability, which means nothing.
        is_finite = ops.all(ops.isfinite(ops.cast(outputs, "float32")), axis=-1)
        return values, is_finite

    def cells(self, values: list[float]) -> list[float]:
        """Returns the cells of an image."""
        return values


class _Collect(keras.callbacks.Callback):
    """Passes the results of each batch on, without padding rows, while later batches run."""

    def __init__(self, take: Callable[..., None], plan: Plan, first_step: int):
        """Takes the consumer, the plan of the batches, and the number of the first batch."""
        super().__init__()
        self._take, self._plan, self._step = take, plan, first_step
        self._waiting = collections.deque()

    def on_predict_batch_end(self, batch, logs=None):
        """Keeps the newest results, which the device may still compute, and passes older ones."""
        self._waiting.append(logs["outputs"])
        while len(self._waiting) > LATE:
            self._pass_on()

    def on_predict_end(self, logs=None):
        """Passes the rest."""
        while self._waiting:
            self._pass_on()

    def _pass_on(self) -> None:
        outputs = [np.asarray(each) for each in self._waiting.popleft()]
        masks, num_rows = [], 0
        while num_rows < len(outputs[0]):
            for replica in range(self._plan.num_replicas):
                masks.append(self._plan.real(epoch=0, step=self._step, replica_index=replica))
                num_rows += len(masks[-1])
            self._step += 1
        is_real = np.concatenate(masks)
        self._take(*(each[is_real] for each in outputs))


class _Rows:
    """Puts answers and errors in the order of the files.

    Attributes:
      next_good: the place among the readable files of the next one without a row.
    """

    def __init__(
        self,
        pieces: Pieces,
        files: Sequence[str],
        reasons: dict[int, str],
        good: np.ndarray,
        asked: _Likeliest | _All,
    ):
        """Takes where to write, the files, why some cannot be read, which can be, and the cells."""
        self._pieces, self._files, self._reasons, self._good = pieces, files, reasons, good
        self._cells, self._none, self._skip = asked.cells, [None] * len(asked.columns), 0
        self._next = pieces.start  # the next row of all
        self.next_good = int(np.searchsorted(good, self._next))

    def skip_before(self, first_good: int) -> None:
        """Says that the answers begin with an earlier file, whose row is already written."""
        self._skip = self.next_good - first_good

    def take(self, *results: np.ndarray) -> None:
        """Takes the answers for the next readable files, the last of which says which are known."""
        skip = min(self._skip, len(results[0]))
        self._skip -= skip
        columns = (each[skip:].tolist() for each in results)
        for *values, is_known in zip(*columns, strict=True):
            self._errors_before(int(self._good[self.next_good]))
            if is_known:
                self._add(self._cells(*values), None)
            else:
                self._add(self._none, NOT_FINITE)
            self.next_good += 1
        waits.reached(f"{self._next:,} of {len(self._files):,} images")

    def finish(self) -> None:
        """Writes the rows after the last readable file."""
        self._errors_before(len(self._files))

    def _errors_before(self, row: int) -> None:
        while self._next < row:
            self._add(self._none, self._reasons[self._next])

    def _add(self, cells: list[str | float | None], error: str | None) -> None:
        self._pieces.add((self._files[self._next], *cells, error))
        self._next += 1


def _digest(parts) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for each in parts:
        digest.update(each + b"\0")
    return digest.hexdigest()
