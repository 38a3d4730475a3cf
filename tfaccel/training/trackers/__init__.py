"""Experiment trackers: a run's config, metrics and export in MLflow or Weights & Biases.

Takes the names of trackers; gives an object for each, with one interface. Only the chief has some.

    check_installed(("mlflow", "wandb"))                # before TensorFlow starts
    mlflow = MLflow(project="flowers")                  # in mlflow.py
    run = mlflow.begin(None, name="a", config={"train": {"epochs": 3}}, folder=workdir)
    mlflow.log({"step": 50, "epoch": 1, "loss": 0.5})
    mlflow.export(workdir / "export" / "1")
    mlflow.end("finished")

`tracked.py` has the rest, which is the same for every tracker: it keeps the ids of their runs in
the workdir, sends in a thread, and says how the run ended.

Both libraries have Keras callbacks of their own. They are not used here. MLflow's is called at each
batch's end, so that `fit` would wait for each execution's results. The learning rate that W&B's
logs is that of a wrong step if an execution has several steps. Neither knows where a resumed run
goes on (mlflow 3.17, wandb 0.31; 2026-11-30).
"""

import pathlib
from collections.abc import Sequence

from tfaccel.common.errors import UserError
from tfaccel.common.extras import how_to_add, is_installed
from tfaccel.common.redact import shown
from tfaccel.training.logs import Record

LONGEST = 1000  # characters of a library's message
OUTCOMES = ("finished", "failed", "stopped")  # of a run; "stopped" by a signal


def check_installed(names: Sequence[str]) -> None:
    """Raises UserError if the library of a tracker is not installed."""
    for each in names:
        if not is_installed(each):
            raise UserError(
                f"{each} is not installed, but the trackers have it; add the extra: "
                f"{how_to_add(each)}, or leave {each} out of --config.log.trackers"
            )


class Tracker:
    """Gives one run's data to one tracker. Its methods may raise any error of the library.

    Attributes:
      key: the name in the config.
      name: for messages.
    """

    key: str
    name: str

    def begin(
        self, before: str | None, *, name: str, config: dict, folder: pathlib.Path
    ) -> str | None:
        """Begins a run, or goes on with an earlier one, and returns its id.

        Args:
          before: the id of the run to go on with; None to begin a new one.
          name: of the new run.
          config: nested settings, without secrets.
          folder: a folder that exists, for the tracker's own files.

        Raises:
          UserError: you have not logged in.
          RunError: the tracker cannot be reached.
        """

    def log(self, record: Record) -> None:
        """Gives the record of a complete epoch. A thread of its own calls it."""

    def export(self, path: pathlib.Path) -> None:
        """Gives the folder of an export, which is kept as an artefact."""

    def end(self, outcome: str) -> None:
        """Ends the run, with one of `OUTCOMES`."""


def flat(config: dict, prefix: str = "") -> dict[str, object]:
    """Returns nested settings by names such as "train.epochs"."""
    named = {}
    for name, each in config.items():
        named |= (
            flat(each, f"{prefix}{name}.") if isinstance(each, dict) else {f"{prefix}{name}": each}
        )
    return named


def metrics_of(record: Record) -> dict[str, float]:
    """Returns the numbers of a record that trackers show."""
    return {name: each for name, each in record.items() if name not in ("step", "eta_s")}


def in_a_line(error: Exception) -> str:
    """Returns a library's message. Sentences of 700 characters are whole: they have the cure."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return shown(words if len(words) <= LONGEST else f"{words[:LONGEST]} ...")
