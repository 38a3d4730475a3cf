"""Adds flags to the variable XLA_FLAGS, before XLA reads it with this process's first program.

A flag that the user has set keeps its value. `tfaccel.setup` adds those that suit every model, and
`run.compile` the one that depends on the model:

    choose_products(has_batch_norm=False)     # --xla_gpu_enable_triton_gemm=FALSE
"""

import logging
import os
import re

log = logging.getLogger("tfaccel")

CUBLAS_LT = "xla_gpu_enable_cublaslt"
FUSION_AUTOTUNER = "xla_gpu_experimental_enable_fusion_autotuner"
KEPT_LAUNCHES = "xla_gpu_experimental_aot_compiled_thunks"
WITHOUT_KEPT_LAUNCHES = (2, 22)  # the first TensorFlow whose XLA does not know this flag
TRITON = "xla_gpu_enable_triton_gemm"
# Tells what was added here, or in the parent process, from what a user set, who writes `false`.
WITHOUT_TRITON = f"--{TRITON}=FALSE"
# Seconds for which XLA waits for replicas that are late: before it warns (default 10 and 20), and
# before it ends the process (default 30 and 40). At the start of a step, where a replica without
# memory never arrives, it would wait for ever by default.
XLA_PATIENCE_S = {
    "xla_gpu_executable_warn_stuck_timeout": 120,
    "xla_gpu_first_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_gpu_executable_terminate_timeout": 600,
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 600,
    "xla_gpu_nccl_termination_timeout_seconds": 600,
}

# What was chosen for this process's first model. XLA reads its flags once.
_has_triton: list[bool] = []


def warn_of_cublas_lt() -> None:
    """Warns of a flag with which XLA of TensorFlow 2.21 computes wrong results.

    XLA moves a constant factor of a matrix product into cuBLASLt's product, but not into the bias
    that cuBLASLt adds (openxla/xla issue 46110). A layer of 3 axes with a bias and a dropout of 0.5
    after it became 2 x W + b, as TensorFlow's own XLA compiles it for an H100 (2026-11-28).
    """
    if re.search(rf"--{CUBLAS_LT}(=true|=1|\s|$)", os.environ.get("XLA_FLAGS", "")):
        log.warning(
            "XLA_FLAGS has --%s, with which XLA of TensorFlow 2.21 computes c * (x W + b) as "
            "c * x W + b, for example in a layer with a bias before a dropout; remove the flag",
            CUBLAS_LT,
        )


def fuse_by_rule() -> None:
    """Makes XLA choose its fusions by rule, not by timing, before it reads its flags.

    On one GPU, the timing made the start of ResNet-50 12 to 26 s longer, and no step faster
    (shown on an H100, TensorFlow 2.21). On several, it is harmful. XLA compiles a step for each
    GPU, and timings differ, so that one replica may sum in another order than the next. With
    global_clipnorm two H200s drifted apart within ten steps.
    """
    if _add(FUSION_AUTOTUNER, "false"):
        log.info(
            "xla: fusions are chosen without timing, so that the start is shorter, and all "
            "replicas round alike"
        )
    else:
        log.info("xla: XLA_FLAGS sets %s, so replicas may round differently", FUSION_AUTOTUNER)


def wait_for_replicas() -> None:
    """Makes XLA wait for replicas that still compile their step, before it reads its flags.

    If the programs contain a sum over replicas, a replica whose step is ready waits in the sum for
    the others. ResNet-50 takes 70 to 150 s to compile, and XLA ends the process after 30 s. But
    the wait must end: a replica that failed, for example because its GPU has no memory left, never
    arrives, and its error reaches Python only when all replicas have ended.
    """
    decided = [name for name, each in XLA_PATIENCE_S.items() if not _add(name, each)]
    if decided:
        log.info("xla: XLA_FLAGS sets %s", ", ".join(decided))
        return
    seconds = max(XLA_PATIENCE_S.values())
    log.info(
        "xla: a replica waits %d s for other replicas, which may still compile their step; then "
        "XLA ends the process",
        seconds,
    )


def keep_launches(tensorflow: str) -> None:
    """Makes XLA keep the list of kernel launches with a program, before it reads its flags.

    XLA otherwise makes this list anew when it loads a program, for which it repeats most of its
    work before LLVM. A step of ResNet-50 was loaded in 5.7 s without the list, and in 1.1 s with it
    (an H200 host, TensorFlow 2.21).

    Args:
      tensorflow: its version. XLA of 2.22 has no such flag, and ends a process that sets it.
    """
    if tuple(map(int, tensorflow.split(".")[:2])) >= WITHOUT_KEPT_LAUNCHES:
        log.info("compile cache: TensorFlow %s keeps no list of kernel launches", tensorflow)
    elif _add(KEPT_LAUNCHES, "true"):
        log.info("compile cache: keeps the list of kernel launches, so that programs load sooner")
    else:
        log.info("compile cache: XLA_FLAGS sets %s, so programs are loaded slowly", KEPT_LAUNCHES)


def choose_products(*, has_batch_norm: bool) -> None:
    """Decides who computes a model's matrix products, before XLA compiles its first program.

    XLA can write kernels for them with Triton, which also do the operations before and after. It
    compiles and times dozens for each product. That pays for the 1x1 convolutions of networks with
    batch norm: without Triton, MobileNetV3-Large was 2.6% slower and ResNet-50 1.8%. Without batch
    norm, cuBLAS was the faster one: BERT-base by 1.5% with 128 tokens and by 2.0% with 512, a
    GPT-2-small by 1.1%, an LSTM by 2.7%; ViT-B/16 and ConvNeXt-Tiny were within 0.7%. And training
    began after 46 s in place of 99, 48 in place of 90, and 37 in place of 71 (BERT-base, with 512
    tokens, GPT-2; mixed_bfloat16, TensorFlow 2.21, H200, 2026-11-30).

    Args:
      has_batch_norm: whether the model has a layer of batch norm.
    """
    flags = without_ours(os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = flags
    if TRITON in flags:
        return log.info("xla: XLA_FLAGS sets %s", TRITON)
    if _has_triton:
        if _has_triton != [has_batch_norm]:
            log.info("xla: matrix products are computed as in this process's first model")
    else:
        _has_triton.append(has_batch_norm)
        log.info(
            "xla: matrix products are computed by %s",
            "cuBLAS or by kernels that XLA writes with Triton, whichever it times as faster, "
            "because the model has batch norm"
            if has_batch_norm
            else "cuBLAS, because the model has no batch norm, without which XLA's own kernels "
            "gain nothing",
        )
    if _has_triton == [False]:
        os.environ["XLA_FLAGS"] = f"{flags} {WITHOUT_TRITON}".strip()


def without_ours(flags: str) -> str:
    """Returns XLA's flags without the one that `choose_products` added, here or in the parent."""
    return " ".join(each for each in flags.split() if each != WITHOUT_TRITON)


def users_own(flags: str) -> str:
    """Returns XLA's flags without those that `tfaccel.setup` added, which decide no kernel."""
    added = {f"--{FUSION_AUTOTUNER}=false", f"--{KEPT_LAUNCHES}=true"}
    added |= {f"--{name}={seconds}" for name, seconds in XLA_PATIENCE_S.items()}
    return " ".join(each for each in flags.split() if each not in added)


def _add(name: str, value) -> bool:
    """Adds a flag to XLA_FLAGS unless the user has set it; returns whether it has this value."""
    flags, wanted = os.environ.get("XLA_FLAGS", ""), f"--{name}={value}"
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {wanted}".strip()
    return wanted in os.environ["XLA_FLAGS"]
