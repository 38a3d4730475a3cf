"""Divides a traced forward pass at narrow places, and chooses which parts to compute again.

    choice = segments.least_memory(traced)          # or within(traced, budget_bytes=2**30)
    choice.segments, choice.kept_bytes, choice.bytes_before

All figures are estimates from the shapes of tensors. An activation counts if gradients read it or
what only cheap operations make of it: XLA computes such operations in the kernels that read them,
so of a convolution, a batch norm and a ReLU it keeps one array, and not three. Where the number of
rows is not known when the step is traced, one row counts, so that only ratios mean something.
"""

import dataclasses
import itertools
import math

import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.graph_copies import is_input
from tfaccel.step.remat.recompute import Pass, Segment, of_weights

# Operations that XLA computes in the kernels that read their results.
CHEAP = {
    "Abs", "AddV2", "BiasAdd", "Cast", "Div", "Elu", "Erf", "Erfc", "Exp", "ExpandDims", "Gelu",
    "Identity", "LeakyRelu", "Log", "Maximum", "Minimum", "Mul", "Neg", "Pow", "RealDiv", "Relu",
    "Relu6", "Reshape", "Rsqrt", "SelectV2", "Selu", "Sigmoid", "Softplus", "Sqrt", "Square",
    "SquaredDifference", "Squeeze", "Sub", "Tanh", "Transpose", "XlaOptimizationBarrier",
}  # fmt: skip
# Operations of a product or convolution in the time in which a byte is read or written: an H100
# does 800e12 of them in bfloat16, and moves 3e12 bytes, a second, and reaches a half of the first.
WORK_OF_A_BYTE = 130
NUM_CAPS = 24


@dataclasses.dataclass(frozen=True)
class Choice:
    """Segments of a forward pass to compute again.

    Attributes:
      segments: the operations of each, in order.
      num_segments: the number of segments into which the whole pass was divided.
      kept_bytes: what is kept of the pass at the most, with what is computed again at a time.
      bytes_before: what is kept if nothing is computed again.
      work_again: the share of the forward pass that is computed again, between 0 and 1.
    """

    segments: list[list[tf.Operation]]
    num_segments: int
    kept_bytes: int
    bytes_before: int
    work_again: float


def least_memory(traced: Pass) -> Choice:
    """Returns the division whose whole recomputation needs the least memory."""
    return min(_Plan(traced).choices(), key=lambda each: (each.kept_bytes, each.work_again))


def within(traced: Pass, *, budget_bytes: int) -> Choice:
    """Returns the choice with the least to compute again that keeps at most so many bytes.

    If none does, it is the one that keeps the fewest.
    """
    choices = list(_Plan(traced).choices(budget_bytes=budget_bytes))
    fitting = [each for each in choices if each.kept_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda each: (each.work_again, each.kept_bytes))
    return min(choices, key=lambda each: (each.kept_bytes, each.work_again))


