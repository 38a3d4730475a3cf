"""Estimates the memory that a traced function needs beside its inputs and variables.

    peak_bytes(graph, outputs, xla=True)     # of all tensors that are in memory at one time

XLA gives memory to what it writes, and computes the rest in the kernels that read it. So this
divides the operations of the trace into kernels (operations.py), runs them in the order of the
trace, and adds up what is in memory at each. A kernel runs earlier if that frees memory. A result
takes the memory of an input of the same size that is not read again. What README.md of step/ says
of its error was found by comparing it with the buffers that XLA assigns.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfaccel.keras_internals.called_functions import called_by, is_compiled_by_xla
from tfaccel.keras_internals.traced import has_effects
from tfaccel.step.memory.operations import (
    ELEMENTWISE,
    EXPENSIVE,
    JOINS,
    LISTS,
    LOOPS,
    READS,
    RESHAPES,
    TURNING,
    Kind,
    kind_of,
)

SMALL_BYTES = 1024  # up to this size it does not matter whether a result is written
OF_ANY_SIZE = (tf.resource, tf.variant, tf.string)


class UnknownSizeError(Exception):
    """The size of a tensor is not known when the function is traced; the message names it."""


@dataclasses.dataclass(eq=False)
class _Buffer:
    """Memory that a kernel writes.

    Attributes:
      num_bytes: its size.
      item_bytes: the size of an element.
      readers: the kernels that read it.
      num_left: how many of them have not run.
      is_kept: whether it is an output of the function.
    """

    num_bytes: int
    item_bytes: int = 4
    readers: list["_Kernel"] = dataclasses.field(default_factory=list)
    num_left: int = 0
    is_kept: bool = False


@dataclasses.dataclass(eq=False)
class _Kernel:
    """What reads buffers and writes others.

    Attributes:
      reads: the buffers that it reads.
      writes: those that it writes.
      inner_bytes: the memory that a function which it calls needs, with its outputs.
      is_in_place: whether a result may take the memory of an input.
      num_missing: how many buffers that it reads are not written yet.
      has_run: whether it has run.
    """

    reads: tuple[_Buffer, ...]
    writes: tuple[_Buffer, ...]
    inner_bytes: int
    is_in_place: bool
    num_missing: int = 0
    has_run: bool = False

    def gain(self) -> int:
        """Returns the bytes that are freed if it runs next, less those that it writes."""
        freed = sum(
            each.num_bytes for each in self.reads if each.num_left == 1 and not each.is_kept
        )
        return freed - sum(each.num_bytes for each in self.writes if each.readers or each.is_kept)


def peak_bytes(
    graph: tf.Graph,
    outputs: Sequence[tf.Tensor],
    *,
    xla: bool,
    on_gpu: bool,
    device: str | None = None,
) -> int:
    """Returns the most bytes that a function needs at a time, without inputs and variables.

    Args:
      graph: of the traced function; also while it is traced.
      outputs: its results; those of other graphs do not count.
      xla: whether XLA compiles it. Without it each operation writes its result.
      on_gpu: whether it runs on a GPU. XLA for the CPU computes less in the kernels that read it.
      device: count only operations on this device, and those without one; None for all.

    Raises:
      UnknownSizeError: a tensor or a list of tensors has a size that the trace does not tell.
    """
    kernels = _Traced(graph, outputs, xla=xla, on_gpu=on_gpu, device=device).kernels
    return _most_held(kernels)


def bytes_of(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor; 0 for handles, and for whole numbers that are shapes.

    Raises:
      UnknownSizeError: it has an unknown shape.
    """
    if tensor.dtype in OF_ANY_SIZE:
        return 0
    if not tensor.shape.is_fully_defined():
        if tensor.dtype in (tf.int32, tf.int64) and tensor.shape.rank == 1:
            return 0  # for example the axes of a sum
        raise UnknownSizeError(f"{tensor.name} has the shape {tensor.shape}")
    return math.prod(tensor.shape) * tensor.dtype.size


