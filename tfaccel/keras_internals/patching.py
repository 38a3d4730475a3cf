"""Replaces attributes of classes, modules and objects for a while.

    with patched(keras.Model, "compile", other):
        ...

What a thread has replaced holds for the whole process. So of several threads only one may run at a
time (tfaccel/step/lockstep.py). While a thread waits for its turn, `suspended` puts back what it
has replaced, so that the others do not see it.
"""

import contextlib
import threading
from collections.abc import Iterator

_NOTHING = object()  # in place of a value: there is no such attribute or entry


class Swap:
    """A change of state that holds while its context (`swapped`) is entered and not suspended."""

    def put(self) -> None:
        """Makes the change, and keeps what was there before."""
        raise NotImplementedError

    def take(self) -> None:
        """Undoes the change, and keeps what is there, for the next `put`."""
        raise NotImplementedError


class Attributes(Swap):
    """Attributes of objects that differ within the context: they start with the values outside."""

    def __init__(self, places: list[tuple[object, str]]):
        """Takes each object and the name of its attribute."""
        self._places = places
        self._values = [getattr(*each) for each in places]

    def put(self) -> None:
        """Gives the attributes the values of the context."""
        self._exchange()

    def take(self) -> None:
        """Gives the attributes the values outside."""
        self._exchange()

    def _exchange(self) -> None:
        before = [getattr(*each) for each in self._places]
        for (owner, name), value in zip(self._places, self._values, strict=True):
            setattr(owner, name, value)
        self._values = before


class Swaps(list):
    """The swaps that a thread has entered, outer ones first.

    Attributes:
      outer: the swaps of the thread that waits for this thread; None if no thread does.
    """

    def __init__(self, outer: "Swaps | None" = None):
        """Starts without a swap."""
        super().__init__()
        self.outer = outer


class _Thread(threading.local):
    def __init__(self):
        self.swaps = Swaps()


_thread = _Thread()


def swaps() -> Swaps:
    """Returns the swaps of this thread."""
    return _thread.swaps


@contextlib.contextmanager
def swaps_of_a_lane(outer: Swaps) -> Iterator[Swaps]:
    """Within the context, this thread has new swaps; `outer` is that of the thread that waits."""
    before, _thread.swaps = _thread.swaps, Swaps(outer)
    try:
        yield _thread.swaps
    finally:
        _thread.swaps = before


@contextlib.contextmanager
def suspended(down_to: Swaps) -> Iterator[None]:
    """Within the context, the state is as if this thread had entered no swap.

    Args:
      down_to: the outermost swaps that are suspended: this thread's own, or those of a thread that
        waits for it.
    """
    chain = [_thread.swaps]
    while chain[-1] is not down_to and chain[-1].outer is not None:
        chain.append(chain[-1].outer)
    entered = [swap for each in reversed(chain) for swap in each]
    taken = []
    try:
        for swap in reversed(entered):
            swap.take()
            taken.append(swap)
        yield
    finally:
        for swap in reversed(taken):
            swap.put()


@contextlib.contextmanager
def swapped(swap: Swap) -> Iterator[None]:
    """Within the context, the change of a swap holds, except while the thread is suspended."""
    own = _thread.swaps
    swap.put()
    own.append(swap)
    try:
        yield
    finally:
        own.remove(swap)
        swap.take()


def patched(owner, name: str, value) -> contextlib.AbstractContextManager:
    """Within the context, an attribute of a class, module or object has another value."""
    return swapped(_Attribute(owner, name, value))


def with_entry(mapping: dict, name: str, value) -> contextlib.AbstractContextManager:
    """Within the context, an entry of a dict has another value.

    With the `__dict__` of a Keras object, Keras does not track the attribute.
    """
    return swapped(_Entry(mapping, name, value))


class _Entry(Swap):
    """One entry of a dict."""

    def __init__(self, mapping: dict, name: str, value):
        self._mapping, self._name, self._own = mapping, name, value
        self._before = _NOTHING

    def put(self) -> None:
        self._before = self._mapping.get(self._name, _NOTHING)
        self._set(self._own)

    def take(self) -> None:
        self._own = self._mapping.get(self._name, _NOTHING)
        self._set(self._before)

    def _set(self, value) -> None:
        if value is _NOTHING:
            self._mapping.pop(self._name, None)
        else:
            self._mapping[self._name] = value


class _Attribute(_Entry):
    """One attribute. If a class has it from a base class, it is the base's again afterwards."""

    def __init__(self, owner, name: str, value):
        super().__init__(owner.__dict__, name, value)
        self._owner = owner

    def _set(self, value) -> None:
        if value is not _NOTHING:
            setattr(self._owner, self._name, value)
        elif self._name in self._owner.__dict__:
            delattr(self._owner, self._name)
