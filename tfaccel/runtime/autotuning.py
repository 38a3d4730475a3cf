"""Keeps the kernels that XLA chose by timing, for every later program with the same operations.

The choices are in ~/.cache/tfaccel/autotuning. The package may bring those of some networks. A GPU
for which it has none gets the products of a sibling (tfaccel/runtime/xla_device.py): the tiles of a
product fit a GPU's cores, which are the same. cuDNN's choices are left to the GPU itself. The
products in bfloat16 of the package also serve float16, whose values have as many bytes.

    use({"tensorflow": "2.21.0", "gpus": [...], "tf32": True})      # before XLA reads its flags

XLA times several kernels for each matrix product and convolution, while the CPU is idle. For a
ResNet-50 on an H100 this takes 30 to 43 s of a first start (TensorFlow 2.21). The compiled programs
of tfaccel/runtime/compile_cache.py save that only to the same program. A choice also serves other
batch sizes and networks, as far as they have the same operation on arrays of the same shapes.

XLA reads one file of choices when it compiles its first program, and writes all choices that it
knows after each program. It fails if the file is missing, has another version, or has an operation
twice. So each process writes a file of its own. The next one joins them in `kept.pb`, which
is the file that XLA reads. A choice that was kept stays: equal programs use equal kernels.
"""

import contextlib
import fcntl
import functools
import gzip
import hashlib
import json
import logging
import os
import pathlib
import re
import secrets
import time
from collections.abc import Iterable, Mapping

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from tfaccel.common import own_files
from tfaccel.process.cache_folder import cache_folder, make_own
from tfaccel.runtime.compile_cache import check_room
from tfaccel.runtime.xla_device import is_sibling

log = logging.getLogger("tfaccel")

READ = "xla_gpu_load_autotune_results_from"
WRITE = "xla_gpu_dump_autotune_results_to"
OURS = re.compile(rf"\s*--({READ}|{WRITE})=\S*/tfaccel/autotuning/\S+")
KEPT, LOCK = "kept.pb", "lock"
OF_FIRST_SETUP = "XLA goes on with the files of this process's first tfaccel.setup"
SHIPPED = pathlib.Path(__file__).parent / "autotuned"
MOST_BYTES = 32 << 20  # ResNet-50's choices are 42 KB
DAY_S = 24 * 3600

# The flags that this process added, and what they are for. XLA reads its flags once.
_begun: list[str] = []
_begun_for: list[str] = []


def use(decides: Mapping[str, object], *, gpu: str | None = None) -> None:
    """Makes XLA read and write choices for `decides`, before it reads its flags.

    Args:
      decides: all that a choice depends on, as values for JSON. `packages` are the versions of
        libraries, and `gpus` are descriptions of GPUs.
      gpu: XLA's description of the GPU, from `xla_device.described`; None if it is not known.
    """
    flags = without_ours(os.environ.get("XLA_FLAGS", ""))
    text = json.dumps(dict(decides), indent=2, sort_keys=True)
    if _begun:
        os.environ["XLA_FLAGS"] = " ".join([flags, *_begun]).strip()
        if _begun_for != [text]:
            log.info("autotuning: %s", OF_FIRST_SETUP)
        return
    os.environ["XLA_FLAGS"] = flags  # a parent's files are not this process's
    if READ in flags or WRITE in flags:
        return log.info("autotuning: XLA_FLAGS sets the file of kept choices")
    folder = cache_folder("autotuning") / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    if re.search(r"[\s'\"\\]", str(folder)):
        return leave_out(f"XLA's flags do not allow the blank or quote in {folder}")
    try:
        make_own(folder.parent)
        make_own(folder)
        check_room(folder)  # if XLA cannot write the file, it ends the run with an error
        own_files.replace(folder / "settings.json", text.encode())
        shipped = _shipped(decides)
        of_sibling = _of_sibling(shipped, gpu)
        here = join([shipped, of_sibling])
        of_float16 = in_float16(here)
        num_kept, num_shipped = _join(folder, join([here, of_float16]))
    except OSError as error:
        return leave_out(f"{folder} cannot be used ({error.strerror or error})")
    own = folder / f"{os.getpid()}-{secrets.token_hex(4)}.pb"
    _begun_for[:] = [text]
    _begun.append(f"--{WRITE}={own}")
    if num_kept:
        _begun.append(f"--{READ}={folder / KEPT}")
    os.environ["XLA_FLAGS"] = " ".join([flags, *_begun]).strip()
    log.info(
        "autotuning: XLA's choices of kernels are kept in %s; %d are there, %d of them from the "
        "package",
        folder,
        num_kept,
        num_shipped,
    )
    if of_sibling is not None:
        log.info(
            "autotuning: %d choices of the package were made on a GPU with as many cores of the "
            "same architecture, because it has none for this one",
            len(of_sibling.results),
        )
    if of_float16.results:
        log.info(
            "autotuning: %d choices of the package for products in bfloat16 serve those in "
            "float16, too, for which it has none",
            len(of_float16.results),
        )


def leave_out(reason: str) -> None:
    """Makes XLA time all kernels again, and logs the reason."""
    os.environ["XLA_FLAGS"] = without_ours(os.environ.get("XLA_FLAGS", ""))
    if _begun:
        log.info("autotuning: %s, although %s", OF_FIRST_SETUP, reason)
    else:
        log.info("autotuning: no choices are kept, because %s", reason)


def without_ours(flags: str) -> str:
    """Returns XLA's flags without those that `use` added, here or in the parent process."""
    return OURS.sub("", flags).strip()


