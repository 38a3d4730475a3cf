"""Chooses which classes of a source are used, and in which order they are numbered.

    pets = select_classes(source, ["dog", "cat"])    # the dogs are 0 and the cats 1
    test = select_classes(test_source, pets.class_names, may_lack=True)

Needs no TensorFlow.
"""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.redact import shown
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.data.source import ArraySource, ImageSource

MOST_SHOWN = 5  # names in one line of the log

log = logging.getLogger("tfaccel")


def check_has_classes(source: ImageSource | ArraySource, of: str) -> None:
    """Raises UserError unless each image has one class; `of` is the setting that needs it."""
    have = {"multilabel": "several classes each", "regression": "numbers for labels"}
    if source.task != "classes":
        raise UserError(
            f"{of} needs images with one class each, but these have "
            f"{have.get(source.task, 'target images')}; remove it"
        )


def select_classes(
    source: ImageSource | ArraySource,
    class_names: Sequence[str],
    *,
    may_lack: bool = False,
    of: str = "",
) -> ImageSource | ArraySource:
    """Returns the images of some classes, numbered by the order of the names.

    The log says how many images of other classes are left out. An array that is mapped from a file
    is read into memory if images are left out.

    Args:
      source: images with one class each.
      class_names: the names of two or more classes of the source, each once.
      may_lack: whether classes without images are let through with a warning, for a test set. Its
        names are then not known to be right; check them with the training images.
      of: what the log calls the images, such as "training".

    Raises:
      UserError: a name is not a class of the source, a class has no images, or the images have not
        one class each.
    """
    check_has_classes(source, "the choice of classes")
    class_names = tuple(class_names)
    found = {source.class_names[each]: each for each in np.unique(source.labels).tolist()}
    lacking = [each for each in class_names if each not in found]
    if lacking and (len(lacking) == len(class_names) or not may_lack):
        _refuse(lacking[0], source.class_names, found)
    if lacking:
        what = f"{of} images" if of else "images"
        log.warning("data: there are no %s of these classes: %s", what, _some(lacking))
    number_of = np.full(len(source.class_names), -1, np.int32)
    for number, name in enumerate(class_names):
        if name in found:
            number_of[found[name]] = number
    labels = number_of[source.labels]
    kept = labels >= 0
    summary(
        "data: %s%s of %s classes: %s; %s of %s left out, which have other classes",
        f"{of}: " if of else "",
        f"{len(class_names):,}",
        f"{len(source.class_names):,}",
        _some(class_names),
        f"{len(source) - kept.sum():,}",
        counted(len(source), "image"),
    )
    numbered = dataclasses.replace(source, labels=labels, class_names=class_names)
    return numbered if kept.all() else numbered.taken(np.flatnonzero(kept))


def _refuse(name: str, class_names: Sequence[str], found: dict[str, int]) -> None:
    if name in class_names:
        raise UserError(
            f"the class '{name}' of classes has no images; add some, or remove it from classes"
        )
    near = did_you_mean(name, found)
    if "expected one of" in near:
        near = f"; expected some of: {_some(list(found))}"
    raise UserError(f"classes has '{name}', which is not a class of these images{near}")


def _some(names: Sequence[str]) -> str:
    left = len(names) - MOST_SHOWN
    said = ", ".join(names[:MOST_SHOWN]) + (f" and {left:,} more" if left > 0 else "")
    return shown(said, keep="")
