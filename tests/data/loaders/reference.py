"""What every loader must give, slowly: one decoded image and its draws to one training example.

NumPy in float64, and Pillow's antialiased bilinear resize in floating point. Nothing is rounded to
whole grey levels between operations; a loader that does so may differ by half a level for each.
Where a resize's filter reaches over the border, Pillow and TensorFlow leave out what is not there,
and DALI repeats the last pixel (`repeat_border`): equal inside, and there up to some 15 levels
apart in pure noise (below 1 in smooth images).

    image = example(pixels, images, augment, {"mirror": draws["mirror"][row]})
    image, target = example(pixels, images, augment, draws_of_one_row, target=target_pixels)
"""

import math

import numpy as np
import PIL.Image
from PIL import ImageEnhance, ImageOps

from tfaccel.data.policies import CODES

ATTEMPTS = 10
# As in DALI's fn.color_twist: RGB to lightness and two axes of colour; back by the exact inverse.
RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])


def example(pixels, images, augment, draws, target=None, *, repeat_border=False):
    """Returns what a loader makes of one image, or of a pair.

    Args:
      pixels: [height, width, channels] uint8, decoded.
      images: ImageConfig.
      augment: AugmentConfig.
      draws: one row of what `tfaccel.data.draws.draw` gives, by kind.
      target: [height, width, channels] uint8 of the image that belongs to it, if any.
      repeat_border: whether resizing repeats the last pixel, as DALI does.

    Returns:
      image: [height, width, channels] float32; with a target also that: likewise, or uint8 where
        images.targets is "mask".
    """
    where = window(pixels.shape[:2], images.image_size, augment, draws)
    settings = {"repeat_border": repeat_border}
    image = color(geometry(pixels, where, images, draws, **settings), draws)
    has_levels = any(kind in draws for kind in ("policy", "blur", "levels", "erase"))
    if has_levels:
        image = varied(whole(image), draws, images, augment)
    if target is None:
        return normalised(image, images)
    if images.targets == "mask":
        mask = geometry(target, where, images, draws, nearest=True)
        for row in draws.get("policy", ()):
            mask = warp(mask, row[:6].reshape(2, 3), True, images.ignore_class or 0)
        return normalised(image, images), mask.astype(np.uint8)
    target = geometry(target, where, images, draws, **settings)
    for row in draws.get("policy", ()):
        target = move(whole(target), row, images, augment)
    return normalised(image, images), normalised(target, images)


def geometry(pixels, where, images, draws, *, nearest=False, repeat_border=False):
    """Returns the window, resized, warped or mirrored: [height, width, channels] in 0..255."""
    top, left, height, width = where
    image = pixels[top : top + height, left : left + width]
    image = resize(image, images.image_size, nearest=nearest, repeat_border=repeat_border)
    if "warp" in draws:
        fill = images.ignore_class or 0
        return warp(image, draws["warp"], nearest, fill if nearest else 0)
    return mirror(image, draws["mirror"]) if "mirror" in draws else image


def window(source_size, image_size, augment, draws):
    """Returns (top, left, height, width) in whole source pixels."""
    (source_height, source_width), (height, width) = source_size, image_size
    if augment.window == "stretch":
        return 0, 0, source_height, source_width
    if augment.window == "random_resized_crop":
        return _random_resized(source_size, augment, draws["window"])
    if augment.window == "resized_center_crop":
        scale = min(source_height / height, source_width / width) * augment.center_fraction
        # No side vanishes.
        height, width = (max(1, _round(side * scale)) for side in (height, width))
    assert height <= source_height
    assert width <= source_width
    if augment.window == "random_crop":
        return *_anywhere(source_size, (height, width), draws["window"]), height, width
    return *_centred(source_size, (height, width)), height, width


def _random_resized(source_size, augment, draws):
    source_height, source_width = source_size
    areas, ratios = draws[:ATTEMPTS].astype(float), draws[ATTEMPTS : 2 * ATTEMPTS].astype(float)
    for area, ratio in zip(areas * source_height * source_width, ratios, strict=True):
        width, height = _round(np.sqrt(area * ratio)), _round(np.sqrt(area / ratio))
        if 1 <= width <= source_width and 1 <= height <= source_height:
            return *_anywhere(source_size, (height, width), draws[-2:]), height, width
    # None fits: all of the image, cut centrally to the nearest shape that is allowed.
    least, largest = augment.crop_ratio
    width = min(source_width, max(1, _round(source_height * largest)))
    height = min(source_height, max(1, _round(source_width / least)))
    return *_centred(source_size, (height, width)), height, width


def _round(value):
    return int(value + 0.5 + 1e-9)  # whole pixels: half a one goes up, whatever float64 makes of it


def _anywhere(source_size, size, draws):
    # A draw just below 1 may be 1 in float32.
    return tuple(
        min(int(float(draw) * (source - side + 1)), source - side)
        for draw, source, side in zip(draws, source_size, size, strict=True)
    )


