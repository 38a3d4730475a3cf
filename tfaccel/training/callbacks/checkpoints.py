"""Checkpoints in the course of `fit`: what is saved and when, and that all workers end alike.

Takes the folder and when to save; gives the callback, which `fit` of a compiled model finds among
its callbacks (tfaccel/training/resume.py) and lets begin where the newest checkpoint ends.

    checkpoints = run.checkpoints("runs/a/checkpoints", CheckpointConfig(every_steps=500))
    model.fit(train, epochs=90, callbacks=[checkpoints])

The chief writes, in a thread; every worker saves at the same step, because all count alike.
"""

import dataclasses
import json
import logging
import pathlib
import time

import keras

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.run_log import summary
from tfaccel.config import CheckpointConfig, StepConfig
from tfaccel.data.distribute import Loader
from tfaccel.process import progress
from tfaccel.process.signals import StopSignals
from tfaccel.runtime import agreement
from tfaccel.runtime.agreement import AnyWorker, together
from tfaccel.training.callbacks.finite import RollBackError
from tfaccel.training.callbacks.restore import Beginning, Origin
from tfaccel.training.checkpoint import state as state_lib
from tfaccel.training.checkpoint.rotation import largest_is_best
from tfaccel.training.checkpoint.store import CheckpointError, Snapshot, Store, check_space
from tfaccel.training.checkpoint.writer import Writer

log = logging.getLogger("tfaccel")


class Stopped(SystemExit):
    """A signal asked to stop, and the state is saved. A script that does not catch it exits so."""


