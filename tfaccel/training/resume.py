"""A `fit` that begins where its newest checkpoint ends, hears signals and rolls back.

Takes a model's `fit`; gives one that looks for a Checkpoints among its callbacks, and is the same
without.

    fit = from_checkpoint(model.fit, model, StepConfig())
    fit(train, epochs=90, callbacks=[run.checkpoints("runs/a/checkpoints")])
"""

import contextlib
import functools
import inspect
from collections.abc import Callable

import keras

from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.data.distribute import Loader
from tfaccel.process.signals import StopSignals
from tfaccel.runtime.agreement import together
from tfaccel.training.callbacks.checkpoints import Checkpoints
from tfaccel.training.callbacks.finite import RollBackError
from tfaccel.training.workdir import held


def from_checkpoint(fit: Callable, model: keras.Model, config: StepConfig) -> Callable:
    """Returns `fit` with what a Checkpoints among its callbacks asks for."""
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
                if found.is_chief:  # nobody reads before that is done
                    stack.enter_context(held(found.store.folder))
                    found.store.remove_unfinished()
            stop = StopSignals(found.effect_of_stop, speaks=found.is_chief)
            stack.enter_context(stop)
            beginning = found.begin(model, loader, others, stop, config)
            stack.callback(found.finish)
            _check_epochs(call.arguments.get("epochs", 1), loader, found)
            while True:
                # What was saved is put back around the others; it saves what they came to.
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
        raise UserError(f"{len(found)} callbacks for checkpoints; give `fit` one of them")
    return found[0] if found else None


def flat(callbacks) -> list:
    """Returns the callbacks that `fit` is given: one, some, a CallbackList or none."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return keras.tree.flatten(callbacks or [])


def _check_epochs(epochs: int, loader: Loader, found: Checkpoints) -> None:
    """Raises UserError where training is past its end: its weights are of none of the results."""
    begun, steps = divmod(loader.next_position, loader.num_batches)
    if loader.next_position > epochs * loader.num_batches:
        done = f"{begun} epochs and {steps} steps" if steps else f"{begun} epochs"
        raise UserError(
            f"epochs={epochs}, but the checkpoint in {found.store.folder} is of {done}; give "
            f"{begun + bool(steps)} or more, or another folder to begin anew"
        )


def _check(loader, arguments: dict, found: Checkpoints) -> None:
    if not isinstance(loader, Loader):
        raise UserError(
            f"checkpoints with x={type(loader).__name__}; expected a loader, which can begin at "
            "any step: make one by run.image_folder, run.loader, run.examples or run.pipeline"
        )
    for name in ("initial_epoch", "steps_per_epoch"):
        if arguments.get(name):
            raise UserError(
                f"{name}={arguments[name]} beside checkpoints in {found.store.folder}, which count "
                "whole epochs and say where training begins; leave it out"
            )
    if isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList):
        raise UserError("a CallbackList with checkpoints; give `fit` a plain list of callbacks")
