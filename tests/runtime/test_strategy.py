import contextlib
import socket

import pytest
import tensorflow as tf

from tfaccel import UserError, run
from tfaccel.common.errors import RunError
from tfaccel.runtime import strategy
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.strategy import make_strategy


def test_a_replica_on_each_device():
    two = make_strategy(Cluster(), ("/cpu:0", "/cpu:1"))
    assert two.num_replicas_in_sync == 2
    assert make_strategy(Cluster(), ("/cpu:0", "/cpu:1"), peer_timeout_s=5) is two


def test_a_cluster_is_joined_before_tensorflow_starts(monkeypatch):
    tf.constant(1)
    # It would outlast the test.
    monkeypatch.setattr(strategy, "configure_coordination", lambda *_, **__: None)
    with pytest.raises(UserError, match="TensorFlow was used before it could join its cluster"):
        make_strategy(Cluster(("localhost:20001", "localhost:20002")), ("/cpu:0",))


def test_a_port_that_is_taken_is_an_error_not_a_wait():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        addresses = (f"127.0.0.1:{port}", "127.0.0.1:20002")
        with pytest.raises(RunError, match=f"port {port} of this worker .* another port"):
            make_strategy(Cluster(addresses), ("/cpu:0",))


def test_workers_on_a_public_network_are_refused_unless_it_is_allowed(setup, monkeypatch):
    workers = {"workers": ["8.8.8.8:20001", "10.0.0.1:20002"], "worker_index": 1}
    with pytest.raises(UserError, match=r"worker 0 \(8.8.8.8:20001\) has a public address"):
        setup(**workers)
    joined = []
    monkeypatch.setattr(run, "make_strategy", lambda cluster, *_, **__: joined.append(cluster))
    monkeypatch.setattr(run.Watchdog, "check_reach", lambda _: None)
    monkeypatch.setattr(run.Watchdog, "guard", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(run, "agree_on_reductions", lambda *_, **__: None)
    setup(**workers, allow_public_network=True)
    assert joined[0].addresses == ("8.8.8.8:20001", "10.0.0.1:20002")
