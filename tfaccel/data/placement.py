"""Where and how one replica's stream runs."""

import dataclasses

from tfaccel.runtime import Device


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and how one replica's stream runs.

    Attributes:
      device: of the replica: batches are given there.
      num_threads: CPU threads of the stream.
      seed: for random operators that a user's own pipeline has; ours draw nothing.
    """

    device: Device
    num_threads: int
    seed: int
