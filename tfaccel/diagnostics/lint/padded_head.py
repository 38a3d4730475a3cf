"""The fix that changes no result: a Dense head padded to whole tiles, its spare logits cut off.

Takes a functional or sequential model; gives a copy with the same weights, outputs and losses.

    wider = with_padded_heads(model, ["logits"])    # 10 units computed as 16; outputs: 10

The spare logits are masked by leaving them out, inside the layer, rather than by a large negative
number after it: label smoothing would give those a part of each label, and a large loss for it;
one-hot targets, top-k metrics and exports would have to know of them. So nothing outside can tell.
Their weights start at 0, have no gradient, and stay 0: norms, clipping and decay are as before.
"""

from collections.abc import Sequence

import keras
import numpy as np
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.diagnostics.lint.products import padded
from tfaccel.keras_internals.copies import with_layers

# Of Dense's weights: what is 0 adds nothing to these, and stays 0. Of others that is not known.
OF_WEIGHTS = ("kernel_regularizer", "bias_regularizer", "kernel_constraint", "bias_constraint")
OF_ZEROS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
OF_ZEROS += (keras.constraints.NonNeg, keras.constraints.MaxNorm)


@keras.saving.register_keras_serializable("tfaccel")
class PaddedHead(layers.Layer):
    """A Dense layer that computes a multiple of units and gives those that are asked for."""

    def __init__(
        self, units: int, *, multiple: int = 8, activation=None, use_bias: bool = True, **settings
    ):
        """Takes what Dense takes.

        Args:
          units: of the output.
          multiple: of which the units that are computed are one.
          activation: of the units that are left.
          use_bias: whether there is one.
          **settings: of the weights, as OF_WEIGHTS names them, and of every layer: name, dtype.
        """
        of_weights = {name: settings.pop(name, None) for name in OF_WEIGHTS}
        super().__init__(**settings)
        self.units, self.multiple, self.use_bias = units, multiple, use_bias
        self.activation = keras.activations.get(activation)
        self.dense = layers.Dense(
            padded(units, multiple),
            use_bias=use_bias,
            dtype=self.dtype_policy,
            name="padded",
            trainable=self.trainable,
            **of_weights,
        )

    def build(self, input_shape):
        """Makes the weights, padding included."""
        self.dense.build(input_shape)

    def call(self, inputs):
        """Takes [..., features], returns [..., units]."""
        return self.activation(self.dense(inputs)[..., : self.units])

    def compute_output_shape(self, input_shape):
        """Returns the shape without padding."""
        return (*input_shape[:-1], self.units)

    def take_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Sets the weights to a Dense layer's, and those of the padding to 0."""
        spare = padded(self.units, self.multiple) - self.units
        self.dense.set_weights(
            [np.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, spare)]) for each in weights]
        )

    def get_config(self):
        """Returns what makes the same layer again."""
        of_dense = self.dense.get_config()
        return super().get_config() | {
            "units": self.units,
            "multiple": self.multiple,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            **{name: of_dense[name] for name in OF_WEIGHTS},
        }


def with_padded_heads(
    model: keras.Model, names: Sequence[str], *, strategy=None, multiple: int = 8
) -> keras.Model:
    """Returns a copy of a model, not compiled, with these Dense layers padded.

    Args:
      model: functional or sequential, built.
      names: of Dense layers among its own.
      strategy: whose scope the copy is built in; None for none.
      multiple: of which the units are to be one.

    Raises:
      UserError: the model is of another kind, or cannot be copied; it has no such Dense layer, or
        one whose regularizer, constraint or LoRA would tell the padding.
    """

    def pad(layer):
        _check(layer)
        return PaddedHead(
            layer.units,
            multiple=multiple,
            activation=layer.activation,
            use_bias=layer.use_bias,
            name=layer.name,
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
            activity_regularizer=layer.activity_regularizer,
            **{name: getattr(layer, name) for name in OF_WEIGHTS},
        )

    wider = with_layers(
        model,
        dict.fromkeys(names, pad),
        strategy=strategy,
        instead=f"put PaddedHead(units), from {__name__}, in its Dense head's place",
    )
    for name in names:
        head = model.get_layer(name)
        wider.get_layer(name).take_weights(head.get_weights())
        for old, new in zip(head.weights, wider.get_layer(name).weights, strict=True):
            new.trainable = old.trainable
    return wider


def _check(head: layers.Layer) -> None:
    """Raises UserError for a head that would not give the same with padding."""
    if not isinstance(head, layers.Dense):
        raise UserError(f"{head.name} is a layer of kind {type(head).__name__}; expected a Dense")
    if head.lora_enabled:
        raise UserError(f"{head.name} has LoRA, which cannot be padded; leave the head as it is")
    for name in OF_WEIGHTS:
        given = getattr(head, name)
        if given is not None and type(given) not in OF_ZEROS:
            raise UserError(
                f"{head.name} has {name}={type(given).__name__}, which may see the padding; "
                f"expected none, or {', '.join(each.__name__ for each in OF_ZEROS)}; leave the "
                "head as it is"
            )
