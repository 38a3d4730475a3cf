"""The ways to save a GPU's memory, in one table, and the cheapest of them that fits.

Takes where memory goes (memory_plan.py); gives proposals, the best one first.

    found = proposals(Situation(plan, global_batch_size=1024, num_replicas=1, step=StepConfig()))
    found[0].words      # "accumulation_steps=3 (the same result, except for batch norm; ...)"

A new way is one entry of `WAYS`. The out-of-memory message, the warning of the forecast and
`tfaccel autobatch` then know it. Prices are estimates of the bytes that a step moves, because bytes
bound most steps; autobatch measures them.
"""

import dataclasses
import math
from collections.abc import Callable

from tfaccel.config import StepConfig
from tfaccel.training.memory_plan import FRAGMENTS, Plan

# Of XLA's programs for an H100, the least favourable of four networks each (tools/results/LOG.md,
# 2026-11-30): what remat="blocks" leaves of the activations (0.22 to 0.38), and the bytes that its
# step moves (1.20 to 1.30 times).
BLOCKS_LEAVE, BLOCKS_MOVE = 0.4, 1.3
# A step reads and writes each activation about so often (7.5 to 10 times, the same programs).
MOVES = 8
HALF_TAKES = 0.5  # of float32's time and activations, at best


@dataclasses.dataclass(frozen=True)
class Situation:
    """A step, and where its memory goes.

    Attributes:
      plan: the memory of one replica.
      global_batch_size: of the step; None if it is not known.
      num_replicas: of all workers.
      step: its settings.
      trains: whether it trains.
      half_precision: whether activations have 16 bits already.
      saved_by_slices: the bytes that `shard_states` would save; 0 if it cannot.
      packs_states: whether the optimizer can keep its moments in another dtype.
    """

    plan: Plan
    global_batch_size: int | None
    num_replicas: int = 1
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    trains: bool = True
    half_precision: bool = True
    saved_by_slices: int = 0
    packs_states: bool = False

    @property
    def rows(self) -> int | None:
        """The rows of a replica in a step."""
        size = self.global_batch_size
        return math.ceil(size / self.num_replicas) if size else None

    @property
    def parts(self) -> int:
        """In how many parts a replica computes its rows."""
        return self.step.accumulation_steps if self.trains else 1

    @property
    def at_a_time(self) -> int | None:
        """The rows whose activations are in memory at a time."""
        return math.ceil(self.rows / self.parts) if self.rows else None

    def with_activations(self, share: float, **settings) -> "Situation":
        """Returns the situation with a share of the activations, and other settings of the step."""
        plan = self.plan
        if plan.activations is not None:
            plan = dataclasses.replace(plan, activations=math.ceil(share * plan.activations))
        return dataclasses.replace(self, plan=plan, step=dataclasses.replace(self.step, **settings))


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to save memory.

    Attributes:
      field: the setting, as a field of the config: "step.remat".
      value: the cheapest value that fits, by the plan; with a plan that does not tell, a first
        guess. None if the way does not suit the situation.
      stronger: a value that saves more than another one; None if there is none.
      after: the situation with a value: how it changes the forecast.
      times: the estimated time of a step for the same rows, as a multiple.
      changes: what it changes in the mathematics, in words.
      keeps_result: whether training stays the same but for batch norm and rounding.
      at_least: "or more" or "or less", if such values fit as well.
    """

    field: str
    value: Callable[[Situation], object | None]
    stronger: Callable[[Situation, object], object | None]
    after: Callable[[Situation, object], Situation]
    times: Callable[[Situation, object], float]
    changes: str
    keeps_result: bool
    at_least: str = ""

    @property
    def name(self) -> str:
        """The setting's name without its room: "remat"."""
        return self.field.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Ways with their values.

    Attributes:
      settings: each way with its value; mostly one.
      times: the estimated time of a step for the same rows, as a multiple.
    """

    settings: tuple[tuple[Way, object], ...]
    times: float

    @property
    def keeps_result(self) -> bool:
        """Whether training stays the same but for batch norm and rounding."""
        return all(way.keeps_result for way, _ in self.settings)

    @property
    def words(self) -> str:
        """The settings, what they change, and their price."""
        said = " with ".join(
            f"{way.name}={value!r}{f' {way.at_least}' if way.at_least else ''}"
            for way, value in self.settings
        )
        every = list(dict.fromkeys(way.changes for way, _ in self.settings))
        # Of "the same result" and "the same result, except for batch norm" the second says all.
        changes = [
            each for each in every if not any(own != each and own.startswith(each) for own in every)
        ]
        return f"{said} ({', '.join(changes)}; {in_time(self.times)})"


def in_time(times: float) -> str:
    """Returns the price of a way in words."""
    if times >= 1.005:
        return f"a step takes about {times:.2f} times as long"
    if times > 0.995:
        return "the same time for each row"
    return f"a step takes down to {times:.2f} of the time"


def proposals(situation: Situation) -> list[Proposal]:
    """Returns what fits by the plan: first what keeps the result, the cheapest one first.

    If no single way that keeps the result fits, two of them are tried together. A plan that does
    not tell the activations gives first guesses in the same order.
    """
    single = [each for way in WAYS if (each := _proposal(situation, way)) is not None]
    if not any(each.keeps_result for each in single):
        single += _pairs(situation)
    return sorted(single, key=lambda each: (not each.keeps_result, each.times))


def in_words(situation: Situation) -> str:
    """Returns the proposals as what follows "use"."""
    found = proposals(situation)
    if found:
        return ", or ".join(each.words for each in found)
    if situation.plan.activations is None or not situation.plan.limit:
        return "a smaller batch"
    least = math.lcm(8, situation.num_replicas)
    return f"a smaller model or smaller images (even a batch of {least} may not fit)"


def _proposal(situation: Situation, way: Way) -> Proposal | None:
    value = way.value(situation)
    return None if value is None else Proposal(((way, value),), way.times(situation, value))


def _pairs(situation: Situation) -> list[Proposal]:
    """Returns the strongest value of each way with the cheapest one of another that then fits."""
    found = []
    for first in WAYS:
        strongest = first.stronger(situation, None) if first.keeps_result else None
        if strongest is None:
            continue
        after = first.after(situation, strongest)
        for second in WAYS:
            value = second.value(after) if second.keeps_result and second is not first else None
            if value is not None:
                times = first.times(situation, strongest) * second.times(after, value)
                found.append(Proposal(((first, strongest), (second, value)), times))
    return found


# ----- accumulation_steps


def _parts(situation: Situation) -> int | None:
    rows, parts = situation.rows, situation.parts
    if not situation.trains:
        return None
    if not rows:
        return 2 * parts
    fitting = situation.plan.fitting_rows(situation.at_a_time, kept_gradients=True)
    needed = 2 * parts if fitting is None else math.ceil(rows / max(1, fitting))
    needed = max(parts + 1, needed)
    return None if needed > rows or fitting == 0 else needed


def _more_parts(situation: Situation, parts: int | None) -> int | None:
    rows = situation.rows
    if not situation.trains or not rows or parts is None or parts >= rows:
        return None
    return min(2 * parts, rows)


def _in_parts(situation: Situation, parts: int) -> Situation:
    share = 1.0
    if situation.rows:
        share = math.ceil(situation.rows / parts) / situation.at_a_time
    after = situation.with_activations(share, accumulation_steps=parts)
    if situation.parts == 1:  # the sum of the gradients of earlier parts is kept, too
        plan = dataclasses.replace(after.plan, gradients=2 * situation.plan.gradients)
        after = dataclasses.replace(after, plan=plan)
    return after


def _time_in_parts(situation: Situation, parts: int) -> float:
    """Each further part adds its gradients to the sum, and reads the weights again."""
    plan, more = situation.plan, parts - situation.parts
    if not plan.activations:
        return 1.05
    whole = MOVES * plan.activations * situation.parts
    return 1 + more * (3 * plan.gradients + plan.parameters) / whole


# ----- remat


def _remat(situation: Situation) -> str | int | None:
    plan = situation.plan
    if not situation.trains or situation.step.remat is not None:
        return None
    if plan.room is None or not plan.activations:
        return "blocks"
    room = plan.room * (1 - FRAGMENTS)
    if room < BLOCKS_LEAVE * plan.activations:
        return None
    return max(1, math.floor(min(room, plan.activations) / 2**20))


def _more_remat(situation: Situation, value: str | int | None) -> str | None:
    suits = situation.trains and situation.step.remat is None
    return "blocks" if suits and value != "blocks" else None


def _recomputed(situation: Situation, value: str | int) -> Situation:
    activations = situation.plan.activations
    share = BLOCKS_LEAVE
    if value != "blocks" and activations:
        share = min(1.0, max(share, value * 2**20 / activations))
    return situation.with_activations(share, remat=value)


def _time_of_remat(situation: Situation, value: str | int) -> float:
    """A budget takes the share of the time of "blocks" that it saves of the memory."""
    activations, saved = situation.plan.activations, 1.0
    if value != "blocks" and activations:
        saved = min(1.0, max(0.0, (1 - value * 2**20 / activations) / (1 - BLOCKS_LEAVE)))
    return 1 + (BLOCKS_MOVE - 1) * saved


# ----- a smaller batch


def _batch(situation: Situation) -> int | None:
    size, parts = situation.global_batch_size, situation.parts
    fitting = None
    if size:
        fitting = situation.plan.fitting_rows(situation.at_a_time, kept_gradients=parts > 1)
    if fitting is None:
        return None
    multiple = math.lcm(8, situation.num_replicas)
    # Less than the batch that failed, whatever the estimate is.
    largest = min(fitting * situation.num_replicas * parts, size - 1) // multiple * multiple
    return largest or None


def _smaller_batch(situation: Situation, size: int | None) -> int | None:
    multiple = math.lcm(8, situation.num_replicas)
    return None if not size else size // 2 // multiple * multiple or None


def _of_batch(situation: Situation, size: int) -> Situation:
    after = situation.with_activations(size / situation.global_batch_size)
    return dataclasses.replace(after, global_batch_size=size)


# ----- precision


def _precision(situation: Situation) -> str | None:
    return None if situation.half_precision else "mixed_float16"


def _in_halves(situation: Situation, _) -> Situation:
    return dataclasses.replace(situation.with_activations(HALF_TAKES), half_precision=True)


# ----- states of the optimizer


def _fits(plan: Plan) -> bool:
    """Returns whether all fits, or may fit if the plan does not tell."""
    room = plan.room
    return room is None or (plan.activations or 0) <= (1 - FRAGMENTS) * room


def _without(situation: Situation, num_bytes: int, **settings) -> Situation:
    """Returns the situation with so many bytes less of the optimizer's states."""
    plan = dataclasses.replace(situation.plan, optimizer=situation.plan.optimizer - num_bytes)
    step = dataclasses.replace(situation.step, **settings)
    return dataclasses.replace(situation, plan=plan, step=step)


