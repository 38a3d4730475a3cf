"""The values of this package: the job's workers, and what one system says of this process.

Takes what a reader found; gives `Cluster`, which the rest of tfaccel goes by, and `Claim`.

    cluster = Cluster(("10.0.0.1:2222", "10.0.0.2:2222"), worker_index=1, source="TF_CONFIG")
    cluster.num_workers, cluster.is_chief       # 2, False
    cluster.task(0)                             # "/job:worker/replica:0/task:0"
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of the job, and this worker's place among them.

    Attributes:
      addresses: host:port of each worker, the chief's first; none for a process on its own.
      worker_index: which of them this is, from 0.
      has_chief: whether TF_CONFIG calls worker 0 "chief"; TensorFlow then counts the others from 0.
      local_index: which of the workers on this host this is, from 0.
      num_local: workers of the job on this host, which share its cores, memory and GPUs.
      source: who says so, in words for the log.
    """

    addresses: tuple[str, ...] = ()
    worker_index: int = 0
    has_chief: bool = False
    local_index: int = 0
    num_local: int = 1
    source: str = "neither flags nor TF_CONFIG, Slurm or Open MPI name other workers"

    @property
    def num_workers(self) -> int:
        """Processes in the job."""
        return max(1, len(self.addresses))

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that writes what is written once."""
        return self.worker_index == 0

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The addresses by TensorFlow's names of their jobs, as TF_CONFIG has them."""
        jobs = {}
        for worker_index, address in enumerate(self.addresses):
            jobs.setdefault(self.job_and_index(worker_index)[0], []).append(address)
        return jobs

    def task(self, worker_index: int) -> str:
        """Returns what TensorFlow calls a worker, e.g. "/job:worker/replica:0/task:1"."""
        job, index = self.job_and_index(worker_index)
        return f"/job:{job}/replica:0/task:{index}"

    def job_and_index(self, worker_index: int) -> tuple[str, int]:
        """Returns a worker's job, "chief" or "worker", and its index there."""
        if self.has_chief:
            return ("chief", 0) if worker_index == 0 else ("worker", worker_index - 1)
        return "worker", worker_index


@dataclasses.dataclass(frozen=True)
class Claim:
    """What one system says of this process, before anybody asks for addresses.

    Attributes:
      source: the system, e.g. "Slurm step 12.0".
      num_workers: processes in the job.
      worker_index: which of them this is, from 0.
      words: where it says so, e.g. "SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1".
      make: returns the cluster; raises UserError where that cannot be known.
    """

    source: str
    num_workers: int
    worker_index: int
    words: str
    make: Callable[[], Cluster]
