"""How optimizer states are stored: a codec for each value of `StepConfig.state_dtype`.

A codec turns float32 values into the tensors that are stored, and back. It works on tensors of any
shape, and on the same arrays from a checkpoint.

    codec = Blockwise8Bit()
    stored = codec.encode(values, is_signed=True, bits=None)
    values = codec.decode(stored, is_signed=True)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf

from tfaccel.step.states import blockwise, rounding

FLOAT32, BFLOAT16, EIGHT_BIT = "float32", "bfloat16", "8bit"


class Part(NamedTuple):
    """A stored variable of a state: what its name ends with, its shape and its dtype."""

    suffix: str
    shape: tuple[int, ...]
    dtype: str


class Codec(Protocol):
    """Stores float32 values in fewer bytes."""

    name: str

    def num_bytes(self, num_values: int) -> int:
        """Returns the bytes that so many values take."""

    def parts(self, shape: Sequence[int], *, is_signed: bool) -> list[Part]:
        """Returns what is stored of values of this shape. All bits 0 mean values of 0."""

    def encode(
        self, values: tf.Tensor, *, is_signed: bool, bits: Callable[[int], tf.Tensor] | None
    ) -> list[tf.Tensor]:
        """Returns the tensors to store.

        Args:
          values: float32, of any known shape.
          is_signed: whether values may be negative.
          bits: makes random bits for so many values; None rounds to the nearest.
        """

    def decode(self, stored: Sequence, shape: Sequence[int], *, is_signed: bool) -> tf.Tensor:
        """Returns the float32 values, in this shape."""


class BFloat16:
    """Values in bfloat16, in their own shape: 2 bytes each."""

    name = BFLOAT16

    def num_bytes(self, num_values):
        """Returns two for each value."""
        return 2 * num_values

    def parts(self, shape, *, is_signed):
        """Returns one part, without an ending, because Keras would keep it under the same name."""
        return [Part("", tuple(shape), "bfloat16")]

    def encode(self, values, *, is_signed, bits):
        """Returns the values, rounded at random."""
        if bits is None:
            return [tf.cast(values, tf.bfloat16)]
        drawn = tf.reshape(bits(values.shape.num_elements()), values.shape)
        return [rounding.to_bfloat16(values, drawn)]

    def decode(self, stored, shape, *, is_signed):
        """Returns the values, which float32 has all."""
        return tf.reshape(tf.cast(stored[0], tf.float32), shape)


class Blockwise8Bit:
    """Values in 8 bits, in blocks (blockwise.py): 1.016 bytes each."""

    name = EIGHT_BIT

    def num_bytes(self, num_values):
        """Returns one for each value, and four for each block."""
        return num_values + 4 * blockwise.num_blocks(num_values)

    def parts(self, shape, *, is_signed):
        """Returns the codes, and of each block the value of the largest size, both flat."""
        size = tf.TensorShape(shape).num_elements()
        kind = "signed" if is_signed else "unsigned"
        return [
            Part(f"_{kind}_codes", (size,), "uint8"),
            Part("_absmax", (blockwise.num_blocks(size),), "float32"),
        ]

    def encode(self, values, *, is_signed, bits):
        """Returns the codes that are nearest. It uses no bits, as in the paper."""
        return list(blockwise.quantized(tf.reshape(values, [-1]), is_signed=is_signed))

    def decode(self, stored, shape, *, is_signed):
        """Returns the values that the codes stand for."""
        codes, largest = map(tf.convert_to_tensor, stored)
        return tf.reshape(blockwise.dequantized(codes, largest, is_signed=is_signed), shape)


CODECS = {each.name: each for each in (BFloat16(), Blockwise8Bit())}  # float32 needs none
