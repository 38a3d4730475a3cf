"""Makes a step of the model's own compute, on each replica, what one device computes.

Each replica runs the step on its own rows, so a sum over rows is only a part of the sum that the
step means. While the step is traced, the replicas' values are joined where the step computes them.
The code behind such a place continues with the value of one device:

  - A reduction over rows (a sum, a mean, a product that sums over rows, ...) covers the rows of all
    replicas. A number of rows that the step divides by is the number of all rows.
  - `tape.gradient` with respect to weights returns the gradient of the loss of all rows.
  - `apply_gradients` updates the weights where the step calls it.
  - The collectives of tfaccel and of `tf.distribute` join the replicas.

    plan = planned(model, step, replica, batch, within=True)   # traces the step twice
    rows = Rows(replica, plan, batch, num_rows=6, weight=6.0, reduce=..., rows_of_all=[6, 6])
    with handled_by(rows, model):
        logs = step(batch)

Which axes of a tensor are rows? The plan knows (tfaccel/step/row_plan.py).

Why the gradients are right: the replicas differentiate J, the sum over replicas of share * loss.
The shares of all replicas add up to 1. The gradient of a sum over replicas is the sum over replicas
of the gradients. If every replica has the loss of all rows, J is that loss. If each has the mean of
its own rows, J is the mean of all rows, because a replica's share is its part of all rows.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals import own_gradients, row_operations
from tfaccel.keras_internals.replica import InXla, Replica
from tfaccel.step import compared_rows
from tfaccel.step.in_xla import NotInXlaError
from tfaccel.step.planned_calls import PlannedCalls
from tfaccel.step.row_handler import NEUTRAL, OWN, SAME, Handler
from tfaccel.step.row_plan import NUMBERS, OfRows, Plan, by_size, shape_of


class Rows(Handler):
    """The rows of one replica, as a part of the rows of all replicas, while a step is traced."""

    def __init__(
        self,
        replica: Replica,
        plan: Plan,
        batch,
        *,
        num_rows: int,
        weight: float | tf.Tensor,
        reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        rows_of_all: Sequence[int] | None,
        reduces_rows: bool = True,
        gradients_as: str | None = None,
        joins_in_loops: bool = False,
        merges_results: bool = False,
    ):
        """Adds up the replicas' numbers of rows, which the step's values are joined by.

        Args:
          replica: the replica.
          plan: the plan of the step.
          batch: the replica's batch, or the row that stands in if it has none.
          num_rows: the number of rows that the replica has, padding included; may be 0.
          weight: the number of rows that count, in any unit.
          reduce: sums tensors over the replicas.
          rows_of_all: the number of rows of each replica; None if it is known only when the step
            runs.
          reduces_rows: whether a reduction over rows covers the rows of all replicas.
          gradients_as: the dtype in which gradients are sent; None for their own dtype.
          joins_in_loops: whether `reduce` works in a `tf.while_loop`.
          merges_results: whether the result of a metric is that of all rows where the step asks for
            it (tfaccel/step/merged_results.py).
        """
        self.merges_results = merges_results
        reduces_rows = reduces_rows and not plan.reduces_itself
        super().__init__(replica, replica.num_replicas, reduces_rows=reduces_rows)
        self._compared = plan.compared
        self._reduce_outside, self._gradients_as, self._num_rows = reduce, gradients_as, num_rows
        self._calls, self._by_size = PlannedCalls(plan.calls or ()), plan.calls is None
        self._joins_in_loops, self._sections = joins_in_loops, []
        self._traced = max(num_rows, 1)  # one row stands in for none
        self._rows_of_all = rows_of_all
        own = tf.stack([tf.cast(weight, tf.float32), tf.constant(num_rows, tf.float32)])
        (total,) = reduce([own])
        self._share = tf.math.divide_no_nan(own[0], total[0])
        self._rows = total[1] / self._traced
        self._graph = tf.compat.v1.get_default_graph()
        self._kept = tf.nest.flatten(batch, expand_composites=True)
        self._depends = {id(each): True for each in self._kept}  # on the replica's own rows

    def rows(self) -> tf.Tensor:
        """Returns the number of rows of all replicas, as a multiple of this replica's."""
        return self._rows

    def compares(self) -> None:
        """Says that the step compares own rows, unless its plan has told."""
        if not any(each.kind == compared_rows.PAIRS for each in self._compared):
            self._compared.append(compared_rows.UNKNOWN)
            compared_rows.say([compared_rows.UNKNOWN], set())

    def tags(self, kind: str, sizes: Sequence) -> tuple[str, ...]:
        """Returns what each size of this call is: what the plan says, or its size."""
        if not self._by_size:
            if tf.executing_eagerly():  # `number` does not find all planned numbers without rows
                self._calls.pass_over(kind, lambda own, tags: own in NUMBERS and tags == (SAME,))
            tags = self._calls.take(kind, len(sizes))
            if tags is not None:
                return tags
            self._leave_plan(kind)
        return tuple(self._tag(kind, *each) for each in enumerate(sizes))

    def number(self, kind: str, numbers: Sequence[float | None]) -> int | None:
        """Returns the index of the number that was known when the plan was traced; else None.

        In Python every number is known, so the planned one is found by its kind and its value.
        """
        if not tf.executing_eagerly():
            return super().number(kind, numbers)
        if self._by_size:
            is_one = [each is not None and self._tag(kind, 0, each) != SAME for each in numbers]
        else:
            planned = self._calls.following()
            is_one = [
                planned and (planned[0], planned.sizes[:1]) == (kind, (each,)) for each in numbers
            ]
        return max((index for index, each in enumerate(is_one) if each), default=None)

    def _leave_plan(self, kind: str) -> None:
        planned = self._calls.following()
        by_size(f"{kind} follows where the plan has {planned and planned[0]}")
        self._by_size = True

    @contextlib.contextmanager
    def section(self, kind: str, number: int | None = 0) -> Iterator[None]:
        """Joins nothing in a loop that has a round for each row."""
        with contextlib.ExitStack() as contexts:
            tags = None
            if not self._by_size:
                is_part = kind not in ("loop", "branches")
                tags = contexts.enter_context(self._calls.section(kind, is_part=is_part))
                if tags is None:
                    self._leave_plan(kind)
            is_own = number == self._traced if tags is None else OWN in tags
            if kind == "loop" and is_own:
                contexts.enter_context(row_operations.noticing_nothing())
            self._sections.append(kind)
            yield
            self._sections.pop()

    def _reduce(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        if "loop" in self._sections and not self._joins_in_loops:
            raise UserError(
                "the step joins values of all replicas in a tf.while_loop or tf.map_fn, where a "
                "replica may not wait for another; use a loop of Python, or compute the values "
                "before it"
            )
        return self._reduce_outside(values)

    def _tag(self, kind: str, index: int, size) -> str:
        """Returns what a size probably is, if the plan does not tell."""
        if kind in NUMBERS:
            rows = self._traced
            is_inverse = size == 1 / rows and rows > 1
            return OfRows(rows, is_inverse) if is_inverse or size == rows else SAME
        is_multiple = size is None or (size > 0 and size % self._traced == 0)
        return OWN if index == 0 and is_multiple else SAME

    def own_gradients(self) -> contextlib.AbstractContextManager:
        """Returns a context in which the user's custom gradients may not mix rows."""
        if not self.reduces_rows:
            return contextlib.nullcontext()
        return own_gradients.rows_kept_apart(self._traced)

    # Joins.

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' values, with its gradient."""
        return self._sums([value])[0]

    def _sums(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of the replicas' values. A replica without rows adds zeros."""

        @tf.custom_gradient
        def summed(*values):
            def gradient(*upstream):
                return self._sums(list(upstream))

            own = values if self._num_rows else [tf.zeros_like(each) for each in values]
            return self._reduce(list(own)), gradient

        return [self._joined(each) for each in summed(*values)]

    def totals(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of the replicas' states. A replica without rows has one, too."""
        return [self._joined(each) for each in self._reduce(values)]

    def mean_by_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the mean of the replicas' values, weighted by their rows."""
        share = tf.cast(self._share, value.dtype)
        own = tf.where(share > 0, share * value, tf.zeros_like(value))
        return self.totals([own])[0]

    def all_rows(self, rows: tf.Tensor, times: int | None) -> tf.Tensor:
        """Returns the rows of all replicas; `times` are for each row of a batch, if known."""
        if times is not None and self._rows_of_all is not None:
            sizes = [times * each for each in self._rows_of_all]
        else:
            sizes = self._sizes_now(rows, 0)
        return self._joined(self._placed(rows, 0, sizes))

    def stacked(self, value: tf.Tensor, kind: str) -> tf.Tensor:
        """Returns the replicas' values, [replicas, ...]."""
        if not self._num_rows:
            neutral = tf.cast(NEUTRAL[kind](value.dtype), value.dtype)
            value = _instead(value, tf.fill(tf.shape(value), neutral))
        return self._joined(self._placed(value[tf.newaxis], 0, [1] * self.num_replicas))

    def all_gather(self, value, axis: int = 0) -> tf.Tensor:
        """Returns the replicas' values, concatenated in the order of their ranks."""
        value = tf.convert_to_tensor(value)
        (tag,) = self.tags("gather", [value.shape[axis]])
        axis %= value.shape.rank
        size = value.shape[axis]
        if tag == OWN and not self._num_rows:  # without the row that stands in
            value = tf.gather(value, tf.zeros([0], tf.int32), axis=axis)
        return self._joined(self._placed(value, axis, self._sizes(value, axis, size, tag)))

    def _sizes(self, value: tf.Tensor, axis: int, size: int | None, tag: str):
        """Returns the size of each replica's value along an axis, a list or a tensor."""
        if size is not None and tag != OWN:
            return [size] * self.num_replicas
        is_known = size is not None and not tf.executing_eagerly()  # no mask has chosen rows
        if is_known and self._rows_of_all is not None:
            return [size * rows // self._traced for rows in self._rows_of_all]
        return self._sizes_now(value, axis)

    def _sizes_now(self, value: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns the size of each replica's value along an axis, known when the step runs."""
        own = tf.one_hot(self.rank, self.num_replicas, dtype=tf.int64)
        (sizes,) = self._reduce([own * tf.shape(value, tf.int64)[axis]])
        return sizes

    def _placed(self, value: tf.Tensor, axis: int, sizes) -> tf.Tensor:
        """Returns the replicas' values one behind the other: their sum, each at its place.

        A sum is what XLA, TensorFlow and every gradient can do.
        """
        before, behind = _total(sizes[: self.rank]), _total(sizes[self.rank + 1 :])
        paddings = [[0, 0]] * value.shape.rank
        paddings[axis] = [before, behind]
        return self._added(tf.pad(value, paddings))

    def broadcast(self, value, root_rank: int) -> tf.Tensor:
        """Returns the value of one replica."""
        value = tf.convert_to_tensor(value)
        if self.rank != root_rank:
            zeros = tf.zeros_like(value)  # x + -0.0 is x for every float x, -0.0 included
            value = _instead(value, -zeros if value.dtype.is_floating else zeros)
        return self._joined(self._added(value))

    def _added(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of tensors of any dtype, those of replicas without rows included."""
        dtype = value.dtype
        sent = tf.cast(value, tf.int64) if dtype.is_bool or dtype.is_integer else value

        @tf.custom_gradient
        def summed(each):
            return self._reduce([each])[0], lambda upstream: self._reduce([upstream])[0]

        return tf.cast(summed(sent), dtype)

    # Gradients.

    def gradient(self, direct: Callable, target, sources, output_gradients):
        """Returns gradients: of weights, those of the loss of all rows."""
        targets, flat = tf.nest.flatten(target), tf.nest.flatten(sources)
        given = [None] * len(targets)
        if output_gradients is not None:
            given = tf.nest.flatten(output_gradients)
        target_tags = [self.tags("target", shape_of(each)) for each in targets]
        source_tags = [
            self.tags("source", shape_of(each) if isinstance(each, tf.Tensor) else ())
            for each in flat
        ]
        seeds = list(map(self._seed, targets, target_tags, given))
        found = tf.nest.flatten(direct(tf.nest.pack_sequence_as(target, seeds)))
        pairs = list(zip(found, source_tags, strict=True))
        joined = self._of_all([None if OWN in tags else each for each, tags in pairs])
        found = [old if new is None else new for new, old in zip(joined, found, strict=True)]
        return tf.nest.pack_sequence_as(sources, found)

    def _seed(self, target, tags: tuple[str, ...], given):
        """Returns the gradient of J with respect to a target: see the top of the module."""
        if not isinstance(target, tf.Tensor) or not target.dtype.is_floating:
            return given
        seed = tf.ones_like(target) if given is None else given
        if OWN in tags:  # the sum of all rows' values is differentiated, as on one device
            return seed if self._num_rows else tf.zeros_like(seed)
        return seed * tf.cast(self._share, target.dtype)

    def _of_all(self, gradients: list) -> list:
        """Returns the sums over replicas of gradients, in one collective for each dtype."""
        sums = [None] * len(gradients)
        # Slices become dense: a GPU adds up repeated ids in any order, so replicas would differ.
        given = [(index, each) for index, each in enumerate(gradients) if each is not None]
        dense = {index: tf.convert_to_tensor(each) for index, each in given}
        for dtype in sorted({each.dtype for each in dense.values()}, key=str):
            members = [index for index, each in dense.items() if each.dtype == dtype]
            flat = [tf.reshape(dense[index], [-1]) for index in members]
            sent = tf.concat(flat, axis=0)
            (total,) = self._sums([tf.cast(sent, self._gradients_as or dtype)])
            sizes = [dense[index].shape.num_elements() for index in members]
            parts = tf.split(tf.cast(total, dtype), sizes)
            for index, part in zip(members, parts, strict=True):
                sums[index] = self._joined(tf.reshape(part, dense[index].shape))
        return sums

    # Which values are equal on all replicas.

    def _joined(self, value: tf.Tensor) -> tf.Tensor:
        self._depends[id(value)] = False
        self._kept.append(value)
        return value

    def is_own(self, value) -> bool:
        """Returns whether a traced value depends on the replica's own rows or random numbers.

        Such a value differs between the replicas; any other one is equal on all. Without a graph
        this is not known, and the answer is True.
        """
        if tf.executing_eagerly():
            return True
        asked = tf.convert_to_tensor(value)
        waiting = [asked]
        while waiting:
            tensor = waiting[-1]
            inputs = None if id(tensor) in self._depends else self._inputs(tensor)
            if inputs is None or inputs is True:
                self._depends.setdefault(id(tensor), inputs is True)
                waiting.pop()
                continue
            unknown = [each for each in inputs if id(each) not in self._depends]
            if any(self._depends.get(id(each)) for each in inputs) or not unknown:
                self._depends[id(tensor)] = any(self._depends.get(id(each)) for each in inputs)
                waiting.pop()
            else:
                waiting += unknown
            self._kept.append(tensor)
        return self._depends[id(asked)]

    def _inputs(self, tensor: tf.Tensor):
        """Returns the tensors that a tensor is computed from; True if it differs by itself."""
        if hasattr(tensor, "numpy"):
            return []  # a value that is known when traced
        if "Random" in tensor.op.type:
            return True
        if tensor.op.type != "Placeholder":
            return list(tensor.op.inputs)
        graph = tensor.graph
        outer = [own for own, inner in getattr(graph, "captures", ()) if inner is tensor]
        if outer:
            return outer if graph is not self._graph else []
        return [] if graph is self._graph else True


def _instead(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns another value, with a gradient of zero to `value`.

    All replicas must have the same path of gradients, because the gradient of a sum over replicas
    is one, too.
    """
    return tf.where(tf.zeros_like(value, tf.bool), value, other)


def _total(sizes) -> int | tf.Tensor:
    return tf.reduce_sum(sizes) if tf.is_tensor(sizes) else sum(sizes)


def reduced(
    replica: Replica, values: list[tf.Tensor], *, collectives: InXla | None
) -> list[tf.Tensor]:
    """Returns the sums over the replicas of tensors, within a step."""
    if replica.num_replicas == 1:
        return values
    if collectives is not None:
        if not collectives.is_possible:
            raise NotInXlaError("a branch or a loop of the step joins values of all replicas")
        return collectives.all_reduce(values)
    sums = []
    for each in values:
        if each.shape.num_elements() == 0:  # ends the process in TensorFlow 2.21
            sums.append(each)
            continue
        small = each.dtype.is_integer and each.dtype not in (tf.int32, tf.int64)
        sent = tf.int64 if small else tf.float32 if each.dtype == tf.bfloat16 else each.dtype
        sums.append(tf.cast(replica.all_reduce(tf.cast(each, sent)), each.dtype))
    return sums
