"""What srun tells its tasks, as Slurm 22.05 wrote it."""

import pytest

from tfaccel import UserError
from tfaccel.runtime.cluster import find
from tfaccel.runtime.cluster.slurm import expand, tasks_per_node


def task(rank=0, *, nodes="n[9-10]", counts="1(x2)", local=0, node=None, **changes):
    num_tasks = sum(tasks_per_node(counts))
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(rank if node is None else node),
        **changes,
    }


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n9", "n9"),
        ("n[9-10,12]", "n9 n10 n12"),
        ("gpu-[008-010]-ib,login", "gpu-008-ib gpu-009-ib gpu-010-ib login"),
        ("b2,b1,a[3,1]", "b2 b1 a3 a1"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
    ],
)
def test_node_lists_keep_slurms_order(nodelist, names):
    assert expand(nodelist) == names.split()


@pytest.mark.parametrize("nodelist", ["", "n[9-10", "n9-10]", "n[a-b]", "n[]", "n9,,n10", "n[[1]]"])
def test_no_node_list(nodelist):
    with pytest.raises(UserError, match="node list"):
        expand(nodelist)


def test_counts_of_tasks():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(UserError, match="'2x3'; expected"):
        tasks_per_node("2x3")


def test_every_task_knows_the_same_addresses_and_its_own_place():
    found = [find(task(rank)) for rank in range(2)]
    assert [each.worker_index for each in found] == [0, 1]
    assert found[0].addresses == found[1].addresses
    hosts, ports = zip(*(each.split(":") for each in found[0].addresses), strict=True)
    assert hosts == ("n9", "n10")  # as text n10 would be first
    assert 20000 <= int(ports[0]) == int(ports[1]) - 1 < 32000
    assert found[1].source == "Slurm step 12.0"


def test_several_tasks_on_a_node():
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]  # node, task on it
    for rank, (node, local) in enumerate(places):
        found = find(task(rank, nodes="n[1-3]", counts="2(x2),1", node=node, local=local))
        hosts = [each.partition(":")[0] for each in found.addresses]
        assert hosts == ["n1", "n1", "n2", "n2", "n3"]
        assert (found.worker_index, found.local_index) == (rank, local)
        assert found.num_local == (1 if node == 2 else 2)


def test_another_job_step_or_restart_has_other_ports():
    changes = [
        {},
        {"SLURM_JOB_ID": "13"},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_RESTART_COUNT": "1"},
    ]
    assert len({find(task(**each)).addresses for each in changes}) == len(changes)


@pytest.mark.parametrize(
    "environment",
    [
        # Cyclic on two nodes: ranks 0 and 3 are numbered as in blocks, and must refuse too.
        *(
            task(rank, counts="2(x2)", node=rank % 2, local=rank // 2, SLURM_DISTRIBUTION="cyclic")
            for rank in range(4)
        ),
        task(1, counts="2(x2)", node=1, local=0),
        task(0, counts="2(x2)", SLURM_DISTRIBUTION="plane"),
        task(0, nodes="n9"),
        task(0, node=2),
        task(0, local=1),
        task(0, counts="1(x2)", SLURM_STEP_NUM_TASKS="3"),
    ],
)
def test_tasks_that_are_not_numbered_node_by_node(environment):
    with pytest.raises(UserError, match=r"not numbered node by node \(.*SLURM_STEP_NODELIST="):
        find(environment)


@pytest.mark.parametrize("kind", ["block", "block:cyclic", "block,NoPack"])
def test_blocks(kind):
    environment = task(3, counts="2(x2)", node=1, local=1, SLURM_DISTRIBUTION=kind)
    assert find(environment).worker_index == 3


def test_one_task_on_each_node_is_in_blocks_whatever_the_distribution():
    assert find(task(1, SLURM_DISTRIBUTION="cyclic")).worker_index == 1


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        # The shell of a batch script, where srun was forgotten.
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "srun did not start"),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1"}, "name other workers"),
        (task(nodes="n9", counts="1"), "Slurm step 12.0 has one task"),
    ],
)
def test_a_process_of_its_own_says_why(environment, words):
    alone = find(environment)
    assert alone.num_workers == 1
    assert words in alone.source


def test_a_variable_that_is_missing_or_wrong_is_named():
    without = task()
    del without["SLURM_PROCID"]
    with pytest.raises(UserError, match="SLURM_STEP_NUM_TASKS=2 without SLURM_PROCID"):
        find(without)
    with pytest.raises(UserError, match="SLURM_PROCID='one'; expected a number"):
        find(task(SLURM_PROCID="one"))
