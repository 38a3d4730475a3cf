"""What decides which variants there are, as plain values.

Facts(loaders=("tf_data", "dali_cpu"), gpu_ids=(), ...)
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Facts:
    """An experiment on a machine.

    Attributes:
      loaders: that can read the data, the plain one first.
      gpu_ids: that the config may use; empty for the CPU.
      num_examples: training images.
      global_batch_size: of the config, on all of these GPUs.
      environment: versions and hardware.
    """

    loaders: tuple[str, ...]
    gpu_ids: tuple[int, ...]
    num_examples: int
    global_batch_size: int
    environment: dict
