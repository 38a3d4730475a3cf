import importlib.metadata
import logging
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import FIRST_GPU, in_new_process, new_process
from packaging.version import Version
from tensorflow.python.eager import context
from tensorflow.python.framework import config as tf_config

import tfaccel
from tfaccel import UserError
from tfaccel.config import RuntimeConfig
from tfaccel.runtime import devices as runtime
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.devices import choose_gpus

# (gpu_ids, GPUs TensorFlow sees, GPUs installed, CUDA_VISIBLE_DEVICES) -> (indices, reason)
CHOICES = [
    ((None, 0, 0, None), (), "the machine has none"),
    ((None, 0, 2, ""), (), "CUDA_VISIBLE_DEVICES hides them"),
    ((None, 0, 2, "-1"), (), "CUDA_VISIBLE_DEVICES hides them"),
    ((None, 1, 1, None), (0,), "all 1 GPU(s), the default"),
    ((None, 4, 4, None), (0, 1, 2, 3), "all 4 GPU(s), the default"),
    ((None, 2, 4, "1,3"), (0, 1), "all 2 GPU(s), the default"),
    (((), 4, 4, None), (), "set by gpu_ids"),
    (((), 0, 4, None), (), "set by gpu_ids"),
    (((1, 3), 4, 4, None), (1, 3), "GPU 1, 3 of 4, set by gpu_ids"),
]

# the same -> words of the refusal
REFUSALS = [
    (((0,), 0, 0, None), "asks for GPU 0, but TensorFlow sees no GPU; give other"),
    (((4,), 4, 4, None), "asks for GPU 4, but TensorFlow sees only GPUs 0 to 3;"),
    (((0, 1), 1, 4, "2"), "sees only GPU 0 (CUDA_VISIBLE_DEVICES=2);"),
    # No silent fall-back to the CPU where there is a GPU that cannot be used.
    ((None, 0, 1, None), "driver reports 1 GPU(s), but TensorFlow sees none; install the CUDA"),
    (((0,), 0, 1, None), "driver reports 1 GPU(s), but TensorFlow sees none"),
]


def choose(gpu_ids, num_visible, num_installed, cuda_visible_devices):
    visible_is_set = cuda_visible_devices is not None
    return choose_gpus(
        gpu_ids,
        num_visible=num_visible,
        num_installed=num_installed,
        environment={"CUDA_VISIBLE_DEVICES": cuda_visible_devices} if visible_is_set else {},
        cluster=Cluster(),
    )


@pytest.mark.parametrize(("case", "ids", "reason"), CHOICES)
def test_chooses_gpus_and_says_why(case, ids, reason):
    chosen, why = choose(*case)
    assert chosen == ids
    assert reason in why


def test_workers_of_one_host_share_its_gpus_unless_gpu_ids_says_which():
    second = Cluster(("a:1", "a:2"), 1, local_index=1, num_local=2)
    given = {"num_visible": 4, "num_installed": 4, "environment": {}, "cluster": second}
    assert choose_gpus(None, **given)[0] == (2, 3)
    assert choose_gpus((0, 1), **given)[0] == (0, 1)


@pytest.mark.parametrize(("case", "words"), REFUSALS)
def test_refuses_gpus_that_are_not_there(case, words):
    with pytest.raises(UserError) as error:
        choose(*case)
    assert words in str(error.value)


def test_setup_on_the_cpu(setup, caplog):
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        run = setup(precision="O2", seed=3)
    assert [device.name for device in run.runtime.devices] == ["/cpu:0"]
    assert keras.config.dtype_policy().name == "mixed_float16"
    assert run.strategy.num_replicas_in_sync == 1
    said = " ".join(record.message for record in caplog.records)
    assert "device: CPU" in said
    assert "precision: mixed_float16" in said


def test_one_seed_decides_the_weights(setup):
    def kernel(seed):
        setup(seed=seed)
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        return layer.kernel.numpy()

    first, again, other = kernel(1), kernel(1), kernel(2)
    assert (first == again).all()
    assert (first != other).any()


