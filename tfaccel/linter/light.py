"""What activations cost: a copy of a model with ReLU in their place, to be timed beside it.

It is another model, and nobody is given it: as good a result may need the activation it had.

    lighter = with_relu(model, ["dense", "activation_3"], strategy=None)
"""

from collections.abc import Sequence

import keras

from tfaccel.linter.copied import with_layers


def with_relu(model: keras.Model, names: Sequence[str], *, strategy) -> keras.Model:
    """Returns a copy of a model, not compiled, whose layers of these names have ReLU.

    Args:
      model: functional or sequential, built.
      names: of layers among its own that have an activation.
      strategy: whose scope the copy is built in; None for none.

    Raises:
      UserError: the model is of another kind, lacks such a layer, or cannot be copied.
    """

    def lighten(layer):
        return layer.__class__.from_config(layer.get_config() | {"activation": "relu"})

    return with_layers(
        model,
        dict.fromkeys(names, lighten),
        strategy=strategy,
        instead="time it with another activation yourself",
    )
