"""The job's workers, and the claim of one source about this process.

`Cluster` is used by the rest of tfaccel. `Claim` is used only in this package.

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
      addresses: host:port of each worker, the chief's first; empty for a single process.
      worker_index: this worker's index, from 0.
      has_chief: whether TF_CONFIG calls worker 0 "chief". TensorFlow then counts the others from 0.
      local_index: this worker's index among the workers of this host, from 0.
      num_local: number of workers on this host, which share its cores, memory and GPUs.
      source: where this was found, for the log.
    """

    addresses: tuple[str, ...] = ()
    worker_index: int = 0
    has_chief: bool = False
    local_index: int = 0
    num_local: int = 1
    source: str = "neither flags nor TF_CONFIG, Slurm or Open MPI name other workers"

    @property
    def num_workers(self) -> int:
        """Number of processes in the job."""
        return max(1, len(self.addresses))

    @property
    def is_chief(self) -> bool:
        """True if this worker writes the files that the job needs only once."""
        return self.worker_index == 0

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The addresses by job name, as in TF_CONFIG."""
        jobs = {}
        for worker_index, address in enumerate(self.addresses):
            jobs.setdefault(self.job_and_index(worker_index)[0], []).append(address)
        return jobs

    def task(self, worker_index: int) -> str:
        """Returns TensorFlow's name of a worker, such as "/job:worker/replica:0/task:1"."""
        job, index = self.job_and_index(worker_index)
        return f"/job:{job}/replica:0/task:{index}"

    def job_and_index(self, worker_index: int) -> tuple[str, int]:
        """Returns a worker's job, "chief" or "worker", and its index in the job."""
        if self.has_chief:
            return ("chief", 0) if worker_index == 0 else ("worker", worker_index - 1)
        return "worker", worker_index


@dataclasses.dataclass(frozen=True)
class Claim:
    """What one source says about this process, before any addresses are looked up.

    Attributes:
      source: the source, such as "Slurm step 12.0".
      num_workers: number of processes in the job.
      worker_index: this process's index, from 0.
      words: the evidence, such as "SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1".
      make: returns the cluster, or raises UserError if the source does not know it.
    """

    source: str
    num_workers: int
    worker_index: int
    words: str
    make: Callable[[], Cluster]
