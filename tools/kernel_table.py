"""Shows where the GPU time of a step goes: kinds of kernels, the longest kernels, and idle time.

The program takes a folder that TensorFlow's profiler wrote, and the number of steps in the profile.
It prints a table for each GPU. An arm of tools/bench.py can write such a profile:

    python tools/bench.py --rows=S1 --repeats=1 --ours='{"trace": "/tmp/trace"}'
    python tools/kernel_table.py /tmp/trace --steps=350

A second list has the XLA kernels that take longer than their memory traffic explains. The traffic
of a kernel is the size of its operands and results, but at most what the bandwidth allows. The
limit is needed because a kernel may read only a slice of an operand. On an H200, no kernel exceeded
4.4 of the memory's 4.8 TB/s (ResNet-50, 2026-11-22). On an H100, no large kernel exceeded 3.2 of
3.35 TB/s (2026-11-26).

A third list has XLA's kernels by the TensorFlow operation that they come from, with the numbers of
layers left out. So the same operation of all layers is one line.

The program relies on names of TensorFlow 2.21: tensorflow.tsl.profiler.protobuf.xplane_pb2, and its
planes "/device:GPU:N" with lines "Stream ...", "/host:CPU", and "/host:metadata" with programs
("Hlo Proto", of tensorflow.compiler.xla.service.hlo_pb2).
"""

import argparse
import bisect
import collections
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

PS_PER_MS = 1e9
BYTES_PER_GB = 1e9
SHORT_GAP_MS, LONG_GAP_MS = 0.01, 0.3
# The kind of a kernel is the first one with a pattern that matches the kernel's name.
KINDS = {
    "convolution or product": r"conv(?!ert)|gemm|cudnn|xmma|cutlass|nvjet|wgrad|dgrad|fprop|matmul",
    "all-reduce": r"nccl",
    "copy": r"memcpy|memset|copy",
    "sum": r"reduce",
    "element by element": r"loop|fusion|convert|select|add|mul|kernel",
}


class Span(NamedTuple):
    """An event: start and end in picoseconds, its name, and its XLA program and operation."""

    start: float
    end: float
    name: str
    operation: tuple[str, str] = ("", "")


def main(arguments: Sequence[str]) -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="a folder that the profiler wrote")
    parser.add_argument("--steps", type=int, required=True, help="the steps in the profile")
    parser.add_argument("--kernels", type=int, default=30, help="kernels to list (default: 30)")
    parser.add_argument(
        "--bandwidth", type=float, default=4.4, help="memory bandwidth in TB/s (default: 4.4)"
    )
    options = parser.parse_args(arguments)
    files = sorted(options.folder.rglob("*.xplane.pb"))
    if not files or options.steps < 1:
        what = f"--steps={options.steps}" if files else f"{options.folder} has no *.xplane.pb file"
        parser.error(f"{what}; expected a profile, and at least one step")
    space = xplane_pb2.XSpace.FromString(files[-1].read_bytes())
    host = [span for plane in space.planes if "/host:CPU" in plane.name for span in spans(plane)]
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    sizes, of_tensorflow = bytes_of_operations(space), sources_of_operations(space)
    tables = []
    for plane in gpus:
        if kernels := spans(plane, "Stream"):
            where = table(kernels, host, options.steps, options.kernels)
            beyond = bytes_table(kernels, sizes, options.steps, options.kernels, options.bandwidth)
            sources = source_table(kernels, sizes, of_tensorflow, options.steps, options.kernels)
            tables.append("\n".join([plane.name, *where, *beyond, *sources]))
    print("\n\n".join(tables) or f"{options.folder}: the profile has no GPU kernels")
    return 0 if tables else 1


def spans(plane, lines: str = "") -> list[Span]:
    """Returns the events of the lines with names that begin with `lines`."""
    return [
        span
        for line in plane.lines
        if line.name.startswith(lines)
        for span in spans_of(line, plane)
    ]


