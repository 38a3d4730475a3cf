"""Numbers, shapes and layers in words, as findings name them.

percent(0.25), shown((26, 26, 3)), named(layers)
"""

from collections.abc import Iterable

from tfaccel.common.tables import counted
from tfaccel.diagnostics.lint.facts import Layer, Shape
from tfaccel.diagnostics.lint.products import LITTLE


def percent(part: float) -> str:
    """Returns a part of 1 in words that promise no more digits than it has."""
    if part >= 0.1:
        return f"{100 * part:.0f}%"
    return f"{100 * part:.1f}%" if part >= 0.001 else "under 0.1%"


def shown(shape: Shape) -> str:
    """Returns a shape as people write it: 26 x 26 x 3."""
    return " x ".join("?" if each is None else str(each) for each in shape) or "one value"


def of_which(whole: int, part: int, noun: str) -> str:
    """Returns how many of a tile's rows or columns are padding, in words."""
    return f"{part} of {counted(whole, noun)} {'is' if part == 1 else 'are'} padding"


def named(layers: Iterable[Layer], most: int = 3) -> str:
    """Returns names of layers, each once, the first few in full."""
    names = list(dict.fromkeys(each.name for each in layers))
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def of_tiles(lost: float) -> str:
    """Returns the gain of tiles that need not be padding."""
    small = "next to nothing, " if lost < LITTLE else ""
    return f"{small}{percent(lost)} of the model's tiles"
