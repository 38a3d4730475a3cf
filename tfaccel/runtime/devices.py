"""The process and its machine, once, before TensorFlow starts its devices.

Takes a `RuntimeConfig`; gives a `Runtime`: which devices, and why. It loads the CUDA libraries,
chooses GPUs, sets memory, TF32, the Keras dtype policy and the seed.

    runtime = configure(RuntimeConfig(gpu_ids=[0], precision="mixed_float16"))
    runtime.devices     # (Device(name="/gpu:0", cuda_ordinal=0),)

It may be called again, as where a notebook's cell is run twice: the last call holds, and what
TensorFlow has fixed by then, GPUs and their memory, must be as they are.
"""

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence

import keras
import psutil
import pynvml
import tensorflow as tf

from tfaccel.common import run_log
from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.common.version import __version__
from tfaccel.config import RuntimeConfig
from tfaccel.process import progress, start_noise
from tfaccel.runtime import compile_cache
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.cluster.share import num_cores, share_gpus
from tfaccel.runtime.private_names import devices_are_known, stop_determinism

log = logging.getLogger("tfaccel")

ALONE = Cluster()
FUSION_AUTOTUNER = "xla_gpu_experimental_enable_fusion_autotuner"
# XLA's patience with replicas that are not yet where the others wait for them, in seconds: before
# it says so (10 and 20 by default), and before it ends the process (30 and 40). Where each step
# begins, which a replica whose memory is full never does, its patience is without end by default.
XLA_PATIENCE_S = {
    "xla_gpu_executable_warn_stuck_timeout": 120,
    "xla_gpu_first_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_gpu_executable_terminate_timeout": 600,
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 600,
    "xla_gpu_nccl_termination_timeout_seconds": 600,
}
PERSISTENT_NORM = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
QUEUES, MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32


