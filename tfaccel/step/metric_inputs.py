"""What the `update_state` of metrics gets, on its way from one replica's pass to all replicas.

`Inputs` takes the arguments of a call during the pass, and puts other objects in their place. After
the replicas have exchanged what they stand for, it gives the arguments of all rows.

    inputs = Inputs(replica, has_rows=True, xla=False)
    inputs.begin_part(num_rows, weight)
    kept = inputs.kept(metric, (args, kwargs))     # in each part the same calls, in the same order
    args, kwargs = inputs.found(kept, numbers=sums_of_numbers, gathered=rows_of_all)

Tensors are taken for rows and are gathered. A single float is taken for a mean over the rows, and a
single whole number for a count. All else is the same on every replica.
"""

import dataclasses
import logging
from collections.abc import Sequence

import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.reductions import mask_of, with_mask
from tfaccel.keras_internals.replica import Replica
from tfaccel.step.in_xla import NotInXlaError

log = logging.getLogger("tfaccel")

SAME = "same"  # stands for the rows of a tensor that is equal on all replicas


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A tensor that is gathered: its place among those, its dtype, and its mask."""

    index: int
    dtype: tf.DType
    mask: "_Rows | None" = None


@dataclasses.dataclass(frozen=True)
class _Ragged:
    """A ragged tensor: its values and the lengths of its rows."""

    values: "_Rows | _Ragged"
    lengths: _Rows


@dataclasses.dataclass(frozen=True)
class _Number:
    """A single number: its place among those, and that of its weight; no weight for a count."""

    index: int
    weight: int | None
    dtype: tf.DType


class Inputs:
    """The arguments that one replica keeps.

    Attributes:
      is_own: whether a value differs between the replicas; None if that is not known. A value that
        does not differ is neither gathered nor added up.
      has_rows: False if a row stands in for a batch or a part without rows. It does not count.
      numbers: of the part, single numbers, times its weight, and the weight. They are to be summed
        over the parts and the replicas.
    """

    def __init__(self, replica: Replica, *, has_rows: bool, xla: bool):
        """Starts a pass.

        Args:
          replica: the replica of the pass.
          has_rows: False if a row stands in for a batch without rows. It does not count.
          xla: whether XLA compiles the pass.
        """
        self.is_own, self.has_rows = None, has_rows
        self._replica, self._xla = replica, xla
        self._sent, self._rows_per_row = [], []  # a list of the parts' rows, for each tensor
        self.begin_part(None, None)

    def begin_part(self, num_rows: int | None, weight) -> None:
        """Begins a part of the batch, of so many rows and of this weight: its rows, in any unit."""
        self._num_rows, self._weight, self._weight_index = num_rows, weight, None
        self.numbers, self._num_sent, self._own = [], 0, []
        self._known = {}  # what stands for a tensor that several metrics get, by id, and the tensor

    def of_part(self) -> list[tuple]:
        """Returns the places of what a part has for itself."""
        names = ("is_own", "has_rows", "numbers", "_num_rows", "_weight", "_weight_index")
        return [(self, each) for each in (*names, "_num_sent", "_known", "_own")]

    def kept(self, metric, arguments):
        """Keeps the arguments of a call; returns the same nest of what stands for them."""
        return tf.nest.map_structure(lambda each: self._send(metric, each), arguments)

    def _send(self, metric, leaf):
        """Keeps an argument of `update_state`; returns what stands for it."""
        if not isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
            return leaf
        if hasattr(leaf, "numpy") and not tf.executing_eagerly():
            # It was made outside the step, so it is the same on every replica.
            return leaf
        if isinstance(leaf, tf.RaggedTensor):
            values = self._send_rows(metric, leaf.values, per_row=False)
            return _Ragged(values, self._send_rows(metric, leaf.row_lengths()))
        if isinstance(leaf, tf.SparseTensor) or leaf.dtype == tf.string:
            kind = "a SparseTensor" if isinstance(leaf, tf.SparseTensor) else "strings"
            raise UserError(
                f"update_state of the metric {metric.name} gets {kind}, which replicas cannot "
                "exchange; expected dense numbers: convert them before, or give the metric "
                "merge_state = 'sum', 'max' or 'min', or a method merge_state(self, metrics)"
            )
        if leaf.shape.rank == 0:
            self._warn_of_number(metric, leaf)
            return self.kept_number(leaf)
        if id(leaf) not in self._known:
            self._known[id(leaf)] = self._send_rows(metric, leaf), leaf
        return self._known[id(leaf)][0]

    def _send_rows(self, metric, value, *, per_row: bool = True):
        if isinstance(value, tf.RaggedTensor):
            inner = self._send_rows(metric, value.values, per_row=False)
            return _Ragged(inner, self._send_rows(metric, value.row_lengths(), per_row=False))
        if not self._differs(value):
            return self._send_same(value)
        size = value.shape[0]
        if size is None and self._xla:
            raise NotInXlaError(
                f"the metric {metric.name} gets a number of rows that is not known before"
            )
        mask = mask_of(value)
        mask = None if mask is None else self._send_rows(metric, mask)
        is_known = per_row and size is not None and self._num_rows
        times = size // self._num_rows if is_known else None
        is_first = self._num_sent == len(self._sent)
        is_alike = is_first or self._rows_per_row[self._num_sent] == times
        if not is_alike or (is_known and size % self._num_rows):
            raise UserError(
                f"update_state of the metric {metric.name} gets a tensor of shape {value.shape} "
                f"for {self._num_rows} rows; with several replicas its first axis must be rows: "
                "pass rows, or give the metric merge_state = 'sum', 'max' or 'min', or a method "
                "merge_state(self, metrics)"
            )
        rows = value if self.has_rows else value[:0]
        return _Rows(self._append(rows, times), value.dtype, mask)

    def _append(self, value: tf.Tensor, times) -> int:
        """Keeps rows behind those of the earlier parts; returns their place."""
        place = self._num_sent
        self._num_sent += 1
        self._own.append(tf.cast(value, _sent_as(value.dtype)))
        if place == len(self._sent):
            self._sent.append([])
            self._rows_per_row.append(times)
        if times != SAME or not self._sent[place]:
            self._sent[place].append(self._own[place])
        return place

    def _differs(self, value) -> bool:
        return self.is_own is None or self.is_own(value)

    def _send_same(self, value: tf.Tensor) -> _Rows:
        """Keeps a tensor that is equal on all replicas: the first one's is taken."""
        return _Rows(self._append(value, SAME), value.dtype)

    def kept_number(self, value: tf.Tensor) -> _Number:
        """Keeps a single number; returns what stands for it."""
        is_whole = not value.dtype.is_floating
        counts = is_whole and self._differs(value)
        dtype = tf.float64 if is_whole or value.dtype == tf.float64 else tf.float32
        number = tf.cast(value, dtype)
        if not counts and self._weight_index is None:
            self._weight_index = len(self.numbers)
            self.numbers.append(tf.cast(self._weight if self.has_rows else 0.0, tf.float32))
        if counts:
            number = number if self.has_rows else tf.zeros_like(number)
        else:
            weight = tf.cast(self.numbers[self._weight_index], dtype)
            # A weight of 0 gives 0, even for NaN.
            number = tf.where(weight > 0, number * weight, tf.zeros_like(number))
        self.numbers.append(number)
        return _Number(len(self.numbers) - 1, None if counts else self._weight_index, value.dtype)

    def _warn_of_number(self, metric, value: tf.Tensor) -> None:
        if self._replica.local_index > 0:
            return
        taken_as = "a mean over rows" if value.dtype.is_floating else "a count, which is added up"
        log.warning(
            "step: update_state of the metric %s gets one number for all rows. It is taken as %s, "
            "so that several replicas make one. If it is something else, pass the rows",
            metric.name,
            taken_as,
        )

    def take_sent(self) -> list[tf.Tensor]:
        """Returns the rows to be gathered, and forgets them."""
        sent, self._sent = self._sent, []
        self.begin_part(None, None)  # lets go of the graph
        return [each[0] if len(each) == 1 else tf.concat(each, axis=0) for each in sent]

    def gathered_now(self, merging) -> list[tf.Tensor]:
        """Returns the rows of all replicas that the part has got so far, before the pass ends.

        Args:
          merging: the MergedResults of the part.
        """
        kept = zip(self._own, self._rows_per_row, strict=False)
        return [each if times == SAME else merging.gathered(each, times) for each, times in kept]

    def gathered(self, sent: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the rows of all replicas, outside XLA."""
        is_first = self._replica.index == 0
        sent = [
            each[:0] if times == SAME and not is_first else each
            for each, times in zip(sent, self._rows_per_row, strict=True)
        ]
        found = [self._replica.all_gather(each) for each in sent]
        for own, each in zip(sent, found, strict=True):
            each.set_shape([None, *own.shape[1:]])
        return found

    def in_place(self, sent: list[tf.Tensor], rows: Sequence[int]) -> list[tf.Tensor]:
        """Returns this replica's rows in their place among zeros: their sum has all rows.

        XLA has no gathering of different numbers of rows.

        Args:
          sent: from `take_sent`.
          rows: the rows of each replica's batch.
        """
        own = self._replica.index
        before, after = sum(rows[:own]), sum(rows[own + 1 :])
        placed = []
        for each, times in zip(sent, self._rows_per_row, strict=True):
            if times == SAME:
                placed.append(each if own == 0 else tf.zeros_like(each))
                continue
            others = [[0, 0]] * (each.shape.rank - 1)
            placed.append(tf.pad(each, [[times * before, times * after], *others]))
        return placed

    def found(self, kept, *, numbers: list, gathered: list):
        """Returns the arguments of all rows.

        Args:
          kept: the nest from `kept`.
          numbers: the sums of `numbers` over the replicas.
          gathered: the rows of all replicas.
        """
        return tf.nest.map_structure(lambda each: _found(each, numbers, gathered), kept)


def _found(leaf, numbers: list, gathered: list):
    """Returns the argument that a leaf of a call stands for."""
    if isinstance(leaf, _Number):
        number = numbers[leaf.index]
        if leaf.weight is not None:
            number = tf.math.divide_no_nan(number, tf.cast(numbers[leaf.weight], number.dtype))
            number = number if leaf.dtype.is_floating else tf.round(number)
        return tf.cast(number, leaf.dtype)
    if isinstance(leaf, _Ragged):
        values, lengths = (_found(each, numbers, gathered) for each in (leaf.values, leaf.lengths))
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    if isinstance(leaf, _Rows):
        rows = tf.cast(gathered[leaf.index], leaf.dtype)
        if leaf.mask is None:
            return rows
        return with_mask(rows, _found(leaf.mask, numbers, gathered))
    return leaf


def _sent_as(dtype: tf.DType) -> tf.DType:
    # Not every collective takes half precision, bool or small integers. float64 holds whole numbers
    # up to 2**53.
    if dtype.is_floating:
        return dtype if dtype.size >= 4 else tf.float32
    return tf.float64
