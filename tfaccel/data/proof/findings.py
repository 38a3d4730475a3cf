"""Checks recorded epochs for the usual mistakes of loaders. Each check returns a finding.

expected = Expected.of(epochs, num_examples=50000, shuffle=True, last_batch="pad")
order(epochs, expected)    # Finding("order", True, "a new order in every epoch")
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from tfaccel.data.proof.epochs import Epoch
from tfaccel.data.sampling import ClassSampling

# Draws with so many bits of information are equal by coincidence once in a million.
CERTAIN_BITS = 20
FEW_EXAMPLES = 10  # fewer examples may have the same order twice by coincidence


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      name: "shapes", "shards", "length", "coverage", "duplicates", "classes", "order" or "draws".
      ok: whether the epochs pass; None if an earlier fault makes the check pointless.
      text: what was found, in one line.
    """

    name: str
    ok: bool | None
    text: str


@dataclasses.dataclass(frozen=True)
class Expected:
    """What an epoch should be.

    Attributes:
      num_examples: number of examples in the source.
      num_replicas: number of replicas that share the examples.
      rows: number of rows in every batch on each replica.
      num_steps: number of steps in an epoch.
      num_left_out: number of examples that do not fill a batch and are dropped.
      num_repeated: number of examples that are repeated to fill the last batch.
      shuffle: whether each epoch has a new order.
      sampling: how many images of each class an epoch has; None for each example once.
    """

    num_examples: int
    num_replicas: int
    rows: int
    num_steps: int
    num_left_out: int
    num_repeated: int
    shuffle: bool
    sampling: ClassSampling | None = None

    @classmethod
    def of(cls, epochs: Sequence[Epoch], *, num_examples: int, shuffle: bool, last_batch: str):
        """Returns the expectation for epochs with such batches; the arguments are `verdict`'s."""
        rows = int(max(each.num_rows.max() for each in epochs))
        num_replicas = epochs[0].num_rows.shape[1]
        batch = rows * num_replicas
        drops = last_batch == "drop"
        num_steps = num_examples // batch if drops else math.ceil(num_examples / batch)
        difference = num_examples - num_steps * batch
        return cls(
            num_examples=num_examples,
            num_replicas=num_replicas,
            rows=rows,
            num_steps=num_steps,
            num_left_out=max(0, difference),
            num_repeated=max(0, -difference) if last_batch == "repeat" else 0,
            shuffle=shuffle,
        )


def shapes(epochs: Sequence[Epoch], expected: Expected) -> Finding:
    """Checks that all batches have the same number of rows."""
    for number, epoch in enumerate(epochs):
        others = np.argwhere(epoch.num_rows != expected.rows)
        if len(others):
            step, replica = others[0]
            return _fault(
                "shapes",
                f"{len(others)} batches of epoch {number} do not have {expected.rows} rows: step "
                f"{step} gives replica {replica} {epoch.num_rows[step, replica]}; XLA compiles "
                "each shape again",
            )
    return _fine("shapes", f"every batch has {expected.rows} rows")


def shards(epochs: Sequence[Epoch], expected: Expected) -> Finding:
    """Checks that no two replicas read the same examples, in every step or over the epoch."""
    ids, real = epochs[0].ids, epochs[0].real
    in_order = np.sort(np.where(real, ids, -1), axis=-1)
    own = [_existing(ids[:, each][real[:, each]], expected) for each in range(ids.shape[1])]
    with_rows = [replica for replica, each in enumerate(own) if len(each)]
    if expected.rows * expected.num_replicas > expected.num_examples:
        with_rows = []  # the only batch is filled up with examples of other replicas
    for one, other in itertools.combinations(with_rows, 2):
        how = None
        if np.array_equal(in_order[:, one], in_order[:, other]):
            how = "in every step"
        elif _is_same_shard(own[one], own[other], expected):
            how = "each in its own order"
        if how:
            return _fault(
                "shards",
                f"replicas {one} and {other} read the same examples, {how}: shard_id and "
                "num_shards are not set",
            )
    return _fine("shards", f"each of {expected.num_replicas} replicas reads its own examples")


