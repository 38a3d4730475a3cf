"""A study of Optuna in a folder, which threads, processes and later starts share.

Takes the folder; gives trials. Optuna's journal file has all trials. Each trial has a folder, and
whoever runs it holds a lock there. The system releases the lock when that process ends, in whatever
way. So a trial that Optuna takes to be running, but whose lock is free, was left behind. It is
marked as failed, and Optuna's own callback for such trials queues it again, for the same folder,
where training continues from the newest checkpoint. (Optuna's heartbeats, which find such trials
otherwise, need a data base, and a file of SQLite is not safe on network file systems.)

    study = SharedStudy(folder, direction="maximize", space=space, facts={"metric": "val_accuracy"})
    while held := study.ask(at_most=20):
        ...
        study.tell(held, value=0.9)
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator

import optuna
from optuna.storages import JournalStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from tfaccel.common.errors import UserError
from tfaccel.common.own_files import open_own
from tfaccel.diagnostics.search.space import Space

NAME = "search"  # of the study in its file
JOURNAL = "journal.log"
MOST_STARTS = 4  # of a trial: one that ends its whole machine must not be tried forever


@dataclasses.dataclass(frozen=True)
class Held:
    """A trial that this process runs.

    Attributes:
      trial: Optuna's.
      folder: the trial's own.
      lock: the descriptor of the locked file in it.
    """

    trial: optuna.Trial
    folder: pathlib.Path
    lock: int


class SharedStudy:
    """The study. Any thread may call its methods."""

    def __init__(self, folder: pathlib.Path, *, direction: str, space: Space, facts: dict):
        """Opens the study, or begins it.

        Args:
          folder: the search's own folder, which exists.
          direction: "minimize" or "maximize".
          space: gives the sampler and the pruner.
          facts: JSON-ready; every start of the search must have the same.

        Raises:
          UserError: the folder has another search.
        """
        self._folder, self._is_exhausted = folder, False
        with self.alone():
            storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
            self.study = optuna.create_study(
                storage=storage,
                study_name=NAME,
                direction=direction,
                sampler=space.sampler,
                pruner=space.pruner,
                load_if_exists=True,
            )
            facts = json.loads(json.dumps({"direction": direction, **facts}))
            before = self.study.user_attrs.get("facts", facts)
            if before != facts:
                changed = ", ".join(each for each in facts if facts[each] != before.get(each))
                raise UserError(
                    f"{folder} has another search, with another {changed}; give another "
                    "--workdir, or undo the changes"
                )
            self.study.set_user_attr("facts", facts)

    def ask(self, *, at_most: int) -> Held | None:
        """Returns the next trial; None if the study has as many as that, over all processes."""
        with self.alone():
            self._queue_those_left_behind()
            trials = self.study.get_trials(deepcopy=False)
            is_full = self._is_exhausted or len({_folder_of(each) for each in trials}) >= at_most
            if is_full and not any(each.state == TrialState.WAITING for each in trials):
                return None
            trial = self.study.ask()
            folder = self.folder_of(self.study.get_trials(deepcopy=False)[trial.number])
            folder.mkdir(parents=True, exist_ok=True)
            lock = _locked(folder)
        assert lock is not None, "nobody else knows a trial that was just made"
        return Held(trial, folder, lock)

    def tell(
        self, held: Held, *, value: float | None = None, state: TrialState | None = None
    ) -> None:
        """Ends a trial: with its value, or as PRUNED or FAIL."""
        with self.alone():
            try:
                self.study.tell(held.trial, value, state=state)
            except RuntimeError as error:
                # A sampler that has tried everything, such as GridSampler, stops the study. Optuna
                # allows that only within `optimize`, but has told the trial by then (5.0).
                if "Study.stop" not in str(error):
                    raise
                self._is_exhausted = True
        os.close(held.lock)

    def leave(self, held: Held) -> None:
        """Leaves a trial behind, for the next start of the search."""
        os.close(held.lock)

    def best(self) -> FrozenTrial | None:
        """Returns the best trial; None if none is complete."""
        with contextlib.suppress(ValueError):  # Optuna's, if there is none
            return self.study.best_trial
        return None

    def folder_of(self, trial: FrozenTrial) -> pathlib.Path:
        """Returns the folder of a trial."""
        return self._folder / "trials" / _folder_of(trial)

    def counts(self) -> dict[str, int]:
        """Returns the number of trials by state. One that was tried again counts once."""
        last = {_folder_of(each): each.state for each in self.study.get_trials(deepcopy=False)}
        names = [state.name.lower() for state in last.values()]
        return {each: names.count(each) for each in ("complete", "pruned", "fail", "running")}

    def _queue_those_left_behind(self) -> None:
        again = RetryHeartbeatStaleTrialCallback(max_retry=MOST_STARTS - 1)
        for each in self.study.get_trials(deepcopy=False):
            if each.state != TrialState.RUNNING:
                continue
            lock = _locked(self.folder_of(each))
            if lock is None:  # somebody runs it
                continue
            try:
                self.study.tell(each.number, state=TrialState.FAIL)
                again(self.study, each)
            finally:
                os.close(lock)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within the context no other thread or process changes the study."""
        file = open_own(self._folder / "study.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _folder_of(trial: FrozenTrial) -> str:
    """Returns the name of a trial's folder: its number, or that of the trial that it repeats."""
    first = RetryHeartbeatStaleTrialCallback.retried_trial_number(trial)
    return f"{trial.number if first is None else first:05d}"


def _locked(folder: pathlib.Path) -> int | None:
    """Returns the descriptor of the folder's locked file; None if another holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open_own(folder / "trial.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file