def test_setup_again_gives_a_run_that_trains_as_the_first_did(setup):
    def trained():
        run = setup(seed=3)
        with run.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        run.compile(model, optimizer="sgd", loss="mse")
        model.train_on_batch(np.ones((4, 4)), np.ones((4, 2)))
        return run, model.get_weights()

    (first, weights), (again, weights_again) = trained(), trained()
    assert first is not again
    assert first.strategy is again.strategy
    for one, other in zip(weights, weights_again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_setup_again_with_other_settings_is_obeyed(setup):
    setup(deterministic=True, precision="mixed_float16", tf32=False)
    assert tf_config.is_op_determinism_enabled()
    setup()
    assert not tf_config.is_op_determinism_enabled()
    assert keras.config.dtype_policy().name == "float32"
    assert tf.config.experimental.tensor_float_32_execution_enabled()


@pytest.mark.gpu
def test_setup_again_on_a_gpu_is_refused_if_its_memory_would_be_another():
    program = (
        "import tfaccel, tensorflow as tf\n"
        "for memory in ('growth', 'growth', 8192):\n"
        "    try: tfaccel.setup(gpu_ids=[0], memory=memory); tf.zeros(1)\n"
        "    except tfaccel.UserError as error: print('restart the kernel' in str(error))"
    )
    assert in_new_process(program) == "True\n"


def test_pure_float16_is_warned_of(setup, caplog):
    with caplog.at_level(logging.WARNING, logger="tfaccel"):
        setup(precision="O3")
    assert "shows the largest possible speed" in caplog.text


def test_tf32_is_switched(setup):
    for tf32 in (False, True):
        setup(tf32=tf32)
        assert tf.config.experimental.tensor_float_32_execution_enabled() is tf32


NO_TIMING = "--xla_gpu_experimental_enable_fusion_autotuner=false"
WITH_LAUNCHES = "--xla_gpu_experimental_aot_compiled_thunks=true"
KEEPS_LAUNCHES = tf.__version__.startswith("2.21")
ADDED = f"{NO_TIMING} {WITH_LAUNCHES}" if KEEPS_LAUNCHES else NO_TIMING


@pytest.fixture
def on_planted_gpus(setup, monkeypatch):
    """A function that configures this process as if it had GPUs, and returns XLA's flags."""

    def configure(num_gpus, num_workers=1, **settings):
        gpus = [object()] * num_gpus  # that are not there
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
        monkeypatch.setattr(
            runtime, "choose_gpus", lambda *_, **__: (tuple(range(num_gpus)), "planted")
        )
        addresses = tuple(f"host:{port}" for port in range(num_workers))
        cluster = Cluster(addresses, 0) if num_workers > 1 else Cluster()
        runtime.configure(RuntimeConfig(precision="float32", **settings), cluster)
        return os.environ["XLA_FLAGS"]

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv(runtime.PERSISTENT_NORM, "0")  # which is put back afterwards
    for name in ("_start_devices", "load_cuda_libraries"):
        monkeypatch.setattr(runtime, name, lambda *_, **__: None)
    for kept in (runtime.compile_cache, runtime.autotuning):
        monkeypatch.setattr(kept, "use", lambda decides, **_: None)
    return configure


@pytest.mark.parametrize(
    ("num_gpus", "num_workers", "waits"),
    [(1, 1, False), (2, 1, True), (1, 2, True), (2, 2, True)],
)
def test_replicas_wait_for_others_that_compile(on_planted_gpus, num_gpus, num_workers, waits):
    flags = on_planted_gpus(num_gpus, num_workers, xla=True)
    assert ("xla_gpu_executable_terminate_timeout" in flags) is waits
    assert NO_TIMING in flags


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, ADDED),
        ({"compile_cache": False}, NO_TIMING),
        ({"xla": False}, ""),
    ],
)
def test_one_gpu_needs_two_flags(on_planted_gpus, settings, flags):
    assert on_planted_gpus(1, **settings) == flags


