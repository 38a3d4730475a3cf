"""The fix that changes no result: a Dense head padded to whole tiles, its spare logits cut off.

Takes a functional or sequential model; gives a copy with the same weights and the same outputs.

    wider = with_padded_heads(model, ["logits"])    # 10 units computed as 16; outputs: 10

The spare logits are masked by leaving them out, inside the layer, rather than by a large negative
number after it: label smoothing would give those a part of each label, and a large loss for it;
one-hot targets, top-k metrics and exports would have to know of them. So nothing outside can tell.
Their weights start at 0, have no gradient, and stay 0: norms, clipping and decay are as before.

Private Keras name relied on: `Functional`, the class of `keras.Model(inputs, outputs)`.
"""

import contextlib
from collections.abc import Sequence

import keras
import numpy as np
from keras import layers
from keras.src.models.functional import Functional

from tfaccel.errors import UserError
from tfaccel.linter.products import padded


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
          **settings: of every layer: name, dtype.
        """
        super().__init__(**settings)
        self.units, self.multiple, self.use_bias = units, multiple, use_bias
        self.activation = keras.activations.get(activation)
        self.dense = layers.Dense(
            padded(units, multiple), use_bias=use_bias, dtype=self.dtype_policy, name="padded"
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
        return super().get_config() | {
            "units": self.units,
            "multiple": self.multiple,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
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
      UserError: the model is of another kind, or has no such Dense layer.
    """
    # Exactly these: a copy of a subclass would lose what it adds, a train_step say.
    if type(model) not in (keras.Sequential, Functional):
        raise UserError(
            f"{model.name} is a subclassed model, which cannot be copied with another layer; put "
            "PaddedHead(units), from tfaccel.linter.padded_head, in its Dense head's place"
        )
    heads = [each for each in model.layers if each.name in names]
    if len(heads) != len(set(names)) or not all(isinstance(each, layers.Dense) for each in heads):
        raise UserError(f"{model.name} has no Dense layer {', '.join(names)} among its own layers")

    def copy(layer):
        if layer.name not in names:
            return layer.__class__.from_config(layer.get_config())
        return PaddedHead(
            layer.units,
            multiple=multiple,
            activation=layer.activation,
            use_bias=layer.use_bias,
            name=layer.name,
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
        )

    with strategy.scope() if strategy else contextlib.nullcontext():
        wider = keras.models.clone_model(model, clone_function=copy)
    for old, new in zip(model.layers, wider.layers, strict=True):
        if isinstance(new, PaddedHead):
            new.take_weights(old.get_weights())
        else:
            new.set_weights(old.get_weights())
    return wider
