"""Which errors mean that memory is full. They have many types and one type has many meanings.

Takes an error's text; gives whether memory was full, and how much was asked for in vain. Needs no
TensorFlow.

    if is_out_of_memory(str(error)): ...
    asked_bytes(str(error))     # 68719476736, or None where the error does not say

TensorFlow's ResourceExhaustedError alone does not tell: a full disk and too many open files are one
too. DALI's errors reach Python as InternalError or RuntimeError, or as a sentence with their text.
"""

import math
import re

_SAYS = re.compile(
    "|".join(
        (
            # TensorFlow 2.21: its kernels, eager operations, XLA, and the CUDA libraries.
            "OOM when allocating",
            "failed to allocate memory",
            "Out of memory while trying to allocate",
            r"Out of memory allocating \d+ bytes",
            r"Failed to allocate request for",
            "CUDA_ERROR_OUT_OF_MEMORY",
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
            "CUDNN failed to allocate",
            # NCCL, when it sets up its buffers.
            "Cuda failure.{0,9}out of memory",
            r"Failed to allocate .{0,80} from NCCL",
            # DALI 2.4: its pools, the CUDA calls, and its decoder (allocator failure).
            r"Can't allocate \d+ bytes on (device|host)",
            "CUDA allocation failed",
            "cudaErrorMemoryAllocation",
            r"nvImageCodec failure: '#(5|15)'",
            # tfaccel's own sentence (memory_plan.py), whose cause may not say it.
            r"out of memory( with global_batch_size=\d+)?; use ",
        )
    ),
    re.IGNORECASE,
)
# Of batch norm without XLA, for one, where cuDNN had no room beside the tensors (TensorFlow 2.21);
# and of GPUs' first collective, beside another job that filled one of them (NCCL logs it if it is
# asked to, by NCCL_DEBUG).
_LOGS_ITS_CAUSE = re.compile("cuDNN launch failure|NCCL: unhandled cuda error")
_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "bytes": 0}
_XLA = re.compile(
    r"Out of memory (?:while trying to allocate|allocating) ([\d.]+) ?([KMGT]iB|B|by)"
)
_DALI = re.compile(r"Can't allocate (\d+) bytes")
_KERNEL = re.compile(r"OOM when allocating tensor with shape ?\[([\d,]*)\] and type (\w+)")
_TYPE_BYTES = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "uint8": 1, "int8": 1, "bool": 1}


def is_out_of_memory(text: str, *, log: str = "") -> bool:
    """Returns whether an error's text, or a process's last words, say that memory was full.

    Args:
      text: of the error.
      log: what its process printed until then, where that is known. It is asked of an error that
        leaves its cause to the log.
    """
    return bool(_SAYS.search(text) or (leaves_its_cause_to_the_log(text) and _SAYS.search(log)))


def leaves_its_cause_to_the_log(text: str) -> bool:
    """Returns whether an error's text does not tell a full memory from another fault."""
    return bool(_LOGS_ITS_CAUSE.search(text))


def is_of_xla(text: str) -> bool:
    """Returns whether an error's text says that XLA had no memory for what it runs."""
    return bool(_XLA.search(text))


def asked_bytes(text: str) -> int | None:
    """Returns the bytes that were asked for in vain; None where the text does not say.

    XLA asks for all that a step needs beside variables and batch at once; a kernel for one tensor.
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
