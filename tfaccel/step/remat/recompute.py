"""Computes parts of a traced forward pass again in the backward pass, to keep fewer activations.

    recompute = Recompute(choose, xla=True)
    gradient = recompute.around(tf.GradientTape.gradient)   # takes its place while a step is traced

A traced step is a graph. When its gradients have been added, some of their operations read
activations: tensors of the forward pass. For each segment of the forward pass that `choose` names,
the operations that lead to these tensors are copied, and the gradients read the copies. The copies
wait for the gradient that the segment's backward pass begins with: without XLA by a control
dependency, and with XLA, which has none, by a barrier, which this gradient passes together with
what enters the segment, the batch included. XLA begins what waits for nothing as early as it likes,
and computes it once if the forward pass has the same. So the gradient must come from what follows
the segment: that of a result which nothing reads is a constant. XLA also ends what nothing waits
for as late as it likes, and keeps what that is made of. So the gradients of weights that need
nothing of the segment pass the barrier, too.

This is what `tf.recompute_grad` and `jax.checkpoint` do to functions (Chen et al. 2016,
arXiv:1604.06174), done to operations. So layers need not be functions of tensors: random numbers
are those of the forward pass, because what they are made of is an input of the segment, and what a
layer assigns, such as batch norm's moving statistics, is assigned once.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from tfaccel.keras_internals.graph_copies import (
    copied,
    current_graph,
    give_input,
    is_copyable,
    is_persistent,
    modules_in_any_order,
)
from tfaccel.keras_internals.traced import OF_SHAPES
from tfaccel.keras_internals.xla_gradients import optimization_barrier

_HANDLES = (tf.resource, tf.variant, tf.string)  # a barrier does not hold them
_OF_FUNCTIONS = {"IdentityN"}  # with which functions with gradients of their own end


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a step has traced when its gradients are known.

    Attributes:
      forward: the operations before the gradients, in the order in which they were made.
      backward: those of the gradients.
    """

    forward: Sequence[tf.Operation]
    backward: Sequence[tf.Operation]


class Recompute:
    """Replaces activations that gradients read by copies that are computed in the backward pass."""

    def __init__(self, choose: Callable[[Pass], Sequence[Sequence[tf.Operation]]], *, xla: bool):
        """Takes what chooses.

        Args:
          choose: returns segments of the forward pass, each a list of operations, first ones first.
          xla: whether XLA compiles the step.
        """
        self._choose, self._xla = choose, xla
        self._depth = 0
        self._past: set[int] = set()  # the ids of operations of gradients and of copies
        self._waiting: dict[int, list[tf.Operation]] = {}  # copies, by the id of what they wait for

    def around(self, gradient: Callable) -> Callable:
        """Returns a replacement of `tf.GradientTape.gradient`.

        It leaves the gradients of a persistent tape, or of a tape within another gradient, as they
        are: more gradients may follow, of these gradients or of the same forward pass.
        """

        def compute(tape, *args, **kwargs):
            graph = current_graph()
            if graph is None or self._depth or is_persistent(tape):
                return gradient(tape, *args, **kwargs)
            before = graph.get_operations()
            self._depth += 1
            try:
                found = gradient(tape, *args, **kwargs)
            finally:
                self._depth -= 1
            made = graph.get_operations()[len(before) :]
            self._past.update(map(id, made))
            forward = [each for each in before if id(each) not in self._past]
            results = self._recompute(Pass(forward, made), tf.nest.flatten(found))
            return tf.nest.pack_sequence_as(found, results)

        return compute

    def _recompute(self, traced: Pass, results: list) -> list:
        """Replaces what gradients read; returns the results, each after a barrier with XLA."""
        waits_for: dict[int, tf.Tensor] = {}  # what a copy waits for, by the id of the copy
        places = _places(traced)
        chosen = self._choose(traced)
        _cut_unused(traced, results)
        modules_in_any_order(traced.backward)
        segments = [Segment(each, traced.backward) for each in chosen]
        passed: dict[int, tf.Tensor] = {}  # results after their barrier, by their ids before it
        while segments:
            own = segments[-1]
            needing = self._needing(own.inner.values())
            if (start := own.start(needing, waits_for, places)) is not None:
                ready = []
                if self._xla:
                    later = [each for segment in segments for each in segment.inner.values()]
                    needing = self._needing([start, *later])
                    unpassed = [each for each in results if id(each) not in passed]
                    ready = [each for each in _arrays(unpassed) if id(each) not in needing]
                    ready = [each for each in ready if id(each.op) in self._past]
                made, held = own.replace(start, ready, xla=self._xla)
                passed |= zip(map(id, ready), held, strict=True)
                waits_for |= {id(each): start for each in made}
                self._waiting.setdefault(id(start.op), []).extend(made)
                self._past.update(map(id, made))
            segments.pop()
        return [passed.get(id(each), each) for each in results]

    def _needing(self, tensors: Iterable[tf.Tensor]) -> set[int]:
        """Returns the ids of `tensors`, and of what gradients and copies make of them."""
        waiting, seen = list(tensors), set()
        found = set(map(id, waiting))
        while waiting:
            readers = waiting.pop().consumers()
            while readers:
                op = readers.pop()
                if id(op) in self._past and id(op) not in seen:
                    seen.add(id(op))
                    found.update(map(id, op.outputs))
                    waiting += op.outputs
                    readers += self._waiting.get(id(op), ())
        return found