@pytest.mark.skipif(not KEEPS_LAUNCHES, reason="XLA of this TensorFlow keeps no launches")
def test_a_user_can_do_without_kept_launches(on_planted_gpus, monkeypatch, caplog):
    without = WITH_LAUNCHES.replace("true", "false")
    monkeypatch.setenv("XLA_FLAGS", without)
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        assert on_planted_gpus(1) == f"{without} {NO_TIMING}"
    assert "XLA_FLAGS sets xla_gpu_experimental_aot_compiled_thunks" in caplog.text


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ("--xla_gpu_enable_cublaslt=true", True),
        ("--a=b --xla_gpu_enable_cublaslt", True),
        ("--xla_gpu_enable_cublaslt=1 --a=b", True),
        ("--xla_gpu_enable_cublaslt=false", False),
        ("--a=b", False),
    ],
)
def test_a_flag_with_which_xla_computes_wrong_is_warned_of(
    on_planted_gpus, monkeypatch, caplog, flags, warned
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        assert on_planted_gpus(1) == f"{flags} {ADDED}"
    assert ("computes c * (x W + b) as c * x W + b" in caplog.text) is warned
    caplog.clear()
    on_planted_gpus(1, xla=False)
    assert "cublaslt" not in caplog.text


def test_kept_programs_depend_on_the_flags(on_planted_gpus, monkeypatch):
    kept, flags = [], ["", "--xla_gpu_enable_triton_gemm=false"]
    monkeypatch.setattr(runtime.compile_cache, "use", kept.append)
    for each in flags:
        monkeypatch.setenv("XLA_FLAGS", each)
        on_planted_gpus(1)
    assert [each.pop("xla_flags") for each in kept] == [f"{each} {ADDED}".strip() for each in flags]
    assert kept[0] == kept[1]


def test_choices_of_kernels_depend_on_the_users_flags_only(on_planted_gpus, monkeypatch):
    kept, left_out = [], []
    monkeypatch.setattr(runtime.autotuning, "use", lambda decides, **_: kept.append(decides))
    monkeypatch.setattr(runtime.autotuning, "leave_out", left_out.append)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    on_planted_gpus(1)
    on_planted_gpus(2)  # which adds flags of patience
    assert [each["xla_flags"] for each in kept] == ["--xla_gpu_enable_triton_gemm=false"] * 2
    assert kept[0] == kept[1]
    for settings in ({"deterministic": True}, {"compile_cache": False}, {"xla": False}):
        on_planted_gpus(1, **settings)
    assert len(kept) == 2
    assert [each.split("=")[0] for each in left_out] == ["deterministic", "compile_cache", "xla"]


def test_fused_batch_norm_keeps_channels_last_unless_the_user_says_otherwise(monkeypatch, caplog):
    name = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
    monkeypatch.setenv(name, "0")  # which is put back afterwards
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        runtime._norm_channels_last()
        assert os.environ[name] == "0"
        assert f"{name}=0, unchanged" in caplog.text
        monkeypatch.delenv(name)
        runtime._norm_channels_last()
    assert os.environ[name] == "1"
    assert "channels last" in caplog.text


@pytest.fixture
def before_tensorflow(monkeypatch):
    """As if TensorFlow had not been asked for its devices, and the user had set no queues."""
    runtime._take_all_queues.cache_clear()
    monkeypatch.setenv(runtime.QUEUES, "1")  # which is put back afterwards
    monkeypatch.delenv(runtime.QUEUES)
    monkeypatch.setattr(context.context(), "_physical_devices", None)
    yield
    runtime._take_all_queues.cache_clear()


def test_cuda_gives_all_its_queues(before_tensorflow):
    assert runtime._take_all_queues().startswith("32 per GPU, set by CUDA_DEVICE_MAX_CONNECTIONS")
    assert os.environ[runtime.QUEUES] == "32"
    assert runtime._take_all_queues().startswith("32 per GPU")  # in a second setup, too


def test_queues_are_as_the_user_says(before_tensorflow, monkeypatch):
    monkeypatch.setenv(runtime.QUEUES, "1")
    assert runtime._take_all_queues() == "CUDA_DEVICE_MAX_CONNECTIONS=1, unchanged"
    assert os.environ[runtime.QUEUES] == "1"


def test_it_is_said_where_queues_come_too_late(before_tensorflow, monkeypatch):
    monkeypatch.setattr(context.context(), "_physical_devices", [])
    assert "before tfaccel.setup()" in runtime._take_all_queues()
    assert runtime.QUEUES not in os.environ


def test_queues_are_asked_for_before_cuda_starts(before_tensorflow, setup, monkeypatch):
    seen, list_devices = [], tf.config.list_physical_devices

    def list_after(kind):
        seen.append(os.environ.get(runtime.QUEUES))
        return list_devices(kind)

    monkeypatch.setattr(tf.config, "list_physical_devices", list_after)
    setup()
    assert seen[0] == "32"


def test_the_cpu_leaves_xlas_flags_alone(setup, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    setup(xla=True)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/x"


def test_devices_started_otherwise_are_an_error():
    # TensorFlow of this process has started, with its CPU devices as they are.
    tf.zeros(1)
    cpu = tf.config.list_physical_devices("CPU")
    with pytest.raises(UserError, match=r"already started with other settings.*restart the kernel"):
        runtime._start_devices(cpu, 1024)


def test_environment_is_described():
    described = runtime.describe_environment()
    assert Version(described["packages"]["tensorflow"]) == Version(tf.__version__)
    assert described["cpu_cores"] >= 1


def test_environment_is_described_without_dali(monkeypatch):
    version = importlib.metadata.version

    def without_dali(name):
        if name.startswith("nvidia-dali"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_dali)
    packages = runtime.describe_environment()["packages"]
    assert packages["nvidia-dali-cuda120"] is None
    assert packages["numpy"] == version("numpy")


FACTORS = """
import tfaccel; tfaccel.setup(gpu_ids=[0], compile_cache=False)
import keras, numpy as np, tensorflow as tf
draw = np.random.default_rng(0)
w, b = (tf.constant(draw.normal(size=each), "bfloat16") for each in ((128, 512), (512,)))
wrong = []
for shape in ((256, 128), (8, 32, 128)):
    x = tf.constant(draw.normal(size=shape), "bfloat16")
    for name in ("linear", "relu", "gelu"):
        for factor in (0.125, 2.0):
            def scaled(x):
                return getattr(keras.activations, name)(tf.tensordot(x, w, 1) + b) * factor
            found = tf.function(scaled, jit_compile=True, autograph=False)(x)
            error = tf.cast(found, "float64") - tf.cast(scaled(x), "float64")
            wrong += [(shape, name, factor)] * bool(np.abs(error).max() > 0.1 * factor * 4)
print(wrong)
"""


@pytest.mark.gpu
def test_a_factor_scales_a_product_and_its_bias():
    """Also where XLA gives products to cuBLAS, not to Triton, which it may do after timing both."""
    for flags in ("", "--xla_gpu_enable_triton_gemm=false"):
        done = new_process(FACTORS, XLA_FLAGS=flags)
        assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.gpu
def test_a_memory_limit_holds():
    program = (
        "import tfaccel; tfaccel.setup(gpu_ids=[0], memory=8192)\n"
        "import tensorflow as tf\n"
        "kept = tf.zeros((4096, 2**20 // 4))\n"  # 4096 MiB
        "try: tf.zeros((6144, 2**20 // 4))\n"
        "except tf.errors.ResourceExhaustedError: print('refused')"
    )
    assert in_new_process(program) == "refused\n"


ONE_REPLICA_FULL = """
import keras, numpy as np, tensorflow as tf, tfaccel
from tfaccel.runtime import xla_flags
xla_flags.XLA_PATIENCE_S["xla_gpu_nccl_termination_timeout_seconds"] = 40
run = tfaccel.setup(gpu_ids=[0, 1], memory=8000, precision="float32", xla=True)
with run.scope():
    model = keras.Sequential([keras.Input((1,))])
    for width in (4096, 1):
        model.add(keras.layers.Dense(width, activation="relu"))
run.compile(model, "sgd", "mse")
with tf.device("/gpu:1"):
    taken = tf.zeros((7400, 2**20 // 4))  # MiB
rows = np.ones((131072, 1), "float32")  # whose step takes 1 to 2 GiB on each
model.fit(rows, rows, batch_size=len(rows), verbose=0)
"""


@pytest.mark.multi_gpu
def test_the_process_ends_where_memory_is_full_on_one_gpu_alone():
    done = new_process(
        ONE_REPLICA_FULL,
        timeout_s=200,
        XLA_FLAGS="",
        TF_CPP_MIN_LOG_LEVEL="1",  # or what the allocator says is left out
    )
    assert done.returncode != 0
    assert "(GPU_1_bfc) ran out of memory" in done.stderr, done.stderr


@pytest.mark.gpu
def test_memory_grows_by_what_is_used():
    program = (
        "import tfaccel; tfaccel.setup(gpu_ids=[0])\n"
        "import pynvml, tensorflow as tf\n"
        f"pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByIndex({FIRST_GPU})\n"
        "used = lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20\n"
        "start = used(); kept = tf.zeros((2048, 2**20 // 4)); print(used() - start)"
    )
    # 2048 MiB, in pieces that TensorFlow doubles; all of an H200 would be 140,000.
    assert 1500 < int(in_new_process(program)) < 6000


@pytest.mark.gpu
def test_the_gpu_is_found_without_any_environment_variable():
    program = "import tfaccel; print(tfaccel.setup(gpu_ids=[0]).runtime.devices[0].name)"
    assert in_new_process(program) == "/gpu:0\n"


@pytest.mark.gpu
def test_setup_finds_the_gpu_and_lets_memory_grow():
    run = tfaccel.setup(gpu_ids=[0])
    assert run.runtime.devices == (runtime.Device("/gpu:0", 0),)
    gpu = tf.config.get_visible_devices("GPU")
    assert len(gpu) == 1
    assert tf.config.experimental.get_memory_growth(gpu[0])


@pytest.mark.parametrize(
    ("asked", "on_gpu", "xla", "said"),
    [
        (None, True, True, "on, the default with GPUs"),
        (None, False, False, "off, because it makes most steps slower on a CPU"),
        (True, True, True, "on, set by xla=True"),
        (True, False, True, "on, set by xla=True, although it makes most steps slower on a CPU"),
        (False, True, False, "off, set by xla=False"),
        (False, False, False, "off, set by xla=False"),
    ],
)
def test_xla_is_off_on_a_cpu_unless_it_is_asked_for(asked, on_gpu, xla, said):
    chosen, why = runtime.choose_xla(asked, on_gpu=on_gpu)
    assert chosen is xla
    assert why.startswith(said)


def test_a_cpu_says_why_xla_is_off_and_nothing_of_tf32(setup, caplog):
    assert setup().runtime.xla is False
    assert "xla: off, because it makes" in caplog.text
    assert "tf32" not in caplog.text
