"""tools/time_attention.py: what it would time on a GPU is traced, for XLA's parser."""

import pytest
import tensorflow as tf
from loaded_tool import loaded
from tensorflow.compiler.tf2xla.python import xla

from tfaccel.step.attention.dropout_calls import Attention, blocks_of

SHAPE = (2, 32, 2, 16)


@pytest.fixture
def tool():
    with loaded("time_attention") as module:
        yield module


@pytest.fixture
def traced(monkeypatch, tool):
    """A function that traces a step which would be timed, and says that it took 1 ms."""
    call_module = xla.call_module
    anywhere = {"disabled_checks": ["platform"]}
    monkeypatch.setattr(xla, "call_module", lambda *a, **k: call_module(*a, **{**k, **anywhere}))

    def milliseconds(step, *carried):
        run = tf.function(lambda *values: tuple(step(*values)), jit_compile=True)
        run.experimental_get_compiler_ir(*carried)(stage="hlo", platform_name="CPU")
        return 1.0

    monkeypatch.setattr(tool, "milliseconds", milliseconds)


def of():
    return Attention(SHAPE, SHAPE, tf.bfloat16, 0.25, 0.1, True, (1, SHAPE[1]))


def test_each_way_is_timed(tool, traced):
    lines = list(tool.ways(of()))
    assert [line.split(":")[0] for line in lines] == ["tfaccel", "plain", "cuDNN without dropout"]
    assert "forward 1.000 ms, with its gradient 1.000 ms" in lines[0]


def test_blocks_of_each_kernel(tool, traced, monkeypatch):
    monkeypatch.setattr(tool, "BLOCKS", {name: [(32, 32, 4, 2)] for name in tool.BLOCKS})
    lines = list(tool.blocks(of()))
    assert [line.split()[0] for line in lines] == ["forward", "of_query", "of_key"]
    chosen = blocks_of("forward", of())
    assert f"(now ({chosen.query}, {chosen.key}, " in lines[0]
    assert "1.000 (32, 32, 4, 2)" in lines[0]


def test_without_a_gpu_it_says_so(tool, capsys, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    assert tool.main(["ways"]) == 1
    assert "sees no GPU" in capsys.readouterr().out
