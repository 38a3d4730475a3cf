"""A model's matrix products: what they cost, in multiplications and tiles, and which are the ends.

share(model, model.layers[:1])      # 0.25 of the multiplications
heads(model)
"""

from collections.abc import Iterable

from tfaccel.diagnostics.lint.facts import OUTSIDE, Layer, Model

# Of a model's tiles. From MUCH on, what is lost is a warning. Below LITTLE it is next to nothing:
# the steps of one model differ by more, so that no measurement would show the gain.
MUCH, LITTLE = 0.05, 0.01


def padded(size: int, multiple: int) -> int:
    """Returns the next multiple: what whole tiles hold."""
    return -(-size // multiple) * multiple


def multiple_of(layer: Layer) -> int:
    """Returns the multiple that a layer's sizes should be.

    16 bytes: 8 in float16 and bfloat16, 16 in int8; see tensor_cores.py. float32 is judged as
    float16, which it should become; TF32 alone needs 4.
    """
    return 16 if layer.dtype == "int8" else 8


def can_pad(head: Layer) -> bool:
    """Returns whether `fix` knows how to fill a head's tiles."""
    return head.kind == "Dense" and head.dtype != "int8"


def tile_work(layer: Layer) -> float:
    """Returns a layer's multiplications as its tiles have them, padding included."""
    if not layer.multiplies:
        return 0.0
    multiple = multiple_of(layer)
    sizes = [each for each in (layer.features_in, layer.features_out) if each]
    work = float(layer.multiplies)
    for size in sizes:
        work *= padded(size, multiple) / size
    return work


def padding(model: Model, layers: Iterable[Layer], size: int, multiple: int) -> float:
    """Returns the part of the model's tiles that is padding, 0 to 1.

    Args:
      model: all of it.
      layers: of its own, which have the size.
      size: of an input or an output.
      multiple: that a tile holds.
    """
    whole = sum(map(tile_work, model.layers))
    empty = 1 - size / padded(size, multiple)
    return sum(map(tile_work, dict.fromkeys(layers))) * empty / whole if whole else 0.0


def share(model: Model, layers: Iterable[Layer]) -> float:
    """Returns these layers' part of the model's multiplications, 0 to 1."""
    whole = sum(each.multiplies for each in model.layers)
    return sum(each.multiplies for each in layers) / whole if whole else 0.0


def heads(model: Model) -> tuple[Layer, ...]:
    """Returns the products after which there are no more: their sizes are the task's."""
    products = [index for index, each in enumerate(model.layers) if each.multiplies]
    return tuple(
        model.layers[index]
        for index in products
        if not _reached(model, index) & set(products)
        # What comes after an operation outside all layers is not known, but for the last one.
        and (index == products[-1] or OUTSIDE not in _reached(model, index))
    )


def firsts(model: Model) -> tuple[Layer, ...]:
    """Returns the products before which there are none: their inputs' sizes are the data's."""
    products = [index for index, each in enumerate(model.layers) if each.multiplies]
    after = {each for index in products for each in _reached(model, index)}
    known = (
        products
        if OUTSIDE not in after
        else [index for index in products if model.layers[index].is_input or index == products[0]]
    )
    return tuple(model.layers[index] for index in known if index not in after)


def _reached(model: Model, index: int) -> set[int]:
    """Returns the layers that come after one, and OUTSIDE for what is none."""
    found, left = set(), [index]
    while left:
        each = left.pop()
        if each != OUTSIDE:
            new = set(model.layers[each].feeds) - found
            found |= new
            left += new
    return found