@dataclasses.dataclass(frozen=True)
class Device:
    """One replica's device.

    Attributes:
      name: what TensorFlow calls it, e.g. "/gpu:0", counted among the GPUs that were chosen.
      cuda_ordinal: what CUDA calls it, counted among all that CUDA sees; None for the CPU.
    """

    name: str
    cuda_ordinal: int | None


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What `configure` did.

    Attributes:
      devices: of this process's replicas.
      precision: Keras dtype policy now in force.
      xla: whether steps are compiled with XLA.
      seed: the one seed.
      loader_threads: CPU threads for each replica's loader.
    """

    devices: tuple[Device, ...]
    precision: str
    xla: bool
    seed: int
    loader_threads: int


def configure(config: RuntimeConfig, cluster: Cluster = ALONE) -> Runtime:
    """Changes the process as `config` says and returns what it became.

    Args:
      config: what is asked for.
      cluster: the job's processes; those on this host share its GPUs and cores.

    Raises:
      UserError: a GPU that was asked for is not there, GPUs cannot be shared equally, or
        TensorFlow's devices were already started otherwise.
    """
    run_log.show(speaks=cluster.is_chief or not progress.is_launched())
    load_cuda_libraries()
    compile_cache.prepare(wanted=config.xla is not False and config.compile_cache)
    queues = _take_all_queues()
    # Of a machine without GPUs, TensorFlow's error is no news: the reason below says it.
    installed = describe_gpus()
    with start_noise.left_out(has_gpus=bool(installed)):
        visible = tf.config.list_physical_devices("GPU")
    gpu_ids, reason = choose_gpus(
        config.gpu_ids,
        num_visible=len(visible),
        num_installed=len(installed),
        environment=os.environ,
        cluster=cluster,
    )
    if gpu_ids:
        log.info("queues: %s", queues)
    _start_devices([visible[index] for index in gpu_ids], config.memory)

    keras.config.set_dtype_policy(config.precision)
    if config.precision == "float16":
        log.warning(
            "precision float16 (O3) keeps variables and updates in float16 too: a ceiling for "
            "speed, not for training; use mixed_float16 to train"
        )
    tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
    if gpu_ids:
        log.info("tf32: %s", _on(config.tf32))
    xla, why = choose_xla(config.xla, on_gpu=bool(gpu_ids))
    log.info("seed: %d", config.seed)
    summary("device: %s; precision: %s; xla: %s", reason, config.precision, why)
    if xla and gpu_ids and len(gpu_ids) * cluster.num_workers > 1:
        _compile_alike()
        if cluster.num_workers == 1:  # or no sum is in XLA's programs: see local_replicas
            _wait_for_compilation()
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
        log.info("deterministic: kernels that give the same bits in every run")
    elif stop_determinism():  # which an earlier call asked for
        log.info("deterministic: off again")

    if gpu_ids and not xla and not config.deterministic:
        _norm_channels_last()
    _keep_programs(config, gpu_ids, xla=xla)

    cores, num_replicas = num_cores(os.environ, cluster), max(1, len(gpu_ids))
    loader_threads = max(1, cores // num_replicas)
    log.info(
        "loader: %d threads for each of %d replicas, %d of the host's cores",
        loader_threads,
        num_replicas,
        cores,
    )
    return Runtime(
        devices=tuple(Device(f"/gpu:{index}", gpu_id) for index, gpu_id in enumerate(gpu_ids))
        or (Device("/cpu:0", None),),
        precision=config.precision,
        xla=xla,
        seed=config.seed,
        loader_threads=loader_threads,
    )


def choose_xla(asked: bool | None, *, on_gpu: bool) -> tuple[bool, str]:
    """Returns whether steps are compiled with XLA, and the reason, in words.

    On 2 CPU cores the digits' network trains 9,181 images/s without XLA and 3,982 with it
    (2026-11-24), and its start takes longer.

    Args:
      asked: what the user asked for; None for the default.
      on_gpu: whether the replicas are GPUs.
    """
    if asked is None:
        if on_gpu:
            return True, "on, the default with GPUs"
        return False, "off, because on a CPU it makes most steps slower (xla=True turns it on)"
    if asked and not on_gpu:
        return True, "on, as xla=True asks, although on a CPU it makes most steps slower"
    return asked, f"{_on(asked)}, as xla={asked} asks"


@functools.cache  # so that a second `setup` says the same
def _take_all_queues() -> str:
    """Lets CUDA give this process all its queues to a GPU, before it starts; returns what it has.

    By default there are 8, and streams that share one wait for each other: beside a step, which is
    queued whole, some of DALI's kernels began only when it had ended. ResNet-50 from JPEG files:
    7,894 images/s with 32 queues, 6,324 with 8 (H200, 2026-11-23).
    """
    if QUEUES in os.environ:
        return f"{QUEUES}={os.environ[QUEUES]}, as it was"
    if devices_are_known():
        return "CUDA's default, because TensorFlow was asked for its devices before tfaccel.setup()"
    os.environ[QUEUES] = str(MOST_QUEUES)
    return f"{MOST_QUEUES} to a GPU, by {QUEUES}, so that loaders need not wait behind a step"


def _compile_alike() -> None:
    """Lets XLA choose its fusions by rule, not by timing them, before it reads its flags.

    It compiles a step for each GPU. Timings differ, so that one may sum in another order than its
    neighbour: with global_clipnorm two H200s drifted apart within ten steps (TensorFlow 2.21).
    """
    if _add_xla_flag(FUSION_AUTOTUNER, "false"):
        log.info("xla: fusions are chosen without timing them, so that all replicas round alike")
    else:
        log.info("xla: XLA_FLAGS decides on %s; replicas may round differently", FUSION_AUTOTUNER)


def _wait_for_compilation() -> None:
    """Lets XLA wait for replicas whose step is still compiled, before it reads its flags.

    Where a sum over replicas is in their programs, one that is compiled, or came from the cache,
    waits in it for the others. ResNet-50 takes 70 to 150 s to compile, and XLA ends the process
    after 30 s. But not for ever: one that has failed, as where memory is full on its GPU alone,
    never comes, and its error reaches Python when all have ended.
    """
    decided = [name for name, each in XLA_PATIENCE_S.items() if not _add_xla_flag(name, each)]
    if decided:
        log.info("xla: XLA_FLAGS decides on %s", ", ".join(decided))
        return
    seconds = max(XLA_PATIENCE_S.values())
    log.info(
        "xla: a replica waits %d s for others, whose step may still be compiled; then it takes "
        "them for failed and ends the process",
        seconds,
    )


def _add_xla_flag(name: str, value) -> bool:
    """Adds to XLA_FLAGS what the user has not set there; returns whether it is there as wanted."""
    flags, wanted = os.environ.get("XLA_FLAGS", ""), f"--{name}={value}"
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {wanted}".strip()
    return wanted in os.environ["XLA_FLAGS"]


def _norm_channels_last() -> None:
    """Lets TensorFlow's fused batch norm take float16 with channels last, before it is asked for.

    By default it is given to cuDNN with channels first: 265 transpositions were 30 ms of a step of
    123 of ResNet-50 without XLA, and its kernels took three times as long (H200, 2026-11-22).
    TensorFlow leaves cuDNN's other ones out because they sum in scaled whole numbers, which huge
    inputs overflow; PyTorch uses them.
    """
    if (value := os.environ.setdefault(PERSISTENT_NORM, "1")) == "1":
        log.info("batch norm: float16 with channels last, by %s=1", PERSISTENT_NORM)
    else:
        log.info("batch norm: %s=%s, as it was", PERSISTENT_NORM, value)


def _keep_programs(config: RuntimeConfig, gpu_ids: Sequence[int], *, xla: bool) -> None:
    """Sets the cache of what XLA compiles, by all that decides how it does."""
    if not gpu_ids:
        return None  # only programs for GPUs are kept
    if not xla or not config.compile_cache:
        off = "compile_cache" if xla else "xla"
        return compile_cache.leave_out(f"{off}=False asks for that")
    names = ("tensorflow", "nvidia-cudnn-cu12", "nvidia-cublas-cu12", "nvidia-cuda-nvcc-cu12")
    return compile_cache.use(
        {
            "packages": {name: _version(name) for name in names},
            "gpus": sorted({json.dumps(each) for each in describe_gpus()}),
            "tf32": config.tf32,
            "deterministic": config.deterministic,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # CUDA's libraries are not Python packages everywhere, and DALI may be left out


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def load_cuda_libraries() -> None:
    """Loads the CUDA libraries of the `nvidia-*-cu12` wheels, so that TensorFlow finds them.

    TensorFlow 2.21's RUNPATH lacks `nvidia/cusolver/lib`, so that without this (or LD_LIBRARY_PATH)
    it sees no GPU. A library that is in memory under its soname is not searched for again.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else ()
    waiting = sorted(each for root in roots for each in pathlib.Path(root).glob("*/lib*/*.so*"))
    # They depend on one another: try again those that failed for as long as others succeed.
    while waiting:
        failed = [library for library in waiting if not _load(library)]
        if len(failed) == len(waiting):
            log.debug("CUDA libraries that did not load: %s", [each.name for each in failed])
            return
        waiting = failed


