"""The fix of what can be padded, measured on this machine, and kept if it is faster.

fixed = padded_if_faster(facts, model, strategy, keep=None, num_steps=30)
print(fixed); fixed.model
"""

import dataclasses

import keras
import tensorflow as tf

from tfaccel.errors import UserError
from tfaccel.linter.facts import Data, Facts, Layer, Model
from tfaccel.linter.measure import Spread, step_times
from tfaccel.linter.padded_head import with_padded_heads
from tfaccel.linter.products import can_pad, heads, multiple_of, padded
from tfaccel.linter.words import shown
from tfaccel.table_text import as_html, in_lines


@dataclasses.dataclass(frozen=True)
class Fix:
    """A model with padded heads, and whether it is faster here.

    Attributes:
      model: the padded one where it is faster, or was asked for; else the one that was given.
      kept: whether it is the padded one.
      heads: what was padded, in words.
      before: seconds of a step, forward and backward.
      after: likewise, padded.
      where: the device, in words.
    """

    model: keras.Model = dataclasses.field(repr=False)
    kept: bool
    heads: tuple[str, ...]
    before: Spread | None = None
    after: Spread | None = None
    where: str = ""

    def __str__(self):
        """Returns what was measured and what became of it."""
        if not self.heads:
            return "fix: no head to pad; the other fixes are yours to choose"
        gain = self.before.median_s / self.after.median_s
        verdict = "kept" if self.kept else "not kept: not faster beyond the spread"
        text = (
            f"fix: {', '.join(self.heads)}; outputs stay the same. A step, forward and backward, "
            f"took {1000 * self.before.median_s:.3g} ms before ({_range(self.before)}) and "
            f"{1000 * self.after.median_s:.3g} ms after ({_range(self.after)}), {gain:.2f} times "
            f"as fast, on {self.where}: {verdict}"
        )
        return in_lines(text, rest="     ")

    def as_dict(self) -> dict:
        """Returns what is ready for JSON: all but the model."""
        return {
            "kept": self.kept,
            "heads": self.heads,
            "before": self.before and dataclasses.asdict(self.before),
            "after": self.after and dataclasses.asdict(self.after),
            "where": self.where,
        }

    def _repr_html_(self) -> str:
        """Returns it for a notebook."""
        return f"<p>{as_html(str(self))}</p>"


def _range(spread: Spread) -> str:
    return f"half of them {1000 * spread.first_s:.3g} to {1000 * spread.third_s:.3g}"


def padded_if_faster(
    facts: Facts, model: keras.Model, strategy, *, keep: bool | None, num_steps: int
) -> Fix:
    """Pads the Dense heads whose units fill no whole tiles, and measures.

    Args:
      facts: of the model, and of its step.
      model: functional or sequential.
      strategy: whose scope it belongs to; None for none.
      keep: whether to return the padded model; None for where it is faster beyond the spread.
      num_steps: of each model that are timed.

    Raises:
      UserError: there is a head to pad in a model that cannot be copied, or a head that cannot be
        padded, or inputs of which nobody knows the size, or that are no numbers.
    """
    odd = _to_pad(facts.model)
    if not odd:
        return Fix(model, kept=False, heads=())
    wider = with_padded_heads(model, [each.name for each in odd], strategy=strategy)
    times = step_times(
        [model, wider],
        _specs(model, facts.data),
        rows=facts.rows or 32,
        xla=facts.step.xla is not False,
        num_steps=num_steps,
    )
    before, after = map(Spread.of, times)
    kept = after.is_below(before) if keep is None else keep
    return Fix(
        wider if kept else model,
        kept=kept,
        heads=tuple(
            f"{each.name} padded from {each.features_out} to "
            f"{padded(each.features_out, multiple_of(each))} units"
            for each in odd
        ),
        before=before,
        after=after,
        where="the GPU" if tf.config.list_logical_devices("GPU") else "the CPU",
    )


def _specs(model: keras.Model, data: Data) -> list[tf.TensorSpec]:
    """Returns what the model takes; sizes that it leaves open are the data's."""
    shapes = [tuple(each.shape[1:]) for each in model.inputs]
    given = data.inputs if list(map(len, data.inputs)) == list(map(len, shapes)) else shapes
    known = [
        tuple(other if size is None else size for size, other in zip(*pair, strict=True))
        for pair in zip(shapes, given, strict=True)
    ]
    if any(None in each for each in known):
        raise UserError(
            f"{model.name} takes {' and '.join(map(shown, known))}, and a step is timed with whole "
            "shapes; give lint a dataset in which all examples are of one size"
        )
    return [
        tf.TensorSpec((None, *shape), each.dtype)
        for shape, each in zip(known, model.inputs, strict=True)
    ]


def _to_pad(model: Model) -> list[Layer]:
    """Returns the Dense heads whose units fill no whole tiles."""
    odd = [each for each in heads(model) if each.features_out % multiple_of(each)]
    return list(filter(can_pad, odd))