def _in_slices(situation: Situation, _) -> Situation:
    after = _without(situation, situation.saved_by_slices, shard_states=True)
    return dataclasses.replace(after, saved_by_slices=0)


def _slices(situation: Situation) -> bool | None:
    may = situation.trains and situation.saved_by_slices >= 2**20
    return True if may and _fits(_in_slices(situation, True).plan) else None


def _more_slices(situation: Situation, value: bool | None) -> bool | None:
    return True if value is None and situation.saved_by_slices >= 2**20 else None


def _packed(situation: Situation, dtype: str) -> Situation:
    left = {"bfloat16": 0.5, "8bit": 0.26}[dtype]  # with a float32 for 256 values
    plan = situation.plan
    # The slice of the weights, which a sharded optimizer has, is not packed.
    weights = plan.parameters // situation.num_replicas if situation.step.shard_states else 0
    saved = math.floor((1 - left) * max(0, plan.optimizer - weights))
    # What is packed need not be moved to other replicas.
    replicas = situation.num_replicas
    by_slices = max(0, situation.saved_by_slices - saved * (replicas - 1) // replicas)
    after = _without(situation, saved, state_dtype=dtype)
    return dataclasses.replace(after, saved_by_slices=by_slices, packs_states=False)


def _packing(situation: Situation) -> str | None:
    if not situation.trains or not situation.packs_states:
        return None
    dtypes = ("bfloat16", "8bit")
    return next((each for each in dtypes if _fits(_packed(situation, each).plan)), None)


def _more_packing(situation: Situation, value: str | None) -> str | None:
    return "8bit" if situation.packs_states and value != "8bit" else None


WAYS = [
    Way(
        "step.accumulation_steps",
        value=_parts,
        stronger=_more_parts,
        after=_in_parts,
        times=_time_in_parts,
        changes="the same result, except for batch norm",
        keeps_result=True,
        at_least="or more",
    ),
    Way(
        "step.remat",
        value=_remat,
        stronger=_more_remat,
        after=_recomputed,
        times=_time_of_remat,
        changes="the same result",
        keeps_result=True,
    ),
    Way(
        "step.shard_states",
        value=_slices,
        stronger=_more_slices,
        after=_in_slices,
        times=lambda *_: 1.05,  # not measured: gradients and weights move about twice the bytes
        changes="the same result",
        keeps_result=True,
    ),
    Way(
        "step.state_dtype",
        value=_packing,
        stronger=_more_packing,
        after=_packed,
        times=lambda *_: 1.0,
        changes="moments of fewer bits",
        keeps_result=False,
    ),
    Way(
        "data.global_batch_size",
        value=_batch,
        stronger=_smaller_batch,
        after=_of_batch,
        times=lambda *_: 1.0,
        changes="more updates of fewer rows",
        keeps_result=False,
        at_least="or less",
    ),
    Way(
        "runtime.precision",
        value=_precision,
        stronger=lambda *_: None,
        after=_in_halves,
        times=lambda *_: HALF_TAKES,
        changes="activations of 16 bits",
        keeps_result=False,
    ),
]
