"""Tests of the flags that tfaccel adds to XLA_FLAGS."""

import logging
import os

import keras
import pytest
from conftest import FIRST_GPU, in_new_process, new_process

from tfaccel.runtime import xla_flags

NO_TIMING = "--xla_gpu_experimental_enable_fusion_autotuner=false"
WITH_LAUNCHES = "--xla_gpu_experimental_aot_compiled_thunks=true"
NO_TRITON = "--xla_gpu_enable_triton_gemm=FALSE"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, NO_TIMING),
        ("", NO_TIMING),
        ("--xla_dump_to=/tmp/x", f"--xla_dump_to=/tmp/x {NO_TIMING}"),
        # The user's own choice stays.
        (f"{NO_TIMING[:-5]}true", f"{NO_TIMING[:-5]}true"),
        (f"--a=b {NO_TIMING[:-5]}true", f"--a=b {NO_TIMING[:-5]}true"),
    ],
)
def test_replicas_fuse_by_rule(monkeypatch, given, wanted):
    monkeypatch.setenv("XLA_FLAGS", given or "")
    if given is None:
        monkeypatch.delenv("XLA_FLAGS")
    for _ in range(2):  # setup may be called twice
        xla_flags.fuse_by_rule()
        assert os.environ["XLA_FLAGS"] == wanted


def test_xla_waits_for_replicas_that_are_still_compiled(monkeypatch):
    own = "--xla_gpu_executable_terminate_timeout=7"
    monkeypatch.setenv("XLA_FLAGS", own)
    for _ in range(2):
        xla_flags.wait_for_replicas()
    flags = os.environ["XLA_FLAGS"].split()
    assert len(flags) == 5
    assert flags[0] == own
    assert "--xla_gpu_first_collective_call_terminate_timeout_seconds=600" in flags
    assert "--xla_gpu_nccl_termination_timeout_seconds=600" in flags
    # XLA ends a process that has a flag which it does not know.
    in_new_process(
        "import tensorflow as tf; tf.function(lambda: tf.constant(1), jit_compile=True)()"
    )


def test_xla_knows_every_flag_that_is_added():
    # XLA ends a process that has a flag which it does not know.
    in_new_process(
        "from tfaccel.runtime import xla_flags\n"
        "import tensorflow as tf\n"
        "xla_flags.keep_launches(tf.__version__)\n"
        "xla_flags.fuse_by_rule()\n"
        "xla_flags.choose_products(has_batch_norm=False)\n"
        "tf.function(lambda: tf.constant(1), jit_compile=True)()"
    )


@pytest.mark.parametrize(("version", "flags"), [("2.21.0", WITH_LAUNCHES), ("2.22.0-rc0", "")])
def test_kept_launches_are_a_flag_of_tensorflow_2_21(monkeypatch, version, flags):
    monkeypatch.setenv("XLA_FLAGS", "")
    xla_flags.keep_launches(version)
    assert os.environ["XLA_FLAGS"] == flags


def test_a_choice_by_the_user_is_said_to_be_one(monkeypatch, caplog):
    monkeypatch.setenv("XLA_FLAGS", f"{NO_TIMING[:-5]}true")
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        xla_flags.fuse_by_rule()
    assert "XLA_FLAGS sets xla_gpu_experimental_enable_fusion_autotuner" in caplog.text


@pytest.fixture
def first_model(monkeypatch):
    """As if this process had compiled no model yet; its flags are put back afterwards."""
    monkeypatch.setattr(xla_flags, "_has_triton", [])
    monkeypatch.setenv("XLA_FLAGS", "--a=b")


@pytest.mark.parametrize(
    ("has_batch_norm", "flags", "says"),
    [(True, "--a=b", "kernels that XLA writes with Triton"), (False, f"--a=b {NO_TRITON}", "gain")],
)
def test_products_suit_the_first_model(first_model, caplog, has_batch_norm, flags, says):
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        xla_flags.choose_products(has_batch_norm=has_batch_norm)
        assert os.environ["XLA_FLAGS"] == flags
        assert says in caplog.text
        caplog.clear()
        xla_flags.choose_products(has_batch_norm=has_batch_norm)
        assert not caplog.text
        xla_flags.choose_products(has_batch_norm=not has_batch_norm)  # too late for XLA
    assert os.environ["XLA_FLAGS"] == flags
    assert "as in this process's first model" in caplog.text


@pytest.mark.parametrize("users", ["--xla_gpu_enable_triton_gemm=true", NO_TRITON.lower()])
def test_the_users_choice_of_products_stays(first_model, monkeypatch, caplog, users):
    monkeypatch.setenv("XLA_FLAGS", users)
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        xla_flags.choose_products(has_batch_norm=False)
    assert os.environ["XLA_FLAGS"] == users
    assert "XLA_FLAGS sets xla_gpu_enable_triton_gemm" in caplog.text


def test_a_parents_choice_of_products_is_not_this_process_s(first_model, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--a=b {NO_TRITON}")
    xla_flags.choose_products(has_batch_norm=True)
    assert os.environ["XLA_FLAGS"] == "--a=b"


@pytest.mark.parametrize("has_batch_norm", [True, False])
def test_compile_looks_for_batch_norm_at_every_depth(setup, monkeypatch, has_batch_norm):
    from tfaccel.step import compile as step_compile

    chosen = []
    monkeypatch.setattr(step_compile, "_is_on_cpu", lambda strategy: False)
    monkeypatch.setattr(xla_flags, "choose_products", lambda **choice: chosen.append(choice))
    norm = keras.layers.BatchNormalization if has_batch_norm else keras.layers.LayerNormalization
    run = setup(xla=True)
    with run.scope():
        model = keras.Sequential([keras.Input((2,)), keras.Sequential([norm()])])
    run.compile(model, "sgd", "mse")
    assert chosen == [{"has_batch_norm": has_batch_norm}]


FLAGS_SET_LATE = """
import os, pathlib, tensorflow as tf
tf.random.stateless_normal((8, 8), (1, 2)) @ tf.ones((8, 8))
tf.function(lambda: tf.ones((8, 8)))()
os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=FALSE --xla_dump_to=DUMP"
tf.function(lambda: tf.constant(1), jit_compile=True)()
print(len(list(pathlib.Path("DUMP").iterdir())) > 0)
"""


def test_xla_reads_its_flags_with_the_first_program(tmp_path):
    # It also knows the flag: XLA ends a process that has one which it does not know.
    program = FLAGS_SET_LATE.replace("DUMP", str(tmp_path / "dump"))
    assert in_new_process(program) == "True\n"


OF_DENSE_LAYERS = """
import keras, numpy as np, tfaccel
run = tfaccel.setup(gpu_ids=[0], precision="mixed_bfloat16", compile_cache=False)
with run.scope():
    dense = [keras.layers.Dense(512) for _ in range(2)]
    model = keras.Sequential([keras.Input((512,)), *dense])
run.compile(model, "sgd", "mse")
rows = np.ones((1024, 512), "float32")
model.fit(rows, rows, batch_size=1024, verbose=0)
"""


@pytest.mark.gpu
def test_products_without_batch_norm_are_computed_by_cublas(tmp_path):
    done = new_process(
        OF_DENSE_LAYERS, CUDA_VISIBLE_DEVICES=str(FIRST_GPU), XLA_FLAGS=f"--xla_dump_to={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    texts = [each.read_text() for each in tmp_path.glob("*gpu_after_optimizations.txt")]
    assert any("__cublas$gemm" in each for each in texts)
    assert not any("__triton_gemm" in each for each in texts)
