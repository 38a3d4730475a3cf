"""What node 0 decides for two nodes of two ranks, by a clock of the test's own."""

import dataclasses

import pytest

from tfaccel.launch.coordinator import Coordinator
from tfaccel.launch.gang import RankState
from tfaccel.launch.messages import Arrival, Report
from tfaccel.launch.options import Options


class Job:
    """A coordinator, the clock that it goes by, and what its nodes say."""

    def __init__(self, **options):
        self.now = 1000.0
        given = {"num_nodes": 2, "num_ranks_per_node": 2, "master_addr": "n9", "max_restarts": 2}
        self.options = Options(**{**given, **options})
        self.coordinator = Coordinator(self.options, "digest", clock=lambda: self.now)

    def join(self, node, **changed):
        arrival = Arrival(
            node,
            host=f"10.0.0.{9 + node}" if node else "127.0.0.1",
            ports=(21000, 21001),
            digest="digest",
            launcher=f"launcher {node}",
            reached_at="10.0.0.9" if node else "",
        )
        return self.coordinator.join(dataclasses.replace(arrival, **changed))

    def report(self, node, first, second=None, *, attempt=0, stop_signal=0, launcher=None):
        states = {2 * node: first, 2 * node + 1: second or first}
        launcher = launcher or f"launcher {node}"
        return self.coordinator.report(Report(node, attempt, states, launcher, stop_signal))

    def begin(self):
        self.join(0)
        self.join(1)
        return self.join(0)


def at(step, **more):
    return RankState(beats=step, phase="train", step=step, **more)


FAILED = RankState(beats=5, phase="train", step=5, exit_code=3, tail=("Error: x", "last"))
DONE = RankState(beats=9, phase="train", step=9, exit_code=0)


def test_an_attempt_begins_when_all_nodes_are_there():
    job = Job()
    assert job.join(0).action == "wait"
    assert job.join(0).action == "wait"
    begun = job.join(1)
    assert begun.action == "start"
    # Node 0 by the address that others reach it by; the ranks node by node.
    assert begun.addresses == (
        "10.0.0.9:21000",
        "10.0.0.9:21001",
        "10.0.0.10:21000",
        "10.0.0.10:21001",
    )
    assert job.join(0) == begun
    assert job.join(1) == begun  # an answer that was lost on its way
    assert job.report(0, at(1)).action == "go"


def test_all_end_well_when_every_rank_is_done():
    job = Job()
    job.begin()
    assert job.report(0, DONE).action == "go"
    end = job.report(1, DONE)
    assert (end.is_final, end.exit_code, end.reason) == (True, 0, "all ranks are done")
    assert not job.coordinator.all_told
    assert job.report(0, DONE) == end
    assert job.coordinator.all_told


def test_p6_a_rank_that_fails_ends_all_nodes_and_all_start_again():
    job = Job()
    job.begin()
    job.report(0, at(5))
    end = job.report(1, at(5), FAILED)
    assert (end.action, end.is_final) == ("end", False)
    assert end.reason == (
        "rank 3 ended with exit code 3; restart 1 of 2 from the last checkpoint in 1 s"
    )
    assert end.tail == ("Error: x", "last")
    assert job.report(0, at(6)) == end
    # Both wait for each other, and for the pause.
    assert job.join(0).action == job.join(1).action == "wait"
    job.now += 1
    assert job.join(0).action == "start"
    assert job.join(1).attempt == 1


def test_the_number_of_restarts_is_bounded():
    job = Job(max_restarts=1)
    for attempt in range(2):
        job.now += 100
        job.begin()
        end = job.report(1, FAILED, attempt=attempt)
    assert end.is_final
    assert end.exit_code == 3
    assert "all 1 restarts of --max-restarts are used up" in end.reason


def test_two_restarts_that_come_no_further_are_the_last():
    job = Job(max_restarts=9)
    for attempt in range(3):
        job.now += 100
        job.begin()
        end = job.report(1, FAILED, attempt=attempt)
    assert end.is_final
    assert "two restarts in a row got no further than step 5" in end.reason


def test_p6_a_node_that_falls_silent_is_lost_and_named():
    job = Job()
    job.begin()
    job.report(1, at(3))
    for _ in range(29):
        job.now += 1
        assert job.report(0, at(3)).action == "go"
    job.now += 2
    end = job.report(0, at(3))
    assert end.reason.startswith(
        "node 1 (10.0.0.10) is lost: it was silent for 31 s; restart 1 of 2"
    )
    # It was cut off, and has ended its ranks meanwhile.
    job.now += 10
    job.join(0)
    assert job.join(1).action == "start"


def test_a_node_that_comes_again_has_lost_its_ranks():
    job = Job()
    job.begin()
    job.report(0, at(3))
    job.report(1, at(3))
    assert job.join(1).action == "wait"
    assert "node 1 (10.0.0.10) left its ranks" in job.report(0, at(3)).reason


def test_a_node_that_never_comes_is_named():
    job = Job(start_timeout_s=100)
    assert job.join(0).action == "wait"
    job.now += 101
    end = job.join(0)
    assert end.is_final
    assert end.exit_code == 1
    assert "node 1 did not join within 100 s" in end.reason


