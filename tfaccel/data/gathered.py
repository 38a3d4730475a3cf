"""Gathers the batches of the user's own data for launches of several steps.

Takes an iterator over batches on the host, each of which has a part for every replica. Gives the
batches of a launch as one `Deferred` for each replica, or a batch by itself.

    launches = Launches(10)                      # as many steps in an execution
    batches = Gathered(begin, launches=launches, allowance=allowance, places=places)
    deferred = batches.take(10)                  # None if the next launch has one step
    batch = next(batches)

A thread reads the batches, in their order, and others copy them to the devices. They are up to two
launches ahead of the step, and never beyond the epoch (`Allowance`). So a device trains while the
host gathers the next launch, and while that launch is copied.

One launch has batches of equal shapes. Each other shape, and each other number of batches, is
compiled once more, so `Launches` keeps the numbers few.
"""

import collections
import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfaccel.data.deferred import Deferred, dividing
from tfaccel.data.endings import ender
from tfaccel.process.to_device import carried, copy_to, stack_to

log = logging.getLogger("tfaccel")

# The bytes that the batches of one launch may take on each replica. Three launches are in memory at
# once: the one that runs, and two that wait. Ten batches of 32 texts of 512 tokens take 4 MiB.
MOST_BYTES = 256 << 20
AHEAD = 2  # launches that are read ahead of the step
# The numbers of batches in a launch, beside 1, for which batches of one shape are compiled: usually
# `steps_per_execution`, and what is left at an epoch's end.
MOST_LENGTHS = 2


class Launches:
    """Decides how many batches go in one launch, and says so.

    It lives as long as the compiled step, because each other number is compiled once.
    """

    def __init__(self, most: int):
        """Takes the number of steps in an execution."""
        self.most = most
        self._lengths = {}  # by the shapes of a batch
        self._said = set()

    def fitting(self, num_bytes: int) -> int:
        """Returns how many batches of so many bytes one launch may take; it divides `most`.

        Args:
          num_bytes: of one replica's batch.
        """
        number, why = fitting(self.most, num_bytes)
        if number < self.most:
            how = "one batch" if number == 1 else f"{number} batches"
            self._say("data: a launch takes %s, because %s", how, why)
        return number

    def cut(self, shapes: str, number: int) -> list[int]:
        """Returns the lengths of the launches of so many batches of equal shapes, in order."""
        lengths = self._lengths.setdefault(shapes, [])
        if number > 1 and number not in lengths and len(lengths) < MOST_LENGTHS:
            lengths.append(number)
        cut = []
        while number:
            cut.append(max((each for each in lengths if each <= number), default=1))
            number -= cut[-1]
        return cut

    def say(self, why_not: str | None) -> None:
        """Logs whether several batches go in one launch, or why not; each reason once."""
        if why_not is None:
            self._say("step: batches of up to %d steps go in one launch", self.most)
        else:
            self._say("step: the batches of an execution go one by one, because %s", why_not)

    def say_shapes(self) -> None:
        """Logs once that shapes differ within an execution."""
        self._say("data: an execution has several launches where the shapes of its batches differ")

    def say_uneven(self) -> None:
        """Logs once that the replicas do not share the rows of a batch equally."""
        self._say("data: a batch whose rows the replicas do not share equally goes by itself")

    def _say(self, words: str, *arguments) -> None:
        if (words, arguments) not in self._said:
            self._said.add((words, arguments))
            log.info(words, *arguments)