class Checkpoints(keras.callbacks.Callback):
    """Saves the state of training. It comes after all callbacks whose state it saves too.

    In `fit` it raises Stopped, once saved, where a signal asked to stop. Where the chief could not
    write, and `on_error` is "stop" or a signal asked to stop, it raises CheckpointError, and the
    other workers RunError at the same step.

    Attributes:
      store: the checkpoints.
      is_chief: whether this worker writes.
      when_begun: called on the chief once it is settled where training begins; None for nothing.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        config: CheckpointConfig,
        *,
        monitor: str,
        is_chief: bool,
        resume: str,
        accept_changes: bool,
        facts: dict,
    ):
        """Writes nothing yet. `Run.checkpoints` says what it takes."""
        super().__init__()
        self.is_chief, self.when_begun = is_chief, None
        self._doing = "begin"
        self._config, self._monitor, self._warned = config, monitor, False
        self.store = Store(
            folder,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            largest_is_best=largest_is_best(monitor),
        )
        self._origin = Origin(self.store, resume, accept_changes, facts, is_chief=is_chief)

    def __repr__(self):
        """Returns where it saves, when, and how many are kept."""
        config, steps = self._config, ""
        if config.every_steps is not None:
            steps = f"{config.every_steps} steps and every "
        return (
            f"<tfaccel checkpoints in {self.store.folder}: every {steps}"
            f"{config.every_epochs} epoch(s), the last {config.keep_last} kept and the best "
            f"{config.keep_best} by {self._monitor}>"
        )

    def begin(
        self, model, loader: Loader, others: list, stop: StopSignals, config: StepConfig
    ) -> Beginning:
        """Returns where the `fit` begins that has these, and sets the loader there.

        Raises:
          UserError: the newest checkpoint is none to go on from.
        """
        self._loader, self._others, self._stop = loader, others, stop
        self._strategy = model.distribute_strategy
        self._any_worker, self._asked = AnyWorker(self._strategy), False
        self._writer, self._saving_s = Writer(self.store, on_error=self._config.on_error), 0.0
        state_lib.warn_of_forgetful(others)
        settings = {"monitor": self._monitor, "steps_per_execution": model.steps_per_execution}
        settings |= dataclasses.asdict(self._config)
        self._go_on(self._origin.newest(model, loader, config, settings))
        with together(self._strategy, "could not begin"):
            if self.is_chief and self.when_begun:
                self.when_begun()
        return self._begun

    def roll_back(self, error: RollBackError) -> Beginning:
        """Returns where training goes on after a step that was not finite, as `Origin.before`."""
        self._wait_together()  # nobody reads before the chief has written
        self._go_on(self._origin.before(error, self._begun))
        return self._begun

    def _go_on(self, beginning: Beginning) -> None:
        self._begun, self._last_saved = beginning, self._loader.position
        # Of an epoch whose steps are done.
        self._logs, self._counted = beginning.state["logs"], state_lib.metrics_in(beginning.arrays)

    def end(self) -> None:
        """Returns when all is on the disk. Ends all workers where a signal came after all steps."""
        self._doing = "end"
        self._wait_together()
        if self.is_chief:
            log.info("checkpoint: training waited %.2f s for all of them", self._saving_s)
        (asked,) = AnyWorker(self._strategy).says(bool(self._stop.requested))
        if asked:
            self._stop_now()

    def what_comes(self) -> str:
        """Returns what a signal that asks to stop now leads to, in words, from any thread."""
        if self._doing == "validate":
            return (
                "the validation stops at its next batch, and training saves its state; the same "
                "command repeats the validation and goes on"
            )
        if self._doing == "end":
            return "what is saved already stays, and this process stops"
        if self._doing == "begin":
            return (
                "training saves its state after its first step, which is being prepared and "
                "compiled, and stops"
            )
        if not self._any_worker.is_alone:
            return (
                "all workers stop together after the same step and save the state, within about "
                f"{agreement.ASK_EVERY_S:g} s, or after one step where steps take longer"
            )
        most = self.model.steps_per_execution
        steps = "this step" if most == 1 else f"this execution, of up to {most} steps"
        return f"training saves its state after {steps} and stops"

    def finish(self) -> None:
        """Waits for what was begun, whatever ended `fit`: it may be the newest."""
        try:
            self._writer.wait()
        except CheckpointError as error:
            log.warning("checkpoint: %s", error)  # beside what ended it

    def on_train_begin(self, logs=None):
        """Looks whether there is room, and says how much a checkpoint takes."""
        self._doing = "begin"
        keep = self._config.keep_last + self._config.keep_best
        with together(self._strategy, "has no room for checkpoints"):
            if self.is_chief:
                size = state_lib.num_bytes(self.model)
                check_space(self.store.folder, size, keep=keep)
                summary(
                    "checkpoint: %.1f MiB each, of which %.1f are weights; up to %d are kept",
                    size / 2**20,
                    state_lib.weight_bytes(self.model) / 2**20,
                    keep,
                )

    def on_train_batch_end(self, batch, logs=None):
        """Saves when it is time; after an epoch's last step, its validation comes first."""
        self._doing = "train"
        ends_epoch = self._loader.position % self._loader.num_batches == 0
        # At an epoch's end in any case, so that no worker begins a validation that nobody wants.
        self._logs, asked = dict(logs or {}), self._is_asked(now=ends_epoch)
        if ends_epoch:
            self._counted = state_lib.metrics(self.model)
            return
        if asked or self._is_due():
            self._save()
        if asked:
            self._stop_now()

    def on_test_begin(self, logs=None):
        """Saves and stops when a signal asked for it during the epoch's last steps."""
        self._doing = "validate"
        self._stop_untested()

    def on_test_batch_end(self, batch, logs=None):
        """Saves what is trained, but not tested, when a signal asked to stop."""
        self._stop_untested()

    def on_test_end(self, logs=None):
        """Notes that the validation is over."""
        self._doing = "train"

    def _stop_untested(self) -> None:
        if self._is_asked():
            for each in self._others:
                each.on_test_end()  # as the averaged weights, which give the trained ones back
            self._save(tested=False)
            self._stop_now(tested=False)

    def on_epoch_end(self, epoch, logs=None):
        """Saves with the epoch's score."""
        for name, value in (logs or {}).items():
            self._begun.state["history"].setdefault(name, []).append(float(value))
        asked, score = self._is_asked(now=True), self._score(logs or {})
        last = epoch + 1 == self.params["epochs"] or self.model.stop_training
        if asked or last or self._is_due() or (epoch + 1) % self._config.every_epochs == 0:
            self._save(score=score)
        if asked:
            self._stop_now()

    def _is_due(self) -> bool:
        every = self._config.every_steps
        return every is not None and self._loader.position - self._last_saved >= every

    def _is_asked(self, *, now: bool = False) -> bool:
        """Returns whether a signal asked a worker to stop; of several, some steps ago."""
        own = bool(self._stop.requested), self._writer.has_failed
        asked, failed = self._any_worker.says(*own, now=now)
        if failed:
            self._wait_together()
        self._asked |= asked
        return self._asked

    def _wait_together(self) -> None:
        """Returns once the chief has written; or a launcher may kill it before the others end."""
        with progress.within("save"), together(self._strategy, "could not save a checkpoint"):
            self._writer.wait()

    def _stop_now(self, *, tested: bool = True) -> None:
        self._wait_together()
        with together(self._strategy, "could not save before it stopped"):
            self._writer.check_last()
        log.log(
            logging.WARNING if self.is_chief else logging.INFO,
            "checkpoint: stopped by %s after step %d, which is saved; %s",
            self._stop.requested or "another worker's signal",
            self._loader.position + self._begun.state["offset"],
            self._where_it_goes_on(tested=tested),
        )
        progress.beat("end")
        raise Stopped(self._config.exit_code)

    def _where_it_goes_on(self, *, tested: bool) -> str:
        epochs, steps = divmod(self._loader.position, self._loader.num_batches)
        if not tested:
            return (
                f"epoch {epochs} is trained and not yet tested: the same command tests it, writes "
                "its line and goes on"
            )
        if steps:
            num_steps = self._loader.num_batches
            return (
                f"the same command goes on after step {steps} of {num_steps} of epoch {epochs + 1}"
            )
        if epochs >= self.params["epochs"] or self.model.stop_training:
            return "training is complete, and the same command does what comes after it"
        return f"the same command goes on with epoch {epochs + 1}"

    def _save(self, *, score: float | None = None, tested: bool = True) -> None:
        begun, self._last_saved = time.monotonic(), self._loader.position
        epoch, step = divmod(self._last_saved, self._loader.num_batches)
        metrics = state_lib.metrics(self.model) if step else {}
        if not tested:
            epoch, step, metrics = epoch - 1, self._loader.num_batches, self._counted
        with progress.within("save"):
            # When a worker is lost, NCCL breaks its sums off, and whatever they leave is taken for
            # a sum: the workers answer each other after the copy, or nothing is saved.
            with together(self._strategy, "could not copy its state"):
                snapshot = self._snapshot(epoch, step, metrics) if self.is_chief else None
            if self.is_chief:  # once the one before is written
                self._writer.write(snapshot, score=score, tested=tested)
        self._saving_s += time.monotonic() - begun

    def _snapshot(self, epoch: int, step: int, metrics: state_lib.Arrays) -> Snapshot:
        callbacks, arrays = state_lib.of_callbacks(self._others)
        begun = self._begun.state
        state = {
            **{name: begun[name] for name in ("offset", "rollbacks", "history")},
            **self._origin.run,
            "step": self._last_saved + begun["offset"],
            "epoch": epoch,
            "step_in_epoch": step,
            "stop_training": bool(self.model.stop_training),
            "logs": {name: float(each) for name, each in self._logs.items()},
            "callbacks": callbacks,
        }
        arrays = metrics | arrays | state_lib.variables(self.model)
        return Snapshot(arrays, json.loads(json.dumps(state)))

    def _score(self, logs: dict) -> float | None:
        """Returns the monitor's value, if there is one.

        Raises:
          UserError: training is to stop early by it and, with test images measured too, there is
            none: it never would.
        """
        if self._monitor in logs:
            return float(logs[self._monitor])
        is_tested = any(name.startswith("val_") for name in logs)
        if is_tested and any(map(self._is_to_stop_by_it, self._others)):
            raise UserError(
                f"monitor={self._monitor!r} is none of the logs, and training is to stop early by "
                f"it{did_you_mean(self._monitor, logs)}"
            )
        if self._config.keep_best and not self._warned:
            self._warned = True
            log.warning(
                "checkpoint: monitor=%r is none of the logs (%s): no checkpoint is best",
                *(self._monitor, ", ".join(logs)),
            )
        return None

    def _is_to_stop_by_it(self, callback) -> bool:
        early = keras.callbacks.EarlyStopping
        return isinstance(callback, early) and callback.monitor == self._monitor
