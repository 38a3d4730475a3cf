"""Divides the examples of one source into training and validation, or into folds.

    train, validation = split(source, 0.2)
    train, validation = fold(source, 0, num_folds=5, group_pattern="^([^/]+)/")

Whether an example is held out depends on the seed and on its path below the deepest folder that
holds all examples. So the parts are the same on all workers, in each run, and wherever the folder
lies. With labels, each part has the same share of each class, as nearly as whole examples allow. An
image of several classes counts for its rarest one. Numbers are not looked at.

Examples of one group stay in one part: the images of a patient, or the frames of a video. Groups
are dealt one by one, the largest first, to the part that becomes most like the whole, as in
scikit-learn's StratifiedGroupKFold. The measure here is the sum over parts and classes of
(examples - wanted)^2 / wanted.
"""

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence

import numpy as np

from tfaccel.common.checks import check_int, check_number
from tfaccel.common.errors import UserError
from tfaccel.common.redact import shown
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.data.source import ArraySource, Blobs, ImageSource

log = logging.getLogger("tfaccel")

Source = ImageSource | ArraySource


def split(
    source: Source, share: float, *, seed: int = 0, group_pattern: str | None = None
) -> tuple[Source, Source]:
    """Returns the source for training and the one for validation.

    Args:
      source: the examples.
      share: the share of the examples in validation, above 0 and below 1.
      seed: another seed holds out other examples.
      group_pattern: a regular expression that finds the group in a path below the deepest folder
        that holds all examples: its first parenthesis, or all that it matches. None: the source's
        own groups, if it has any.

    Raises:
      UserError: an argument is wrong, a path has no group, or a part would be empty.
    """
    check_number("share", share, above=0, below=1)
    parts, groups = _parts(source, (1 - share, share), seed, group_pattern)
    _tell(f"validation_split={share}", parts == 1, groups, group_pattern)
    return source.taken(np.flatnonzero(parts == 0)), source.taken(np.flatnonzero(parts == 1))


def fold(
    source: Source,
    index: int,
    *,
    num_folds: int,
    seed: int = 0,
    group_pattern: str | None = None,
) -> tuple[Source, Source]:
    """Returns the source without one fold, for training, and the fold, for validation.

    Args:
      source: the examples.
      index: the fold, from 0 to `num_folds` - 1. Each example is in one fold.
      num_folds: the number of folds, of nearly equal size.
      seed: as for `split`.
      group_pattern: as for `split`.

    Raises:
      UserError: as for `split`.
    """
    check_int("num_folds", num_folds, at_least=2)
    check_int("index", index, at_least=0, at_most=num_folds - 1)
    parts, groups = _parts(source, (1 / num_folds,) * num_folds, seed, group_pattern)
    _tell(f"fold {index} of {num_folds} (the first is 0)", parts == index, groups, group_pattern)
    _warn_of_rare(source, num_folds)
    return source.taken(np.flatnonzero(parts != index)), source.taken(
        np.flatnonzero(parts == index)
    )


def _tell(what: str, is_test: np.ndarray, groups: np.ndarray | None, pattern: str | None) -> None:
    """Shows how many examples, and of how many groups, each part has."""
    numbers = []
    for chosen in (~is_test, is_test):
        of = "" if groups is None else f" of {counted(len(np.unique(groups[chosen])), 'group')}"
        numbers.append(counted(int(chosen.sum()), "image") + of)
    by = "" if groups is None else f", by {'group_column' if pattern is None else 'group_pattern'}"
    summary("data: %s%s: %s train, %s test", what, by, *numbers)


def _warn_of_rare(source: Source, num_folds: int) -> None:
    """Warns of classes with fewer images than there are folds, which some folds do not test."""
    if source.task != "classes":
        return
    counts = np.bincount(source.labels, minlength=len(source.class_names))
    rare = np.flatnonzero((counts > 0) & (counts < num_folds))
    if rare.size:
        least = rare[np.argmin(counts[rare])]
        count = int(counts[least])
        log.warning(
            "data: %s has %s, fewer than num_folds=%d, so that at least %s none of it%s",
            f"class {shown(source.class_names[least], keep='')}",
            counted(count, "image"),
            num_folds,
            f"{counted(num_folds - count, 'fold')} test{'s' if num_folds - count == 1 else ''}",
            f"; use num_folds of at most {count} to test it in each" if count > 1 else "",
        )