class _Traced:
    """The kernels of a traced function.

    Attributes:
      kernels: in the order of the trace.
    """

    def __init__(self, graph: tf.Graph, outputs, *, xla: bool, on_gpu: bool, device: str | None):
        self._xla, self._on_gpu = xla, on_gpu
        outputs = [each for each in outputs if getattr(each, "graph", None) is graph]
        order = [*_in_order(graph, outputs, device)]
        self._inputs = {id(op): tuple(op.inputs) for op in order}
        self._kinds = {id(op): kind_of(op, xla=xla) for op in order}
        self._consumers: dict[int, list[tf.Operation]] = {}
        for op in order:
            for each in self._inputs[id(op)]:
                self._consumers.setdefault(id(each), []).append(op)
        self._buffers: dict[int, tuple[_Buffer, ...]] = {}  # from which a tensor is read, by its id
        self._sources: dict[int, tuple[_Buffer, ...]] = {}  # of which fused readers make it anew
        self._names: dict[int, object] = {}  # of a tensor, which those that are equal to it have
        self._alike: dict[tuple, list[tf.Operation]] = {}
        self.kernels: list[_Kernel] = []
        for op in order:
            self._add(op)
        for each in outputs:
            for buffer in self._of(each):
                buffer.is_kept = True

    def _of(self, tensor: tf.Tensor) -> tuple[_Buffer, ...]:
        return self._buffers.get(id(tensor), ())

    def _made_of(self, tensor: tf.Tensor) -> tuple[_Buffer, ...]:
        """Returns what a kernel reads that computes a tensor with its own result."""
        return self._sources.get(id(tensor), self._of(tensor))

    def _add(self, op: tf.Operation) -> None:
        kind, inputs = self._kinds[id(op)], self._inputs[id(op)]
        if kind is Kind.NOTHING:
            return
        if kind is Kind.VIEW:
            self._pass_on(op, inputs)
            return
        of = self._made_of if kind in (Kind.FUSED, Kind.REDUCING) else self._of
        reads = tuple({id(own): own for each in inputs for own in of(each)}.values())
        if kind is Kind.FUSED:
            if self._is_repeated(op):
                return
            if not any(self._is_written(each, reads) for each in op.outputs):
                self._buffers |= {id(each): reads for each in op.outputs}
                return
            if not self._on_gpu and op.type in ELEMENTWISE - EXPENSIVE:
                self._sources |= {id(each): reads for each in op.outputs if reads}
        if kind is Kind.BARRIER:
            token = _Buffer(0)  # what reads the results waits for all inputs
            for own, each in zip(inputs, op.outputs, strict=True):
                self._buffers[id(each)] = (*self._of(own), token)
            self.kernels.append(_Kernel(reads, (token,), 0, False))
            return
        self.kernels.append(self._kernel(op, kind, reads))

    def _pass_on(self, op: tf.Operation, inputs: Sequence[tf.Tensor]) -> None:
        if not inputs:
            return
        for index, each in enumerate(op.outputs):
            own = inputs[min(index, len(inputs) - 1)]
            self._buffers[id(each)] = self._of(own)
            if id(own) in self._sources:
                self._sources[id(each)] = self._sources[id(own)]
            name = self._name(own)  # in another shape it is another tensor to those that read it
            self._names[id(each)] = (name, str(each.shape)) if op.type in RESHAPES else name

    def _kernel(self, op: tf.Operation, kind: Kind, reads: tuple[_Buffer, ...]) -> _Kernel:
        writes = []
        for index, each in enumerate(op.outputs):
            if op.type in LOOPS and each.dtype in OF_ANY_SIZE:
                self._buffers[id(each)] = self._of(self._inputs[id(op)][index])
                continue
            size = _bytes_of_list(op) if op.type in LISTS else bytes_of(each)
            buffer = _Buffer(0 if kind is Kind.ASSIGNS else size, each.dtype.size)
            self._buffers[id(each)] = (buffer,)
            writes.append(buffer)
        inner = 0
        if kind is Kind.OPAQUE:
            xla = self._xla or is_compiled_by_xla(op)
            graphs = called_by(op)
            how = {"xla": xla, "on_gpu": self._on_gpu}
            inner = max((peak_bytes(each, each.outputs, **how) for each in graphs), default=0)
        if self._xla and not self._on_gpu and op.type in TURNING:
            inner += sum(map(bytes_of, [*op.outputs, op.inputs[2]]))
        return _Kernel(reads, tuple(writes), inner, op.type in ELEMENTWISE or op.type in LOOPS)

    def _is_written(self, tensor: tf.Tensor, reads: Sequence[_Buffer]) -> bool:
        """Returns whether XLA writes a result that its readers could compute, too.

        It does so for readers that read memory, such as products, and where computing it anew for
        each reader would move more bytes. A float32 value that is made of half precision is not
        written for a barrier: XLA moves the conversion behind it.
        """
        size = bytes_of(tensor)
        if size <= SMALL_BYTES:
            return True
        readers = {id(each): each for each in self._readers(tensor)}
        kinds = {self._kinds[each] for each in readers}
        if Kind.OPAQUE in kinds:
            return True
        if Kind.BARRIER in kinds:
            large = [each for each in reads if 4 * each.num_bytes >= size]
            return not large or any(each.item_bytes >= tensor.dtype.size for each in large)
        if not self._on_gpu and len(readers) > 1 and tensor.op.type in EXPENSIVE | JOINS:
            return True
        read = sum(each.num_bytes for each in reads)
        number = len({self._name_of_reader(each) for each in readers.values()})
        return read + size + number * size < number * read

    def _readers(self, tensor: tf.Tensor) -> Iterator[tf.Operation]:
        for op in self._consumers.get(id(tensor), ()):
            if self._kinds[id(op)] is Kind.VIEW:
                inputs = self._inputs[id(op)]
                for own, each in zip(inputs, op.outputs, strict=False):
                    if own is tensor:
                        yield from self._readers(each)
            else:
                yield op

    def _name_of_reader(self, op: tf.Operation):
        return self._call(op) if self._kinds[id(op)] is Kind.FUSED else id(op)

    def _is_repeated(self, op: tf.Operation) -> bool:
        """Returns whether an earlier operation is the same; XLA computes them once."""
        alike = self._alike.setdefault(self._call(op), [])
        for other in alike:
            if _attributes(other) == _attributes(op):
                for own, each in zip(op.outputs, other.outputs, strict=True):
                    self._buffers[id(own)] = self._of(each)
                    self._names[id(own)] = self._name(each)
                return True
        alike.append(op)
        return False

    def _call(self, op: tf.Operation) -> tuple:
        return op.type, tuple(self._name(each) for each in self._inputs[id(op)])

    def _name(self, tensor: tf.Tensor):
        """Returns what equal tensors have in common."""
        if (name := self._names.get(id(tensor))) is None:
            name = id(tensor)
            if tensor.op.type == "Const":
                name = tensor.op.node_def.attr["value"].tensor.SerializeToString()
            self._names[id(tensor)] = name
        return name


