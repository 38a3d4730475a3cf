"""DALI's operators, from encoded images and their draws to normalised images.

With operations on whole grey levels (a policy, a blur and others), DALI gives whole grey levels,
and TensorFlow does the rest on the replica's device, as in every loader. The draws of these
operations pass through the pipeline with their batch.

`batch` takes the inputs of a batch as DALI nodes. Nothing here is random or decides on an order:
both are inputs from a Feed. Nothing here computes with numbers, either, because Python computes all
arguments of the operators. A random window took some hundred operators on numbers, which needed 25
to 40 ms for 256 rows (2 CPU cores, 2026-11-22).

    @pipeline_def
    def pipeline():
        inputs = {"image": fn.external_source(...), "corner": fn.external_source(...), ...}
        return batch(inputs, images, augment, decode={"device": "cpu"}, dtype="float16")

DALI's conventions, found by tests: `warp_affine` maps output to input pixels, counted from the
corner, with pixel centres at one half. `color_twist` and `brightness_contrast` change contrast
about 128. The decoders cut out a window exactly as if they had decoded the whole image. Resizing
repeats the pixels at the border, which Pillow and TensorFlow do not.
"""

import functools

from nvidia.dali import fn, types

from tfaccel.config import CROPS, AugmentConfig, ImageConfig
from tfaccel.data.draws import LEVEL_KINDS

DTYPES = {"float16": types.FLOAT16, "float32": types.FLOAT}

# JPEG stores one colour for four pixels. By default a GPU repeats it, while every other decoder
# interpolates. Of 1,000 ImageNet files, the mean difference is up to 3.3 of 255 grey levels and the
# largest is 45 (H200, 2026-11-23), so an exported model would see other pixels.
INTERPOLATED = {"jpeg_fancy_upsampling": True}

# The draws that are separate arguments of operators, in the order of `draws.draw`; colours by
# number of channels.
MIRRORS = ("vertical", "horizontal")
COLORS = {1: ("brightness", "contrast"), 3: ("brightness", "contrast", "saturation", "hue")}


def batch(inputs: dict, images: ImageConfig, augment: AugmentConfig, *, decode: dict, dtype: str):
    """Returns the nodes (image, label), or (image, target) for pairs.

    If there are draws of LEVEL_KINDS, images are uint8 and not normalised, and the nodes of these
    draws follow, in the order of LEVEL_KINDS.

    Args:
      inputs: the nodes of the inputs, by their names in `dali_inputs`.
      images: size, channels, mean and std.
      augment: which part of an image is cut out.
      decode: the decoder's arguments: its device, and hints.
      dtype: dtype of the images.
    """
    grey = images.channels == 1
    settings = {"inputs": inputs, "images": images, "augment": augment, "decode": decode}
    image = _geometry(inputs["image"], grey=grey, **settings)
    image = _colored(image, images, inputs)
    levels = tuple(inputs[kind] for kind in LEVEL_KINDS if kind in inputs)
    normalised = functools.partial(_finished, images=images, dtype=dtype)
    finished = _mirrored if levels else normalised
    image = finished(image, inputs)
    if "label" in inputs:
        return image, inputs["label"], *levels
    if images.targets == "mask":
        mask = _geometry(inputs["target"], grey=True, nearest=True, **settings)
        return image, _mirrored(mask, inputs), *levels
    target = _geometry(inputs["target"], grey=grey, **settings)
    return image, finished(target, inputs), *levels


def _geometry(encoded, *, inputs, images, augment, decode, grey, nearest=False):
    """Decodes the window, or the whole image if there is none, and resizes and warps it: uint8."""
    # The type is never types.ANY_DATA, because DALI 2.4 aborts the process for a grey JPEG.
    # Grey images are decoded in colour first. The decoder's own grey is different: for a PNG with a
    # gAMA or sRGB chunk it is linear light, up to 91 of 255 levels off, and for a JPEG it is the
    # lightness before colours are clipped to 0..255.
    decode = {**decode, "output_type": types.RGB}
    decode["adjust_orientation"] = False  # as stored, as in TensorFlow and torchvision
    interpolation = {"interp_type": types.INTERP_NN if nearest else types.INTERP_LINEAR}
    if "corner" in inputs:
        image = _window(encoded, inputs["corner"], inputs["size"], augment, decode)
    else:
        image = fn.decoders.image(encoded, **decode, **INTERPOLATED)
    if grey:
        image = fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY)
    if augment.window not in CROPS:  # crops have the size already
        image = fn.resize(image, size=images.image_size, **interpolation)
    if "warp" in inputs:
        fill = (images.ignore_class or 0) if nearest else 0
        image = fn.warp_affine(image, matrix=inputs["warp"], fill_value=fill, **interpolation)
    return image


def _window(encoded, corner, size, augment, decode):
    """Decodes the window with corner [top, left] and size [height, width], in pixels."""
    if decode["device"] == "mixed" and not augment.has_random_window:
        # Evaluation and export use this. nvJPEG cannot interpolate part of an image, so DALI would
        # decode it on the CPU and print two lines for each image (H200, 2026-11-23).
        image = fn.decoders.image(encoded, **decode, **INTERPOLATED)
        return fn.slice(image, start=corner, shape=size, axes=[0, 1])
    # This gives the same pixels as decoding all and then cutting, and is faster: 435 to 488
    # ImageNet JPEGs per CPU second compared with 337 to 380, for a random window (2 cores,
    # 2026-11-21).
    absolute = {"normalized_anchor": False, "normalized_shape": False}
    return fn.decoders.image_slice(encoded, corner, size, axes=[0, 1], **absolute, **decode)


def _colored(image, images, inputs):
    if "brightness" not in inputs:
        return image
    factors = {name: inputs[name] for name in COLORS[images.channels]}
    twist = fn.brightness_contrast if images.channels == 1 else fn.color_twist
    return twist(image, **factors)


def _finished(image, inputs, *, images, dtype):
    """Mirrors and normalises."""
    if "vertical" in inputs:
        image = fn.flip(image, vertical=inputs["vertical"], horizontal=0)
    return fn.crop_mirror_normalize(
        image,
        mirror=inputs.get("horizontal", 0),
        mean=[255 * each for each in images.mean],
        std=[255 * each for each in images.std],
        dtype=DTYPES[dtype],
        output_layout="HWC",
    )


def _mirrored(image, inputs):
    """Mirrors a mask or an image of whole grey levels, and does not change its values."""
    if any(name in inputs for name in MIRRORS):
        image = fn.flip(image, **{name: inputs.get(name, 0) for name in MIRRORS})
    return image
