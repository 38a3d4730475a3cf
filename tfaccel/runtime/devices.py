"""Sets up the process and its devices once, before TensorFlow starts them.

`configure` takes a `RuntimeConfig` and returns a `Runtime`. It loads the CUDA libraries, chooses
GPUs, and sets memory, TF32, the Keras dtype policy and the seed.

    runtime = configure(RuntimeConfig(gpu_ids=[0], precision="mixed_float16"))
    runtime.devices     # (Device(name="/gpu:0", cuda_ordinal=0),)

It may be called again, for example when a notebook's cell runs twice. The last call counts, but the
GPUs and their memory settings cannot change, because TensorFlow has fixed them.
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
from tfaccel.runtime import autotuning, compile_cache, xla_device, xla_flags
from tfaccel.runtime.cluster import Cluster
from tfaccel.runtime.cluster.share import num_cores, share_gpus
from tfaccel.runtime.private_names import devices_are_known, stop_determinism

log = logging.getLogger("tfaccel")

ALONE = Cluster()
PERSISTENT_NORM = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
QUEUES, MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32


@dataclasses.dataclass(frozen=True)
class Device:
    """One replica's device.

    Attributes:
      name: TensorFlow's name, such as "/gpu:0", counted among the chosen GPUs.
      cuda_ordinal: CUDA's number, counted among all GPUs that CUDA sees; None for the CPU.
    """

    name: str
    cuda_ordinal: int | None


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The result of `configure`.

    Attributes:
      devices: the devices of this process's replicas.
      precision: the current Keras dtype policy.
      xla: whether steps are compiled with XLA.
      seed: the seed of all random numbers.
      loader_threads: CPU threads for each replica's loader.
      flash_attention: whether cuDNN's flash kernels compute attentions where they can.
      begin_without_xla: whether training begins while XLA still compiles the step.
    """

    devices: tuple[Device, ...]
    precision: str
    xla: bool
    seed: int
    loader_threads: int
    flash_attention: bool = True
    begin_without_xla: bool = False


def configure(config: RuntimeConfig, cluster: Cluster = ALONE) -> Runtime:
    """Sets up the process according to `config`, and returns the result.

    Args:
      config: the settings.
      cluster: the job's processes; those on this host share its GPUs and cores.

    Raises:
      UserError: a chosen GPU does not exist, GPUs cannot be shared equally, or TensorFlow's
        devices already started with other settings.
    """
    run_log.show(speaks=cluster.is_chief or not progress.is_launched())
    load_cuda_libraries()
    compile_cache.prepare(wanted=config.xla is not False and config.compile_cache)
    queues = _take_all_queues()
    # On a machine without GPUs, TensorFlow's errors are hidden: `reason` below says enough.
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
            "precision float16 (O3) keeps variables and updates in float16 too; it shows the "
            "largest possible speed, but does not train well; use mixed_float16 to train"
        )
    tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
    if gpu_ids:
        log.info("tf32: %s", _on(config.tf32))
    xla, why = choose_xla(config.xla, on_gpu=bool(gpu_ids))
    log.info("seed: %d", config.seed)
    summary("device: %s; precision: %s; xla: %s", reason, config.precision, why)
    if xla and gpu_ids:
        xla_flags.warn_of_cublas_lt()
        xla_flags.fuse_by_rule()
        if len(gpu_ids) * cluster.num_workers > 1:
            xla_flags.wait_for_replicas()
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
        log.info("deterministic: on; kernels give the same bits in every run")
    elif stop_determinism():  # set by an earlier call
        log.info("deterministic: turned off again")

    if gpu_ids and not xla and not config.deterministic:
        _norm_channels_last()
    if config.begin_without_xla and config.deterministic:
        summary("step: training waits for XLA, because deterministic=True is set")
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
        flash_attention=config.flash_attention,
        begin_without_xla=config.begin_without_xla and not config.deterministic,
    )


def choose_xla(asked: bool | None, *, on_gpu: bool) -> tuple[bool, str]:
    """Returns whether steps are compiled with XLA, and the reason.

    On 2 CPU cores the digits' network trains 9,181 images/s without XLA and 3,982 with it
    (2026-11-24), and its start takes longer.

    Args:
      asked: the user's choice; None for the default.
      on_gpu: whether the replicas are GPUs.
    """
    if asked is None:
        if on_gpu:
            return True, "on, the default with GPUs"
        return False, "off, because it makes most steps slower on a CPU (xla=True turns it on)"
    if asked and not on_gpu:
        return True, "on, set by xla=True, although it makes most steps slower on a CPU"
    return asked, f"{_on(asked)}, set by xla={asked}"


@functools.cache  # so that a second `setup` returns the same
def _take_all_queues() -> str:
    """Gives this process all of CUDA's queues to a GPU, before CUDA starts; returns their number.

    The default is 8, and streams that share a queue wait for each other. Some of DALI's kernels
    then started only when the step had ended, because a whole step is queued at once. ResNet-50
    from JPEG files: 7,894 images/s with 32 queues, 6,324 with 8 (H200, 2026-11-23).
    """
    if QUEUES in os.environ:
        return f"{QUEUES}={os.environ[QUEUES]}, unchanged"
    if devices_are_known():
        return "CUDA's default, because TensorFlow was asked for its devices before tfaccel.setup()"
    os.environ[QUEUES] = str(MOST_QUEUES)
    return f"{MOST_QUEUES} per GPU, set by {QUEUES}, so that loaders do not wait for a step"