@dataclasses.dataclass(frozen=True)
class _Read:
    """An operation's input."""

    reader: tf.Operation
    index: int

    @property
    def tensor(self) -> tf.Tensor:
        return self.reader.inputs[self.index]


class Segment:
    """Operations of the forward pass, and what gradients read of what they compute.

    Attributes:
      inner: the tensors that only these operations and gradients read, by their ids. They can be
        computed again.
      read: those of them that gradients read.
    """

    def __init__(self, segment: Sequence[tf.Operation], backward: Sequence[tf.Operation]):
        """Takes the segment's operations, and those of the gradients."""
        self._segment, self._backward = segment, backward
        self._of_gradients = {id(each) for each in backward}
        self._of_weights: dict[int, bool] = {}
        may_read = self._of_gradients | {id(each) for each in segment}
        self.inner = {
            id(tensor): tensor
            for op in segment
            if is_copyable(op) and not of_weights(op, self._of_weights)
            for tensor in op.outputs
            if all(id(each) in may_read for each in tensor.consumers())
        }
        self._reads = [
            _Read(op, index)
            for op in backward
            for index, tensor in enumerate(op.inputs)
            if id(tensor) in self.inner
        ]
        self.read = {id(each.tensor): each.tensor for each in self._reads}

    def start(
        self, needing: set[int], waits_for: dict[int, tf.Tensor], places: dict[int, int]
    ) -> tf.Tensor | None:
        """Returns the gradient with which the backward pass of the segment begins; None without it.

        It needs nothing of the segment, so what enters the segment can wait for it. Of several, it
        is the first that needs what follows the segment in the forward pass.

        Args:
          needing: the ids of the tensors that need something of the segment.
          waits_for: what copies of other segments wait for, by the id of the copy.
          places: of the last operation of the forward pass that a tensor is made of, by its id.
        """
        end = max(places[id(each)] for op in self._segment for each in op.outputs)
        found, found_place = None, -2
        for op in self._backward:
            if op.type in _OF_FUNCTIONS or not (op.outputs and id(op.outputs[0]) in needing):
                continue
            for tensor in op.inputs:
                source = waits_for.get(id(tensor.op), tensor)
                is_gradient = source is tensor or tensor is tensor.op.outputs[-1]  # of a barrier
                if not is_gradient or id(source.op) not in self._of_gradients:
                    continue
                is_array = tensor.shape.rank != 0 and tensor.dtype not in _HANDLES
                if is_array and id(source) not in needing and places[id(source)] > found_place:
                    found, found_place = tensor, places[id(source)]
            if found_place > end:
                break
        return found

    def replace(
        self, start: tf.Tensor, ready: Sequence[tf.Tensor], *, xla: bool
    ) -> tuple[list[tf.Operation], list[tf.Tensor]]:
        """Makes the gradients read copies.

        Args:
          start: what the copies wait for.
          ready: with XLA, what they wait for, too.
          xla: whether XLA compiles the step.

        Returns:
          The operations that were made, and those that are `ready` after the wait.
        """
        entering, order = self._to_copy()
        known, made, after, passed = {}, [], [] if xla else [start.op], list(ready)
        if xla:
            readers = self._readers(start)
            (*held, gradient), made = _held([*entering, *ready, start])
            for each in readers:  # XLA takes from a barrier what nothing needs
                give_input(each.reader, each.index, gradient)
            passed = held[len(entering) :]
            known = dict(zip(map(id, entering), held[: len(entering)], strict=True))
        for op in order:
            copy = copied(op, [known.get(id(each), each) for each in op.inputs], after=after)
            made.append(copy)
            pairs = zip(op.outputs, copy.outputs, strict=True)
            known |= {id(each): own for each, own in pairs if id(each) in self.inner}
        for each in self._reads:
            give_input(each.reader, each.index, known[id(each.tensor)])
        return made, passed

    def _readers(self, tensor: tf.Tensor) -> list[_Read]:
        """Returns where gradients read a tensor."""
        return [
            _Read(op, index)
            for op in {id(each): each for each in tensor.consumers()}.values()
            if id(op) in self._of_gradients
            for index, each in enumerate(op.inputs)
            if each is tensor
        ]

    def copies(self) -> list[tf.Operation]:
        """Returns the operations that are copied, in their order."""
        return self._to_copy()[1]

    def _to_copy(self) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        """Returns the tensors that the copies read and do not make, and what is copied."""
        entering, found = {}, set()
        waiting = [each.op for each in self.read.values()]
        while waiting:
            op = waiting.pop()
            if id(op) in found:
                continue
            found.add(id(op))
            for tensor in op.inputs:
                if id(tensor) in self.inner:
                    waiting.append(tensor.op)
                elif _can_be_held(tensor) and not of_weights(tensor.op, self._of_weights):
                    entering[id(tensor)] = tensor
        return list(entering.values()), [each for each in self._segment if id(each) in found]


