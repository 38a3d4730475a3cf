"""A run in its trackers: which run of a tracker it is, what was sent, and how it ended.

Takes the trackers and a folder, in which it keeps the ids of their runs, so that a resumed run goes
on in the same ones. It is a writer of records, like those in `tfaccel/training/logs`.

    with Tracked(trackers, workdir, name="a") as tracked:
        tracked.begin(config, continues=False)
        tracked.epoch({"step": 50, "epoch": 1, "loss": 0.5})
        tracked.export(workdir / "export" / "1")

A thread for each tracker sends the records, so training never waits for a server. If one cannot be
sent, there is a warning, and it is sent again with the next one. A record of a step that was sent
before is not sent again: a run that resumes before its last record would else have two of them.
"""

import collections
import concurrent.futures
import json
import logging
import pathlib
import threading
from collections.abc import Callable, Sequence

from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.own_files import replace
from tfaccel.common.redact import redacted
from tfaccel.common.regular_file import read_regular
from tfaccel.common.run_log import summary
from tfaccel.process import leave, signals, waits
from tfaccel.training.callbacks.checkpoints import Stopped
from tfaccel.training.logs import Record, Writer
from tfaccel.training.trackers import Tracker, in_a_line
from tfaccel.training.trackers.mlflow import MLflow
from tfaccel.training.trackers.wandb import WandB

log = logging.getLogger("tfaccel")

FILE = "trackers.json"
NOTHING_LOST = "this process stops now; it has trained no step that is not saved"
KINDS = {each.key: each for each in (MLflow, WandB)}


def make_trackers(names: Sequence[str], *, project: str | None) -> list[Tracker]:
    """Returns the trackers of these names; see `LogConfig` for the project."""
    return [KINDS[each](project=project) for each in names]


