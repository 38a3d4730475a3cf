"""DALI's operators: encoded images and their draws to normalised images.

Takes the inputs of a batch as DALI nodes; gives what the batch holds. Nothing here is random and
nothing has an order: both come in as inputs, from a Feed.

    @pipeline_def
    def pipeline():
        inputs = {"image.path": fn.external_source(...), "mirror": fn.external_source(...), ...}
        return batch(inputs, images, augment, decode={"device": "cpu"}, dtype="float16")

DALI's conventions, each found by test: `warp_affine` maps output to input pixels, counted from the
corner, centres at one half; `color_twist` and `brightness_contrast` turn contrast about 128; the
decoders cut a window out exactly as if all had been decoded; and resizing repeats the pixel at the
border, where Pillow and TensorFlow leave out what is not there.
"""

import functools

import numpy as np
from nvidia.dali import fn, math, types

from tfaccel.config import CROPS, AugmentConfig, ImageConfig
from tfaccel.data.draws import ATTEMPTS

DTYPES = {"float16": types.FLOAT16, "float32": types.FLOAT}
FAR = 2.0**30  # pixels: outside of any image

_exact = functools.partial(fn.cast, dtype=types.FLOAT64)
_whole = functools.partial(fn.cast, dtype=types.INT32)


def batch(inputs: dict, images: ImageConfig, augment: AugmentConfig, *, decode: dict, dtype: str):
    """Returns (image, label), or (image, target) of a pair: what DALI holds for each sample.

    Args:
      inputs: "image.path", a path as uint8 that zero bytes may follow; "label", an int32 scalar,
        or "target.path"; and the feed's draws by kind, one row for each sample.
      images: size, channels, mean and std.
      augment: which part of an image is cut out.
      decode: the decoder's arguments: its device, and hints.
      dtype: of the images.
    """
    encoded, is_pair = _read(inputs["image.path"]), "label" not in inputs
    cuts = is_pair or augment.window != "stretch"
    window = _window(encoded, images, augment, inputs) if cuts else None
    grey = images.channels == 1
    image = _geometry(encoded, window, images, augment, inputs, decode, grey=grey)
    image = _finished(_colored(image, images, inputs), images, augment, inputs, dtype)
    if not is_pair:
        return image, inputs["label"]

    encoded_target = _read(inputs["target.path"])
    window = _if_same_size(encoded, encoded_target, window)
    geometry = functools.partial(_geometry, encoded_target, window, images, augment, inputs, decode)
    if images.targets == "mask":
        return image, _finished_mask(geometry(grey=True, nearest=True), inputs)
    return image, _finished(geometry(grey=grey), images, augment, inputs, dtype)


def _read(path):
    # Mapping small files costs more than copying them: 18,700 against 34,500 MNIST PNGs a second
    # on 2 cores (2026-11-21). A file cut short while mapped would be a SIGBUS, too.
    return fn.io.file.read(path, dont_use_mmap=True)


def _geometry(encoded, window, images, augment, inputs, decode, *, grey, nearest=False):
    """Decodes a window (None: all of it), resizes and warps it: uint8."""
    # Never as types.ANY_DATA: DALI 2.4 aborts the process for a grey JPEG.
    decode = {**decode, "output_type": types.GRAY if grey else types.RGB}
    decode["adjust_orientation"] = False  # as stored, like TensorFlow and torchvision
    interpolation = {"interp_type": types.INTERP_NN if nearest else types.INTERP_LINEAR}
    if window is None:
        image = fn.decoders.image(encoded, **decode)
    else:
        # To the pixel what decoding all and cutting would give, and faster: 435 to 488 against 337
        # to 380 ImageNet JPEGs per CPU second with a random window (2 cores, 2026-11-21).
        absolute = {"normalized_anchor": False, "normalized_shape": False}
        image = fn.decoders.image_slice(encoded, *window, axes=[0, 1], **absolute, **decode)
    if augment.window not in CROPS:  # which have the size already
        image = fn.resize(image, size=images.image_size, **interpolation)
    if "warp" in inputs:
        image = fn.warp_affine(image, matrix=inputs["warp"], fill_value=0, **interpolation)
    return image


def _colored(image, images, inputs):
    if "color" not in inputs:
        return image
    brightness, contrast, saturation, hue = (inputs["color"][index] for index in range(4))
    if images.channels == 1:
        return fn.brightness_contrast(image, brightness=brightness, contrast=contrast)
    return fn.color_twist(
        image, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue
    )