def spans_of(line, plane) -> Iterator[Span]:
    """Yields the events of a line."""
    names = plane.stat_metadata
    for event in line.events:
        start = line.timestamp_ns * 1000 + event.offset_ps
        stats = {names[each.metadata_id].name: each for each in event.stats}
        operation = tuple(
            stats[name].str_value or names[stats[name].ref_value].name if name in stats else ""
            for name in ("hlo_module", "hlo_op")
        )
        name = plane.event_metadata[event.metadata_id].name
        yield Span(start, start + event.duration_ps, name, operation)


def table(kernels: list[Span], host: list[Span], steps: int, num_kernels: int) -> Iterator[str]:
    """Yields the text lines of one GPU's table."""

    def per_step(picoseconds: float) -> float:
        return picoseconds / PS_PER_MS / steps

    seconds = collections.Counter()
    for each in kernels:
        seconds[each.name] += each.end - each.start
    counts = collections.Counter(each.name for each in kernels)
    waits = gaps(kernels)
    whole = max(each.end for each in kernels) - min(each.start for each in kernels)
    idle = sum(each.end - each.start for each in waits)
    yield (
        f"{per_step(whole):8.2f} ms per step, {per_step(whole - idle):.2f} of them busy, with "
        f"{len(kernels) / steps:.0f} kernels"
    )
    kinds = collections.Counter()
    for name, each in seconds.items():
        kinds[kind_of(name)] += each
    for name, each in kinds.most_common():
        yield f"{per_step(each):8.2f} ms {name}"
    for words, least, most in (
        (f"idle for less than {SHORT_GAP_MS:g} ms at a time", 0, SHORT_GAP_MS),
        (f"idle for {SHORT_GAP_MS:g} to {LONG_GAP_MS:g} ms at a time", SHORT_GAP_MS, LONG_GAP_MS),
        (f"idle for more than {LONG_GAP_MS:g} ms at a time", LONG_GAP_MS, float("inf")),
    ):
        found = [each for each in waits if least <= (each.end - each.start) / PS_PER_MS < most]
        total = per_step(sum(each.end - each.start for each in found))
        yield f"{total:8.2f} ms {words}, {len(found) / steps:.1f} times"
    yield "the longest kernels: ms per step, calls per step, name:"
    for name, each in seconds.most_common(num_kernels):
        yield f"{per_step(each):8.2f} {counts[name] / steps:6.1f}  {name[:84]}"
    long = [each for each in waits if each.end - each.start > LONG_GAP_MS * PS_PER_MS]
    if long:
        yield (
            f"what the host did while the GPU was idle for more than {LONG_GAP_MS:g} ms: ms per "
            "step, name:"
        )
        for name, each in overlaps(long, host).most_common(12):
            yield f"{per_step(each):8.2f}  {name[:90]}"


def bytes_of_operations(space) -> dict[tuple[str, str], int]:
    """Returns the bytes of the operands and results of each operation in XLA's programs."""
    sizes = {}
    for module in programs(space):
        for computation in module.computations:
            own = {each.id: each for each in computation.instructions}
            for each in own.values():
                shapes = [each.shape, *(own[operand].shape for operand in each.operand_ids)]
                sizes[module.name, each.name] = sum(map(bytes_of, shapes))
    return sizes


def sources_of_operations(space) -> dict[tuple[str, str], str]:
    """Returns TensorFlow's name of each operation in XLA's programs, without numbers of layers."""
    return {
        (module.name, each.name): re.sub(r"\d+", "#", each.metadata.op_name) or "(no name)"
        for module in programs(space)
        for computation in module.computations
        for each in computation.instructions
    }


def programs(space) -> Iterator[hlo_pb2.HloModuleProto]:
    """Yields the XLA programs in a profile."""
    for plane in space.planes:
        if plane.name == "/host:metadata":
            for event in plane.event_metadata.values():
                for stat in event.stats:
                    if plane.stat_metadata[stat.metadata_id].name == "Hlo Proto":
                        yield hlo_pb2.HloProto.FromString(stat.bytes_value).hlo_module


