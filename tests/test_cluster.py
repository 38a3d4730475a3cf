import pytest

from tfaccel import UserError
from tfaccel.cluster import Cluster, from_environment, make_strategy

ONE = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
TWO = '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "chief", "index": 0}}'


@pytest.mark.parametrize(
    "environment", [{}, {"TF_CONFIG": ONE}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": ""}]
)
def test_one_process_is_a_job_of_its_own(environment):
    assert from_environment(environment) == Cluster(num_workers=1, worker_index=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [(TWO, "TF_CONFIG names 2 workers"), ("{", "cannot be read"), ("[1]", "cannot be read")],
)
def test_what_tf_config_may_not_say(text, words):
    with pytest.raises(UserError, match=words):
        from_environment({"TF_CONFIG": text})


def test_a_replica_on_each_device():
    two = make_strategy(("/cpu:0", "/cpu:1"))
    assert two.num_replicas_in_sync == 2
    assert make_strategy(("/cpu:0", "/cpu:1")) is two