def _is_same_shard(one: np.ndarray, other: np.ndarray, expected: Expected) -> bool:
    counts, others = (np.bincount(each, minlength=expected.num_examples) for each in (one, other))
    # Replicas that share examples because their epochs are too long also repeat their own examples.
    if max(counts.max(), others.max()) > 1:
        return False
    return np.count_nonzero(counts & others) > 0.9 * min(len(one), len(other))


def length(epochs: Sequence[Epoch], expected: Expected) -> Finding:
    """Checks that every epoch has the number of steps that its examples fill."""
    for number, epoch in enumerate(epochs):
        num_rows = len(epoch.ids) * expected.rows * expected.num_replicas
        if len(epoch.ids) != expected.num_steps:
            return _fault(
                "length",
                f"epoch {number} has {len(epoch.ids):,} steps, and their {num_rows:,} rows are "
                f"{num_rows / expected.num_examples:.2f} times the {expected.num_examples:,} "
                f"examples; expected {expected.num_steps:,} steps",
            )
    return _fine("length", f"every epoch has {expected.num_steps:,} steps")


def coverage(epochs: Sequence[Epoch], expected: Expected) -> Finding:
    """Checks that an epoch has every example, and nothing else."""
    for number, epoch in enumerate(epochs):
        ids = epoch.ids[epoch.real]
        if len(_existing(ids, expected)) < len(ids):
            unknown = ids[(ids < 0) | (ids >= expected.num_examples)]
            return _fault("coverage", f"epoch {number} has {_some(unknown)}, which do not exist")
        missing = np.flatnonzero(np.bincount(ids, minlength=expected.num_examples) == 0)
        if len(missing) > expected.num_left_out:
            return _fault(
                "coverage",
                f"epoch {number} leaves out {len(missing):,} of {expected.num_examples:,} "
                f"examples: {_some(missing)}",
            )
    left_out = expected.num_left_out
    but = f" except {left_out:,} that do not fill a batch" if left_out else ""
    return _fine("coverage", f"every epoch has every example{but}")


def duplicates(epochs: Sequence[Epoch], expected: Expected) -> Finding:
    """Checks that no example occurs twice in an epoch."""
    for number, epoch in enumerate(epochs):
        counts = np.bincount(_existing(epoch.ids[epoch.real], expected))
        again = np.flatnonzero(counts > 1)
        if (counts[again] - 1).sum() > expected.num_repeated:
            places = np.argwhere(epoch.real & (epoch.ids == again[0]))[:2]
            where = " and ".join(f"step {step} on replica {on}" for step, on, _ in places)
            return _fault(
                "duplicates",
                f"epoch {number} has {len(again):,} examples more than once: {_some(again)} "
                f"({again[0]} in {where})",
            )
    repeated = expected.num_repeated
    but = f" except {repeated:,} that fill the last batch" if repeated else ""
    return _fine("duplicates", f"no example occurs twice in an epoch{but}")


def classes(epochs: Sequence[Epoch], expected: Expected) -> Finding:
    """Checks that an epoch has as many images of each class as the sampling says.

    It also checks that no image comes again before all others of its class, over all epochs. Rows
    that do not fill a batch may be missing or repeated.
    """
    sampling, times = expected.sampling, np.zeros(expected.num_examples, np.int64)
    members, in_part_batch = sampling.members(), expected.num_left_out + expected.num_repeated
    for number, epoch in enumerate(epochs):
        ids = _existing(epoch.ids[epoch.real], expected)
        own = np.bincount(ids, minlength=expected.num_examples)
        times += own
        found, wanted = np.array([own[each].sum() for each in members]), sampling.counts(number)
        if np.abs(found - wanted).sum() > in_part_batch:
            worst = np.abs(found - wanted).argmax()
            return _fault(
                "classes",
                f"epoch {number} has {found[worst]:,} images of class {sampling.classes[worst]}; "
                f"expected {wanted[worst]:,}",
            )
        uneven = [_num_uneven(times[each]) for each in members]
        if sum(uneven) > (number + 1) * in_part_batch:
            return _fault(
                "classes",
                f"up to epoch {number}, images of class {sampling.classes[np.argmax(uneven)]} come "
                "again before all others of their class",
            )
    but = ", except for rows that do not fill a batch" if in_part_batch else ""
    return _fine(
        "classes",
        f"every epoch has as many images of each class as sampling={sampling} says{but}",
    )