def fitting(most: int, num_bytes: int) -> tuple[int, str]:
    """Returns how many batches one launch may take, and why not more.

    The number divides `most`, so that all launches of an execution have one length.

    Args:
      most: number of steps in an execution.
      num_bytes: of one replica's batch.

    Returns:
      The number, and a reason in words: `most` and "" if an execution is one launch.
    """
    fit = min(MOST_BYTES // max(num_bytes, 1), most)
    number, advice = dividing(most, fit)
    if number == most:
        return most, ""
    why = f"{most} batches would take {math.ceil(most * num_bytes / 2**20):,} MiB on a replica, "
    why += f"more than {MOST_BYTES >> 20:,} MiB"
    return number, why + advice


def why_not(element_spec) -> str | None:
    """Returns why batches with these specs cannot be gathered; None if they can."""
    for each in tf.nest.flatten(element_spec):
        if each is None or isinstance(each, tf.OptionalSpec):  # a weight that is missing
            continue
        if not isinstance(each, tf.TensorSpec):
            return f"a batch has a {type(each).__name__.removesuffix('Spec')}"
        if not (each.dtype.is_floating or each.dtype.is_integer or each.dtype.is_bool):
            return f"a batch has values of dtype {each.dtype.name}"
    return None


class Allowance:
    """How many batches the epoch may still read ahead of the step.

    Attributes:
      left: batches that this epoch's executions have not been given yet; infinity for all that the
        iterator has. Nothing is read ahead if it is 0, as before the first epoch.
    """

    def __init__(self):
        """Allows nothing."""
        self.left = 0


@dataclasses.dataclass(frozen=True)
class Places:
    """The replicas of this process, and how a batch lies on them.

    Attributes:
      devices: the device of each replica.
      cut: returns each replica's part of a batch.
      join: returns a batch of these parts.
    """

    devices: tuple[str, ...]
    cut: Callable[[Any], list]
    join: Callable[[list], Any]


class Gathered(Iterator):
    """The batches of one iterator, for one launch after another.

    Attributes:
      are_made: True, because the batches of a launch wait for each other.

    Raises:
      Exception: what the iterator raised, after all batches before it.
    """

    are_made = True

    def __init__(
        self,
        begin: Callable[[Callable[[], bool]], Iterator],
        *,
        launches: Launches,
        allowance: Allowance,
        places: Places,
    ):
        """Reads nothing: the first call of `take` or `next` does.

        Args:
          begin: returns the iterator; called once, in the thread that asks for the first batch. Its
            argument tells later whether batches were read that no step was given.
          launches: decides how many batches go in one launch.
          allowance: of the epoch. The epoch sets it, and each batch given reduces it.
          places: the replicas.
        """
        self._begin, self._launches, self._allowance = begin, launches, allowance
        self._places, self._reader = places, None
        self._ready = collections.deque()  # launches
        self._waiting = collections.deque()  # what will be lists of launches
        self._is_over, self._error = False, None

    def take(self, most: int, *, may_wait: bool = True) -> list[Deferred] | None:
        """Returns each replica's batches for a launch of several steps.

        None at the end, and if the next launch has only one step.

        Args:
          most: the number of steps in an execution.
          may_wait: whether batches may wait until all of the launch are there. If not, they come
            one by one.
        """
        reader = self._started()
        reader.is_alone = not may_wait
        if not may_wait:
            return None
        launch = self._next_launch(most - reader.given.number % most)
        if launch is None or len(launch) == 1:
            return None
        deferred = launch.deferred()
        self._ready.popleft()
        self._give(len(launch))
        return deferred

    def __next__(self):
        """Returns the next batch."""
        self._started()
        launch = self._next_launch(1)
        if launch is None:
            raise StopIteration
        batch = self._places.join(launch.first())
        self._ready.popleft()
        if len(launch) > 1:
            self._ready.appendleft(launch.rest())
        self._give(1)
        return batch

    def _started(self) -> "_Reader":
        if self._reader is None:
            reading, copying = (
                ThreadPoolExecutor(number, f"tfaccel-{name}")
                for name, number in (
                    ("gathering", 1),
                    ("copying", AHEAD * len(self._places.devices)),
                )
            )
            self._submit = reading.submit
            given = _Given()
            self._reader = _Reader(
                self._begin(given.is_behind), self._launches, self._places, copying.submit, given
            )
            # Nothing in the threads refers to this object, so it is freed when it is dropped.
            for each in (reading, copying):
                shutdown = functools.partial(each.shutdown, wait=False, cancel_futures=True)
                weakref.finalize(self, ender(), shutdown)
        return self._reader

    def _next_launch(self, wanted: int) -> "_Launch | None":
        """Returns the next launch; None at the end. It may wait for `wanted` batches."""
        while not self._ready and not self._is_over:
            if not self._waiting:
                self._read(wanted)
            launches, self._is_over, self._error = self._waiting[0].result()
            self._waiting.popleft()  # after the result, which Ctrl-C may interrupt
            self._ready += launches
        if not self._ready and self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._ready[0] if self._ready else None

    def _give(self, number: int) -> None:
        """Counts batches that the step gets, and reads ahead."""
        self._reader.given.number += number
        self._allowance.left -= number
        while len(self._waiting) + bool(self._ready) < AHEAD and not self._is_over:
            if self._allowance.left <= 0:
                break
            self._read(self._allowance.left)

    def _read(self, wanted: float) -> None:
        until = self._reader.given.number + max(wanted, self._allowance.left)
        self._waiting.append(self._submit(self._reader.next_launches, until))


class _Given:
    """Counts the batches that were read, and those that the step was given."""

    def __init__(self):
        self.read, self.number = 0, 0

    def is_behind(self) -> bool:
        return self.number < self.read


@dataclasses.dataclass(frozen=True)
class _Launch:
    """Batches of equal shapes, which are being copied to the replicas' devices.

    Attributes:
      number: of batches.
      make: makes a batch from its tensors by name.
      copies: each replica's tensors by name, stacked: [batches, ...]. A batch by itself is not
        stacked.
      is_stacked: whether they are.
    """

    number: int
    make: "Taken"
    copies: Sequence[Future]
    is_stacked: bool

    def __len__(self):
        return self.number

    def deferred(self) -> list[Deferred]:
        named = [self.make.named(each.result()) for each in self.copies]
        return [Deferred(each, {}, self.make, is_made=True) for each in named]

    def first(self) -> list:
        """Returns each replica's part of the first batch."""
        if not self.is_stacked:
            return [self.make.packed(each.result()) for each in self.copies]
        return [
            self.make({name: each[0] for name, each in deferred.inputs.items()})
            for deferred in self.deferred()
        ]

    def rest(self) -> "_Launch":
        """Returns the launch without its first batch."""
        copies = []
        for each in self.copies:
            copies.append(Future())
            copies[-1].set_result([stack[1:] for stack in each.result()])
        return dataclasses.replace(self, number=self.number - 1, copies=copies)


@dataclasses.dataclass(frozen=True)
class Taken:
    """Makes a batch from its tensors. Two are equal if they make batches of equal structure.

    Attributes:
      key: the structure as text.
      structure: a batch with a name in place of each tensor; None stays None.
    """

    key: str
    structure: Any = dataclasses.field(compare=False, repr=False)

    def __call__(self, tensors: dict[str, tf.Tensor]):
        """Returns the batch of tensors that `stack_to` has copied."""
        tensors = {name: _as_before(name, each) for name, each in tensors.items()}
        return tf.nest.map_structure(
            lambda name: None if name is None else tensors[name], self.structure
        )

    def named(self, tensors: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the tensors by name."""
        names = [each for each in tf.nest.flatten(self.structure) if each is not None]
        return dict(zip(names, tensors, strict=True))

    def packed(self, tensors: Sequence[tf.Tensor]):
        """Returns the batch of tensors as they are."""
        named = self.named(tensors)
        return tf.nest.map_structure(
            lambda name: None if name is None else named[name], self.structure
        )


def taken(batch) -> Taken:
    """Returns what makes batches of this one's structure and dtypes."""
    numbers = iter(range(len(tf.nest.flatten(batch))))
    structure = tf.nest.map_structure(
        lambda each: None if each is None else f"{next(numbers)} {each.dtype.name}", batch
    )
    return Taken(repr(structure), structure)


def _as_before(name: str, tensor: tf.Tensor) -> tf.Tensor:
    dtype = tf.as_dtype(name.partition(" ")[2])
    return tensor if carried(dtype) == dtype else tf.bitcast(tensor, dtype)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """A batch of all replicas.

    Attributes:
      make: as of a `_Launch`.
      parts: each replica's tensors.
      shapes: text that two batches share if one launch may have both; None for a batch of which the
        replicas' parts have different shapes.
      num_bytes: of the first replica's part.
    """

    make: Taken
    parts: list[list[tf.Tensor]]
    shapes: str | None
    num_bytes: int


class _Reader:
    """Reads the batches of an iterator. Only one thread may call it."""

    def __init__(
        self,
        batches: Iterator,
        launches: Launches,
        places: Places,
        submit: Callable[..., Future],
        given: _Given,
    ):
        self._batches, self._launches, self._places = batches, launches, places
        self._submit, self.given = submit, given
        self._number, self._next = 0, None  # batches in launches so far, and one in none yet
        self.is_alone = False  # whether each batch is a launch
        self._is_over = False  # after which the iterator is not read again, as it may go on

    def next_launches(self, until: float) -> tuple[list[_Launch], bool, BaseException | None]:
        """Returns the next launches: batches of equal shapes, within one execution.

        Args:
          until: the batch, counted from the first, before which it stops to read.

        Returns:
          The launches; whether nothing follows; and the error that ended the iterator.
        """
        found, failed = [], None
        most = self._launches.most - self._number % self._launches.most
        while not self._is_over and len(found) < most and self._number + len(found) < until:
            try:
                batch, self._next = self._next or self._draw(), None
            except StopIteration:
                self._is_over = True
                break
            except BaseException as error:  # the thread that asks for the batch raises it
                self._is_over, failed = True, error
                break
            if not found:
                is_alone = self.is_alone or batch.shapes is None
                if batch.shapes is None:
                    self._launches.say_uneven()
                most = 1 if is_alone else min(most, self._launches.fitting(batch.num_bytes))
            elif batch.shapes != found[0].shapes:
                self._next = batch
                self._launches.say_shapes()
                break
            found.append(batch)
        self._number += len(found)
        return self._copied(found), self._is_over, failed

    def _draw(self) -> _Batch:
        batch = next(self._batches)
        self.given.read += 1
        parts = self._places.cut(batch)
        make = taken(parts[0])
        leaves = [[each for each in tf.nest.flatten(part) if each is not None] for part in parts]
        shapes = [str([each.shape.as_list() for each in part]) for part in leaves]
        is_even = all(each == shapes[0] for each in shapes)
        num_bytes = sum(each.shape.num_elements() * each.dtype.size for each in leaves[0])
        return _Batch(make, leaves, make.key + shapes[0] if is_even else None, num_bytes)

    def _copied(self, batches: list[_Batch]) -> list[_Launch]:
        """Begins to copy batches of equal shapes, and returns them as launches."""
        launches = []
        lengths = self._launches.cut(batches[0].shapes, len(batches)) if len(batches) > 1 else [1]
        for length in lengths if batches else ():
            own, batches = batches[:length], batches[length:]
            is_stacked = length > 1
            copies = [
                self._submit(stack_to, device, [each.parts[index] for each in own])
                if is_stacked
                else self._submit(copy_to, device, own[0].parts[index])
                for index, device in enumerate(self._places.devices)
            ]
            launches.append(_Launch(length, own[0].make, copies, is_stacked))
        return launches
