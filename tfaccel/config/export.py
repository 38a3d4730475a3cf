"""How a trained model is exported."""

import dataclasses

from tfaccel.common.checks import check_choice, check_flag, check_int
from tfaccel.config.documented import documented

PIXEL_DTYPES = ("float32", "uint8")
COMPUTES_IN = ("policy", "float32")
WEIGHTS = ("trained", "average")
CHECKPOINTS = ("newest", "best")


@documented
@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """How a trained model is exported. (Training exports with these defaults.)"""

    samples: int = 256
    """Evaluation images that it is compared on, spread over all of them."""
    pixel_dtype: str = "float32"
    """Of the pixels, 0 to 255, that `serving_default` takes: "float32" or "uint8"."""
    computes_in: str = "policy"
    """The precision it computes in: "policy" for the one that it was trained in, or "float32",
    which CPUs compute much faster than float16. Answers are float32 in both."""
    weights: str = "trained"
    """Which: "trained", or "average" for their moving average, where the optimizer keeps one."""
    xla: bool = False
    """Whether it is compiled with XLA where it is served: anew for each number of rows."""
    onnx: bool = False
    """Whether there is a `model.onnx`, too, in float32, from pixels to answers."""

    def __post_init__(self):
        """Checks every field."""
        check_int("samples", self.samples, at_least=1)
        check_choice("pixel_dtype", self.pixel_dtype, PIXEL_DTYPES)
        check_choice("computes_in", self.computes_in, COMPUTES_IN)
        check_choice("weights", self.weights, WEIGHTS)
        check_flag("xla", self.xla)
        check_flag("onnx", self.onnx)