def _parts(
    source: Source, shares: Sequence[float], seed: int, group_pattern: str | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the part and the group of each example, [num_examples] each; None without groups."""
    check_int("seed", seed, at_least=0)
    names = list(_names(source))
    keys = np.array([_key(seed, each) for each in names])
    labels = _strata(source)
    groups = source.groups if group_pattern is None else _groups(names, group_pattern)

    def dealt(shares):
        if groups is None:
            return _of_examples(keys, labels, shares)
        return _of_groups(groups, names, labels, shares, seed)

    parts = dealt(shares)
    if len(np.unique(parts)) < len(shares):
        what, number = "image", len(names)
        if groups is not None:
            what, number = "group", len(np.unique(groups))
        folds = range(min(number, len(shares) - 1), 1, -1)
        most = next((n for n in folds if len(np.unique(dealt((1 / n,) * n))) == n), None)
        raise UserError(_too_few(counted(number, what), what, len(shares), most))
    return parts, groups


def _too_few(counts: str, what: str, num_parts: int, most: int | None) -> str:
    """Returns the error for parts of which one is empty; `most` folds would have examples."""
    if counts == "1 group":
        fix = "all images are of one group: give a column or a pattern that tells groups apart"
    elif num_parts == 2:
        fix = f"give more {what}s, or hold out another share"
    else:
        fix = f"use num_folds of at most {most}" if most else f"give more {what}s of each class"
    into = "training and test" if num_parts == 2 else f"{num_parts} folds"
    return f"{counts} cannot be divided into {into}; {fix}"


def _strata(source: Source) -> np.ndarray:
    """Returns the number of the class that an example counts for, [num_examples]."""
    if source.task == "classes":
        return source.labels
    if source.task != "multilabel":
        return np.zeros(len(source), np.int64)
    # Rare classes first, as Sechidis et al. do (On the Stratification of Multi-Label Data, 2011).
    order = np.argsort(source.labels.sum(axis=0), kind="stable")
    rarest = source.labels[:, order].argmax(axis=1)
    return np.where(source.labels.any(axis=1), 1 + rarest, 0)


def _names(source: Source) -> Iterator[bytes]:
    """Yields what names each example, wherever the folder lies: its path, or its index."""
    if not isinstance(source.images, Blobs):
        yield from (b"%d" % index for index in range(len(source)))
        return
    blobs = source.images
    start = len(blobs.folder)
    for index in range(len(blobs)):
        path = blobs.name(index)[start:].lstrip("/")
        yield path.encode("utf-8", "surrogateescape")


def _key(seed: int, name: bytes) -> int:
    digest = hashlib.blake2b(name, digest_size=8, key=b"%d" % seed).digest()
    return int.from_bytes(digest) >> 1  # an int64 that is not negative


def _groups(names: Sequence[bytes], pattern: str) -> np.ndarray:
    """Returns the group of each example, [num_examples]: the bytes that the pattern finds."""
    try:
        finds = re.compile(pattern.encode())
    except re.error as error:
        raise UserError(f"group_pattern={pattern!r} is no regular expression ({error})") from error
    found = [finds.search(each) for each in names]
    if None in found:
        name = names[found.index(None)].decode(errors="replace")
        raise UserError(
            f"group_pattern={pattern!r} finds nothing in {name}; expected a regular expression "
            "that finds the group in each path below the deepest folder of all images"
        )
    return np.array([each[1 if finds.groups else 0] or b"" for each in found])


def _of_examples(keys: np.ndarray, labels: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Deals the examples class by class, in the order of their keys."""
    parts, before = np.zeros(len(keys), np.int64), 0
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(keys[members], kind="stable")]
        # The places of all classes run on, so that the parts have the right size together.
        if len(shares) == 2:
            held = round((before + len(members)) * shares[1]) - round(before * shares[1])
            held = min(held, len(members) - 1)  # training sees each class
            own = (np.arange(len(members)) < held).astype(np.int64)
        else:
            own = (before + np.arange(len(members))) % len(shares)
        parts[members] = own
        before += len(members)
    return parts


def _of_groups(
    groups: np.ndarray,
    names: Sequence[bytes],
    labels: np.ndarray,
    shares: Sequence[float],
    seed: int,
) -> np.ndarray:
    """Deals whole groups, the largest first, to the part that becomes most like the whole."""
    distinct, group_of = np.unique(groups, return_inverse=True)
    order = np.argsort(group_of, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(group_of))[:-1])
    # A group is known by its first path, because a column's groups are numbers by order.
    tie = [_key(seed, min(names[index] for index in each.tolist())) for each in members]
    by_size = sorted(range(len(distinct)), key=lambda each: (-len(members[each]), tie[each]))
    wanted = np.outer(shares, np.bincount(labels)).astype(np.float64)
    dealt, parts = np.zeros_like(wanted), np.zeros(len(labels), np.int64)
    for each in by_size:
        classes, counts = np.unique(labels[members[each]], return_counts=True)
        goal, has = wanted[:, classes], dealt[:, classes]
        cost = (counts * (2 * has + counts - 2 * goal) / goal).sum(axis=1)
        part = int(np.argmin(cost))
        dealt[part, classes] += counts
        parts[members[each]] = part
    return parts
