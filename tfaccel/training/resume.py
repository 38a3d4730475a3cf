"""Makes `fit` begin where its newest checkpoint ends, obey signals to stop, and roll back.

Takes a model's `fit`; gives a `fit` that does this if there is a Checkpoints among its callbacks.
Without one it does nothing else than the original.

    fit = from_checkpoint(model.fit, model, StepConfig())
    fit(train, epochs=90, callbacks=[run.checkpoints("runs/a/checkpoints")])
"""

import contextlib
import functools
import inspect
from collections.abc import Callable

import keras

from tfaccel.common.errors import UserError
from tfaccel.common.tables import counted
from tfaccel.config import StepConfig
from tfaccel.data.distribute import Loader
from tfaccel.process.signals import StopSignals
from tfaccel.runtime.agreement import together
from tfaccel.training.callbacks.checkpoints import Checkpoints
from tfaccel.training.callbacks.finite import RollBackError
from tfaccel.training.workdir import held


def from_checkpoint(fit: Callable, model: keras.Model, config: StepConfig) -> Callable:
    """Returns `fit`, which resumes, stops and rolls back if its callbacks have a Checkpoints."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def wrapper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        found = _checkpoints_in(call.arguments.get("callbacks"))
        if found is None:
            return fit(*args, **kwargs)
        loader = call.arguments.get("x")
        _check(loader, call.arguments, found)
        others = [each for each in flat(call.arguments["callbacks"]) if each is not found]
        with contextlib.ExitStack() as stack:
            with together(model.distribute_strategy, "could not take the checkpoints' folder"):
                if found.is_chief:  # no worker reads before this is done
                    stack.enter_context(held(found.store.folder))
                    found.store.remove_unfinished()
            stop = StopSignals(found.effect_of_stop, error=found.stopped(), speaks=found.is_chief)
            stack.enter_context(stop)
            beginning = found.begin(model, loader, others, stop, config)
            stack.callback(found.finish)
            _check_epochs(call.arguments.get("epochs", 1), loader, found)
            while True:
                # The saved state is restored around the other callbacks. Checkpoints follows them.
                around = beginning.around(others, is_chief=found.is_chief)
                call.arguments["callbacks"] = [*around, found]
                call.arguments["initial_epoch"] = beginning.epoch
                try:
                    history = fit(*call.args, **call.kwargs)
                    break
                except RollBackError as error:
                    beginning = found.roll_back(error)
            found.end()
            return history

    return wrapper


def _checkpoints_in(callbacks) -> Checkpoints | None:
    found = [each for each in flat(callbacks) if isinstance(each, Checkpoints)]
    if len(found) > 1:
        raise UserError(f"`fit` has {len(found)} callbacks for checkpoints; give it only one")
    return found[0] if found else None


def flat(callbacks) -> list:
    """Returns the callbacks of `fit` as a list. They may be one, some, a CallbackList or none."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return keras.tree.flatten(callbacks or [])


def _check_epochs(epochs: int, loader: Loader, found: Checkpoints) -> None:
    """Raises UserError if the checkpoint has more steps than `epochs` epochs."""
    begun, steps = divmod(loader.next_position, loader.num_batches)
    if loader.next_position > epochs * loader.num_batches:
        done = counted(begun, "epoch") + (f" and {counted(steps, 'step')}" if steps else "")
        raise UserError(
            f"epochs={epochs}, but the checkpoint in {found.store.folder} has trained {done}; "
            f"set epochs to {begun + bool(steps)} or more, or give another folder"
        )


def _check(loader, arguments: dict, found: Checkpoints) -> None:
    if not isinstance(loader, Loader):
        raise UserError(
            f"checkpoints with x={type(loader).__name__}; expected a loader, which can begin at "
            "any step; make one with run.image_folder, run.loader, run.examples or run.pipeline"
        )
    for name in ("initial_epoch", "steps_per_epoch"):
        if arguments.get(name):
            raise UserError(
                f"{name}={arguments[name]} together with checkpoints in {found.store.folder}, "
                f"which count whole epochs and decide where training begins; remove {name}"
            )
    if isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList):
        raise UserError("checkpoints in a CallbackList; give `fit` a plain list of callbacks")