def _attributes(op: tf.Operation) -> dict:
    return {name: each for name, each in op.node_def.attr.items() if not name.startswith("_")}


def _bytes_of_list(op: tf.Operation) -> int:
    """Returns the bytes of a list of tensors of one shape, which loops write to."""
    shape, number = (tf.get_static_value(each) for each in op.inputs)
    known = shape is not None and number is not None
    if not known or number < 0 or (shape.ndim and (shape < 0).any()) or (not shape.ndim):
        raise UnknownSizeError(f"{op.name} makes a list of tensors whose sizes are not known")
    return int(math.prod(shape) * number) * tf.as_dtype(op.get_attr("element_dtype")).size


def _most_held(kernels: Sequence[_Kernel]) -> int:
    """Runs the kernels in order, and returns the most bytes that are in memory at one time."""
    written = {id(own) for each in kernels for own in each.writes}
    for kernel in kernels:
        kernel.num_missing = sum(id(each) in written for each in kernel.reads)
        for each in kernel.reads:
            each.readers.append(kernel)
            each.num_left += 1
    held = most = 0
    for first in kernels:
        waiting = [first]
        while waiting:
            kernel = waiting.pop()
            if kernel.has_run:
                continue
            held, peak = _run(kernel, held)
            most = max(most, peak)
            near = (each for own in (*kernel.writes, *kernel.reads) for each in own.readers)
            waiting += [
                each
                for each in near
                if not each.has_run and not each.num_missing and each.gain() > 0
            ]
    return most


def _run(kernel: _Kernel, held: int) -> tuple[int, int]:
    """Returns the bytes in memory after a kernel, and the most while it runs."""
    kernel.has_run = True
    for each in kernel.reads:
        each.num_left -= 1
    for own in kernel.writes:
        for each in own.readers:
            each.num_missing -= 1
    free = [each.num_bytes for each in kernel.reads if not each.num_left and not each.is_kept]
    written, sizes = 0, [*free]
    for each in kernel.writes:
        if kernel.is_in_place and each.num_bytes in sizes:
            sizes.remove(each.num_bytes)
        else:
            written += each.num_bytes
    most = held + max(written, kernel.inner_bytes)
    stays = [each.num_bytes for each in kernel.writes if each.readers or each.is_kept]
    return held + sum(stays) - sum(free), most


def _in_order(graph: tf.Graph, outputs, device: str | None) -> Iterator[tf.Operation]:
    """Yields the operations that a function runs, each after what it reads.

    The order is otherwise that of the trace. But what is computed again in the backward pass, which
    was traced last, comes where it is first read.
    """
    operations = [each for each in graph.get_operations() if _is_on(each, device)]
    before = {id(op): [*(each.op for each in op.inputs), *op.control_inputs] for op in operations}
    needed: set[int] = set()
    waiting = [op for op in operations if has_effects(op.type) and op.type not in READS]
    waiting += [each.op for each in outputs]
    while waiting:
        op = waiting.pop()
        if id(op) not in needed and id(op) in before:
            needed.add(id(op))
            waiting += before[id(op)]
    done: set[int] = set()
    opened: set[int] = set()  # in a loop of operations, one of them comes before what it reads
    for first in operations:
        stack = [first] if id(first) in needed else []
        while stack:
            op = stack[-1]
            missing = [
                each for each in before[id(op)] if id(each) not in done and id(each) in before
            ]
            if missing and id(op) not in opened:
                opened.add(id(op))
                stack += reversed(missing)
                continue
            stack.pop()
            if id(op) not in done:
                done.add(id(op))
                yield op


def _is_on(op: tf.Operation, device: str | None) -> bool:
    """Returns whether an operation is on a device, or on none."""
    return device is None or not op.device or _short(op.device) == _short(device)


def _short(device: str) -> str:
    return ":".join(device.upper().rpartition("/")[2].split(":")[-2:])
