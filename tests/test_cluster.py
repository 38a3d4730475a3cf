import json

import pytest
import tensorflow as tf

from tfaccel import UserError, cluster
from tfaccel.cluster import Cluster, from_environment, make_strategy


def tf_config(jobs, kind="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
        tf_config({"worker": ["a:1"]}),
        tf_config({"chief": ["a:1"], "worker": []}, "chief"),
    ],
)
def test_one_process_is_a_job_of_its_own(environment):
    alone = from_environment(environment)
    assert alone == Cluster()
    assert (alone.num_workers, alone.worker_index, alone.is_chief) == (1, 0, True)


# (cluster, task type, index) -> worker index, what TensorFlow calls the three workers
WORKERS = {"worker": ["a:1", "b:1", "c:1"]}
CHIEF = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
PLACES = [
    ((WORKERS, "worker", 0), 0, ("worker", 0), ("worker", 1), ("worker", 2)),
    ((WORKERS, "worker", 2), 2, ("worker", 0), ("worker", 1), ("worker", 2)),
    ((WORKERS, "worker", "1"), 1, ("worker", 0), ("worker", 1), ("worker", 2)),
    ((CHIEF, "chief", 0), 0, ("chief", 0), ("worker", 0), ("worker", 1)),
    ((CHIEF, "worker", 1), 2, ("chief", 0), ("worker", 0), ("worker", 1)),
]


@pytest.mark.parametrize(("given", "worker_index", "tasks"), [(p[0], p[1], p[2:]) for p in PLACES])
def test_a_place_among_several(given, worker_index, tasks):
    found = from_environment(tf_config(*given))
    assert found.addresses == ("a:1", "b:1", "c:1")
    assert (found.num_workers, found.worker_index) == (3, worker_index)
    assert found.is_chief == (worker_index == 0)
    names = tuple(f"/job:{job}/replica:0/task:{index}" for job, index in tasks)
    assert tuple(map(found.task, range(3))) == names


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"TF_CONFIG": "{"}, "cannot be read .*expected"),
        ({"TF_CONFIG": "[1]"}, "cannot be read"),
        ({"TF_CONFIG": '{"cluster": ["a:1", "b:1"]}'}, "cannot be read"),
        (tf_config({**WORKERS, "ps": ["d:1"]}), "has the job 'ps'; .* take 'ps' out"),
        (tf_config({"worker": ["a:1"], "evaluator": ["d:1"]}), "has the job 'evaluator'"),
        (tf_config({"worker": ["a:1", 2]}), r"has worker=\['a:1', 2\]; expected .*host:port"),
        (tf_config({"worker": ["a:1", "b"]}), r"worker=\['a:1', 'b'\]; expected .*host:port"),
        (tf_config({"worker": "a:1"}), "has worker='a:1'; expected"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "keep one, and make workers of others"),
        (tf_config({"chief": ["a:1"], "worker": ["a:1"]}), r"an address twice \(a:1, a:1\)"),
        (tf_config(WORKERS, "worker", 3), "'index': 3}, which is not .* worker 1, worker 2"),
        (tf_config(WORKERS, "evaluator"), "'evaluator', 'index': 0}, which is not in its cluster"),
        (tf_config(WORKERS, "worker", True), "which is not in its cluster"),
        ({"TF_CONFIG": json.dumps({"cluster": WORKERS})}, "task=None, which is not in its cluster"),
    ],
)
def test_what_tf_config_may_not_say(environment, words):
    with pytest.raises(UserError, match=words):
        from_environment(environment)


def test_a_replica_on_each_device():
    two = make_strategy(Cluster(), ("/cpu:0", "/cpu:1"))
    assert two.num_replicas_in_sync == 2
    assert make_strategy(Cluster(), ("/cpu:0", "/cpu:1"), peer_timeout_s=5) is two


def test_a_cluster_is_joined_before_tensorflow_starts(monkeypatch):
    tf.constant(1)
    monkeypatch.setattr(cluster, "_set_heartbeat", lambda *_: None)  # it would outlast the test
    with pytest.raises(UserError, match="TensorFlow was used before it could join its cluster"):
        make_strategy(Cluster(("localhost:1", "localhost:2")), ("/cpu:0",))
