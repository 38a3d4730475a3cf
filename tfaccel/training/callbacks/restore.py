"""Decides where a `fit` begins: at the newest checkpoint, which it restores, or at the start.

Takes the checkpoints, the model and its loader; gives a Beginning. All workers must find the same
checkpoint. It must be of the same run, unless changes are accepted.

    origin = Origin(store, "auto", False, {})
    beginning = origin.newest(model, loader, StepConfig(), {})
    model.fit(loader, initial_epoch=beginning.epoch, callbacks=beginning.around(callbacks, ...))
    beginning = origin.before(error, beginning)     # to roll back; then call `fit` again
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
from tfaccel.data.source import NAMES
from tfaccel.keras_internals.model_view import named_optimizers
from tfaccel.runtime.agreement import check_same, together
from tfaccel.training.callbacks.finite import NonFiniteError, RollBackError
from tfaccel.training.checkpoint import state as state_lib
from tfaccel.training.checkpoint.store import Snapshot, Store

log = logging.getLogger("tfaccel")

MOST_SAID = 8  # differences in one message
XLA = "runtime.xla"  # True, False, or None if the default chose
# The facts that decide which images each step of an epoch has.
CUT_BY = ("num_examples", "global_batch_size", "seed", "shuffle", "sampling")


@dataclasses.dataclass
class Beginning:
    """Where a `fit` begins.

    Attributes:
      epoch: the first epoch of the `fit`.
      within_epoch: whether steps of that epoch are done.
      state: a checkpoint's state; in a new run only its counts, history and logs, all empty.
      arrays: a checkpoint's arrays, until they are restored; empty in a new run.
      keep: the name of a variable that is not restored; None to restore all.
      anew: whether the optimizer begins anew, because other weights are trained from here on.
    """

    epoch: int
    within_epoch: bool
    state: dict
    arrays: state_lib.Arrays
    keep: str | None = None
    anew: bool = False

    def around(self, callbacks: list, *, is_chief: bool) -> list:
        """Returns the callbacks between two that restore the arrays and the state."""
        if not self.arrays:
            return callbacks
        return [_Before(self, is_chief=is_chief), *callbacks, _After(self, callbacks)]


class Origin:
    """The checkpoints at which a `fit` may begin.

    Attributes:
      run: what checkpoints record about this run; `newest` sets it.
      anew_at: an epoch that trains other weights than the one before it, so that the optimizer
        begins anew there; None if there is none.
    """

    def __init__(
        self, store: Store, resume: str, accept_changes: bool, facts: dict, *, is_chief: bool = True
    ):
        """Takes the checkpoints, and the arguments of `Run.checkpoints` with the same names."""
        self._is_chief, self.anew_at = is_chief, None
        self._store, self._facts = store, facts
        self._resume, self._accept_changes = resume, accept_changes

    def newest(self, model, loader: Loader, config: StepConfig, settings: dict) -> Beginning:
        """Returns the newest checkpoint, or the start if there is none, and sets the loader there.

        Args:
          model: the model of `fit`, compiled with `config`.
          loader: the training data.
          config: gives `max_rollbacks`; its other settings are facts of the run.
          settings: must be the same on all workers; a resumed run may change them.

        Raises:
          UserError: the checkpoint is of another run, or `resume` does not allow what is there.
        """
        self._model, self._loader, self._settings = model, loader, settings
        self._keep, self._max_rollbacks = None, config.max_rollbacks
        facts = _step_facts(config) | self._facts | _data_facts(loader) | _optimizer_facts(model)
        self.run = {
            "facts": json.loads(json.dumps(facts)),
            "loader": getattr(loader.data, "loader", None),  # only images have one
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
            # Only on the chief: copies of the files on other machines may have other times.
            if self._is_chief:
                self._note_stamps(loader, snapshot)
        if snapshot is None:
            loader.start_at(epoch=0)  # an earlier `fit` may have read from it
            new = {"offset": 0, "rollbacks": 0, "history": {}, "logs": {}}
            return Beginning(epoch=0, within_epoch=False, state=new, arrays={})
        state = snapshot.state
        self._say_what_changes(state)
        epoch, step = state["epoch"], state["step_in_epoch"]
        if step and not self._has_same_steps(state):
            log.warning(
                "checkpoint: the steps of this run have other images than before (%d steps per "
                "epoch, before %d), so epoch %d restarts at its first step",
                *(loader.num_batches, state["num_steps"], epoch + 1),
            )
            step = 0
        beginning = self._at(epoch, step, snapshot)
        if state["stop_training"]:
            summary("checkpoint: training is complete: it stopped early, after epoch %d", epoch)
            beginning.epoch = 2**31  # more than any run has, so that `fit` trains nothing
        return beginning

    def before(self, error: RollBackError, begun: Beginning) -> Beginning:
        """Returns the newest checkpoint, with the loader after the execution that was not finite.

        The error ended, at the loader's position, the `fit` that began at `begun`.

        Raises:
          NonFiniteError: there is no checkpoint, or there were too many rollbacks.
        """
        counted = state_lib.metrics(self._model)
        snapshot, rollbacks = self._read(), begun.state["rollbacks"]
        if snapshot is None or rollbacks >= self._max_rollbacks:
            why = f"it did so {rollbacks} times" if snapshot else "there is no checkpoint yet"
            raise NonFiniteError(f"{error}; nonfinite='rollback' cannot go back: {why}") from error
        position, num_steps = self._loader.position, self._loader.num_batches
        log.warning(
            "checkpoint: rolled back to step %d; training continues with the data after step %d",
            *(snapshot.step, position),
        )
        # After an epoch's last step, its validation is left.
        epoch, last = divmod(position - 1, num_steps)
        beginning = self._at(epoch, last + 1, snapshot)
        beginning.state |= {"rollbacks": rollbacks + 1, "history": begun.state["history"]}
        if last + 1 == num_steps and not beginning.within_epoch:
            # No step of this epoch is left, so its logs come from the steps that are rolled back.
            beginning.within_epoch, beginning.state["logs"] = True, error.logs
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
                f"{self._store.folder} has no checkpoint to resume from; check the path, or remove "
                "resume='required' to start a new run"
            )
        if snapshot and self._resume == "never":
            raise UserError(
                f"{self._store.folder} has a checkpoint of step {snapshot.step}; give another "
                "folder, or resume='auto' to resume from it"
            )

    def _check_facts(self, state: dict) -> None:
        now, defaults = self.run["facts"], deciding(Config())
        # A setting that the checkpoint does not know had its default value.
        before = {name: defaults[name] for name in now if name in defaults} | state["facts"]
        # XLA's default may differ between machines. That is a warning: see `_say_what_changes`.
        if now.get(XLA) is None:
            before.pop(XLA, None)
            now = {name: each for name, each in now.items() if name != XLA}
        elif before[XLA] is None:
            before[XLA] = state.get("xla")
        if NAMES not in before:  # which checkpoints of earlier versions do not know
            now = {name: each for name, each in now.items() if name != NAMES}
        differences = list(_differences(before, now))
        more = f"; and {len(differences) - MOST_SAID} more" if len(differences) > MOST_SAID else ""
        changed = "; ".join(differences[:MOST_SAID]) + more
        if changed:
            self._accept(
                f"the checkpoint of step {state['step']} in {self._store.folder} is of another "
                f"run: {changed}; undo the changes"
            )
            log.warning("checkpoint: resumed with changes: %s", changed)
            self._keep = "learning_rate"  # else the optimizer's old one would be restored

    def _accept(self, changes: str) -> None:
        """Raises a UserError that begins with `changes`, unless changes are accepted."""
        if not self._accept_changes:
            raise UserError(
                f"{changes}, give another folder, or resume with the changes by "
                "accept_changes=True (for the command, --accept_changes)"
            )

    def _note_stamps(self, loader: Loader, snapshot: Snapshot | None) -> None:
        """Notes the sizes and times of the data's files.

        Raises:
          UserError: they have changed since the checkpoint was made.
        """
        if hasattr(loader.data, "stamps"):  # the files that a user's own code reads are unknown
            self.run["stamps"] = loader.data.stamps()
        before = snapshot.state.get("stamps", {}) if snapshot else {}  # none in older checkpoints
        now = {name: self.run["stamps"].get(name) for name in before}
        changed = "; ".join(_differences(before, now))
        if changed:
            self._accept(
                f"the data have changed since the checkpoint of step {snapshot.step} in "
                f"{self._store.folder} was made: {changed}; restore the files (`cp -p` and `rsync "
                "-t` keep their times)"
            )
            log.warning("checkpoint: resumed with changed data: %s", changed)

    def _say_what_changes(self, state: dict) -> None:
        summary(
            "checkpoint: resumed from step %d: epoch %d, step %d of %d",
            *(state["step"], state["epoch"] + 1, state["step_in_epoch"], state["num_steps"]),
        )
        if state["num_replicas"] != self.run["num_replicas"]:
            same = " (images, order and augmentation stay)" if self._has_same_steps(state) else ""
            log.warning(
                "checkpoint: made on %d replicas, resumed on %d%s: dropout and mixup draw "
                "differently, batch norm normalises other parts of a batch, and sums round "
                "differently",
                *(state["num_replicas"], self.run["num_replicas"], same),
            )
        before = state.get("xla", state["facts"].get(XLA))
        if before is not None and before != self.run["xla"]:
            words = {True: "with", False: "without"}
            log.warning(
                "checkpoint: made %s XLA, resumed %s it: sums round differently; for equal sums "
                "set xla=%s",
                *(words[before], words[self.run["xla"]], before),
            )
        if state.get("loader") != self.run["loader"]:
            log.warning(
                "checkpoint: made with the loader %s, resumed with %s: pixels may differ a little; "
                "for equal pixels set data.loader",
                *(state.get("loader"), self.run["loader"]),
            )

    def _has_same_steps(self, state: dict) -> bool:
        """Returns whether each step of an epoch has the same images as before."""
        before, now = state["facts"], self.run["facts"]
        same = all(before.get(name) == now.get(name) for name in CUT_BY)
        # A user's own pipeline divides the data among the replicas, not among the steps.
        if not isinstance(self._loader.data.plan, Plan):
            same &= state["num_replicas"] == self.run["num_replicas"]
        return same and state["num_steps"] == self.run["num_steps"]

    def _at(self, epoch: int, step: int, snapshot: Snapshot) -> Beginning:
        self._loader.start_at(epoch=epoch, step=step)
        state = snapshot.state
        same_epoch = (state["epoch"], state["num_steps"]) == (epoch, self._loader.num_batches)
        within = same_epoch and step > 0 and state["step_in_epoch"] > 0
        # Steps in checkpoints' names must increase, even if epochs have fewer steps than before.
        offset = max(state.get("offset", 0), state["step"] - self._loader.position)
        anew = (state["epoch"], state["step_in_epoch"]) == (self.anew_at, 0)
        state = state | {"offset": offset}
        return Beginning(epoch, within, state, snapshot.arrays, self._keep, anew)


def _differences(before: Mapping, now: Mapping, prefix: str = "") -> Iterator[str]:
    """Yields "name old -> new" for each field that differs, also within mappings and lists."""
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
    """Restores the variables and an epoch's logs, before all other callbacks."""

    def __init__(self, beginning: Beginning, *, is_chief: bool):
        super().__init__()
        self._begun, self._is_chief = beginning, is_chief
        self._logs = beginning.state["logs"] if beginning.within_epoch else {}

    def on_train_begin(self, logs=None):
        how = {"keep": self._begun.keep, "anew": self._begun.anew}
        state_lib.put_variables(self.model, self._begun.arrays, **how)

    def on_epoch_begin(self, epoch, logs=None):
        if self._begun.arrays and self._begun.within_epoch:
            state_lib.put_metrics(self.model, self._begun.arrays, is_chief=self._is_chief)

    def on_train_batch_end(self, batch, logs=None):
        self._logs = {}  # this `fit` trains steps of the epoch, and makes logs itself

    def on_epoch_end(self, epoch, logs=None):
        logs.update({**self._logs, **logs})
        self._logs = {}


