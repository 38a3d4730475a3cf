"""The metric of image restoration, which Keras lacks.

Takes normalised images; gives the mean over images of their peak signal-to-noise ratio, in dB.

    run.compile(model, metrics=[PSNR(std=0.5)])
"""

from collections.abc import Sequence

import keras
from keras import ops

# Of a perfect image the ratio is infinite, and no mean is left of the others: 100 dB stands in. An
# error of half a grey level of 8 bits in every pixel is 54 dB.
LEAST_MSE = 1e-10


@keras.saving.register_keras_serializable("tfaccel")
class PSNR(keras.metrics.MeanMetricWrapper):
    """Mean over images of the peak signal-to-noise ratio, in dB, of pixels in 0..1.

    Its state, a sum over images and their number, is additive over replicas; an image of weight 0
    does not count. Outputs are taken as they are, neither clipped nor rounded.
    """

    def __init__(self, std: float | Sequence[float] = 1.0, name="psnr", dtype=None):
        """Starts at no images.

        Args:
          std: what images were divided by, of each channel or one number for all: a difference of
            normalised values times this is one of pixels in 0..1.
          name: in the logs.
          dtype: of its state; Keras's default, float32, holds it.
        """
        self.std = std
        super().__init__(psnr, name=name, dtype=dtype, std=std)
        self._direction = "up"

    def get_config(self) -> dict:
        """Returns what `PSNR(**config)` is made from."""
        return {"name": self.name, "dtype": self.dtype, "std": self.std}


def psnr(y_true, y_pred, *, std: float | Sequence[float]):
    """Returns the ratio of each image, [rows] float32, in dB.

    Args:
      y_true: [rows, height, width, channels], normalised.
      y_pred: likewise.
      std: what they were divided by, of each channel or one number for all.
    """
    difference = ops.cast(y_true, "float32") - ops.cast(y_pred, "float32")
    pixels = difference * ops.convert_to_tensor(std, "float32")
    mse = ops.mean(ops.square(pixels), axis=(1, 2, 3))
    return -10 * ops.log10(ops.maximum(mse, LEAST_MSE))
