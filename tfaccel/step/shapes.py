"""Says how often a step is built for batches of new shapes, such as texts of several lengths.

    shapes = Shapes()
    with shapes.watched(step, batches):     # a `tf.function` of the replicas' batches
        step(batches)

TensorFlow builds a step for each shape of a batch once, and XLA compiles each. A few shapes that
return in every epoch are right: buckets of texts, or a last batch with fewer rows. But if nearly
every batch has a new shape, as texts without padding do, the training spends its time on building.
"""

import contextlib
import logging
import re
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.run_log import summary
from tfaccel.runtime.agreement import of_workers
from tfaccel.step.parts import num_rows

log = logging.getLogger("tfaccel")

A_FEW = 8  # shapes, such as four buckets, each with a last batch of fewer rows


def rows_of_all(strategy: tf.distribute.Strategy, batches: list, *, asks: bool) -> list[int] | None:
    """Returns the number of rows of each replica's batch, those of all workers included.

    Args:
      strategy: the strategy over all workers.
      batches: the batch of each replica of this process.
      asks: whether to ask the other workers, which takes about 1 ms. Then every worker must call
        it. If false and there are other workers, the result is None.
    """
    rows = [num_rows(each) for each in batches]
    if len(rows) == strategy.num_replicas_in_sync:
        return rows
    return of_workers(np.array(rows), strategy).reshape(-1).tolist() if asks else None


# In the words of TensorFlow, Keras and NumPy.
_OF_SHAPES = re.compile(
    r"shape|dimension|size|slice|split|divi|elements|indices|index|broadcast|incompatible", re.I
)


@contextlib.contextmanager
def telling_rows(
    strategy: tf.distribute.Strategy, batches: list, *, parts: int = 1
) -> Iterator[None]:
    """Within the context, an error about shapes gets a note: a step has only a part of the rows.

    Args:
      strategy: the strategy over all workers.
      batches: the batch of each replica of this process; [] if they are not made yet.
      parts: the number of parts in which each replica computes its rows.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, IndexError, tf.errors.InvalidArgumentError) as error:
        # Keras 3.16 raises another one about the loss, of which TensorFlow hides the cause.
        if isinstance(error.__context__, UserError):
            raise error.__context__ from None
        num_replicas = strategy.num_replicas_in_sync
        if num_replicas * parts > 1 and _OF_SHAPES.search(str(error)):
            error.add_note(_about_rows(list(map(num_rows, batches)), num_replicas, parts))
        raise


def _about_rows(rows: list[int], num_replicas: int, parts: int) -> str:
    """Returns which rows of a batch a step has, and how it gets all of them."""
    own = f"{rows[0]} " if rows else "only its own "
    own += f"of the {sum(rows)} " if len(rows) == num_replicas > 1 else ""
    divided, cure = [], "use x.shape[0] or tf.shape(x)[0] in place of a fixed number of rows"
    if num_replicas > 1:
        divided.append(f"over {num_replicas} replicas")
        cure += ", or gather the rows of all replicas first: tfaccel.collectives.all_gather(x)"
    if parts > 1:
        divided.append(f"in {parts} parts (accumulation_steps)")
    return (
        f"tfaccel: the batch is divided {' and '.join(divided)}. A replica has {own}rows. "
        f"If the step expects more (in top_k, reshape, split or a slice), {cure}"
    )


class Shapes:
    """The shapes of the batches that each of a step's functions was built for."""

    def __init__(self, what: str):
        """Takes the step's name for the log."""
        self._what = what
        self._seen = weakref.WeakKeyDictionary()  # a list of shapes for each function

    @contextlib.contextmanager
    def watched(
        self, function: Callable, batches: list, *, in_launch: bool = False
    ) -> Iterator[None]:
        """Within the context, the function is called; if that builds it again, the log says so.

        Args:
          function: the wrapper of a `tf.function`, from `alike`.
          batches: the batch of each replica of this process, or its specs.
          in_launch: whether the function takes several such batches. It is also built again for
            another number of them, which the log does not say here.
        """
        count = function.__wrapped__.experimental_get_tracing_count
        before, began = count(), time.perf_counter()
        yield
        if count() == before:
            return
        seen = self._seen.setdefault(function, [])
        new = [
            [each.shape for each in tf.nest.flatten(batch) if hasattr(each, "shape")]
            for batch in batches
        ]
        is_first, is_known = not before, new in seen
        if not is_known:
            seen.append(new)
        if not is_first and not (is_known and in_launch):
            self._say(seen, time.perf_counter() - began)

    def _say(self, seen: list, took_s: float) -> None:
        shapes, number = ", ".join(map(str, _together(seen[-1]))), len(seen)
        others = number - A_FEW - 1
        if others < 0:
            summary(
                "%s: built again in %.1f s for a batch of shapes %s; %d shapes so far, each built "
                "once%s",
                self._what,
                took_s,
                shapes,
                number,
                _advice(seen),
            )
        elif others & (others - 1) == 0:  # the 9th, 10th, 11th, 13th, 17th, ...: ever more seldom
            log.warning(
                "%s: built again in %.1f s for a batch of shapes %s, the %dth new shape; each "
                "costs this once: pad batches to a few lengths (bucket_by_sequence_length with "
                "pad_to_bucket_boundary=True), or drop the last batch of an epoch",
                self._what,
                took_s,
                shapes,
                number,
            )


def _together(batches: list) -> list[tuple]:
    """Returns the shapes of a batch, from those of its parts on each replica."""
    return [
        (sum(each[0] for each in parts), *parts[0][1:]) if len(parts[0]) else ()
        for parts in zip(*batches, strict=True)
    ]


def _advice(seen: list) -> str:
    """Returns what to do about a batch that differs from an earlier one only in its rows."""
    rest = [[[each[1:] for each in shapes] for shapes in batches] for batches in seen]
    return "; to save this, drop the last batch of an epoch" if rest[-1] in rest[:-1] else ""
