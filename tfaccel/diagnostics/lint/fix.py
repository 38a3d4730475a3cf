"""The fix of what can be padded, measured on this machine, and kept if it is faster.

What activations cost, beside ReLU, is measured with it.

    fix = fixed(facts, model, strategy, keep=None, num_steps=30)
    print(fix); fix.model
"""

import dataclasses

import keras

from tfaccel.common.report import Report
from tfaccel.diagnostics.lint.facts import Facts, Layer, Model
from tfaccel.diagnostics.lint.light import Cost, cost_of
from tfaccel.diagnostics.lint.measure import Spread, device, shortened, spreads
from tfaccel.diagnostics.lint.padded_head import with_padded_heads
from tfaccel.diagnostics.lint.products import LITTLE, can_pad, heads, multiple_of, padded, padding
from tfaccel.diagnostics.lint.words import of_tiles


@dataclasses.dataclass(frozen=True, repr=False)
class Fix(Report):
    """A model with padded heads, and whether it is faster here.

    Attributes:
      model: the padded one, not compiled, where it is faster, or was asked for; else the one that
        was given.
      kept: whether it is the padded one.
      heads: what was padded, in words.
      before: seconds of a step, forward and backward; None where it was not timed.
      after: likewise, padded.
      where: the device, in words.
      verdict: why it was kept, or not; and why it was not timed, where its gain would be below 1%.
      cost: of activations; None where none computes more than ReLU.
      num_steps: of each model that were to be timed.
    """

    model: keras.Model
    kept: bool = False
    heads: tuple[str, ...] = ()
    before: Spread | None = None
    after: Spread | None = None
    where: str = ""
    verdict: str = ""
    cost: Cost | None = None
    num_steps: int = 0

    def parts(self):
        """Returns what was measured and what became of it."""
        yield self._padding()
        if self.cost:
            yield str(self.cost)

    def _padding(self) -> str:
        if not self.heads:
            return "fix: no head to pad; the other fixes are yours to choose"
        if not self.before:
            return f"fix: {', '.join(self.heads)}: {self.verdict}."
        gain = self.before.median_s / self.after.median_s
        return (
            f"fix: {', '.join(self.heads)}; the outputs stay the same. A step, forward and "
            f"backward, took {self.before} as it was, and {self.after} padded. The padded model "
            f"is {gain:.2f} times as fast on {self.where}; {self.verdict}."
            f"{shortened(self.before, num_steps=self.num_steps)}"
        )

    def as_dict(self) -> dict:
        """Returns what is ready for JSON: all but the model."""
        said = dataclasses.asdict(dataclasses.replace(self, model=None))
        del said["model"]
        return said


def fixed(facts: Facts, model: keras.Model, strategy, *, keep: bool | None, num_steps: int) -> Fix:
    """Pads the Dense heads whose units fill no whole tiles, and measures; and activations' cost.

    Args:
      facts: of the model, and of its step.
      model: functional or sequential, where there is a head to pad.
      strategy: whose scope it belongs to; None for none.
      keep: whether to return the padded model; None for where it is faster beyond the spread.
      num_steps: of each model that are timed.

    Raises:
      UserError: there is a head to pad in a model that cannot be copied, or a head that cannot be
        padded, or inputs of which nobody knows the size, or that are no numbers.
    """
    odd = _to_pad(facts.model)
    fix = _padded(odd, facts, model, strategy, keep=keep, num_steps=num_steps)
    return dataclasses.replace(fix, cost=cost_of(facts, model, strategy, num_steps=num_steps))


def _padded(
    odd: list[Layer], facts: Facts, model: keras.Model, strategy, *, keep, num_steps: int
) -> Fix:
    if not odd:
        return Fix(model)
    names = tuple(
        f"{each.name} padded from {each.features_out} to "
        f"{padded(each.features_out, multiple_of(each))} units"
        for each in odd
    )
    lost = sum(padding(facts.model, [each], each.features_out, multiple_of(each)) for each in odd)
    if lost < LITTLE and not keep:
        verdict = f"not timed and not kept, as the gain is {of_tiles(lost)}"
        return Fix(model, heads=names, verdict=verdict)
    wider = with_padded_heads(model, [each.name for each in odd], strategy=strategy)
    if lost < LITTLE:
        verdict = f"kept, as keep={keep} asks, but not timed, as the gain is {of_tiles(lost)}"
        return Fix(wider, kept=True, heads=names, verdict=verdict)
    before, after = spreads([model, wider], facts, num_steps=num_steps)
    kept, verdict = _judged(before, after, keep)
    return Fix(
        wider if kept else model,
        kept=kept,
        heads=names,
        before=before,
        after=after,
        where=device(),
        verdict=verdict,
        num_steps=num_steps,
    )


def _judged(before: Spread, after: Spread, keep: bool | None) -> tuple[bool, str]:
    if keep is not None:
        return keep, f"it is {'kept' if keep else 'not kept'}, as keep={keep} asks"
    if after.is_below(before):
        return True, "it is kept"
    if before.is_below(after):
        return False, "it is not kept, as it is slower"
    return False, "it is not kept, as single steps differ by more than that"


def _to_pad(model: Model) -> list[Layer]:
    """Returns the Dense heads whose units fill no whole tiles."""
    odd = [each for each in heads(model) if each.features_out % multiple_of(each)]
    return list(filter(can_pad, odd))