class _Plan:
    """What a forward pass keeps, and what each of its parts would."""

    def __init__(self, traced: Pass):
        self._traced = traced
        self._of_weights: dict[int, bool] = {}
        self._parts: dict[tuple[int, int], tuple[bool, float]] = {}
        self._place = {id(op): place for place, op in enumerate(traced.forward)}
        self._last_reader = self._last_readers()
        self._read = np.zeros(len(traced.forward) + 1)  # bytes that gradients read, by place
        for tensor in self._sources().values():
            self._read[self._place[id(tensor.op)] + 1] += bytes_of(tensor)
        self._read = np.cumsum(self._read)
        self._whole_work = sum(work(op) for op in traced.forward if self._is_activation(op)) or 1

    def _last_readers(self) -> dict[int, int]:
        """Returns the place of the last operation of the pass that reads a tensor, by its id."""
        found = {}
        for place, op in enumerate(self._traced.forward):
            for tensor in op.inputs:
                found[id(tensor)] = place
        return found

    def _is_activation(self, op: tf.Operation) -> bool:
        is_known = id(op) in self._place and not is_input(op)
        return is_known and not of_weights(op, self._of_weights)

    def _sources(self) -> dict[int, tf.Tensor]:
        """Returns the activations that are kept for gradients, by id."""
        found = {}
        for op in self._traced.backward:
            for tensor in op.inputs:
                if self._is_activation(tensor.op):
                    source = self._source(tensor)
                    found[id(source)] = source
        return found

    def _source(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor that a tensor is cheaply made of; a sum of two is one itself."""
        while tensor.op.type in CHEAP:
            large = [
                each
                for each in tensor.op.inputs
                if self._is_activation(each.op) and elements(each) >= elements(tensor)
            ]
            if len({id(each) for each in large}) != 1:
                break
            tensor = large[0]
        return tensor

    def choices(self, *, budget_bytes: int | None = None):
        """Yields choices for divisions into fewer and fewer segments.

        With a budget, segments stay as they are where it has room for what they keep.
        """
        cuts, bytes_in, entering = self._cuts()
        before = int(self._read[-1])
        seen = set()
        largest = max(bytes_in[i, i + 1] for i in range(len(cuts) - 1)) if len(cuts) > 1 else 0
        caps = np.geomspace(max(largest, 1), max(before, 1), NUM_CAPS)
        for cap in caps:
            path = tuple(_shortest(bytes_in, entering, cap * 1.000001))
            if path in seen:
                continue
            seen.add(path)
            pairs = list(itertools.pairwise(path))
            parts = [(cuts[i], cuts[j]) for i, j in pairs]
            kept = [float(bytes_in[pair]) for pair in pairs]
            enters = [float(entering[pair]) for pair in pairs]
            yield self._choice(parts, kept, enters, before, budget_bytes)

    def _cuts(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Returns where segments may begin and end, and what is between and across two such places.

        A cut at a place is before the operation of that place.
        """
        forward = self._traced.forward
        spans = []  # of activations: made at, last read at, bytes
        for place, op in enumerate(forward):
            if self._is_activation(op):
                for tensor in op.outputs:
                    if (last := self._last_reader.get(id(tensor), -1)) > place:
                        spans.append((place, last, bytes_of(tensor)))
        live = np.zeros(len(forward) + 1)
        for made, last, size in spans:
            live[made + 1] += size
            live[last + 1] -= size
        live = np.cumsum(live)
        # Of places with the same kept bytes before them, the one that the fewest bytes cross.
        inner = {}
        for place in range(1, len(forward)):
            key = self._read[place]
            if live[place] and (key not in inner or live[place] < live[inner[key]]):
                inner[key] = place
        inner = sorted(inner.values())
        cuts = [0, *inner, len(forward)]
        number = len(cuts)
        bytes_in, entering = np.zeros((number, number)), np.zeros((number, number))
        made = np.array([each[0] for each in spans] or [0])
        last = np.array([each[1] for each in spans] or [0])
        size = np.array([each[2] for each in spans] or [0.0])
        for j in range(1, number):
            crosses = (made < cuts[j]) & (last >= cuts[j])
            order = np.searchsorted(cuts, made[crosses], side="right") - 1
            by_start = np.bincount(order, weights=size[crosses], minlength=number)
            entering[:j, j] = np.cumsum(by_start[::-1])[::-1][:j]  # made at or after cut i
            bytes_in[:j, j] = self._read[cuts[j]] - self._read[cuts[:j]]
        return cuts, bytes_in, entering

    def _part(self, first: int, end: int) -> tuple[bool, float]:
        """Returns whether gradients read what a part computes, and the work to compute it again."""
        if (first, end) not in self._parts:  # divisions have parts in common
            own = Segment(self._traced.forward[first:end], self._traced.backward)
            self._parts[first, end] = bool(own.read), sum(map(work, own.copies()))
        return self._parts[first, end]

    def _choice(
        self,
        parts: list[tuple[int, int]],
        kept: list[float],
        leaves: list[float],
        before: int,
        budget_bytes: int | None,
    ) -> Choice:
        """Returns the choice to compute all parts again but the last, or what a budget needs.

        Args:
          parts: the places at which each part begins and ends.
          kept: the bytes that gradients read of each part.
          leaves: the bytes that each part makes and later parts read.
          before: the bytes of all parts that gradients read.
          budget_bytes: the bytes to be kept at the most.
        """
        found = [self._part(*each) for each in parts[:-1]]
        works = [each for _, each in found]
        gains = [each - own for each, own in zip(kept, leaves, strict=True)]
        by_gain = sorted(
            (index for index, (is_read, _) in enumerate(found) if is_read and gains[index] > 0),
            key=lambda index: -gains[index] / max(works[index], 1),
        )
        again = set() if budget_bytes is not None else set(by_gain)
        peak = _peak(kept, leaves, again)
        for index in by_gain if budget_bytes is not None else ():
            if peak <= budget_bytes:
                break
            again.add(index)
            peak = _peak(kept, leaves, again)
        return Choice(
            segments=[list(self._traced.forward[slice(*parts[index])]) for index in sorted(again)],
            num_segments=len(parts),
            kept_bytes=int(peak),
            bytes_before=before,
            work_again=sum(works[index] for index in again) / self._whole_work,
        )


def _peak(kept: list[float], leaves: list[float], again: set[int]) -> float:
    """Returns the most bytes that are kept while the gradients are computed, last part first."""
    held = [leaves[index] if index in again else kept[index] for index in range(len(kept))]
    sums = list(itertools.accumulate(held))
    return max(
        (each + (kept[index] if index in again else 0) for index, each in enumerate(sums)),
        default=0,
    )


def _shortest(bytes_in: np.ndarray, entering: np.ndarray, cap: float) -> list[int]:
    """Returns the cuts whose parts read at most `cap` bytes each, with the fewest across them."""
    number = len(bytes_in)
    best, previous = np.full(number, np.inf), np.zeros(number, int)
    best[0] = 0
    for j in range(1, number):
        costs = np.where(bytes_in[:j, j] <= cap, best[:j] + entering[:j, j], np.inf)
        if not np.isfinite(costs).any():  # one part is larger than the cap
            costs = best[:j] + entering[:j, j] + bytes_in[:j, j]
        previous[j] = int(np.argmin(costs))
        best[j] = costs[previous[j]]
    path = [number - 1]
    while path[-1]:
        path.append(int(previous[path[-1]]))
    return path[::-1]


def elements(tensor: tf.Tensor) -> int:
    """Returns the number of elements of a tensor, with 1 for each size that is not known."""
    if tensor.shape.rank is None:
        return 1
    return math.prod(1 if each is None else each for each in tensor.shape)


def bytes_of(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor, likewise."""
    return elements(tensor) * tensor.dtype.size


def work(op: tf.Operation) -> float:
    """Returns the time that an operation takes, in that of a byte that is read or written."""
    moved = 0 if op.type in CHEAP else sum(map(bytes_of, [*op.inputs, *op.outputs]))
    return moved + _multiplications(op) / WORK_OF_A_BYTE


def _multiplications(op: tf.Operation) -> float:
    """Returns twice the number of multiplications of a product or convolution."""
    if op.type in ("Conv2D", "DepthwiseConv2dNative", "Conv3D"):
        results, filters = elements(op.outputs[0]), elements(op.inputs[1])
        return 2 * results * filters / (op.inputs[1].shape[-1] or 1)
    if op.type in ("MatMul", "BatchMatMulV2", "Einsum", "XlaDotV2") and len(op.inputs) == 2:
        # Of (m, k) and (k, n): the root of m k times k n times m n.
        return 2 * math.sqrt(math.prod(map(elements, [*op.inputs, op.outputs[0]])))
    return 0.0
