import json

import pytest

from tfaccel import UserError
from tfaccel.runtime.cluster import find
from tfaccel.runtime.cluster.tf_config import claim


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
    alone = find(environment)
    assert alone.addresses == ()
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
    found = find(tf_config(*given))
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
        (tf_config({**WORKERS, "ps": ["d:1"]}), "has the job 'ps', .* remove 'ps'"),
        (tf_config({"worker": ["a:1"], "evaluator": ["d:1"]}), "has the job 'evaluator'"),
        (tf_config({"worker": ["a:1", 2]}), r"has worker=\['a:1', 2\]; expected .*host:port"),
        (tf_config({"worker": ["a:1", "b"]}), r"worker=\['a:1', 'b'\]; expected .*host:port"),
        (tf_config({"worker": "a:1"}), "has worker='a:1'; expected"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "make the others workers"),
        (tf_config({"chief": ["a:1"], "worker": ["a:1"]}), r"an address twice \(a:1, a:1\)"),
        (tf_config(WORKERS, "worker", 3), "'index': 3}, which is not .* worker 1, worker 2"),
        (tf_config(WORKERS, "evaluator"), "'evaluator', 'index': 0}, which is not in its cluster"),
        (tf_config(WORKERS, "worker", True), "which is not in its cluster"),
        ({"TF_CONFIG": json.dumps({"cluster": WORKERS})}, "task=None, which is not in its cluster"),
    ],
)
def test_what_tf_config_may_not_say(environment, words):
    with pytest.raises(UserError, match=words):
        claim(environment)


def test_workers_of_one_host_are_counted():
    found = find(tf_config({"worker": ["a:1", "b:1", "a:2", "a:3"]}, index=2))
    assert (found.local_index, found.num_local) == (1, 3)
