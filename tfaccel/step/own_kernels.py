"""What tfaccel's own Triton kernels share: where they run, said once, turned off by an error."""

import logging
from collections.abc import Sequence

from tfaccel.common.run_log import summary
from tfaccel.step import triton_calls
from tfaccel.step.capability import capability_for_kernels

log = logging.getLogger("tfaccel")


class OwnKernels:
    """Kernels of one kind in a model's steps.

    Attributes:
      what: what they compute, as a plural noun for the log.
      are_off: whether XLA refused one, so that none is used again.
    """

    what: str

    def __init__(self):
        """Takes nothing."""
        self.is_used, self.are_off = False, False

    def say_used(self) -> None:
        """Says once that they are used."""
        if not self.is_used:
            self.is_used = True
            log.info("step: tfaccel's kernels compute %s", self.what)

    def turned_off_by(self, error: str) -> bool:
        """Returns whether an error is of these kernels, which are then not used again."""
        if not self.is_used or self.are_off or not triton_calls.OF_TRITON.search(error):
            return False
        self.are_off = True
        first = error.strip().splitlines()[0]
        summary(
            "step: tfaccel's kernels no longer compute %s, because XLA refused one: %s",
            self.what,
            first,
        )
        return True


def kernels_on(
    kind: type[OwnKernels], devices: Sequence[str], *, wanted: bool
) -> OwnKernels | None:
    """Returns the kernels of a kind for a model's steps; None if XLA computes without them.

    Args:
      kind: what computes by kernels, of no arguments.
      devices: TensorFlow's names of the replicas' devices in this process.
      wanted: whether XLA is wanted.
    """
    return kind() if wanted and capability_for_kernels(devices) is not None else None
