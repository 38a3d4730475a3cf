"""The parts that `accumulation_steps` cuts a replica's batch into, and the sum of their results.

    sums = traced(run_part, batch, 4)          # one after the other, in a graph
    sums = compiled(run_part, batch, 4)        # the same, for XLA
    sums = side_by_side(run_part, batch, 4)    # joined where the step computes values

`run_part` returns a nest of tensors, and `sums` is the same nest. One after the other, only one
part is in memory. Side by side, a part waits wherever the step needs a value of all rows, such as
the mean loss, until every part is there. So the step computes what it would compute of the whole
batch. That takes more memory, because what a part needs behind such a place is kept meanwhile.
"""

import itertools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.replica import Replica
from tfaccel.step import lockstep


def num_rows(batch) -> int:
    """Returns the number of rows of a batch, including padding."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    rows = next(each for each in tf.nest.flatten(x) if each is not None).shape[0]
    if rows is None:
        raise UserError(
            "the number of rows of a batch is not known when the step is traced (a ragged "
            "tensor?); several replicas or accumulation need it: use a dense tensor"
        )
    return rows


def traced(run_part: Callable, batch, parts: int):
    """Sums `run_part` over the parts of a batch, one after the other: only one fits in memory."""
    sums = None
    for start, stop in _edges(batch, parts):
        if start == stop:
            continue
        rows = batch if parts == 1 else rows_from(batch, start, stop - start)
        if sums is None:
            sums = run_part(rows)
        else:
            with tf.control_dependencies(tf.nest.flatten(sums)):
                rows = tf.nest.map_structure(lambda x: None if x is None else tf.identity(x), rows)
            sums = tf.nest.map_structure(tf.add, sums, run_part(rows))
    return sums


def compiled(run_part: Callable, batch, parts: int):
    """Does the same in a loop. XLA compiles its body once and runs the equal parts one by one."""
    size = num_rows(batch) // parts
    if parts == 1 or size == 0:
        return run_part(batch)

    def body(index, sums):
        part = run_part(rows_from(batch, index * size, size))
        return index + 1, tf.nest.map_structure(tf.add, sums, part)

    first = run_part(rows_from(batch, 0, size))
    _, sums = tf.while_loop(lambda index, _: index < parts, body, [tf.constant(1), first])
    if size * parts < num_rows(batch):
        rest = run_part(rows_from(batch, size * parts, num_rows(batch) - size * parts))
        sums = tf.nest.map_structure(tf.add, sums, rest)
    return sums


def rows_from(batch, start, size: int):
    """Returns `size` rows of every tensor. XLA must know the size when it compiles, not `start`."""

    def cut(each):
        if each is None:
            return None
        if isinstance(each, tf.RaggedTensor):
            return each[start : start + size]
        rest = each.shape.rank - 1
        if isinstance(each, tf.SparseTensor):
            of_rows = tf.cast(each.dense_shape[1:], tf.int64)
            return tf.sparse.slice(
                each,
                tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(of_rows)], 0),
                tf.concat([[tf.cast(size, tf.int64)], of_rows], 0),
            )
        return tf.slice(each, [start, *[0] * rest], [size, *[-1] * rest])

    return tf.nest.map_structure(cut, batch)


def _edges(batch, parts: int) -> Iterator[tuple[int, int]]:
    """Yields the first row of each part, and the row behind its last one."""
    return itertools.pairwise(sizes_before(num_rows(batch), parts))


def sizes_before(rows: int, parts: int) -> list[int]:
    """Returns how many rows are before each part of some rows, and their number."""
    return [rows * index // parts for index in range(parts + 1)]


class Part:
    """One of the parts that are traced side by side.

    Attributes:
      num_rows_of_batch: of the whole batch of the replica; 1 if a row stands in for it.
    """

    def __init__(self, lane: lockstep.Lane, num_parts: int, num_rows_of_batch: int):
        """Takes the lane (tfaccel/step/lockstep.py) that traces the part."""
        self._lane, self._num_parts = lane, num_parts
        self.num_rows_of_batch = num_rows_of_batch

    def of(self, replica: Replica) -> Replica:
        """Returns the part as if it were a replica: one of all parts of all replicas."""
        index = replica.index * self._num_parts + self._lane.index
        return replica.like(index=index, num_replicas=replica.num_replicas * self._num_parts)

    def sizes(self, rows_of_all: list[int]) -> list[int]:
        """Returns the rows of all parts, given those of all replicas."""
        edges = (itertools.pairwise(sizes_before(each, self._num_parts)) for each in rows_of_all)
        return [stop - start for each in edges for start, stop in each]

    def sum(self, values: list[tf.Tensor], reduce: Callable) -> list[tf.Tensor]:
        """Returns the sums of the values of all parts, which `reduce` sums over the replicas."""
        of_all = self._lane.meet(values)
        sums = None
        if self._lane.index == 0:
            sums = reduce([tf.add_n(list(each)) for each in zip(*of_all, strict=True)])
        return self._lane.meet(sums)[0]

    def is_first_to_go_on(self) -> bool:
        """Waits for the other parts; returns True in one of them, which then acts for all."""
        self._lane.meet(None)
        return self._lane.index == 0

    def is_own(self, value) -> bool:
        """Returns False if a value that a step in Python assigns is the same in every part.

        In a graph, what the value is computed from tells that it is of the part's own rows.

        Raises:
          UserError: the parts have different values.
        """
        values = [each.numpy().tobytes() for each in self._lane.meet(tf.convert_to_tensor(value))]
        if any(each != values[0] for each in values):
            raise UserError(
                "with run_eagerly and accumulation_steps, the step assigns a variable a value that "
                "differs between the parts of the batch; set accumulation_steps=1 while the step "
                "runs eagerly, or assign a value of all rows, such as a mean over them"
            )
        return False

    def once(self, function: Callable | None) -> Callable | None:
        """Returns a function that every part calls, and that runs in one of them."""
        if function is None:
            return None
        return lambda *arguments: function(*arguments) if self.is_first_to_go_on() else None


def side_by_side(run_part: Callable, batch, parts: int):
    """Sums `run_part`, a function of a part, its number of rows and its Part, over all parts.

    A part without rows gets the batch's first row, and 0 as its number of rows.
    """

    def lane_of(start: int, stop: int) -> Callable:
        def run(lane: lockstep.Lane):
            part = rows_from(batch, start if stop > start else 0, max(stop - start, 1))
            return run_part(part, stop - start, Part(lane, parts, num_rows(batch)))

        return run

    results = lockstep.run([lane_of(*each) for each in _edges(batch, parts)])
    return tf.nest.map_structure(lambda *each: tf.add_n(each), *results)
