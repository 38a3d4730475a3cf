"""A model's matrix products: their multiplications and tiles, and the first and last products.

share(model, model.layers[:1])      # 0.25 of the multiplications
heads(model)
"""

import math
from collections.abc import Iterable

from tfaccel.diagnostics.lint.facts import OUTSIDE, Layer, Model

# Shares of a model's tiles. A loss of MUCH or more is a warning. A loss below LITTLE cannot be
# measured, because the steps of one model differ by more.
MUCH, LITTLE = 0.05, 0.01


def padded(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below the size."""
    return -(-size // multiple) * multiple


def multiple_of(layer: Layer) -> int:
    """Returns the number that a layer's sizes should be a multiple of.

    It is 16 bytes: 8 in float16 and bfloat16, 16 in int8; see tensor_cores.py. float32 layers are
    treated as float16, which they should become, although TF32 needs only 4.
    """
    return 16 if layer.dtype == "int8" else 8


def can_pad(head: Layer) -> bool:
    """Returns whether `fix` can pad a head."""
    return head.kind == "Dense" and head.dtype != "int8"


def tile_work(layer: Layer) -> float:
    """Returns a layer's multiplications, including the padding of its tiles."""
    multiple = multiple_of(layer)
    sizes = filter(None, (layer.features_in, layer.features_out))
    return layer.multiplies * math.prod(padded(size, multiple) / size for size in sizes)


def padding(model: Model, layers: Iterable[Layer], size: int, multiple: int) -> float:
    """Returns the share of the model's tiles that is padding because of a size, 0 to 1.

    `layers` are the layers with this number of inputs or outputs; `multiple` of them fill a tile.
    """
    whole = sum(map(tile_work, model.layers))
    empty = 1 - size / padded(size, multiple)
    return sum(map(tile_work, dict.fromkeys(layers))) * empty / whole if whole else 0.0


def share(model: Model, layers: Iterable[Layer]) -> float:
    """Returns the share of the model's multiplications that these layers have, 0 to 1."""
    whole = sum(each.multiplies for each in model.layers)
    return sum(each.multiplies for each in layers) / whole if whole else 0.0


def heads(model: Model) -> tuple[Layer, ...]:
    """Returns the products that no other product follows. The task determines their sizes."""
    products = [index for index, each in enumerate(model.layers) if each.multiplies]
    return tuple(
        model.layers[index]
        for index in products
        if not _reached(model, index) & set(products)
        # What follows an operation outside all layers is not known, except for the last product.
        and (index == products[-1] or OUTSIDE not in _reached(model, index))
    )


def firsts(model: Model) -> tuple[Layer, ...]:
    """Returns the products that follow no other product. The data determines their sizes."""
    products = [index for index, each in enumerate(model.layers) if each.multiplies]
    after = {each for index in products for each in _reached(model, index)}
    known = (
        products
        if OUTSIDE not in after
        else [index for index in products if model.layers[index].is_input or index == products[0]]
    )
    return tuple(model.layers[index] for index in known if index not in after)


def _reached(model: Model, index: int) -> set[int]:
    """Returns the indices of all layers after a layer, and OUTSIDE for anything else."""
    found, left = set(), [index]
    while left:
        each = left.pop()
        if each != OUTSIDE:
            new = set(model.layers[each].feeds) - found
            found |= new
            left += new
    return found
