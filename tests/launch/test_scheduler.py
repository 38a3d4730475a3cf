"""What Slurm's and Open MPI's variables say of the nodes of a launcher."""

import pytest

from tfaccel.common.errors import UserError
from tfaccel.launch.scheduler import PORT_VARIABLE, nodes

# As srun --nodes=2 --ntasks-per-node=1 sets them for the second task (Slurm 22.05).
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


def test_a_step_of_slurm_says_all():
    found = nodes(SLURM, {"num_ranks_per_node": 4})
    port = found.pop("master_port")
    assert found == {
        "num_nodes": 2,
        "node_rank": 1,
        "master_addr": "n9",
        "num_ranks_per_node": 4,
        "port_chosen_by": "Slurm step 12.0",
    }
    assert 20000 <= port < 32000
    again = nodes({**SLURM, "SLURM_RESTART_COUNT": "1"}, {})["master_port"]
    other_task = nodes({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, {})["master_port"]
    assert port == other_task != again


def test_a_port_is_a_schedulers_unless_a_flag_gives_one():
    assert nodes(SLURM, {"master_port": 29400})["port_chosen_by"] == ""
    given = {"num_nodes": 2, "master_addr": "n9", "master_port": 29400}
    assert nodes({PORT_VARIABLE: "Ray"}, given) == {**given, "port_chosen_by": "Ray"}


def test_mpirun_says_no_address():
    assert nodes(OPEN_MPI, {"master_addr": "n9"}) == {
        "num_nodes": 2,
        "node_rank": 1,
        "master_addr": "n9",
    }


@pytest.mark.parametrize("environment", [{}, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_process_of_one_task_says_nothing(environment):
    assert nodes(environment, {"num_nodes": 2}) == {"num_nodes": 2}


@pytest.mark.parametrize(
    ("environment", "given", "sentence"),
    [
        (SLURM, {"num_nodes": 3}, "--nnodes=3, but the scheduler's value is 2"),
        (SLURM, {"node_rank": 0}, "--node-rank=0, but the scheduler's value is 1"),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            {},
            r"Slurm step 12.0 has 4 tasks on 2 node\(s\); start only one launcher per node",
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            {},
            r"Open MPI has 2 tasks on 1 node\(s\); start only one launcher per node",
        ),
    ],
)
def test_what_does_not_fit_is_refused(environment, given, sentence):
    with pytest.raises(UserError, match=sentence):
        nodes(environment, given)
