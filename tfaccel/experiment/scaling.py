"""Measures the all-reduce of the gradients, and says which scaling to expect from it.

    all_reduce_s = time_all_reduce(GradientSum(model, gradients_as=None), strategy)
    print(Scaling(num_replicas=2, num_bytes=375848, all_reduce_s=all_reduce_s, step_s=0.012))

The workers agree on the number of sums. Otherwise one would wait for a sum that another leaves out.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import tensorflow as tf

from tfaccel.common.tables import in_figures
from tfaccel.runtime.agreement import slowest
from tfaccel.step.gradient_sum import GradientSum

BUDGET_S = 0.3  # for all rounds; there is at least one
MOST_ROUNDS = 9
# A round has several sums if they are quick, because the host waits for the device in each round.
ROUND_S = 0.02
MOST_SUMS = 20

# MB and GB are 10^6 and 10^9 bytes, as in nccl-tests.
TEXT = """\
  all-reduce {mb} MB of gradients over {n} replicas in {ms} ms; bus bandwidth {gbs} GB/s
  step       {step_ms} ms without loading; minus the all-reduce: {pass_ms} ms
  scaling    expected: {expected}
"""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What the measured times mean for the speed of all replicas together.

    Attributes:
      num_replicas: the number of replicas of all workers.
      num_bytes: the bytes of gradients that each replica adds to the sum.
      all_reduce_s: the seconds of one all-reduce of these bytes.
      step_s: the seconds of a step of all replicas, with the all-reduce, without loading.
    """

    num_replicas: int
    num_bytes: int
    all_reduce_s: float
    step_s: float

    @property
    def bus_bandwidth(self) -> float:
        """The bus bandwidth of the all-reduce in bytes/s, as nccl-tests defines it.

        It is the bandwidth that each link needs, so it can be compared with the hardware's. For n
        replicas and S bytes it is S / t * 2 * (n - 1) / n:
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        factor = 2 * (self.num_replicas - 1) / self.num_replicas
        return self.num_bytes / self.all_reduce_s * factor

    @property
    def pass_s(self) -> float:
        """The seconds of a step without the all-reduce: the difference, or 0 if it is negative.

        It is not measured by itself, because that would need a second compiled step. It includes
        the time in which a replica waits for a slower one.
        """
        return max(0.0, self.step_s - self.all_reduce_s)

    @property
    def share(self) -> float:
        """The expected speed of all replicas, as a share of `num_replicas` times one replica.

        It assumes that nothing runs beside the all-reduce. In tfaccel this is so: a step sums its
        gradients after the pass (tfaccel/step/functions.py). It says nothing of the loader, or of a
        worker that becomes slow later.
        """
        return self.pass_s / (self.pass_s + self.all_reduce_s)

    def __str__(self) -> str:
        """Returns the lines that a dry run prints."""
        expected = (
            f"{self.share:.2f} of {self.num_replicas} times one replica (the all-reduce is not "
            "hidden behind the pass)"
            if self.pass_s
            else "unknown, because an all-reduce alone took as long as a step"
        )
        return TEXT.format(
            mb=in_figures(self.num_bytes / 1e6),
            n=self.num_replicas,
            ms=in_figures(1e3 * self.all_reduce_s),
            gbs=in_figures(self.bus_bandwidth / 1e9),
            step_ms=in_figures(1e3 * self.step_s),
            pass_ms=in_figures(1e3 * self.pass_s),
            expected=expected,
        )


def time_all_reduce(
    gradient_sum: GradientSum,
    strategy: tf.distribute.Strategy,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the median seconds of an all-reduce on the slowest worker; all workers must call it.

    Args:
      gradient_sum: the all-reduce to measure.
      strategy: the strategy over all workers.
      clock: a monotonic clock, in seconds.

    Raises:
      tf.errors.OpError: a collective failed, for example because a worker is lost.
    """

    def timed(num_sums: int) -> float:
        began = clock()
        gradient_sum.run(num_sums)
        return (clock() - began) / num_sums

    timed(1)  # compiles, and opens connections
    num_rounds, num_sums = planned(slowest(timed(1), strategy))
    return slowest(statistics.median(timed(num_sums) for _ in range(num_rounds)), strategy)


def planned(all_reduce_s: float) -> tuple[int, int]:
    """Returns the number of rounds, and of sums in each, for the time of a warm all-reduce."""
    num_sums = min(MOST_SUMS, max(1, math.ceil(ROUND_S / all_reduce_s)))
    return min(MOST_ROUNDS, max(1, int(BUDGET_S / (num_sums * all_reduce_s)))), num_sums
