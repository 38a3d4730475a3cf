"""The writers of a run, one for each form of its log."""

import pathlib

from tfaccel.training.logs import Writer
from tfaccel.training.logs.csv import Csv
from tfaccel.training.logs.first_batch import FirstBatch
from tfaccel.training.logs.json_lines import JsonLines
from tfaccel.training.logs.tensorboard import TensorBoard
from tfaccel.training.logs.terminal import Terminal


def make_writers(workdir: pathlib.Path, *, loader, num_epochs: int) -> list[Writer]:
    """Returns a run's writers: terminal, JSON lines, CSV, TensorBoard and the first batch's sheet.

    Args:
      workdir: the folder of the run, which exists.
      loader: the images that the run trains on.
      num_epochs: the epochs of the whole run.
    """
    return [
        Terminal(num_epochs=num_epochs, steps_per_epoch=loader.num_batches),
        JsonLines(workdir / "metrics.jsonl"),
        Csv(workdir / "metrics.csv"),
        TensorBoard(workdir / "tensorboard"),
        FirstBatch(workdir / "first_batch.png", loader),
    ]
