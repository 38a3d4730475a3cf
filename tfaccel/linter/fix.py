"""The fix of what can be padded, measured on this machine, and kept if it is faster.

What activations cost, beside ReLU, is measured with it.

    fix = fixed(facts, model, strategy, keep=None, num_steps=30)
    print(fix); fix.model
"""

import dataclasses
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfaccel.errors import UserError
from tfaccel.linter.facts import Data, Facts, Layer, Model
from tfaccel.linter.layers import costly
from tfaccel.linter.light import with_relu
from tfaccel.linter.measure import Spread, step_times
from tfaccel.linter.padded_head import with_padded_heads
from tfaccel.linter.products import can_pad, heads, multiple_of, padded
from tfaccel.linter.words import named, shown
from tfaccel.table_text import as_html, in_lines


@dataclasses.dataclass(frozen=True)
class Fix:
    """A model with padded heads, and whether it is faster here; and what activations cost here.

    Attributes:
      model: the padded one where it is faster, or was asked for; else the one that was given.
      kept: whether it is the padded one.
      heads: what was padded, in words.
      activations: for which ReLU stood in, in words; never in `model`.
      before: seconds of a step, forward and backward.
      after: likewise, padded.
      with_relu: likewise, with ReLU.
      not_timed: why their cost is not known, in words; "" where it is.
      where: the device, in words.
    """

    model: keras.Model = dataclasses.field(repr=False)
    kept: bool = False
    heads: tuple[str, ...] = ()
    activations: str = ""
    before: Spread | None = None
    after: Spread | None = None
    with_relu: Spread | None = None
    not_timed: str = ""
    where: str = ""

    def __str__(self):
        """Returns what was measured and what became of it."""
        return "\n".join(in_lines(each, rest="     ") for each in self._sentences())

    def _sentences(self) -> Iterator[str]:
        if self.heads:
            verdict = "kept" if self.kept else "not kept: not faster beyond the spread"
            yield (
                f"fix: {', '.join(self.heads)}; outputs stay the same. {self._against(self.after)}"
                f": {verdict}"
            )
        else:
            yield "fix: no head to pad; the other fixes are yours to choose"
        if self.with_relu:
            yield (
                f"cost: relu for {self.activations}, which makes it another model. "
                f"{self._against(self.with_relu)}: not kept, for you to judge"
            )
        if self.not_timed:
            yield f"cost: of {self.activations}, not timed: {self.not_timed}"

    def _against(self, other: Spread) -> str:
        return (
            f"A step, forward and backward, took {_range(self.before)} before and {_range(other)} "
            f"after, {self.before.median_s / other.median_s:.2f} times as fast, on {self.where}"
        )

    def as_dict(self) -> dict:
        """Returns what is ready for JSON: all but the model."""
        named = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        del named["model"]
        return {
            name: dataclasses.asdict(value) if isinstance(value, Spread) else value
            for name, value in named.items()
        }

    def _repr_html_(self) -> str:
        """Returns it for a notebook."""
        return "".join(f"<p>{as_html(each)}</p>" for each in self._sentences())


def _range(spread: Spread) -> str:
    first, third = 1000 * spread.first_s, 1000 * spread.third_s
    return f"{1000 * spread.median_s:.3g} ms (half of them {first:.3g} to {third:.3g})"


def fixed(facts: Facts, model: keras.Model, strategy, *, keep: bool | None, num_steps: int) -> Fix:
    """Pads the Dense heads whose units fill no whole tiles, and times that; and activations' cost.

    Args:
      facts: of the model, and of its step.
      model: functional or sequential.
      strategy: whose scope it belongs to; None for none.
      keep: whether to return the padded model; None for where it is faster beyond the spread.
      num_steps: of each model that are timed.

    Raises:
      UserError: there is a head to pad in a model that cannot be copied, or a head that cannot be
        padded; or there is a step to time, and inputs are of a size that nobody knows, or text.
    """
    odd, slow = _to_pad(facts.model), costly(facts.model)
    others, not_timed = {}, ""
    if odd:
        names = [each.name for each in odd]
        others["after"] = with_padded_heads(model, names, strategy=strategy)
    if slow:
        try:
            names = [each.name for each in slow]
            others["with_relu"] = with_relu(model, names, strategy=strategy)
        except UserError as error:
            not_timed = str(error)
    fix = Fix(model, activations=_activations(slow), not_timed=not_timed)
    if not others:
        return fix
    times = step_times(
        [model, *others.values()],
        _specs(model, facts.data),
        rows=facts.rows or 32,
        xla=facts.step.xla is not False,
        num_steps=num_steps,
    )
    spreads = dict(zip(("before", *others), map(Spread.of, times), strict=True))
    faster = odd and spreads["after"].is_below(spreads["before"])
    kept = bool(odd) and bool(faster if keep is None else keep)
    return dataclasses.replace(
        fix,
        model=others["after"] if kept else model,
        kept=kept,
        heads=tuple(map(_padding, odd)),
        where="the GPU" if tf.config.list_logical_devices("GPU") else "the CPU",
        **spreads,
    )


def _padding(head: Layer) -> str:
    whole = padded(head.features_out, multiple_of(head))
    return f"{head.name} padded from {head.features_out} to {whole} units"


def _activations(layers: list[Layer]) -> str:
    names = sorted({each.activation for each in layers})
    return f"{' and '.join(names)} in {named(layers)}" if layers else ""


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