def _centred(source_size, size):
    return tuple((source - side) // 2 for source, side in zip(source_size, size, strict=True))


def resize(pixels, size, *, nearest=False, repeat_border=False):
    """Resizes to (height, width): bilinear and antialiased, or the pixel at each centre's place."""
    if nearest:
        rows, columns = (
            ((np.arange(new) + 0.5) * old / new).astype(int)
            for new, old in zip(size, pixels.shape, strict=False)
        )
        return pixels[rows][:, columns]
    height, width = pixels.shape[:2]
    border = max(height, width) if repeat_border else 0
    channels = [
        np.asarray(
            PIL.Image.fromarray(np.pad(channel.astype(np.float32), border, "edge")).resize(
                size[::-1],
                PIL.Image.Resampling.BILINEAR,
                box=(border, border, border + width, border + height),
            )
        )
        for channel in np.moveaxis(pixels, -1, 0)
    ]
    return np.stack(channels, axis=-1)


def warp(pixels, matrix, nearest=False, fill=0):
    """Each pixel from where an affine map of output to input (x, y) says; `fill` from outside."""
    height, width = pixels.shape[:2]
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    x, y = np.einsum("ij,jhw->ihw", matrix.astype(float), np.stack([x, y, np.ones_like(x)]))
    if nearest:
        return _at(pixels, np.floor(y), np.floor(x), fill)
    x, y = x - 0.5, y - 0.5
    total = 0.0
    for down in (0, 1):
        for right in (0, 1):
            row, column = np.floor(y) + down, np.floor(x) + right
            weight = (1 - np.abs(y - row)) * (1 - np.abs(x - column))
            total = total + weight[..., None] * _at(pixels, row, column)
    return total


def _at(pixels, rows, columns, fill=0):
    height, width = pixels.shape[:2]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    rows, columns = (np.where(inside, each, 0).astype(int) for each in (rows, columns))
    return np.where(inside[..., None], pixels[rows, columns], fill)


def mirror(pixels, draws):
    """Mirrors top to bottom, and left to right, where the two draws are 1."""
    return pixels[:: -1 if draws[0] else 1, :: -1 if draws[1] else 1]


def color(pixels, draws):
    """Saturation and hue in YIQ, then contrast about 128, then brightness; cut to 0..255."""
    if "color" not in draws:
        return pixels
    brightness, contrast, saturation, hue_degrees = draws["color"].astype(float)
    if pixels.shape[-1] == 3:
        hue = np.radians(hue_degrees)
        turn = np.array([[1, 0, 0], [0, np.cos(hue), np.sin(hue)], [0, -np.sin(hue), np.cos(hue)]])
        scale = np.diag([1, saturation, saturation])
        pixels = pixels @ (np.linalg.inv(RGB_TO_YIQ) @ turn @ scale @ RGB_TO_YIQ).T
    return np.clip(((pixels - 128.0) * contrast + 128) * brightness, 0, 255)


def whole(pixels):
    """Whole grey levels, uint8."""
    return np.floor(np.asarray(pixels) + 0.5).clip(0, 255).astype(np.uint8)


def varied(pixels, draws, images, augment):
    """A policy's operations, then blur, posterizing, solarizing and erasing, in whole levels."""
    for row in draws.get("policy", ()):
        pixels = move(pixels, row, images, augment)
        pixels = by_pillow(pixels, CODES[int(row[6])], float(row[7]))
    if "blur" in draws:
        pixels = blurred(pixels, float(draws["blur"][0]), augment.blur_sigma[1])
    if "levels" in draws:
        multiple, threshold = draws["levels"]
        pixels = by_pillow(by_pillow(pixels, "posterize", multiple), "solarize", threshold)
    return erased(pixels, draws["erase"], images, augment) if "erase" in draws else pixels


def move(pixels, row, images, augment):
    """An affine map of whole grey levels."""
    levels = np.array([round(255 * each) for each in images.mean])
    fill = levels if augment.policy_fill == "mean" else 0
    return whole(warp(pixels.astype(float) - fill, row[:6].reshape(2, 3)) + fill)


def by_pillow(pixels, name, argument):
    """One operation of `policies.CODES` on [height, width, channels] uint8, as Pillow does it."""
    image = PIL.Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    enhance = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "saturation": ImageEnhance.Color,
        "sharpness": ImageEnhance.Sharpness,
    }
    if name in enhance:
        image = enhance[name](image).enhance(argument)
    elif name == "posterize":
        bits = 8 - int(math.log2(argument))
        # Pillow 13 refuses to keep no bits, which timm's largest magnitude does.
        image = ImageOps.posterize(image, bits) if bits else PIL.Image.new(image.mode, image.size)
    elif name == "solarize":
        image = ImageOps.solarize(image, argument)
    elif name == "solarize_add":
        table = [min(255, level + int(argument)) if level < 128 else level for level in range(256)]
        image = image.point(table * pixels.shape[-1])
    elif name != "identity":
        image = getattr(ImageOps, name)(image)
    return np.asarray(image).reshape(pixels.shape)


def blurred(pixels, sigma, largest):
    """A Gaussian blur to three times the largest sigma, with the border's pixels repeated."""
    if sigma == 0:
        return pixels
    radius = math.ceil(3 * largest)
    weight = np.exp(-((np.arange(-radius, radius + 1) / sigma) ** 2) / 2)
    weight /= weight.sum()
    padded = np.pad(pixels.astype(float), [(radius, radius), (radius, radius), (0, 0)], "edge")
    for axis in (0, 1):
        padded = np.apply_along_axis(np.convolve, axis, padded, weight, "valid")
    return whole(padded)


def erased(pixels, draws, images, augment):
    """A rectangle painted over."""
    width, channels = pixels.shape[1:]
    top, left, tall, wide, seed = (int(each) for each in draws)
    found = pixels.copy()
    for y in range(top, top + tall):
        for x in range(left, left + wide):
            for channel in range(channels):
                place = (y * width + x) * channels + channel
                found[y, x, channel] = {
                    "mean": round(255 * images.mean[channel]),
                    "black": 0,
                    "random": noise(seed, place),
                }[augment.erase_fill]
    return found


def noise(seed, place):
    """A level of 0..255, by the last steps of MurmurHash3."""
    mixed = (seed * 0x9E3779B1 + place) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**32
    return mixed & 255


def normalised(pixels, images):
    """(pixel / 255 - mean) / std, in float32."""
    return ((pixels / 255 - np.array(images.mean)) / np.array(images.std)).astype(np.float32)
