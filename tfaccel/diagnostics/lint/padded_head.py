"""Pads a Dense head to whole tiles and cuts the extra logits off, so that no result changes.

Takes a functional or sequential model; returns a copy with the same weights, outputs and losses.

    wider = with_padded_heads(model, ["logits"])    # 10 units computed as 16; outputs: 10

The layer itself cuts the extra logits off. The alternative, a large negative number in their place,
has faults: label smoothing would give these logits a part of each label, and so a large loss, and
one-hot targets, top-k metrics and exports would have to know of them. The weights of the padding
start at 0, have no gradient and stay 0, so norms, clipping and weight decay do not change.
"""

from collections.abc import Sequence

import keras
import numpy as np
from keras import layers

from tfaccel.common.errors import UserError
from tfaccel.diagnostics.lint.products import padded
from tfaccel.keras_internals.copies import with_layers

# Arguments for Dense's weights, and the classes that keep zeros and add nothing for them.
WEIGHT_ARGS = ("kernel_regularizer", "bias_regularizer", "kernel_constraint", "bias_constraint")
SAFE_FOR_ZEROS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
SAFE_FOR_ZEROS += (keras.constraints.NonNeg, keras.constraints.MaxNorm)


@keras.saving.register_keras_serializable("tfaccel")
class PaddedHead(layers.Layer):
    """A Dense layer that computes a multiple of some number of units and returns only its units."""

    def __init__(
        self, units: int, *, multiple: int = 8, activation=None, use_bias: bool = True, **settings
    ):
        """Takes the arguments of Dense.

        Args:
          units: the number of outputs.
          multiple: the number of computed units is a multiple of this.
          activation: the activation of the outputs.
          use_bias: whether the layer has a bias.
          **settings: the settings in WEIGHT_ARGS, and those of every layer: name, dtype, ...
        """
        weight_args = {name: settings.pop(name, None) for name in WEIGHT_ARGS}
        super().__init__(**settings)
        self.units, self.multiple, self.use_bias = units, multiple, use_bias
        self.activation = keras.activations.get(activation)
        self.dense = layers.Dense(
            padded(units, multiple),
            use_bias=use_bias,
            dtype=self.dtype_policy,
            name="padded",
            trainable=self.trainable,
            **weight_args,
        )

    def build(self, input_shape):
        """Creates the weights, including the padding."""
        self.dense.build(input_shape)

    def call(self, inputs):
        """Takes [..., features] and returns [..., units]."""
        return self.activation(self.dense(inputs)[..., : self.units])

    def compute_output_shape(self, input_shape):
        """Returns the shape without the padding."""
        return (*input_shape[:-1], self.units)

    def take_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Sets the weights to those of a Dense layer, and the weights of the padding to 0."""
        spare = padded(self.units, self.multiple) - self.units
        self.dense.set_weights(
            [np.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, spare)]) for each in weights]
        )

    def get_config(self):
        """Returns the arguments that create the same layer."""
        dense_config = self.dense.get_config()
        return super().get_config() | {
            "units": self.units,
            "multiple": self.multiple,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            **{name: dense_config[name] for name in WEIGHT_ARGS},
        }


def with_padded_heads(
    model: keras.Model, names: Sequence[str], *, strategy=None, multiple: int = 8
) -> keras.Model:
    """Returns a copy of a model, not compiled, with padded Dense layers.

    Args:
      model: a functional or sequential model that is built.
      names: the names of the Dense layers to pad; layers of models inside it are not allowed.
      strategy: the copy is built in the scope of this strategy; None for none.
      multiple: the number of computed units is a multiple of this.

    Raises:
      UserError: the model is of another kind or cannot be copied; it has no such Dense layer; or
        the layer has LoRA, or a regularizer or constraint that may see the padding.
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
            **{name: getattr(layer, name) for name in WEIGHT_ARGS},
        )

    wider = with_layers(
        model,
        dict.fromkeys(names, pad),
        strategy=strategy,
        instead=f"replace its Dense head by PaddedHead(units) from {__name__}",
    )
    for name in names:
        head = model.get_layer(name)
        wider.get_layer(name).take_weights(head.get_weights())
        for old, new in zip(head.weights, wider.get_layer(name).weights, strict=True):
            new.trainable = old.trainable
    return wider


def _check(head: layers.Layer) -> None:
    """Raises UserError if padding would change what the head computes."""
    if not isinstance(head, layers.Dense):
        raise UserError(f"{head.name} is a {type(head).__name__} layer; expected a Dense layer")
    if head.lora_enabled:
        raise UserError(f"{head.name} has LoRA, which cannot be padded; do not pad this head")
    for name in WEIGHT_ARGS:
        given = getattr(head, name)
        if given is not None and type(given) not in SAFE_FOR_ZEROS:
            raise UserError(
                f"{head.name} has {name}={type(given).__name__}, which may see the padding; "
                f"expected none, or {', '.join(each.__name__ for each in SAFE_FOR_ZEROS)}; do not "
                "pad this head"
            )
