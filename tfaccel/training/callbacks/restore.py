"""Where a `fit` begins: with the newest checkpoint, which it puts back, or from the start.

Takes the checkpoints, the model and its loader; gives a Beginning. All workers must find the same,
of the same run, or of one whose changes are accepted.

    origin = Origin(store, "auto", False, {})
    beginning = origin.newest(model, loader, StepConfig(), {})
    model.fit(loader, initial_epoch=beginning.epoch, callbacks=beginning.around(callbacks, ...))
    beginning = origin.before(error, beginning)     # and `fit` again, to roll back
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping

import keras

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.config import Config, StepConfig, deciding
from tfaccel.data.distribute import Loader
from tfaccel.data.shards import Plan
from tfaccel.runtime.agreement import check_same, together
from tfaccel.training.callbacks.finite import NonFiniteError, RollBackError
from tfaccel.training.checkpoint import state as state_lib
from tfaccel.training.checkpoint.store import Snapshot, Store

log = logging.getLogger("tfaccel")

MOST_SAID = 8  # of what differs
XLA = "runtime.xla"  # True, False, or None for what the default chose
# The facts by which step s of an epoch has its images.
CUT_BY = ("num_examples", "global_batch_size", "seed", "shuffle")


@dataclasses.dataclass
class Beginning:
    """Where a `fit` begins.

    Attributes:
      epoch: the first.
      goes_on: whether steps of that epoch are done.
      state: of a checkpoint; of a new run as much as is counted on from.
      arrays: of a checkpoint, forgotten once they are put back; of a new run none.
      keep: the name of a variable that is not put back; None for none.
    """

    epoch: int
    goes_on: bool
    state: dict
    arrays: state_lib.Arrays
    keep: str | None = None

    def around(self, callbacks: list, *, is_chief: bool) -> list:
        """Returns the callbacks, between those that put the arrays and the state back."""
        if not self.arrays:
            return callbacks
        return [_Before(self, is_chief=is_chief), *callbacks, _After(self, callbacks)]


class Origin:
    """The checkpoints that a `fit` may begin with, and `run`: what they say of who made them."""

    def __init__(
        self,
        store: Store,
        resume: str,
        accept_changes: bool,
        facts: dict,
        *,
        is_chief: bool = True,
    ):
        """Takes the checkpoints, and which of them will do: see `Checkpoints`."""
        self._is_chief = is_chief
        self._store, self._facts = store, facts
        self._resume, self._accept_changes = resume, accept_changes

    def newest(self, model, loader: Loader, config: StepConfig, settings: dict) -> Beginning:
        """Returns the newest checkpoint, or the start where there is none; sets the loader there.

        Args:
          model: that `fit` is called on, compiled with `config`.
          loader: that it trains on.
          config: whose `max_rollbacks` holds, and whose other settings are facts.
          settings: what all workers must share, but a resumed run need not.

        Raises:
          UserError: it is of another run, or `resume` and the folder do not agree.
        """
        self._model, self._loader, self._settings = model, loader, settings
        self._keep, self._max_rollbacks = None, config.max_rollbacks
        facts = _step_facts(config) | self._facts | _data_facts(loader) | _optimizer_facts(model)
        self.run = {
            "facts": json.loads(json.dumps(facts)),
            "loader": getattr(loader.data, "loader", None),  # of images alone
            "xla": getattr(model.train_function, "xla", False),
            "num_steps": loader.num_batches,
            "num_replicas": model.distribute_strategy.num_replicas_in_sync,
            "stamps": {},
        }
        snapshot = self._read()
        self._check_resume(snapshot)
        if snapshot is not None:
            self._check_facts(snapshot.state)
        with together(model.distribute_strategy, "has other data than before"):
            # The chief's alone: copies on other machines may have other times.
            if self._is_chief:
                self._note_stamps(loader, snapshot)
        if snapshot is None:
            loader.start_at(epoch=0)  # it may have given batches before
            new = {"offset": 0, "rollbacks": 0, "history": {}, "logs": {}}
            return Beginning(epoch=0, goes_on=False, state=new, arrays={})
        state = snapshot.state
        self._say_what_changes(state)
        epoch, step = state["epoch"], state["step_in_epoch"]
        if step and not self._has_the_steps_of(state):
            log.warning(
                "checkpoint: steps have other images now (%d an epoch, before %d): epoch %d begins "
                "anew",
                *(loader.num_batches, state["num_steps"], epoch + 1),
            )
            step = 0
        beginning = self._at(epoch, step, snapshot)
        if state["stop_training"]:
            summary("checkpoint: training ended early, after epoch %d, and is over", epoch)
            beginning.epoch = 2**31  # which no run has
        return beginning

    def before(self, error: RollBackError, begun: Beginning) -> Beginning:
        """Returns the newest checkpoint, with the data after the steps in which the fault was.

        Args:
          error: the fault; it came where the loader is.
          begun: where the `fit` began that it ended.

        Raises:
          NonFiniteError: there is no checkpoint, or there were too many rollbacks.
        """
        counted = state_lib.metrics(self._model)
        snapshot, rollbacks = self._read(), begun.state["rollbacks"]
        if snapshot is None or rollbacks >= self._max_rollbacks:
            why = f"it has {rollbacks} times" if snapshot else "there is no checkpoint yet"
            raise NonFiniteError(f"{error}; nonfinite='rollback' cannot go back: {why}") from error
        position, num_steps = self._loader.position, self._loader.num_batches
        log.warning(
            "checkpoint: back to step %d, and on with the data from step %d of them",
            *(snapshot.step, position),
        )
        # After an epoch's last step there is its validation still to come.
        epoch, last = divmod(position - 1, num_steps)
        beginning = self._at(epoch, last + 1, snapshot)
        beginning.state |= {"rollbacks": rollbacks + 1, "history": begun.state["history"]}
        if last + 1 == num_steps and not beginning.goes_on:
            # Of this epoch no step is left: its numbers are of those that are taken back.
            beginning.goes_on, beginning.state["logs"] = True, error.logs
            beginning.arrays = state_lib.with_metrics(beginning.arrays, counted)
        return beginning

    def _read(self) -> Snapshot | None:
        strategy = self._model.distribute_strategy
        with together(strategy, "could not read the checkpoints"):
            snapshot = self._store.newest()
        check_same(
            {
                "step of checkpoint": snapshot and snapshot.step,
                "content of checkpoint": snapshot and snapshot.digest,
                "config": json.dumps(self.run["facts"], sort_keys=True),
                "checkpoint settings": json.dumps(self._settings, sort_keys=True),
            },
            strategy,
            of=f"their run, in {self._store.folder}",
        )
        return snapshot

    def _check_resume(self, snapshot: Snapshot | None) -> None:
        if snapshot is None and self._resume == "required":
            raise UserError(
                f"{self._store.folder} has no checkpoint to resume from; check the path, or leave "
                "out resume='required' to begin anew"
            )
        if snapshot and self._resume == "never":
            raise UserError(
                f"{self._store.folder} has a checkpoint of step {snapshot.step}; give another "
                "folder, or resume='auto' to go on from it"
            )

    def _check_facts(self, state: dict) -> None:
        now, defaults = self.run["facts"], deciding(Config())
        # A setting that came later than the checkpoint was at its default.
        before = {name: defaults[name] for name in now if name in defaults} | state["facts"]
        # What the default chose for XLA may be another on another machine: that is only said.
        if now.get(XLA) is None:
            before.pop(XLA, None)
            now = {name: each for name, each in now.items() if name != XLA}
        elif before[XLA] is None:
            before[XLA] = state.get("xla")
        differences = list(_differences(before, now))
        more = f"; and {len(differences) - MOST_SAID} more" if len(differences) > MOST_SAID else ""
        changed = "; ".join(differences[:MOST_SAID]) + more
        if changed and not self._accept_changes:
            raise UserError(
                f"the checkpoint of step {state['step']} in {self._store.folder} is of another "
                f"run: {changed}; change that back, give another folder, or go on all the same by "
                "accept_changes (of the command, --accept_changes)"
            )
        if changed:
            log.warning("checkpoint: resumed with changes: %s", changed)
            self._keep = "learning_rate"  # or it would be put back with the optimizer

    def _note_stamps(self, loader: Loader, snapshot: Snapshot | None) -> None:
        """Notes the sizes and times of the data's files.

        Raises:
          UserError: they are others than when the checkpoint was made.
        """
        if hasattr(loader.data, "stamps"):  # of what a user's own code reads nobody knows
            self.run["stamps"] = loader.data.stamps()
        before = snapshot.state.get("stamps", {}) if snapshot else {}  # none in older checkpoints
        now = {name: self.run["stamps"].get(name) for name in before}
        changed = "; ".join(_differences(before, now))
        if changed and not self._accept_changes:
            raise UserError(
                f"the data were changed since the checkpoint of step {snapshot.step} in "
                f"{self._store.folder} was made: {changed}; put the files back as they were (`cp "
                "-p` and `rsync -t` keep times), give another folder, or go on all the same by "
                "accept_changes (of the command, --accept_changes)"
            )
        if changed:
            log.warning("checkpoint: resumed with changed data: %s", changed)

    def _say_what_changes(self, state: dict) -> None:
        summary(
            "checkpoint: resumed from step %d: epoch %d, step %d of %d",
            *(state["step"], state["epoch"] + 1, state["step_in_epoch"], state["num_steps"]),
        )
        if state["num_replicas"] != self.run["num_replicas"]:
            stay = "images, order and augmentation stay; " if self._has_the_steps_of(state) else ""
            log.warning(
                "checkpoint: made on %d replicas, resumed on %d: %sdropout and mixup draw "
                "otherwise, batch norm normalizes other parts of a batch, and sums round otherwise",
                *(state["num_replicas"], self.run["num_replicas"], stay),
            )
        before = state.get("xla", state["facts"].get(XLA))
        if before is not None and before != self.run["xla"]:
            words = {True: "with", False: "without"}
            log.warning(
                "checkpoint: made %s XLA, resumed %s it: sums round otherwise; for the same set "
                "xla=%s",
                *(words[before], words[self.run["xla"]], before),
            )
        if state.get("loader") != self.run["loader"]:
            log.warning(
                "checkpoint: made with the loader %s, resumed with %s, whose pixels may differ a "
                "little; for the same set data.loader",
                *(state.get("loader"), self.run["loader"]),
            )

    def _has_the_steps_of(self, state: dict) -> bool:
        """Whether each step of an epoch has the images that it had: not by their number alone."""
        before, now = state["facts"], self.run["facts"]
        same = all(before.get(name) == now.get(name) for name in CUT_BY)
        # The readers of a user's own pipeline cut the data by replicas, not by steps.
        if not isinstance(self._loader.data.plan, Plan):
            same &= state["num_replicas"] == self.run["num_replicas"]
        return same and state["num_steps"] == self.run["num_steps"]

    def _at(self, epoch: int, step: int, snapshot: Snapshot) -> Beginning:
        self._loader.start_at(epoch=epoch, step=step)
        state = snapshot.state
        same_epoch = (state["epoch"], state["num_steps"]) == (epoch, self._loader.num_batches)
        goes_on = same_epoch and step > 0 and state["step_in_epoch"] > 0
        # Names rise, also where epochs have fewer steps than they had.
        offset = max(state.get("offset", 0), state["step"] - self._loader.position)
        return Beginning(epoch, goes_on, state | {"offset": offset}, snapshot.arrays, self._keep)


def _differences(before: Mapping, now: Mapping, prefix: str = "") -> Iterator[str]:
    """Yields "name old -> new" of each field that is another, also within mappings and lists."""
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            each_of = ({str(place): each for place, each in enumerate(all_)} for all_ in (old, new))
            yield from _differences(*each_of, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name} {old!r} -> {new!r}"


class _Before(keras.callbacks.Callback):
    """What must come before all others: the model as it was, and the logs of an epoch's steps."""

    def __init__(self, beginning: Beginning, *, is_chief: bool):
        super().__init__()
        self._begun, self._is_chief = beginning, is_chief
        self._logs = beginning.state["logs"] if beginning.goes_on else {}

    def on_train_begin(self, logs=None):
        state_lib.put_variables(self.model, self._begun.arrays, keep=self._begun.keep)

    def on_epoch_begin(self, epoch, logs=None):
        if self._begun.arrays and self._begun.goes_on:
            state_lib.put_metrics(self.model, self._begun.arrays, is_chief=self._is_chief)

    def on_train_batch_end(self, batch, logs=None):
        self._logs = {}  # not all steps were trained before

    def on_epoch_end(self, epoch, logs=None):
        logs.update({**self._logs, **logs})
        self._logs = {}


