"""What a plan says about each operation of a step, read in the order in which the step calls them.

calls = PlannedCalls(plan.calls)
calls.take("mean", 1)       # what the size of the next call is; None if it is no mean
with calls.section("loop", is_part=False):      # the calls in a loop
    with calls.section("body", is_part=True):   # traced any number of times, or never
        ...
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

END = "end"


def begin(kind: str) -> str:
    """Returns the kind of the call at which a section of a kind begins."""
    return f"begin {kind}"


class Call(tuple):
    """A call: (kind, what each size is).

    Attributes:
      sizes: the sizes in the first trace.
    """

    sizes: tuple

    def __new__(cls, kind: str, parts: tuple, sizes: tuple):
        """Returns the call."""
        call = super().__new__(cls, (kind, parts))
        call.sizes = sizes
        return call


class PlannedCalls:
    """The calls of a plan: (kind, what each size is)."""

    def __init__(self, calls: Sequence[tuple[str, tuple]]):
        """Begins with the first call."""
        self._calls, self._next = calls, 0
        self._sections = []  # the index of the first call of each section that is open

    def take(self, kind: str, num_sizes: int) -> tuple | None:
        """Returns what the sizes of the next call are; None if it is of another kind."""
        planned = self.following()
        if planned is None or planned[0] != kind or len(planned[1]) != num_sizes:
            return None
        self._next += 1
        return planned[1]

    def pass_over(self, kind: str, is_passed: Callable) -> None:
        """Passes over calls before one of a kind, as long as `is_passed` is true of them."""
        while (planned := self.following()) and planned[0] != kind and is_passed(*planned):
            self._next += 1

    def following(self) -> tuple[str, tuple] | None:
        """Returns the next call, without taking it."""
        return self._calls[self._next] if self._next < len(self._calls) else None

    @contextlib.contextmanager
    def section(self, kind: str, *, is_part: bool) -> Iterator[tuple | None]:
        """Within the context, the calls of a section are taken; behind it, those that follow.

        Args:
          kind: the kind.
          is_part: whether it is a part of the section around it, which may have its parts in any
            order, each any number of times. Else it must be next.

        Yields:
          What its sizes are; None if the plan has no such section.
        """
        start = self._part(kind) if is_part else self._next
        if start is None or [each for each, _ in self._calls[start : start + 1]] != [begin(kind)]:
            yield None
            return
        self._next = start + 1
        self._sections.append(self._next)
        yield self._calls[start][1]
        self._sections.pop()
        self._next = end_of(self._calls, start) + 1

    def _part(self, kind: str) -> int | None:
        index = self._sections[-1] if self._sections else len(self._calls)
        while index < len(self._calls) and self._calls[index][0] != END:
            if self._calls[index][0] == begin(kind):
                return index
            is_section = self._calls[index][0].startswith(begin(""))
            index = end_of(self._calls, index) + 1 if is_section else index + 1
        return None


def end_of(calls: Sequence[tuple[str, tuple]], start: int) -> int:
    """Returns the index of the end of the section that begins at an index."""
    depth = 0
    for index in range(start, len(calls)):
        kind = calls[index][0]
        depth += kind.startswith(begin("")) - (kind == END)
        if depth == 0:
            return index
    return len(calls) - 1
