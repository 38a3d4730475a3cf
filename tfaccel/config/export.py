"""The settings of an export."""

import dataclasses

from tfaccel.common.checks import check_choice, check_flag, check_int
from tfaccel.config.documented import documented

PIXEL_DTYPES = ("float32", "uint8", "uint16")
COMPUTES_IN = ("policy", "float32")
WEIGHTS = ("trained", "average")
CHECKPOINTS = ("newest", "best")
LITERT = ("float32", "float16", "int8")


@documented
@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """How to export a trained model. (Training exports with these defaults.)"""

    samples: int = 256
    """Number of test images on which the export and the trained model are compared. They are taken
    evenly from all test images."""
    pixel_dtype: str = "float32"
    """Data type of the pixels that `serving_default` takes: "float32", or "uint8" for images of 8
    bits, or "uint16" for those of 16 bits. Pixels are 0 to 255, or 0 to 65535 with 16 bits."""
    computes_in: str = "policy"
    """Precision of the exported model: "policy" keeps that of training; "float32" is much faster
    than float16 on CPUs. Outputs are float32 in both cases."""
    weights: str = "trained"
    """Weights to export: "trained", or "average" for their moving average, which exists if
    train.ema_momentum is set."""
    xla: bool = False
    """Compile the model with XLA where it is served. XLA compiles again for each batch size."""
    onnx: bool = False
    """Also write `model.onnx`. It takes pixels and computes in float32."""
    litert: str | None = None
    """Also write `model.tflite` for LiteRT (phones and small devices), which takes pixels:
    "float32"; "float16", with weights of half the bytes; "int8", with a quarter of the bytes, and
    layers in integers, calibrated on test images. None writes none."""

    def __post_init__(self):
        """Checks every field."""
        check_int("samples", self.samples, at_least=1)
        check_choice("pixel_dtype", self.pixel_dtype, PIXEL_DTYPES)
        check_choice("computes_in", self.computes_in, COMPUTES_IN)
        check_choice("weights", self.weights, WEIGHTS)
        check_flag("xla", self.xla)
        check_flag("onnx", self.onnx)
        if self.litert is not None:
            check_choice("litert", self.litert, LITERT)
