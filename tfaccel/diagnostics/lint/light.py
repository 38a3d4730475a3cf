"""What activations cost: a copy of the model with ReLU in their place, timed beside it.

It is another model, and nobody is given it: as good a result may need the activations it had.

    cost = cost_of(facts, model, strategy, num_steps=30)
    print(cost)
"""

import dataclasses
from collections.abc import Sequence

import keras

from tfaccel.common.errors import UserError
from tfaccel.common.tables import cleaned
from tfaccel.diagnostics.lint.facts import Facts, Layer
from tfaccel.diagnostics.lint.layers import costly
from tfaccel.diagnostics.lint.measure import Spread, device, shortened, spreads
from tfaccel.diagnostics.lint.words import named
from tfaccel.keras_internals.copies import with_layers

MOST_LETTERS = 200  # of what an error says


@dataclasses.dataclass(frozen=True)
class Cost:
    """What activations cost on this machine.

    Attributes:
      activations: that compute more than ReLU, and where, in words.
      own: seconds of a step, forward and backward, with them; None where it was not timed.
      relu: likewise, with ReLU.
      not_timed: why it was not, in words; "" where it was.
      num_steps: of each model that were to be timed.
    """

    activations: str
    own: Spread | None = None
    relu: Spread | None = None
    not_timed: str = ""
    num_steps: int = 0

    def __str__(self):
        """Returns a sentence or two."""
        if not self.own:
            return f"cost of {self.activations}: not timed, {self.not_timed}"
        return (
            f"cost of {self.activations}: a step, forward and backward, took {self.own} with it, "
            f"and {self.relu} with relu in its place, which is "
            f"{self.own.median_s / self.relu.median_s:.2f} times as fast on {device()}. With relu "
            "it is another model, so yours is left as it is."
            f"{shortened(self.own, num_steps=self.num_steps)}"
        )


def cost_of(facts: Facts, model: keras.Model, strategy, *, num_steps: int) -> Cost | None:
    """Returns what activations cost that compute more than ReLU; None where there are none.

    Args:
      facts: of the model, and of its step.
      model: of any kind; a subclassed one is not timed.
      strategy: whose scope it belongs to; None for none.
      num_steps: that are timed, with them and with ReLU.
    """
    found = costly(facts.model)
    if not found:
        return None
    names = " and ".join(sorted({each.activation for each in found}))
    cost = Cost(f"{names} in {named(found)}")
    try:
        lighter = with_relu(model, found, strategy=strategy)
        own, relu = spreads([model, lighter], facts, num_steps=num_steps)
    except Exception as error:  # whatever a step raises: this is beside what was asked for
        return dataclasses.replace(cost, not_timed=_reason(error))
    return dataclasses.replace(cost, own=own, relu=relu, num_steps=num_steps)


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    lines = [each for each in str(error).splitlines() if each.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {cleaned(lines[-1])[:MOST_LETTERS]}"


def with_relu(model: keras.Model, found: Sequence[Layer], *, strategy) -> keras.Model:
    """Returns a copy of a model, not compiled, with ReLU as these layers' activation.

    Args:
      model: functional or sequential, built.
      found: layers of its own, none of models within it.
      strategy: whose scope the copy is built in; None for none.

    Raises:
      UserError: the model is of another kind, lacks such a layer, or cannot be copied.
    """
    activations = {each.name: each.activation for each in found}

    def lighten(layer):
        activation = getattr(layer, "activation", None)
        if getattr(activation, "__name__", None) != activations[layer.name]:
            raise UserError(f"{layer.name} is also the name of a layer in a model within")
        return layer.__class__.from_config(layer.get_config() | {"activation": "relu"})

    return with_layers(
        model,
        dict.fromkeys(activations, lighten),
        strategy=strategy,
        instead="time it with another activation yourself",
    )
