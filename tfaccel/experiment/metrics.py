"""The metric of image restoration, which Keras lacks: the peak signal-to-noise ratio.

run.compile(model, metrics=[PSNR(std=0.5)])
"""

from collections.abc import Sequence

import keras
from keras import ops

# The smallest error that counts. A perfect image has an infinite ratio, which would hide the others
# in the mean, so it counts as 100 dB. An error of half an 8-bit grey level in every pixel is 54 dB.
LEAST_MSE = 1e-10


@keras.saving.register_keras_serializable("tfaccel")
class PSNR(keras.metrics.MeanMetricWrapper):
    """The mean over images of the peak signal-to-noise ratio, in dB, for pixels in 0..1.

    Its state is a sum over images and their number, which can be added over replicas. An image of
    weight 0 does not count. Outputs are neither clipped nor rounded.
    """

    def __init__(self, std: float | Sequence[float] = 1.0, name="psnr", dtype=None):
        """Starts without images.

        Args:
          std: the standard deviation that images were divided by, for each channel or one for all.
            It turns a difference of normalized values into one of pixels in 0..1.
          name: the name in the logs.
          dtype: the dtype of the state; Keras's default, float32, suffices.
        """
        self.std = std
        super().__init__(psnr, name=name, dtype=dtype, std=std)
        self._direction = "up"

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        return {"name": self.name, "dtype": self.dtype, "std": self.std}


def psnr(y_true, y_pred, *, std: float | Sequence[float]):
    """Returns the ratio of each image in dB, [rows] float32.

    Args:
      y_true: [rows, height, width, channels], normalized.
      y_pred: [rows, height, width, channels], normalized.
      std: the divisor of the normalization, for each channel or one for all.
    """
    difference = ops.cast(y_true, "float32") - ops.cast(y_pred, "float32")
    pixels = difference * ops.convert_to_tensor(std, "float32")
    mse = ops.mean(ops.square(pixels), axis=(1, 2, 3))
    return -10 * ops.log10(ops.maximum(mse, LEAST_MSE))
