"""Decides what a training step computes again in its backward pass: `StepConfig.remat`.

remat = Remat(model, "blocks")
with remat.in_step(xla=True):           # while a replica traces its step
    step(batch)
"""

import contextlib
import fnmatch
import functools
import logging
from collections.abc import Iterator

import tensorflow as tf

from tfaccel.common import run_log
from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.tables import counted
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.patching import patched
from tfaccel.keras_internals.rematerialized import Calls
from tfaccel.step.remat import segments
from tfaccel.step.remat.recompute import Pass, Recompute

log = logging.getLogger("tfaccel")

BLOCKS = "blocks"
MIB = 2**20


class Remat:
    """Finds the segments of a model's training steps, by their operations or by its layers."""

    def __init__(self, model, setting: str | int | tuple[str, ...] | None):
        """Takes a built model, and `StepConfig.remat`.

        Raises:
          UserError: no layer of the model has one of the names.
        """
        self._setting = setting
        self._said: set[str] = set()
        self._layers = []
        if isinstance(setting, tuple):
            layers = layers_of(model, include_self=False)
            for name in setting:
                own = [each for each in layers if fnmatch.fnmatchcase(each.name, name)]
                if not own:
                    near = did_you_mean(name, sorted({each.name for each in layers}))
                    raise UserError(f"remat={name}: {model.name} has no such layer{near}")
                self._layers += own

    @contextlib.contextmanager
    def in_step(self, *, xla: bool) -> Iterator[None]:
        """Within the context, a training step may be traced."""
        calls = Calls()
        recompute = Recompute(functools.partial(self._segments, calls), xla=xla)
        gradient = recompute.around(tf.GradientTape.gradient)
        layers = list({id(each): each for each in self._layers}.values())
        with calls.noted_in(layers), patched(tf.GradientTape, "gradient", gradient):
            yield

    def _segments(self, calls: Calls, traced: Pass) -> list[list[tf.Operation]]:
        if not traced.forward or not traced.backward:
            return []
        if self._setting == BLOCKS:
            return self._told(segments.least_memory(traced)).segments
        if isinstance(self._setting, int):
            budget = self._setting * MIB
            choice = segments.within(traced, budget_bytes=budget)
            if choice.kept_bytes > budget:
                self._say(
                    logging.WARNING,
                    f"remat={self._setting} MiB is not enough for what the backward pass needs at "
                    f"a time; the least is about {choice.kept_bytes / MIB:,.0f} MiB, which is used",
                )
            return self._told(choice).segments
        if not (of_calls := calls.of(traced.backward[0].graph)):
            return []
        number = counted(len(of_calls), "call")
        self._say(logging.INFO, f"the backward pass computes {number} of layers again (remat)")
        known = {id(each) for each in traced.forward}
        own = [[op for op in each if id(op) in known] for each in of_calls]
        return [each for each in own if each]

    def _told(self, choice: segments.Choice) -> segments.Choice:
        before = f"{choice.bytes_before / MIB:,.0f} MiB"
        if not choice.segments and isinstance(self._setting, int):
            text = f"the backward pass computes nothing again: the activations take about {before}"
        elif not choice.segments:
            text = "the backward pass computes nothing again, because that would save no memory"
        else:
            text = (
                f"the backward pass computes {len(choice.segments)} of {choice.num_segments} "
                f"segments again, {choice.work_again:.0%} of the forward pass; it keeps about "
                f"{choice.kept_bytes / MIB:,.0f} of {before} of activations"
            )
        self._say(logging.INFO if choice.segments else run_log.SUMMARY, text)
        return choice

    def _say(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.log(level, "step: %s", text)
