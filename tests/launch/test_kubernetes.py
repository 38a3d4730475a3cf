"""The manifest as data; tools/check_manifest.py checks it against the published schemas."""

import re

import pytest
import yaml

from tfaccel.common.errors import UserError
from tfaccel.launch import kubernetes, options
from tfaccel.runtime import cluster

FLAGS = ["--engine=k8s", "--print", "--name=digits", "--image=images/tfaccel:0.1"]
TRAIN = ["train", "--config=configs/digits.py", "--workdir=/runs/a"]


def documents(*flags, command=TRAIN):
    return list(yaml.safe_load_all(text(*flags, command=command)))


def text(*flags, command=TRAIN):
    return kubernetes.manifest(*options.parse([*FLAGS, *flags, *command], {}))


def variables(container, index):
    """What a pod's process sees, each made from those before it, as Kubernetes does."""
    seen = {}
    for each in container["env"]:
        value = each.get("value")
        if value is None:
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            value = str(index)
        seen[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: seen[name[1]], value)
    return seen


def test_each_pod_is_one_worker_by_its_index():
    jobset, _ = documents("--nnodes=3", "--max-restarts=4", "--grace=45")
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 45
    (container,) = pod["containers"]
    assert container["image"] == "images/tfaccel:0.1"
    assert container["command"] == ["python", "-m", "tfaccel", *TRAIN]
    for index in range(3):
        found = cluster.find(variables(container, index))
        assert found.worker_index == index
        assert found.addresses == tuple(f"digits-worker-0-{each}.digits:20000" for each in range(3))


def test_all_pods_start_again_but_never_after_a_mistake_in_the_call():
    jobset, _ = documents("--nnodes=2", "--max-restarts=4")
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 4
    assert policy["rules"][0]["action"] == "FailJobSet"
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["backoffLimit"] == 0
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [2]
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_no_other_pod_reaches_the_ports():
    jobset, policy = documents()
    pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}}
    assert policy["spec"] == {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": pods}]}],
    }


def test_it_says_that_it_was_not_run_on_a_cluster():
    assert "not run on a cluster" in text()


def test_the_command_comes_through_as_it_is():
    odd = ['--note=it\'s "$(WORKER_INDEX)" {or} # not: \\', "--other=é"]
    jobset, _ = documents(command=[*TRAIN, *odd])
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    # $$( is Kubernetes' way to write $(.
    received = [each.replace("$$(", "$(") for each in pod["containers"][0]["command"]]
    assert received[-2:] == odd


@pytest.mark.parametrize(
    ("flags", "command", "message"),
    [
        (["--name=Digits"], TRAIN, "--name='Digits'; expected at most 40 small letters"),
        (["--name=" + "a" * 41], TRAIN, "at most 40"),
        (["--name=null"], TRAIN, "is not text in YAML"),
        (["--image="], TRAIN, "--engine=k8s without --image"),
        (["--nproc-per-node=2"], TRAIN, "use more pods with --nnodes"),
        ([], ["train", "--config=a.py", "--workdir=runs/a"], "give the absolute path"),
        (["--noprint"], TRAIN, "cannot submit a job; add --print"),
    ],
)
def test_what_cannot_be_is_a_sentence(flags, command, message):
    with pytest.raises(UserError, match=message):
        kubernetes.run(*options.parse([*FLAGS, *flags, *command], {}))


def test_run_prints(capsys):
    assert kubernetes.run(*options.parse([*FLAGS, *TRAIN], {})) == 0
    assert capsys.readouterr().out == text()
