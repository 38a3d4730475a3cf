"""Measures what activations cost: times a copy of the model that has ReLU in their place.

The copy is only timed, never returned: it is another model, and may give worse results.

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
from tfaccel.diagnostics.lint.words import layer_names
from tfaccel.keras_internals.copies import with_layers

MOST_LETTERS = 200  # characters of an error message that are kept


@dataclasses.dataclass(frozen=True)
class Cost:
    """What activations cost on this machine.

    Attributes:
      activations: the activations that compute more than ReLU and their layers, in words.
      own: the seconds of a step (forward and backward) with them; None if it was not timed.
      relu: the seconds of a step with ReLU; None likewise.
      not_timed: why it was not timed, in words; "" if it was.
      num_steps: how many steps of each model were to be timed.
    """

    activations: str
    own: Spread | None = None
    relu: Spread | None = None
    not_timed: str = ""
    num_steps: int = 0

    def __str__(self):
        """Returns the result in a few sentences."""
        if not self.own:
            return f"cost of {self.activations}: not timed, because {self.not_timed}"
        return (
            f"cost of {self.activations}: a step, forward and backward, took {self.own}, and "
            f"{self.relu} with relu in its place. The model with relu is "
            f"{self.own.median_s / self.relu.median_s:.2f} times as fast on {device()}. It is a "
            "different model, so yours stays as it is."
            f"{shortened(self.own, num_steps=self.num_steps)}"
        )


def cost_of(facts: Facts, model: keras.Model, strategy, *, num_steps: int) -> Cost | None:
    """Measures the cost of activations that compute more than ReLU. Returns None without them.

    Args:
      facts: the facts about the model and its step.
      model: any model; a subclassed model is not timed.
      strategy: the strategy of the model's variables; None for none.
      num_steps: how many steps are timed with the activations, and with ReLU.
    """
    found = costly(facts.model)
    if not found:
        return None
    names = " and ".join(sorted({each.activation for each in found}))
    cost = Cost(f"{names} in {layer_names(found)}")
    try:
        lighter = with_relu(model, found, strategy=strategy)
        own, relu = spreads([model, lighter], facts, num_steps=num_steps)
    except Exception as error:  # the cost is an extra, so no error of a step may stop the fix
        return dataclasses.replace(cost, not_timed=_reason(error))
    return dataclasses.replace(cost, own=own, relu=relu, num_steps=num_steps)


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    lines = [each for each in str(error).splitlines() if each.strip()] or ["no message"]
    return f"{type(error).__name__}: {cleaned(lines[-1])[:MOST_LETTERS]}"


def with_relu(model: keras.Model, found: Sequence[Layer], *, strategy) -> keras.Model:
    """Returns a copy of a model, not compiled, with ReLU as the activation of some layers.

    Args:
      model: a functional or sequential model that is built.
      found: some of its layers, but not layers of models inside it.
      strategy: the copy is built in the scope of this strategy; None for none.

    Raises:
      UserError: the model is of another kind, lacks such a layer, or cannot be copied.
    """
    activations = {each.name: each.activation for each in found}

    def lighten(layer):
        activation = getattr(layer, "activation", None)
        if getattr(activation, "__name__", None) != activations[layer.name]:
            raise UserError(f"{layer.name} is also the name of a layer in a model inside this one")
        return layer.__class__.from_config(layer.get_config() | {"activation": "relu"})

    return with_layers(
        model,
        dict.fromkeys(activations, lighten),
        strategy=strategy,
        instead="time another activation yourself",
    )