def _join(folder: pathlib.Path, shipped: message.Message) -> tuple[int, int]:
    """Joins all choices in `kept.pb`; returns how many there are, and how many are only shipped."""
    with open(own_files.open_own(folder / LOCK, os.O_RDWR | os.O_CREAT)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a moment, unless another process joins them now
        found = {path: read(path) for path in [folder / KEPT, *sorted(folder.glob("*-*.pb"))]}
        own = join(found.values())
        whole = join([own, shipped])
        if whole.ByteSize() > MOST_BYTES:
            log.info(
                "autotuning: removed %d kept choices, which took too much room", len(own.results)
            )
            own, whole = join([]), shipped
        if whole.results:
            own_files.replace(folder / KEPT, whole.SerializeToString())
        for path, results in found.items():
            if results is None:
                _remove_if_old(path)
            elif path.name != KEPT:  # a process that still compiles writes its whole file again
                path.unlink(missing_ok=True)
    return len(whole.results), len(whole.results) - len(own.results)


def join(found: Iterable[message.Message | None]) -> message.Message:
    """Joins the choices of files; the first choice for a GPU and operation counts.

    XLA takes one choice of each, and its own version of the file. A file of another version than
    the first one's is left out, and so is None, which stands for a damaged file.
    """
    version, choices = None, {}
    for results in filter(None, found):
        versions = {(results.version, each.version) for each in results.results}
        version = version or versions
        if versions == version:
            choices = {(each.device, each.hlo): each for each in results.results} | choices
    ((number, _),) = version or [(0, 0)]
    return _results()(version=number, results=choices.values())


def read(path: pathlib.Path) -> message.Message | None:
    """Returns the choices in a file; None if it is missing or damaged.

    Returns:
      A message with `version`, that of the file, and `results`. Each of these has `device` and
      `hlo`, which are the GPU and the operation, `result`, which is the choice as XLA wrote it,
      and `version`, that of the choice.
    """
    with contextlib.suppress(OSError, message.DecodeError):
        return _whole(path.read_bytes())
    return None


def read_shipped(path: pathlib.Path) -> message.Message | None:
    """Returns the choices that the package has beside the JSON file of their versions."""
    return _whole(gzip.decompress(path.with_suffix(".pb.gz").read_bytes()))


def _whole(data: bytes) -> message.Message | None:
    """Returns the choices in a file's bytes; None if something is missing in them.

    Raises:
      google.protobuf.message.DecodeError: these are no choices.
    """
    found = _results().FromString(data)
    has_all = all(each.device and each.hlo and each.result for each in found.results)
    is_alike = len({each.version for each in found.results}) <= 1
    return found if found.version and has_all and is_alike else None


def _remove_if_old(path: pathlib.Path) -> None:
    """Removes a file that no process is still writing."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime > DAY_S:
            path.unlink()


def _shipped(decides: Mapping[str, object]) -> message.Message:
    """Returns the package's choices for these libraries, which tools/ship_autotuning.py made."""
    return join(
        read_shipped(path)
        for path in sorted(SHIPPED.glob("*.json"))
        if json.loads(path.read_text())["packages"] == decides.get("packages")
    )


def _of_sibling(shipped: message.Message, gpu: str | None) -> message.Message | None:
    """Returns a sibling's products for a GPU without choices of its own; None if there are none."""
    devices = {each.device for each in shipped.results}
    if gpu is None or any(each.startswith(gpu) for each in devices):
        return None
    sibling = next((each for each in sorted(devices) if is_sibling(gpu, each)), None)
    if sibling is None:
        return None
    _, _, cudnn = sibling.rpartition(",")
    found = _results()(version=shipped.version)
    for each in shipped.results:
        if each.device == sibling and _is_product(each):
            found.results.add().CopyFrom(each)
            found.results[-1].device = f"{gpu},{cudnn}"
    return found if found.results else None


def in_float16(choices: message.Message) -> message.Message:
    """Returns choices for the products in float16 that `choices` has only in bfloat16."""
    known = {(each.device, each.hlo) for each in choices.results}
    found = _results()(version=choices.version)
    for each in choices.results:
        hlo = each.hlo.replace("bf16[", "f16[")
        is_of_one = not re.search(r"\bf16\b", each.hlo) and "bf16" not in hlo
        if _is_product(each) and is_of_one and (each.device, hlo) not in known:
            found.results.add().CopyFrom(each)
            found.results[-1].hlo = hlo
    return found


def _is_product(choice: message.Message) -> bool:
    """Returns whether a choice is of a matrix product, and what surrounds it."""
    return " dot(" in choice.hlo


@functools.cache
def _results() -> type[message.Message]:
    """Returns the class of XLA's AutotuneResults, which TensorFlow's wheel has only in C++.

    The numbers of the fields are in autotune_results.pb.h. The choice itself stays as it is.
    """
    file = descriptor_pb2.FileDescriptorProto(name="tfaccel/autotuning.proto", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    entry = file.message_type.add(name="Entry")
    for name, number, kind in (
        ("device", 1, field.TYPE_STRING),
        ("hlo", 2, field.TYPE_STRING),
        ("result", 3, field.TYPE_BYTES),
        ("version", 4, field.TYPE_INT32),
    ):
        entry.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    results = file.message_type.add(name="Results")
    results.field.add(name="version", number=1, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
    results.field.add(
        name="results",
        number=4,
        type=field.TYPE_MESSAGE,
        type_name=".Entry",
        label=field.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Results"))