class Tracked(Writer):
    """One run in its trackers. Use it as a context, whose end is the end of the run."""

    name = "trackers"

    def __init__(self, trackers: Sequence[Tracker], folder: pathlib.Path, *, name: str):
        """Begins nothing yet.

        Args:
          trackers: on the chief; empty on other workers, where nothing is sent.
          folder: the run's own folder.
          name: of a new run in the trackers.
        """
        self._folder, self._name = folder, name
        self._notes = _Notes(folder / FILE)
        self._trackers, self._begun, self._posts = trackers, [], []

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return bool(self._begun) or not self._trackers

    def begin(self, config: dict, *, continues: bool) -> None:
        """Begins a run in each tracker, or goes on with the run that the folder names.

        Args:
          config: nested settings; secrets are removed.
          continues: whether training resumes. If not, the tracker has a new run, unless the
            earlier one has no metrics yet.

        Raises:
          UserError: you have not logged in to a tracker.
          Stopped: a signal asked to stop meanwhile.
          RunError: a tracker cannot be reached, or does not know the run.
        """
        if not self._trackers:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for each in self._trackers:
            note = self._notes.of(each.key)
            before = note["run"] if continues or not note["step"] else None
            settings = {"name": self._name, "config": redacted(config), "folder": self._folder}
            self._begun.append(each)  # first, because it may fail when it has begun
            try:
                with waits.on(f"beginning a run of {each.name}"), signals.at_once(NOTHING_LOST):
                    run = each.begin(before, **settings)
            except (UserError, RunError):
                raise
            except Exception as error:  # of the library, of the network or of a database
                which = f"go on with its run {before}" if before else "begin a run"
                cure = f", remove {self._folder / FILE} to begin a new one" if before else ""
                raise RunError(
                    f"{each.name} cannot {which} ({in_a_line(error)}); check its address and your "
                    f"login{cure}, or leave {each.key} out of the trackers"
                ) from error
            if run:
                self._posts.append(_Post(each, self._notes))
                self._notes.put(each.key, run=run, step=note["step"] if run == before else 0)
                summary(
                    "trackers: %s has this as its run %s%s",
                    *(each.name, run, ", which goes on" if run == before else ""),
                )

    def epoch(self, record: Record) -> None:
        """Lets the threads send the record."""
        for each in self._posts:
            each.add(record)

    def close(self) -> None:
        """Waits until all records are sent, or cannot be sent."""
        for each in self._posts:
            each.wait()

    def export(self, path: pathlib.Path) -> None:
        """Gives the folder of an export to the trackers. A failure is a warning."""
        for each in self._begun:
            _say(f"giving the export to {each.name}", each.export, path)

    def __enter__(self) -> "Tracked":
        """Returns itself. From now on, also the loss of another worker ends the run."""
        self._last_words = leave.calling_first(self._end_at_once)
        self._last_words.__enter__()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Sends what is left, and tells the trackers how the run ended."""
        self._last_words.__exit__(None, None, None)
        outcome = outcome_of(error)
        for each in self._posts:
            each.end()
        for each in self._begun:
            _say(f"ending the run of {each.name}", each.end, outcome)

    def _end_at_once(self, code: int) -> None:
        """Tells the trackers the end of a process that ends without `__exit__`."""
        for each in self._begun:
            _say(f"ending the run of {each.name}", each.end, "stopped" if code > 128 else "failed")


def outcome_of(error: BaseException | None) -> str:
    """Returns how a run ended, by what ended it: one of `OUTCOMES`."""
    if isinstance(error, Stopped | KeyboardInterrupt):
        return "stopped"
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished"
    return "failed"


class _Post:
    """The records that wait for one tracker, and the thread that sends them."""

    def __init__(self, tracker: Tracker, notes: "_Notes"):
        self.tracker, self._notes = tracker, notes
        self._waiting, self._has_failed = collections.deque(), False
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=tracker.key)

    def add(self, record: Record) -> None:
        self._waiting.append(dict(record))
        self._thread.submit(self._send)

    def wait(self) -> None:
        with waits.on(f"sending metrics to {self.tracker.name}"):
            self._thread.submit(self._send).result()
        if self._waiting:
            log.warning(
                "trackers: %d records did not reach %s; metrics.csv in the workdir has them",
                *(len(self._waiting), self.tracker.name),
            )

    def end(self) -> None:
        self.wait()
        self._thread.shutdown()

    def _send(self) -> None:
        while self._waiting:
            record = self._waiting[0]
            try:
                if record["step"] > self._notes.of(self.tracker.key)["step"]:
                    self.tracker.log(record)
                    self._notes.put(self.tracker.key, step=record["step"])
            except Exception as error:
                if not self._has_failed:
                    log.warning(
                        "trackers: %s did not take a record (%s); training continues, and it is "
                        "sent again with the next one",
                        *(self.tracker.name, in_a_line(error)),
                    )
                self._has_failed = True
                return
            self._waiting.popleft()


class _Notes:
    """A file with the id of each tracker's run, and the last step that was sent."""

    def __init__(self, path: pathlib.Path):
        self._path, self._lock = path, threading.Lock()
        self._notes = None

    def of(self, key: str) -> dict:
        with self._lock:
            return {"run": None, "step": 0} | self._read().get(key, {})

    def put(self, key: str, **changes) -> None:
        with self._lock:
            notes = self._read()
            notes[key] = notes.get(key, {}) | changes
            try:
                replace(self._path, (json.dumps(notes, indent=2) + "\n").encode())
            except OSError as error:
                raise RunError(f"{self._path} {not_written(error, self._path.parent)}") from error

    def _read(self) -> dict:
        if self._notes is None:
            try:
                read = json.loads(read_regular(self._path))
                self._notes = {key: each for key, each in read.items() if isinstance(each, dict)}
            except (OSError, ValueError, AttributeError):
                self._notes = {}
        return self._notes


def _say(what: str, call: Callable, argument) -> None:
    """Calls a method of a tracker. A failure is a warning, because the training itself is good."""
    try:
        with waits.on(what):
            call(argument)
    except Exception as error:
        log.warning("trackers: %s failed (%s); the run continues", what, in_a_line(error))
