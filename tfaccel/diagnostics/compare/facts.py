"""The facts that decide which variants exist, as plain values.

Facts(loaders=("tf_data", "dali_cpu"), gpu_ids=(), ...)
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Facts:
    """An experiment on a machine.

    Attributes:
      loaders: the loaders that can read the data, the plain variant's first.
      gpu_ids: the GPUs that the config may use; empty on the CPU.
      num_examples: the number of training images.
      global_batch_size: the config's global batch size when it uses all of these GPUs.
      environment: versions and hardware.
    """

    loaders: tuple[str, ...]
    gpu_ids: tuple[int, ...]
    num_examples: int
    global_batch_size: int
    environment: dict