def _finished(image, images, augment, inputs, dtype):
    """Mirrors and normalises."""
    if "mirror" in inputs and augment.vertical_flip:
        image = fn.flip(image, vertical=inputs["mirror"][0], horizontal=0)
    mirror = inputs["mirror"][1] if "mirror" in inputs else 0
    return fn.crop_mirror_normalize(
        image,
        mirror=mirror,
        mean=[255 * each for each in images.mean],
        std=[255 * each for each in images.std],
        dtype=DTYPES[dtype],
        output_layout="HWC",
    )


def _finished_mask(mask, inputs):
    """Mirrors, and leaves the values as they are."""
    if "mirror" in inputs:
        mirror = inputs["mirror"]
        mask = fn.flip(mask, vertical=mirror[0], horizontal=mirror[1])
    return _whole(mask)


# Windows: (top, left) and (height, width), reckoned in float64, as every loader does, so that all
# round alike. Places and sizes are pairs, vertical first.


def _window(encoded, images, augment, inputs):
    """Returns the corner and the size of a window as the decoder takes them: [2] int32 each."""
    source = _size(encoded)
    if augment.window == "random_resized_crop":
        corner, size = _random_resized(source, augment, _exact(inputs["window"]))
    elif augment.window == "stretch":
        corner, size = _constants(0, 0), source
    elif augment.window == "random_crop":
        size = _constants(*images.image_size)
        corner = _anywhere(source, size, _exact(inputs["window"]))
    else:
        size = _constants(*images.image_size)
        if augment.window == "resized_center_crop":
            size = _largest(source, images.image_size, augment.center_fraction)
        corner = _centred(source, size)
    return _whole(fn.stack(*corner)), _whole(fn.stack(*size))


def _size(encoded):
    """Returns (height, width) as the header has them: of every format that DALI decodes."""
    shape = _exact(fn.peek_image_shape(encoded, adjust_orientation=False))
    return shape[0], shape[1]


def _largest(source, shape, fraction):
    """Returns `fraction` of the largest size of that shape that the source holds."""
    scale = math.min(source[0] / shape[0], source[1] / shape[1]) * _number(fraction)
    return tuple(math.max(_round(side * scale), 1) for side in shape)


def _random_resized(source, augment, draws):
    """The first attempt that fits, anywhere; else all of the image, cut to the nearest shape."""
    height, width = source
    area, ratio = draws[:ATTEMPTS] * height * width, draws[ATTEMPTS : 2 * ATTEMPTS]
    heights, widths = _round(math.sqrt(area / ratio)), _round(math.sqrt(area * ratio))
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    number = types.Constant(np.arange(ATTEMPTS, dtype=np.int32))
    first = fn.reductions.min(number + ATTEMPTS * (fits == 0))
    is_first, found = number == first, _exact(first < ATTEMPTS)
    size = tuple(
        # Reductions take no float64.
        _exact(fn.reductions.max(_whole(each * is_first))) + (1 - found) * other
        for each, other in zip((heights, widths), _nearest(source, augment), strict=True)
    )
    drawn, centred = _anywhere(source, size, draws[2 * ATTEMPTS :]), _centred(source, size)
    return tuple(found * a + (1 - found) * b for a, b in zip(drawn, centred, strict=True)), size


def _nearest(source, augment):
    """Returns the source's size, cut to a width / height that is allowed."""
    (height, width), (least, largest) = source, augment.crop_ratio
    return (
        math.min(math.max(_round(width / _number(least)), 1), height),
        math.min(math.max(_round(height * _number(largest)), 1), width),
    )


def _anywhere(source, size, draws):
    free = [old - side for old, side in zip(source, size, strict=True)]
    # A draw just below 1 may be 1 in float32: not past what is free.
    return tuple(
        math.min(math.floor(draws[index] * (each + 1)), each) for index, each in enumerate(free)
    )


def _centred(source, size):
    return tuple(math.floor((old - side) * 0.5) for old, side in zip(source, size, strict=True))


def _if_same_size(encoded, target, window):
    """Returns the window, or one outside of any image where the target has not the input's size.

    DALI has no assertion, but its decoders refuse such a window.
    """
    differs = [one != other for one, other in zip(_size(encoded), _size(target), strict=True)]
    corner, size = window
    return corner + _whole(FAR * (differs[0] | differs[1])), size


def _round(value):
    return math.floor(value + 0.5)


def _number(value: float):
    """Returns a node of all 64 bits, which DALI has only for whole numbers."""
    bits = types.Constant(int(np.float64(value).view(np.int64)), dtype=types.INT64, device="cpu")
    return fn.reinterpret(bits, dtype=types.FLOAT64)


def _constants(*values: int):
    """Returns a node for each, for operators, which take nothing else."""
    return tuple(types.Constant(each, dtype=types.INT32, device="cpu") for each in values)