def _num_uneven(times: np.ndarray) -> int:
    """Returns how many rows must be another image's, so that counts differ by at most one."""
    least = np.arange(times.min(), times.max() + 1)[:, None]
    off = np.maximum(least - times, 0) + np.maximum(times - least - 1, 0)
    return int(off.sum(axis=1).min())


def _existing(ids: np.ndarray, expected: Expected) -> np.ndarray:
    """Returns the ids that are ids of examples."""
    return ids[(ids >= 0) & (ids < expected.num_examples)]


def order(epochs: Sequence[Epoch], expected: Expected) -> Finding:
    """Checks that every epoch has a new order, or that all have the same without shuffling."""
    orders = [each.ids[each.real] for each in epochs]
    same = [np.array_equal(one, other) for one, other in itertools.pairwise(orders)]
    if not expected.shuffle:
        if all(same):
            return _fine("order", "the same in every epoch, as expected without shuffling")
        number = same.index(False)
        return _fault("order", f"epochs {number} and {number + 1} differ; expected no shuffling")
    if expected.num_examples < FEW_EXAMPLES:
        return _fine("order", f"{expected.num_examples} examples are too few to tell")
    if (np.diff(orders[0]) > 0).all():
        return _fault("order", "epoch 0 is in the order of the files: nothing shuffles")
    if any(same):
        number = same.index(True)
        return _fault(
            "order",
            f"epochs {number} and {number + 1} have the same order: shuffled only once",
        )
    return _fine("order", "a new order in every epoch")


def draws(epochs: Sequence[Epoch], expected: Expected) -> Finding:
    """Checks that replicas, steps, rows and epochs have different random numbers."""
    if epochs[0].draws is None:
        return _fine("draws", "nothing is random")
    drawn = np.concatenate([each.draws[each.real] for each in epochs])
    num_distinct = 1 + np.count_nonzero(np.diff(np.sort(drawn)))  # np.unique takes 20 times as long
    if num_distinct == 1 and len(drawn) >= CERTAIN_BITS:
        return _fault("draws", f"all {len(drawn):,} rows have the same random numbers")
    fault = _equal_draws(epochs, expected, bits=math.log2(num_distinct))
    if fault:
        return _fault("draws", fault)
    return _fine("draws", f"{num_distinct:,} different draws in {len(drawn):,} rows")


def _equal_draws(epochs: Sequence[Epoch], expected: Expected, *, bits: float) -> str | None:
    """Returns which parts of the epochs draw the same, if any; `bits` is a row's entropy."""
    first = epochs[0]
    for one, other in itertools.combinations(range(expected.num_replicas), 2):
        if _is_same(first, np.s_[:, one], first, np.s_[:, other], bits):
            return f"replicas {one} and {other} draw the same random numbers: their seeds are equal"
    if _is_same(first, np.s_[1:], first, np.s_[:-1], bits):
        return "every step draws the same random numbers"
    if _is_same(first, np.s_[..., 1:], first, np.s_[..., :-1], bits):
        return "all rows of a batch have the same random numbers"
    for number, (one, other) in enumerate(itertools.pairwise(epochs)):
        steps = np.s_[: min(len(one.ids), len(other.ids))]
        if _is_same(one, steps, other, steps, bits):
            return (
                f"epochs {number} and {number + 1} draw the same random numbers: the seed does not "
                "depend on the epoch"
            )
    return None


def _is_same(one: Epoch, part, other: Epoch, other_part, bits: float) -> bool:
    """Returns whether two parts have the same draws in real rows, and not by coincidence."""
    both = one.real[part] & other.real[other_part]
    same = (one.draws[part] == other.draws[other_part])[both]
    return len(same) * bits >= CERTAIN_BITS and bool(same.all())


def _fault(name: str, text: str) -> Finding:
    return Finding(name, False, text)


def _fine(name: str, text: str) -> Finding:
    return Finding(name, True, text)


def _some(ids: np.ndarray) -> str:
    """Returns the first few ids as text."""
    return ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")
