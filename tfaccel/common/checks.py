"""Checks for the values of settings. Each raises UserError with one sentence, or returns nothing.

check_int("seed", seed, at_least=0)
"""

import importlib.util
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tfaccel.common import meant
from tfaccel.common.errors import UserError, did_you_mean

# The part of XLA_FLAGS that makes XLA record sums over GPUs. XLA accepts upper and lower case.
SUMS_IN_GRAPHS = re.compile(
    r"--xla_gpu_enable_command_buffer=(?:\S*,)?\+?COLLECTIVES\b", re.IGNORECASE
)


def check_dali() -> None:
    """Raises UserError if DALI is not installed, or XLA_FLAGS has a flag that does not suit DALI.

    This does not import DALI, which happens where it is used.
    """
    try:
        found = importlib.util.find_spec("nvidia.dali")
    except ModuleNotFoundError:  # there is no package `nvidia`
        found = None
    if found is None:
        raise UserError(
            "DALI is not installed; install nvidia-dali-cuda120 (`tfaccel doctor` says more), or "
            "use another loader"
        )
    if SUMS_IN_GRAPHS.search(flags := os.environ.get("XLA_FLAGS", "")):
        raise UserError(
            f"XLA_FLAGS={flags} makes XLA record sums over GPUs in CUDA graphs. DALI sometimes "
            "waits for the whole GPU, and that ends the recording and the process; remove "
            "COLLECTIVES from XLA_FLAGS, or use another loader"
        )


def check_names(prefix: str, received, valid) -> None:
    """Raises UserError for the first name that is not valid."""
    for name in received:
        if name not in valid:
            raise UserError(f"{prefix} has no field '{name}'{meant.setting(name, valid)}")


def check_int(name: str, value: Any, *, at_least: int, at_most: int | None = None) -> None:
    """Raises UserError unless `value` is a whole number within the bounds."""
    if not is_int(value, at_least=at_least) or (at_most is not None and value > at_most):
        bound = f" and at most {at_most}" if at_most is not None else ""
        raise UserError(f"{name}={value!r}; expected a whole number of at least {at_least}{bound}")


def check_optional_ints(config: Any, *names: str) -> None:
    """Raises UserError unless each named field is None or a whole number above 0."""
    for name in names:
        if getattr(config, name) is not None:
            check_int(name, getattr(config, name), at_least=1)


def check_batch(global_batch_size: int | None, batch_per_replica: int | None) -> None:
    """Raises UserError unless exactly one of the two batch sizes is given."""
    given = {"global_batch_size": global_batch_size, "batch_per_replica": batch_per_replica}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        check_int(name, value, at_least=1)
    if len(given) != 1:
        raise UserError(
            f"global_batch_size={global_batch_size} and batch_per_replica={batch_per_replica}; "
            "expected one of the two, and None for the other"
        )


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Raises UserError unless `value` is a finite number within the bounds."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (at_least is None or value >= at_least) and (above is None or value > above)
    ok = ok and (at_most is None or value <= at_most) and (below is None or value < below)
    if not ok:
        bounds = (("at least", at_least), ("above", above), ("at most", at_most), ("below", below))
        expected = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        raise UserError(f"{name}={value!r}; expected a number {expected}".rstrip())


def check_flag(name: str, value: Any) -> None:
    """Raises UserError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r}; expected True or False")


def check_choice(name: str, value: Any, choices) -> None:
    """Raises UserError unless `value` is one of the choices."""
    if value not in choices:
        raise UserError(f"{name}={value!r}{did_you_mean(str(value), choices)}")


def check_text(name: str, value: Any, *, expected: str) -> None:
    """Raises UserError unless `value` is a non-empty string; the message says what is expected."""
    if not isinstance(value, str) or not value:
        raise UserError(f"{name}={value!r}; expected {expected}")


def check_type(name: str, value: Any, expected: type) -> None:
    """Raises UserError unless `value` is an instance of a class of tfaccel."""
    if not isinstance(value, expected):
        raise UserError(f"{name}={value!r}; expected tfaccel.{expected.__name__}(...)")


def check_only_with(config: Any, choice: str, fields_of: Mapping[str, Iterable[str]]) -> None:
    """Raises UserError if a field is set that has no effect with the chosen option.

    Args:
      config: a dataclass.
      choice: the name of the field with the chosen option.
      fields_of: for some options, the fields that have an effect only with this option, or with
        others that have them, too.
    """
    chosen, options_of = getattr(config, choice), {}
    for option, names in fields_of.items():
        for name in names:
            options_of.setdefault(name, []).append(option)
    for name, options in options_of.items():
        value, default = getattr(config, name), getattr(type(config), name)
        if value != default and chosen not in options:
            needed = " or ".join(map(repr, options))
            raise UserError(
                f"{name}={value!r} needs {choice}={needed}, but {choice}={chosen!r}; remove "
                f"{name}, or set it to {default!r}"
            )


def is_int(value: Any, *, at_least: int) -> bool:
    """Returns whether `value` is a whole number of at least `at_least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