class _After(keras.callbacks.Callback):
    """Restores the callbacks' states and Keras's History, after all callbacks have reset theirs."""

    def __init__(self, beginning: Beginning, callbacks: list):
        super().__init__()
        self._begun, self._callbacks = beginning, callbacks

    def on_train_begin(self, logs=None):
        self._put_callbacks()

    def on_epoch_begin(self, epoch, logs=None):
        if self._begun.arrays:
            if self._begun.within_epoch:
                self._put_callbacks()  # some reset their state when an epoch begins
            self._put_history()
            self._begun.arrays = {}

    def on_train_end(self, logs=None):
        if self._begun.arrays:  # no epoch was left to train
            self._put_history()

    def _put_callbacks(self) -> None:
        state_lib.put_callbacks(self._callbacks, self._begun.state["callbacks"], self._begun.arrays)

    def _put_history(self) -> None:
        before, history = self._begun.state["history"], self.model.history
        history.history = {name: list(values) for name, values in before.items()}
        history.epoch = list(range(max(map(len, before.values()), default=0)))


def _step_facts(step: StepConfig) -> dict:
    """Returns the settings of a step that decide what it computes."""
    names = deciding(Config(step=step))
    return {name: each for name, each in names.items() if name.startswith("step.")}


def _data_facts(loader: Loader) -> dict:
    """Returns the data's facts without the number of replicas, JSON-ready."""
    facts = loader.data.facts()
    plan = dict(vars(facts.pop("plan")))
    del plan["num_replicas"]
    if plan.get("sampling") is None:  # as in checkpoints from before there was sampling
        plan.pop("sampling", None)
    names = {NAMES: facts.pop(NAMES)} if NAMES in facts else {}  # compared one by one
    return {name: repr(each) for name, each in {**facts, **plan}.items()} | names


def _optimizer_facts(model) -> dict:
    """Returns the optimizers' configs without the names of their parts, JSON-ready."""

    unlike = ("name", "first_step")  # the second differs between the stages of a run that thaws

    def nameless(config):
        if isinstance(config, dict):
            return {key: nameless(each) for key, each in config.items() if key not in unlike}
        return config if isinstance(config, int | float | str | None) else repr(config)

    found = {
        name: [type(each).__name__, nameless(each.get_config())]
        for name, each in named_optimizers(model).items()
    }
    compiled = {name: found.pop(name) for name in ("optimizer",) if name in found}
    return compiled | ({"optimizers": found} if found else {})
