"""What mpirun tells its processes, as Open MPI 4.1 wrote it."""

import pytest

from tfaccel import UserError
from tfaccel.runtime.cluster import find


def process(rank=0, *, size=2, local_size=2, **changes):
    return {
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "PMIX_NAMESPACE": "94044161",
        "OMPI_MCA_ess_base_jobid": "94044161",
        **changes,
    }


def test_one_host():
    found = [find(process(rank)) for rank in range(2)]
    assert found[0].addresses == found[1].addresses
    ports = [int(each.removeprefix("localhost:")) for each in found[0].addresses]
    assert 20000 <= ports[0] == ports[1] - 1 < 32000
    assert [each.worker_index for each in found] == [0, 1]
    assert (found[1].local_index, found[1].num_local, found[1].source) == (1, 2, "Open MPI")
    assert find(process(PMIX_NAMESPACE="5")).addresses != found[0].addresses


def test_one_process_is_a_job_of_its_own():
    assert find(process(size=1, local_size=1)).num_workers == 1


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            process(local_size=1),
            r"runs 1 of 2 processes on this host, .* --map-by ppr:1:node tfacc",
        ),
        (process(PMIX_NAMESPACE="", OMPI_MCA_ess_base_jobid=""), "none of PMIX_NAMESPACE, OMPI_"),
        (process(OMPI_COMM_WORLD_RANK="x"), "OMPI_COMM_WORLD_RANK='x'; expected a number"),
    ],
)
def test_what_cannot_be_known(environment, words):
    with pytest.raises(UserError, match=words):
        find(environment)


def test_on_several_hosts_the_workers_may_be_named():
    workers = ["10.0.0.1:2222", "10.0.0.2:2222"]
    found = find(process(1, local_size=1), workers=workers)
    assert (found.addresses, found.worker_index, found.num_local) == (tuple(workers), 1, 1)
