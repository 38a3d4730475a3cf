"""Finds the feature maps of a backbone by where its resolution halves.

Takes a functional model from images to a feature map; gives one tensor for each resolution.

    maps = feature_maps(body, (224, 224))   # of 224, 112, 56, 28, 14 and 7 pixels a side
"""

import math

import keras

# A map with less than this share of another's pixels has half the sides. Architectures without
# padding lose a row or two on the way: InceptionV3 has sides of 149 and 147, and then of 73.
HALVED_AREA = 0.4


def feature_maps(body: keras.Model, image_size: tuple[int, int]) -> list[keras.KerasTensor | None]:
    """Returns the last feature map of each resolution, from the image's down to the output's.

    "Last" is the last layer that all later ones depend on. So a map is not one of several parallel
    branches, such as a residual branch without its shortcut. NASNet's cells read the two cells
    before them and have no such layer; there, it is the last one of the most channels.

    Args:
      body: a functional model with one input and one output of 4 dimensions.
      image_size: (height, width) that its first layer gets, after padding.

    Returns:
      Tensors [batch, height, width, channels]. The item of index i has about 1 / 2**i of the
      image's sides. It is None if no layer with weights has that resolution.
    """
    operations = _maps_of(body)
    least = _area(body.output.shape[1:3])
    areas = {_area(each.output.shape[1:3]) for each in operations}
    levels = _levels({each for each in areas if each >= least}, _area(image_size))
    passed = _passed_by_all(body)
    found = []
    for level in range(max(levels.values())):
        own = [each for each in operations if levels.get(_area(each.output.shape[1:3])) == level]
        widest = max((each.output.shape[-1] for each in own), default=0)
        own = (
            [each for each in own if id(each) in passed]
            or [each for each in own if each.output.shape[-1] == widest]
            or [None]
        )
        found.append(own[-1] and own[-1].output)
    return [*found, body.output]


def _maps_of(body: keras.Model) -> list[keras.Operation]:
    """Returns the operations that give a feature map, from the first one with weights on."""
    steps = list(body.operations)
    first = next(at for at, each in enumerate(steps) if getattr(each, "trainable_weights", None))
    # Padding and cropping give a map of slightly other places, for the layer behind it only.
    return [
        each
        for each in steps[first:]
        if not isinstance(each, keras.layers.ZeroPadding2D | keras.layers.Cropping2D)
        and isinstance(each.output, keras.KerasTensor)
        and len(each.output.shape) == 4
    ]


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _levels(areas: set[int], whole: int) -> dict[int, int]:
    """Returns the number of halvings of the sides, by the number of pixels."""
    levels, level, largest = {}, 0, whole
    for each in sorted(areas, reverse=True):
        if each < HALVED_AREA * largest:
            # ConvNeXt begins with a quarter of the sides. A tenth is for lost rows.
            level += max(1, math.floor(math.log2(math.sqrt(largest / each)) + 0.1))
            largest = each
        levels[each] = level
    return levels


def _passed_by_all(body: keras.Model) -> set[int]:
    """Returns ids of the operations that every path from the input to the output goes through.

    They are in order. After such an operation, nothing reads what was computed before it.
    """
    steps = list(body.operations)
    last_read = {}
    for at, each in enumerate(steps):
        for tensor in inputs_of(each):
            last_read[id(tensor)] = at
    passed, furthest = set(), 0
    for at, each in enumerate(steps):
        if furthest <= at:
            passed.add(id(each))
        reads = [last_read.get(id(tensor), at) for tensor in keras.tree.flatten(each.output)]
        furthest = max(furthest, *reads)
    return passed


def inputs_of(step: keras.Operation) -> list[keras.KerasTensor]:
    """Returns the tensors that a layer or operation reads; none for the input layer."""
    if isinstance(step, keras.layers.InputLayer):
        return []
    return keras.tree.flatten(step.input)