def _cut_unused(traced: Pass, results: Sequence) -> None:
    """Takes from the ends of functions with gradients of their own what they only pass on.

    Beside gradients they pass on what the function was given, which nothing reads. They would wait
    for copies of it, and the copies may wait for one of these gradients. So they get a gradient of
    the same shape in its place.
    """
    of_gradients = {id(each) for each in traced.backward}
    used = set(map(id, results))
    for op in traced.backward:
        if op.type not in _OF_FUNCTIONS:
            continue
        gradients = [each for each in op.inputs if id(each.op) in of_gradients]
        for index, (given, passed) in enumerate(zip(op.inputs, op.outputs, strict=True)):
            if id(given.op) in of_gradients or id(passed) in used or passed.consumers():
                continue
            for each in gradients:  # any will do
                if each.dtype == given.dtype and each.shape.is_compatible_with(given.shape):
                    give_input(op, index, each)
                    break


def _arrays(results: Sequence) -> list[tf.Tensor]:
    """Returns the results that may pass a barrier, each once."""
    tensors = {id(each): each for each in results if isinstance(each, tf.Tensor)}
    return [each for each in tensors.values() if _can_be_held(each)]


def _can_be_held(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may pass a barrier.

    A whole number, such as the counter of a loop, may become a position or a size. TensorFlow has
    to know these when it hands the program to XLA, and sees no further than a barrier.
    """
    is_number = tensor.shape.rank == 0 and tensor.dtype.is_integer
    return tensor.dtype not in _HANDLES and not is_number


def _places(traced: Pass) -> dict[int, int]:
    """Returns the place of the last operation of the forward pass that each tensor is made of.

    It is -1 for a gradient that is made of none, and the places are by the tensors' ids.
    """
    found = {id(own): place for place, op in enumerate(traced.forward) for own in op.outputs}
    for op in traced.backward:
        made_of = () if op.type in OF_SHAPES else op.inputs
        places = [found.get(id(each), -1) for each in made_of]
        if op.type not in _OF_FUNCTIONS:
            places = [max(places, default=-1)] * len(op.outputs)
        found |= zip(map(id, op.outputs), places, strict=True)
    return found


def _held(tensors: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Returns the tensors as known together, and the operations made for that."""
    graph = tensors[0].graph
    before = len(graph.get_operations())
    with graph.as_default(), graph.control_dependencies(None), tf.name_scope("recomputed/"):
        held = optimization_barrier(*tensors)
    return list(held), graph.get_operations()[before:]


def of_weights(op: tf.Operation, known: dict[int, bool]) -> bool:
    """Returns whether an operation computes from constants and variables alone.

    Args:
      op: an operation of a traced function.
      known: the answers so far, by the id of the operation.
    """
    waiting = [op]
    while waiting:
        each = waiting[-1]
        if id(each) not in known:
            if each.type in ("Const", "ReadVariableOp"):
                known[id(each)] = True
            elif not each.inputs:
                known[id(each)] = False
            elif unknown := [own.op for own in each.inputs if id(own.op) not in known]:
                waiting.extend(unknown)
                continue
            else:
                known[id(each)] = all(known[id(own.op)] for own in each.inputs)
        waiting.pop()
    return known[id(op)]
