"""Words for numbers, shapes and layers, as findings use them.

percent(0.25), shape_text((26, 26, 3)), layer_names(layers)
"""

from collections.abc import Iterable

from tfaccel.common.tables import counted, in_figures
from tfaccel.diagnostics.lint.facts import Layer, Shape
from tfaccel.diagnostics.lint.products import LITTLE

# Why pixels that are scaled twice, or not at all, are a fault.
OVERSCALED = (
    "if pixels are scaled twice, all images are nearly one colour, and pretrained weights see "
    "nothing in them"
)
UNSCALED = "initial weights suit numbers of about 1, so the first steps are far too large"


def percent(part: float) -> str:
    """Returns a share of 1 as a percentage, without digits that mean nothing."""
    if part >= 0.1:
        return f"{100 * part:.0f}%"
    return f"{100 * part:.1f}%" if part >= 0.001 else "under 0.1%"


def shape_text(shape: Shape) -> str:
    """Returns a shape as people write it: 26 x 26 x 3."""
    return " x ".join("?" if each is None else str(each) for each in shape) or "one value"


def range_text(pixel_range: tuple[float, float]) -> str:
    """Returns a range of pixels: 0 to 255."""
    return f"{in_figures(pixel_range[0], 4)} to {in_figures(pixel_range[1], 4)}"


def padding_count(whole: int, part: int, noun: str) -> str:
    """Returns how many of a tile's rows or columns are padding, in words."""
    return f"{part} of {counted(whole, noun)} {'is' if part == 1 else 'are'} padding"


def layer_names(layers: Iterable[Layer], most: int = 3) -> str:
    """Returns the names of layers without repetitions; of many layers, only the first few."""
    names = list(dict.fromkeys(each.name for each in layers))
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def tile_share(lost: float) -> str:
    """Returns a share of tiles that a fix saves, in words."""
    small = "next to nothing, " if lost < LITTLE else ""
    return f"{small}{percent(lost)} of the model's tiles"