def bytes_of(shape) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple; 0 for tokens and the like."""
    if shape.element_type == xla_data_pb2.TUPLE:
        return sum(map(bytes_of, shape.tuple_shapes))
    name = xla_data_pb2.PrimitiveType.Name(shape.element_type)
    bits = 8 if name == "PRED" else int((re.findall(r"^[A-Z]+(\d+)", name) or [0])[0])
    return math.prod(shape.dimensions) * bits // 8


def bytes_table(
    kernels: list[Span],
    sizes: Mapping[tuple[str, str], int],
    steps: int,
    num_kernels: int,
    bandwidth: float,
) -> Iterator[str]:
    """Yields the text lines about XLA kernels that take longer than their memory traffic."""
    seconds, times = collections.Counter(), collections.defaultdict(collections.Counter)
    for each in kernels:
        if each.operation in sizes:
            seconds[each.operation] += (each.end - each.start) / PS_PER_MS / steps
            times[each.operation][each.name] += 1  # an operation may have several kernels
    if not seconds:
        return
    per_ms = bandwidth * BYTES_PER_GB  # a TB/s is a GB/ms
    moved = {
        key: min(sizes[key] * max(times[key].values()) / steps, milliseconds * per_ms)
        for key, milliseconds in seconds.items()
    }
    total = sum(moved.values())
    yield (
        f"{sum(seconds.values()):8.2f} ms in XLA's kernels, which read and write at most "
        f"{total / BYTES_PER_GB:.1f} GB; this takes {total / per_ms:.2f} ms at {bandwidth:g} TB/s"
    )
    yield "those that exceed that time most: ms per step, ms beyond it, GB, name:"
    beyond = collections.Counter({key: seconds[key] - moved[key] / per_ms for key in seconds})
    for key, each in beyond.most_common(num_kernels):
        yield (
            f"{seconds[key]:8.2f} {each:6.2f} {moved[key] / BYTES_PER_GB:6.2f}  "
            f"{key[1]} ({', '.join(times[key])[:60]})"
        )


def source_table(
    kernels: list[Span],
    sizes: Mapping[tuple[str, str], int],
    sources: Mapping[tuple[str, str], str],
    steps: int,
    num_kernels: int,
) -> Iterator[str]:
    """Yields the text lines about XLA kernels by the TensorFlow operation that they come from."""
    milliseconds, counts, moved = (collections.Counter() for _ in range(3))
    for each in kernels:
        if source := sources.get(each.operation):
            milliseconds[source] += (each.end - each.start) / PS_PER_MS / steps
            counts[source] += 1 / steps
            moved[source] += sizes[each.operation] / BYTES_PER_GB / steps
    if not milliseconds:
        return
    yield "by TensorFlow's operation: ms per step, kernels per step, GB at most, name:"
    for source, each in milliseconds.most_common(num_kernels):
        name = source if len(source) < 100 else f"...{source[-97:]}"
        yield f"{each:8.2f} {counts[source]:6.1f} {moved[source]:6.2f}  {name}"


def kind_of(name: str) -> str:
    """Returns the kind of a kernel."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name.lower()):
            return kind
    return "other"


def gaps(kernels: Iterable[Span]) -> list[Span]:
    """Returns the times between the first and the last kernel without a kernel, in order."""
    found, end = [], None
    for each in sorted(kernels):
        if end is not None and each.start > end:
            found.append(Span(end, each.start, ""))
        end = each.end if end is None else max(end, each.end)
    return found


def overlaps(waits: list[Span], host: Iterable[Span]) -> collections.Counter:
    """Returns, by name, how long host events overlap the gaps; the gaps must be in order."""
    found, ends = collections.Counter(), [each.end for each in waits]
    for event in host:
        for wait in waits[bisect.bisect_right(ends, event.start) :]:
            if wait.start >= event.end:
                break
            found[event.name] += min(event.end, wait.end) - max(event.start, wait.start)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
