"""Pads heads, measures the padded model on this machine, and keeps it if it is faster.

It also measures the cost of activations that compute more than ReLU.

    fix = fixed(facts, model, strategy, keep=None, num_steps=30)
    print(fix); fix.model
"""

import dataclasses

import keras

from tfaccel.common.report import Report
from tfaccel.diagnostics.lint.facts import Facts, Layer
from tfaccel.diagnostics.lint.light import Cost, cost_of
from tfaccel.diagnostics.lint.measure import Spread, device, shortened, spreads
from tfaccel.diagnostics.lint.padded_head import with_padded_heads
from tfaccel.diagnostics.lint.products import LITTLE, can_pad, heads, multiple_of, padded, padding
from tfaccel.diagnostics.lint.words import tile_share


@dataclasses.dataclass(frozen=True, repr=False)
class Fix(Report):
    """A model with padded heads, and whether it is faster on this machine.

    Attributes:
      model: the padded model, not compiled, if it is faster or if you asked for it; otherwise the
        original model.
      kept: whether `model` is the padded model.
      heads: the padded heads, in words.
      before: the seconds of a step (forward and backward) of the original model; None if it was not
        timed.
      after: the seconds of a step of the padded model; None likewise.
      where: the device, in words.
      verdict: why the padded model was kept or not, and why it was not timed (a gain below 1%).
      cost: the cost of activations; None if no activation computes more than ReLU.
      num_steps: how many steps of each model were to be timed.
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
        """Yields what was measured and what was decided."""
        yield self._padding()
        if self.cost:
            yield str(self.cost)

    def _padding(self) -> str:
        if not self.heads:
            return "fix: there is no head to pad; choose from the other fixes yourself"
        if not self.before:
            return f"fix: {', '.join(self.heads)}; {self.verdict}."
        gain = self.before.median_s / self.after.median_s
        return (
            f"fix: {', '.join(self.heads)}; the outputs stay the same. A step, forward and "
            f"backward, took {self.before} before padding and {self.after} after it. The padded "
            f"model is {gain:.2f} times as fast on {self.where}; {self.verdict}."
            f"{shortened(self.before, num_steps=self.num_steps)}"
        )

    def as_dict(self) -> dict:
        """Returns everything but the model, as values for JSON."""
        values = dataclasses.asdict(dataclasses.replace(self, model=None))
        del values["model"]
        return values


def fixed(facts: Facts, model: keras.Model, strategy, *, keep: bool | None, num_steps: int) -> Fix:
    """Pads the Dense heads that do not fill whole tiles; measures the gain and activations' cost.

    Args:
      facts: the facts about the model and its step.
      model: the model. If it has a head to pad, it must be functional or sequential.
      strategy: the strategy of the model's variables; None for none.
      keep: whether to return the padded model; None returns it if it is faster beyond the spread.
      num_steps: how many steps of each model are timed.

    Raises:
      UserError: there is a head to pad, but the model cannot be copied, the head cannot be padded,
        an input's size is not known, or an input does not hold numbers.
    """
    odd = [each for each in heads(facts.model) if each.features_out % multiple_of(each)]
    odd = list(filter(can_pad, odd))
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
        verdict = f"not timed and not kept, because the gain is {tile_share(lost)}"
        return Fix(model, heads=names, verdict=verdict)
    wider = with_padded_heads(model, [each.name for each in odd], strategy=strategy)
    if lost < LITTLE:
        verdict = f"kept because keep=True, but not timed, because the gain is {tile_share(lost)}"
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
        return keep, f"it is {'kept' if keep else 'not kept'} because keep={keep}"
    if after.is_below(before):
        return True, "it is kept"
    if before.is_below(after):
        return False, "it is not kept because it is slower"
    return False, "it is not kept because single steps differ by more than that"
