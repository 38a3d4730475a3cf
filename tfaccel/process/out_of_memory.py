"""Recognizes errors that mean that memory is full, by their text.

Such errors have many types, and one type has many meanings. This needs no TensorFlow.

    if is_out_of_memory(str(error)): ...
    asked_bytes(str(error))     # 68719476736, or None if the error does not say

The type is not enough: TensorFlow's ResourceExhaustedError may also mean a full disk or too many
open files. DALI's errors reach Python as InternalError or RuntimeError, or inside another message.
"""

import math
import re

_SAYS = re.compile(
    "|".join(
        (
            # TensorFlow 2.21: kernels, eager operations, XLA, and the CUDA libraries.
            "OOM when allocating",
            "failed to allocate memory",
            "Out of memory while trying to allocate",
            r"Out of memory allocating \d+ bytes",
            r"Failed to allocate request for",
            "CUDA_ERROR_OUT_OF_MEMORY",
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
            "CUDNN failed to allocate",
            # NCCL, when it allocates its buffers.
            "Cuda failure.{0,9}out of memory",
            r"Failed to allocate .{0,80} from NCCL",
            # DALI 2.4: its pools, the CUDA calls, and its decoder (allocator failure).
            r"Can't allocate \d+ bytes on (device|host)",
            "CUDA allocation failed",
            "cudaErrorMemoryAllocation",
            r"nvImageCodec failure: '#(5|15)'",
            # tfaccel's own message (training/memory_errors.py).
            r"out of memory( with global_batch_size=\d+)?; use ",
        )
    ),
    re.IGNORECASE,
)
# For example batch norm without XLA, if cuDNN has no memory beside the tensors (TensorFlow 2.21);
# or the first collective of GPUs, if another job has filled one of them (NCCL logs the cause only
# with NCCL_DEBUG).
_LOGS_ITS_CAUSE = re.compile("cuDNN launch failure|NCCL: unhandled cuda error")
_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "bytes": 0}
_XLA = re.compile(
    r"Out of memory (?:while trying to allocate|allocating) ([\d.]+) ?([KMGT]iB|B|by)"
)
_DALI = re.compile(r"Can't allocate (\d+) bytes")
_KERNEL = re.compile(r"OOM when allocating tensor with shape ?\[([\d,]*)\] and type (\w+)")
_TYPE_BYTES = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "uint8": 1, "int8": 1, "bool": 1}


def is_out_of_memory(text: str, *, log: str = "") -> bool:
    """Returns whether the text of an error, or a process's last output, says that memory was full.

    Args:
      text: the text of the error.
      log: the earlier output of its process, if it is known. It is searched only for errors that
        leave their cause to the log.
    """
    return bool(_SAYS.search(text) or (leaves_its_cause_to_the_log(text) and _SAYS.search(log)))


def leaves_its_cause_to_the_log(text: str) -> bool:
    """Returns whether the text of an error may mean a full memory or something else."""
    return bool(_LOGS_ITS_CAUSE.search(text))


def is_of_xla(text: str) -> bool:
    """Returns whether the text says that XLA could not allocate memory for a program."""
    return bool(_XLA.search(text))


def asked_bytes(text: str) -> int | None:
    """Returns the bytes that could not be allocated; None if the text does not say.

    XLA allocates at once all that a step needs, without variables and batch. A kernel allocates one
    tensor.
    """
    if found := _XLA.search(text):
        unit = "bytes" if found[2] == "by" else found[2]
        return int(float(found[1]) * 2 ** _UNITS[unit])
    if found := _DALI.search(text):
        return int(found[1])
    if found := _KERNEL.search(text):
        sizes = [int(each) for each in found[1].split(",") if each]
        return math.prod(sizes) * _TYPE_BYTES.get(found[2], 4)
    return None