class _After(keras.callbacks.Callback):
    """What must come after all others, who begin anew: their states, and Keras's History."""

    def __init__(self, beginning: Beginning, callbacks: list):
        super().__init__()
        self._begun, self._callbacks = beginning, callbacks

    def on_train_begin(self, logs=None):
        self._put_callbacks()

    def on_epoch_begin(self, epoch, logs=None):
        if self._begun.arrays:
            if self._begun.goes_on:
                self._put_callbacks()  # some begin anew with an epoch
            self._put_history()
            self._begun.arrays = {}

    def on_train_end(self, logs=None):
        if self._begun.arrays:  # not an epoch was left to train
            self._put_history()

    def _put_callbacks(self) -> None:
        state_lib.put_callbacks(self._callbacks, self._begun.state["callbacks"], self._begun.arrays)

    def _put_history(self) -> None:
        before, history = self._begun.state["history"], self.model.history
        history.history = {name: list(values) for name, values in before.items()}
        history.epoch = list(range(max(map(len, before.values()), default=0)))


def _step_facts(step: StepConfig) -> dict:
    """Returns those settings of a step that decide what it computes."""
    names = deciding(Config(step=step))
    return {name: each for name, each in names.items() if name.startswith("step.")}


def _data_facts(loader: Loader) -> dict:
    """Returns what the data are, but for how they are cut for replicas, JSON-ready."""
    facts = loader.data.facts()
    plan = {name: each for name, each in vars(facts.pop("plan")).items() if name != "num_replicas"}
    return {name: repr(each) for name, each in {**facts, **plan}.items()}


def _optimizer_facts(model) -> dict:
    """Returns the optimizer as it was compiled, JSON-ready, but for the names of its parts."""

    def bare(config):
        if isinstance(config, dict):
            return {key: bare(each) for key, each in config.items() if key != "name"}
        return config if isinstance(config, int | float | str | None) else repr(config)

    optimizer = model.optimizer
    return {"optimizer": [type(optimizer).__name__, bare(optimizer.get_config())]}