def _load(library: pathlib.Path) -> bool:
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def choose_gpus(
    gpu_ids: Sequence[int] | None,
    *,
    num_visible: int,
    num_installed: int,
    environment: Mapping[str, str],
    cluster: Cluster,
) -> tuple[tuple[int, ...], str]:
    """Returns the indices of the GPUs to use (none for the CPU) and the reason, in words.

    Args:
      gpu_ids: what the user asked for; None for the default.
      num_visible: GPUs that TensorFlow sees.
      num_installed: GPUs that the driver reports, whatever CUDA_VISIBLE_DEVICES says.
      environment: of this process, for CUDA_VISIBLE_DEVICES and what a scheduler says.
      cluster: the job's processes; without gpu_ids, those on one host share its GPUs.

    Raises:
      UserError: an index is out of range, the driver has GPUs that TensorFlow cannot use, or they
        cannot be shared equally.
    """
    cuda_visible_devices = environment.get("CUDA_VISIBLE_DEVICES")
    hidden = cuda_visible_devices is not None and cuda_visible_devices.strip() in ("", "-1")
    if gpu_ids == ():
        return (), "CPU, as gpu_ids asks"
    if num_visible == 0 and num_installed > 0 and not hidden:
        raise UserError(
            f"the driver reports {num_installed} GPU(s) but TensorFlow sees none; install the CUDA "
            "libraries (`uv run --extra gpu ...`), call tfaccel.setup() before any other use of "
            "TensorFlow (which absl's app.run makes too), check CUDA_VISIBLE_DEVICES, or ask for "
            "the CPU with gpu_ids=()"
        )
    if gpu_ids is None:
        if num_visible == 0:
            why = "CUDA_VISIBLE_DEVICES hides them" if hidden else "the machine has none"
            return (), f"CPU, because there is no GPU to use ({why})"
        shared, reason = share_gpus(environment, cluster, num_visible)
        return tuple(shared), reason
    missing = [index for index in gpu_ids if index >= num_visible]
    if missing:
        seen = f"only GPUs 0 to {num_visible - 1}" if num_visible > 1 else "only GPU 0"
        where = f" (CUDA_VISIBLE_DEVICES={cuda_visible_devices})" if cuda_visible_devices else ""
        raise UserError(
            f"gpu_ids={tuple(gpu_ids)} asks for GPU {missing[0]}, but TensorFlow sees "
            f"{seen if num_visible else 'no GPU'}{where}; give other gpu_ids, or () for the CPU"
        )
    return tuple(gpu_ids), f"GPU {', '.join(map(str, gpu_ids))} of {num_visible}, as gpu_ids asks"


def describe_gpus() -> list[dict]:
    """Returns name, memory and driver of each GPU the driver reports; nothing without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_mib": pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20,
                "driver": pynvml.nvmlSystemGetDriverVersion(),
            }
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def describe_environment() -> dict:
    """Returns versions and hardware as JSON-ready values, for a run to keep beside its results."""
    packages = ("tensorflow", "keras", "nvidia-dali-cuda120", "numpy")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "tfaccel": __version__,
        "packages": {name: _version(name) for name in packages},
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_mib": psutil.virtual_memory().total >> 20,
        "gpus": describe_gpus(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _start_devices(gpus: list, memory: str | int) -> None:
    """Makes exactly `gpus` visible, with their memory as asked; a second identical call is fine."""
    try:
        if tf.config.get_visible_devices("GPU") != gpus:
            tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            if memory == "growth":
                tf.config.experimental.set_memory_growth(gpu, True)
            else:
                limit = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
                tf.config.set_logical_device_configuration(gpu, [limit])
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"TensorFlow's devices were already started with other settings ({error}); call "
            "tfaccel.setup() once, before any other use of TensorFlow (in a notebook: restart the "
            "kernel)"
        ) from error
    if gpus:
        limit = "grows as needed" if memory == "growth" else f"limited to {memory} MiB per GPU"
        log.info("memory: %s", limit)
