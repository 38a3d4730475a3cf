"""DALI's operators: encoded images and their draws to normalised images.

Takes the inputs of a batch as DALI nodes; gives what the batch holds. Nothing here is random and
nothing has an order: both come in as inputs, from a Feed. Nothing here is reckoned, either: inputs
are what operators take. A random window was some hundred operators on numbers, which kept 256 rows
for 25 to 40 ms (2 CPU cores, 2026-11-22).

    @pipeline_def
    def pipeline():
        inputs = {"image": fn.external_source(...), "corner": fn.external_source(...), ...}
        return batch(inputs, images, augment, decode={"device": "cpu"}, dtype="float16")

DALI's conventions, each found by test: `warp_affine` maps output to input pixels, counted from the
corner, centres at one half; `color_twist` and `brightness_contrast` turn contrast about 128; the
decoders cut a window out exactly as if all had been decoded; and resizing repeats the pixel at the
border, where Pillow and TensorFlow leave out what is not there.
"""

from nvidia.dali import fn, types

from tfaccel.config import CROPS, AugmentConfig, ImageConfig

DTYPES = {"float16": types.FLOAT16, "float32": types.FLOAT}

# A GPU repeats the colours that JPEG stores for four pixels, unless it is told to interpolate them
# as every other decoder does: of 1,000 ImageNet files one is 3.3 of 255 grey levels off in its
# mean, 45 at most (H200, 2026-11-23), and what is exported sees other pixels.
INTERPOLATED = {"jpeg_fancy_upsampling": True}

# The draws that operators take one by one, in the order of `draws.draw`; colours by channels.
MIRRORS = ("vertical", "horizontal")
COLORS = {1: ("brightness", "contrast"), 3: ("brightness", "contrast", "saturation", "hue")}


def batch(inputs: dict, images: ImageConfig, augment: AugmentConfig, *, decode: dict, dtype: str):
    """Returns (image, label), or (image, target) of a pair: what DALI holds for each sample.

    Args:
      inputs: as `dali_inputs` has them.
      images: size, channels, mean and std.
      augment: which part of an image is cut out.
      decode: the decoder's arguments: its device, and hints.
      dtype: of the images.
    """
    grey = images.channels == 1
    settings = {"inputs": inputs, "images": images, "augment": augment, "decode": decode}
    image = _geometry(inputs["image"], grey=grey, **settings)
    image = _finished(_colored(image, images, inputs), images, inputs, dtype)
    if "label" in inputs:
        return image, inputs["label"]
    if images.targets == "mask":
        mask = _geometry(inputs["target"], grey=True, nearest=True, **settings)
        return image, _finished_mask(mask, inputs)
    target = _geometry(inputs["target"], grey=grey, **settings)
    return image, _finished(target, images, inputs, dtype)


def _geometry(encoded, *, inputs, images, augment, decode, grey, nearest=False):
    """Decodes a window (all, if there is none), resizes and warps it: uint8."""
    # Never as types.ANY_DATA: DALI 2.4 aborts the process for a grey JPEG.
    # Grey comes after colour: of a PNG with a gAMA or sRGB chunk the decoder's own grey is of
    # linear light, up to 91 of 255 levels off, and of a JPEG it is the lightness before colours
    # are cut to 0..255.
    decode = {**decode, "output_type": types.RGB}
    decode["adjust_orientation"] = False  # as stored, like TensorFlow and torchvision
    interpolation = {"interp_type": types.INTERP_NN if nearest else types.INTERP_LINEAR}
    if "corner" in inputs:
        image = _window(encoded, inputs["corner"], inputs["size"], augment, decode)
    else:
        image = fn.decoders.image(encoded, **decode, **INTERPOLATED)
    if grey:
        image = fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY)
    if augment.window not in CROPS:  # which have the size already
        image = fn.resize(image, size=images.image_size, **interpolation)
    if "warp" in inputs:
        image = fn.warp_affine(image, matrix=inputs["warp"], fill_value=0, **interpolation)
    return image


def _window(encoded, corner, size, augment, decode):
    """Decodes the window at `corner` of `size`, both [height, width] in pixels."""
    if decode["device"] == "mixed" and not augment.has_random_window:
        # What evaluation and an export ask of. nvJPEG refuses to interpolate a part alone: DALI
        # then decodes it on the CPU, and says so in two lines an image (H200, 2026-11-23).
        image = fn.decoders.image(encoded, **decode, **INTERPOLATED)
        return fn.slice(image, start=corner, shape=size, axes=[0, 1])
    # To the pixel what decoding all and cutting would give, and faster: 435 to 488 against 337
    # to 380 ImageNet JPEGs per CPU second with a random window (2 cores, 2026-11-21).
    absolute = {"normalized_anchor": False, "normalized_shape": False}
    return fn.decoders.image_slice(encoded, corner, size, axes=[0, 1], **absolute, **decode)


def _colored(image, images, inputs):
    if "brightness" not in inputs:
        return image
    factors = {name: inputs[name] for name in COLORS[images.channels]}
    twist = fn.brightness_contrast if images.channels == 1 else fn.color_twist
    return twist(image, **factors)


def _finished(image, images, inputs, dtype):
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


def _finished_mask(mask, inputs):
    """Mirrors, and leaves the values as they are."""
    if any(name in inputs for name in MIRRORS):
        mask = fn.flip(mask, **{name: inputs.get(name, 0) for name in MIRRORS})
    return mask