def test_p7_the_age_of_a_report_counts():
    job = Job(step_timeout_s=20)
    job.begin()
    job.report(1, at(3, age_s=15.0))
    job.now += 6
    end = job.report(0, at(4))
    assert "each of" not in end.reason
    assert "made no progress in training for 21 s (limit 20 s), step 3" in end.reason


def test_a_job_that_is_told_to_stop_is_not_started_again():
    job = Job()
    job.begin()
    stopped = RankState(phase="end", step=7, exit_code=143)
    job.report(0, stopped, stop_signal=15)
    end = job.report(1, stopped)
    assert end.is_final
    assert end.exit_code == 143
    assert end.reason.endswith("not restarted: it was told to stop")


def test_a_job_that_is_told_to_stop_before_it_has_ranks_ends():
    job = Job()
    end = job.join(0, stop_signal=15)
    assert end.is_final
    assert end.exit_code == 143


@pytest.mark.parametrize(
    ("node", "changed", "reason"),
    [
        (2, {}, "node 2 in a job of --nnodes=2"),
        (1, {"digest": "another"}, "node 1 launches a different command than node 0"),
        (1, {"ports": (21000,)}, "node 1 has --nproc-per-node=1, node 0 2"),
    ],
)
def test_a_node_of_another_job_is_sent_away_and_harms_nobody(node, changed, reason):
    job = Job()
    sent_away = job.join(node, **changed)
    assert sent_away.is_final
    assert sent_away.exit_code == 2
    assert sent_away.reason.startswith(reason)
    assert job.begin().action == "start"


def hosts(answer):
    return [each.rpartition(":")[0] for each in answer.addresses[::2]]


def test_who_is_sent_away_settles_no_address():
    job = Job()
    job.join(1, digest="another", reached_at="127.0.0.1")
    assert hosts(job.begin()) == ["10.0.0.9", "10.0.0.10"]


def test_a_launcher_on_node_0s_machine_has_its_ranks_there_too():
    job = Job(num_nodes=3)
    job.join(0)
    job.join(1, host="127.0.0.1", reached_at="127.0.0.1")
    assert hosts(job.join(2)) == ["10.0.0.9", "10.0.0.9", "10.0.0.11"]


def test_launchers_of_one_machine_need_no_other_address():
    job = Job()
    job.join(0)
    assert hosts(job.join(1, host="::1", reached_at="::1")) == ["[::1]", "[::1]"]


def test_each_attempt_has_the_addresses_of_its_own_arrivals():
    job = Job()
    job.begin()
    job.report(1, FAILED)
    job.now += 1
    job.join(0)
    moved = job.join(1, host="10.0.7.10", reached_at="10.0.7.9")
    assert hosts(moved) == ["10.0.7.9", "10.0.7.10"]


def test_two_launchers_of_one_number_are_told_apart_and_the_second_harms_nobody():
    job = Job()
    job.join(1)
    for begins in (lambda: None, job.begin):
        begins()
        refused = job.join(1, host="10.0.0.77", launcher="a second one", stop_signal=15)
        assert (refused.action, refused.is_final, refused.exit_code) == ("end", True, 2)
        assert refused.reason.startswith(
            "two launchers are node 1, the first one on 10.0.0.10; give every machine its own "
            "--node-rank"
        )
    assert job.report(1, FAILED, launcher="a second one", stop_signal=15) == refused
    assert job.report(0, at(3)).action == job.report(1, at(3)).action == "go"
    assert "10.0.0.77" not in "".join(job.join(0).addresses)


def test_a_launcher_that_was_started_anew_is_taken_once_the_first_one_is_silent():
    job = Job()
    job.begin()
    job.report(1, at(3))
    job.now += 31
    assert "node 1 (10.0.0.10) is lost" in job.report(0, at(3)).reason
    job.join(0)
    job.join(1, launcher="a second one")
    job.now += 1
    job.join(0)
    assert job.join(1, launcher="a second one").action == "start"
    # The first one was cut off.
    assert job.report(1, at(3)).exit_code == 2
    assert job.report(0, at(3), attempt=1).action == "go"


def test_a_report_of_a_node_that_cannot_be_harms_nobody():
    job = Job()
    job.begin()
    assert job.report(7, FAILED).exit_code == 2
    assert job.report(0, at(3)).action == "go"
    job.report(0, DONE)
    job.report(1, DONE)
    job.report(0, DONE)
    assert job.coordinator.all_told


def test_p6_a_mistake_on_node_0_is_every_nodes_exit_code_before_node_0_ends():
    job = Job()
    job.begin()
    mistaken = RankState(exit_code=2)
    assert job.report(0, mistaken).exit_code == 2
    assert not job.coordinator.all_told
    # Slurm has signalled node 1 meanwhile.
    end = job.report(1, RankState(exit_code=143, phase="end"), stop_signal=15)
    assert (end.is_final, end.exit_code) == (True, 2)
    assert job.coordinator.all_told