def _norm_channels_last() -> None:
    """Lets TensorFlow's fused batch norm run in float16 with channels last, before its first use.

    By default TensorFlow gives it to cuDNN with channels first. In ResNet-50 without XLA, 265
    transpositions took 30 of a step's 123 ms, and the kernels took three times as long (H200,
    2026-11-22). TensorFlow avoids cuDNN's channels-last kernels because they sum in scaled whole
    numbers, which overflow for huge inputs. PyTorch uses them.
    """
    if (value := os.environ.setdefault(PERSISTENT_NORM, "1")) == "1":
        log.info("batch norm: float16 with channels last, set by %s=1", PERSISTENT_NORM)
    else:
        log.info("batch norm: %s=%s, unchanged", PERSISTENT_NORM, value)


def _keep_programs(config: RuntimeConfig, gpu_ids: Sequence[int], *, xla: bool) -> None:
    """Sets up what is kept of XLA's work, with everything that decides how XLA compiles."""
    if not gpu_ids:
        return  # only programs for GPUs are kept
    if not xla or not config.compile_cache:
        reason = f"{'compile_cache' if xla else 'xla'}=False is set"
        autotuning.leave_out(reason)
        compile_cache.leave_out(reason)
        return
    xla_flags.keep_launches(tf.__version__)
    names = ("tensorflow", "nvidia-cudnn-cu12", "nvidia-cublas-cu12", "nvidia-cuda-nvcc-cu12")
    flags = autotuning.without_ours(xla_flags.without_ours(os.environ.get("XLA_FLAGS", "")))
    decides = {
        "packages": {name: _version(name) for name in names},
        "gpus": sorted({json.dumps(each) for each in describe_gpus()}),
        "tf32": config.tf32,
    }
    compile_cache.use(decides | {"deterministic": config.deterministic, "xla_flags": flags})
    if config.deterministic:  # XLA then times no kernels
        autotuning.leave_out("deterministic=True is set")
    else:
        gpu = xla_device.described(gpu_ids[0])
        autotuning.use(decides | {"xla_flags": xla_flags.users_own(flags)}, gpu=gpu)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # CUDA's libraries may come from elsewhere, and DALI may be missing


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def load_cuda_libraries() -> None:
    """Loads the CUDA libraries of the `nvidia-*-cu12` wheels, so that TensorFlow finds them.

    TensorFlow 2.21's RUNPATH lacks `nvidia/cusolver/lib`, so without this (or LD_LIBRARY_PATH) it
    sees no GPU. The dynamic linker does not search again for a library that is already loaded.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else ()
    waiting = sorted(each for root in roots for each in pathlib.Path(root).glob("*/lib*/*.so*"))
    # They depend on one another: retry the failed ones as long as others succeed.
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
    """Returns the indices of the GPUs to use (none for the CPU), and the reason.

    Args:
      gpu_ids: the user's choice; None for the default.
      num_visible: number of GPUs that TensorFlow sees.
      num_installed: number of GPUs that the driver reports, whatever CUDA_VISIBLE_DEVICES is.
      environment: the environment of this process, for CUDA_VISIBLE_DEVICES and schedulers.
      cluster: the job's processes; without gpu_ids, those on one host share its GPUs.

    Raises:
      UserError: an index is out of range, TensorFlow cannot use the driver's GPUs, or the GPUs
        cannot be shared equally.
    """
    cuda_visible_devices = environment.get("CUDA_VISIBLE_DEVICES")
    hidden = cuda_visible_devices is not None and cuda_visible_devices.strip() in ("", "-1")
    if gpu_ids == ():
        return (), "CPU, set by gpu_ids"
    if num_visible == 0 and num_installed > 0 and not hidden:
        raise UserError(
            f"the driver reports {num_installed} GPU(s), but TensorFlow sees none; install the "
            "CUDA libraries (`uv run --extra gpu ...`), call tfaccel.setup() before any other use "
            "of TensorFlow (absl's app.run also uses it), check CUDA_VISIBLE_DEVICES, or choose "
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
    return tuple(gpu_ids), f"GPU {', '.join(map(str, gpu_ids))} of {num_visible}, set by gpu_ids"


def describe_gpus() -> list[dict]:
    """Returns name, memory and driver of each GPU; an empty list without a driver."""
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
    """Returns versions and hardware as values for JSON, to be stored with a run's results."""
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
    """Makes only `gpus` visible, with the memory settings; a second identical call is allowed."""
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
            f"TensorFlow's devices have already started with other settings ({error}); call "
            "tfaccel.setup() once, before any other use of TensorFlow (in a notebook, restart the "
            "kernel)"
        ) from error
    if gpus:
        limit = "grows as needed" if memory == "growth" else f"limited to {memory} MiB per GPU"
        log.info("memory: %s", limit)
