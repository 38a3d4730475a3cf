"""Resizes feature maps by bilinear interpolation, as two products with constant matrices.

    x = Bilinear(height=56, width=56)(x)    # [n, 14, 14, channels] to [n, 56, 56, channels]

The result is `tf.image.resize`'s. XLA has no gradient of that operation (TensorFlow 2.21:
ResizeBilinearGrad with half-pixel centers), and on a GPU it is not deterministic. A product has
both, in any dtype. To read a `.keras` file with the layer, first call `tfaccel.setup(...)` or
`import tfaccel.experiment.models`.
"""

import keras
import numpy as np
from keras import layers, ops


@keras.saving.register_keras_serializable("tfaccel")
class Bilinear(layers.Layer):
    """Resizes [rows, height, width, channels] to a fixed height and width; it has no weights."""

    def __init__(self, height: int, width: int, **settings):
        """Takes the new size in pixels."""
        super().__init__(**settings)
        self.height, self.width = height, width

    def call(self, images):
        """Takes [rows, height, width, channels] of a known size; gives the new size."""
        _, height, width, channels = images.shape
        columns = ops.convert_to_tensor(weights_of(width, self.width), self.compute_dtype)
        rows = ops.convert_to_tensor(weights_of(height, self.height), self.compute_dtype)
        wide = ops.matmul(columns, images)
        flat = ops.reshape(wide, (-1, height, self.width * channels))
        return ops.reshape(ops.matmul(rows, flat), (-1, self.height, self.width, channels))

    def compute_output_shape(self, input_shape):
        """Returns the shape of the result."""
        return (input_shape[0], self.height, self.width, input_shape[-1])

    def get_config(self):
        """Returns what makes the layer again."""
        return super().get_config() | {"height": self.height, "width": self.width}


def weights_of(old: int, new: int) -> np.ndarray:
    """Returns the matrix that resizes a line of pixels, [new, old] float32; each row's sum is 1.

    Pixel centers are at 0.5, 1.5, ...; outside of the first and last center, their pixel counts.
    """
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    before = np.floor(places).astype(int)
    after = np.minimum(before + 1, old - 1)
    matrix = np.zeros((new, old), np.float32)
    np.add.at(matrix, (np.arange(new), before), 1 - (places - before))
    np.add.at(matrix, (np.arange(new), after), places - before)
    return matrix
