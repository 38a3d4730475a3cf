"""Writes a picture of many training examples with their labels, for people to check.

Takes pixels after augmentation, without the normalisation; gives a PNG file.

    write("sheet.png", images, ["cat", "dog", ...])
    write("sheet.png", inputs, names, targets=targets)    # side by side

`write_batch` takes a loader's batch, and undoes the normalisation first.
"""

import colorsys
import io
import math
import os
import pathlib
import warnings
from collections.abc import Sequence

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from tfaccel.common.own_files import replace
from tfaccel.common.tables import cleaned
from tfaccel.config import ImageConfig

SMALLEST, LARGEST = 128, 320  # pixels of a shown image's longer side
GAP, MARGIN = 4, 12  # pixels, between a pair's images and around each example
FONT_SIZE, CAPTION_HEIGHT = 14, 22
PAPER, FRAME, INK = (255, 255, 255), (190, 190, 190), (40, 40, 40)
SHAPE = 4 / 3  # width / height of the sheet, about


def write(
    path: str | os.PathLike,
    images: np.ndarray,
    captions: Sequence[str | tuple[str, ...]],
    *,
    targets: np.ndarray | None = None,
    answers: np.ndarray | None = None,
) -> pathlib.Path:
    """Writes a grid of images with a caption under each and returns the file's path.

    Small images are enlarged by a whole number, pixel by pixel; large images are reduced.

    Args:
      path: of the PNG.
      images: [n, height, width, channels], uint8 or a float dtype in 0..1. Of more channels than
        three, the first three are shown as red, green and blue; of two, the first as grey.
      captions: one per image, a line or several; a line that is too long is cut.
      targets: shown to the right of each image, in the same form; None to show none.
      answers: a model's, shown to the right of these; None to show none.
    """
    cells = [_shown(each) for each in images]
    for others in (targets, answers):
        if others is not None:
            cells = [
                _side_by_side(cell, _shown(each)) for cell, each in zip(cells, others, strict=True)
            ]
    captions = [(each,) if isinstance(each, str) else each for each in captions]
    below = CAPTION_HEIGHT * max(map(len, captions))
    width, height = cells[0].width + MARGIN, cells[0].height + below + MARGIN
    columns = min(math.ceil(math.sqrt(len(cells) * SHAPE * height / width)), len(cells))
    rows = math.ceil(len(cells) / columns)
    sheet = PIL.Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), PAPER)
    draw = PIL.ImageDraw.Draw(sheet)
    font = PIL.ImageFont.load_default(FONT_SIZE)
    for place, (cell, caption) in enumerate(zip(cells, captions, strict=True)):
        left, top = MARGIN + place % columns * width, MARGIN + place // columns * height
        sheet.paste(cell, (left, top))
        draw.rectangle((left - 1, top - 1, left + cell.width, top + cell.height), outline=FRAME)
        for line, text in enumerate(caption):
            middle = top + cell.height + CAPTION_HEIGHT * line + CAPTION_HEIGHT // 2
            place_of_text = left + cell.width // 2, middle
            draw.text(place_of_text, _cut(text, font, cell.width), INK, font, anchor="mm")
    data = io.BytesIO()
    sheet.save(data, "PNG")
    replace(pathlib.Path(path), data.getvalue())
    return pathlib.Path(path)


def write_batch(
    path: str | os.PathLike,
    x: np.ndarray,
    y: np.ndarray,
    *,
    settings: ImageConfig,
    class_names: Sequence[str],
    target_names: Sequence[str] = (),
) -> pathlib.Path:
    """Writes rows of a loader's batches and returns the file's path.

    Args:
      path: of the PNG.
      x: [n, height, width, 1 or 3] of a float dtype, normalised.
      y: [n] int64 labels; or [n, labels] float32, several classes or numbers; or
        [n, height, width, channels] targets, normalised; or [n, height, width, 1] uint8 masks. Each
        value of a mask has its own colour; 0 is black.
      settings: those of the loader.
      class_names: in the order of the labels; empty for numbers.
      target_names: the names of the numbers.
    """
    images = in_unit_range(x, settings)
    if y.ndim == 1:
        return write(path, images, [class_names[label] for label in y])
    if y.ndim == 2:
        return write(path, images, [_caption(each, class_names, target_names) for each in y])
    targets = colors_of(y[..., 0]) if settings.targets == "mask" else in_unit_range(y, settings)
    return write(path, images, [str(index) for index in range(len(images))], targets=targets)


def _caption(label: np.ndarray, class_names: Sequence[str], target_names: Sequence[str]) -> str:
    """Returns the names of an image's classes, or its numbers."""
    if class_names:
        return ", ".join(class_names[place] for place in np.flatnonzero(label > 0.5)) or "none"
    alone = len(target_names) == 1
    named = zip(target_names, label.tolist(), strict=True)
    return ", ".join(f"{each:.4g}" if alone else f"{name} {each:.4g}" for name, each in named)


def in_unit_range(images: np.ndarray, settings: ImageConfig) -> np.ndarray:
    """Returns pixels in 0..1 from normalised pixels.

    Pixels of float32 may have any value. The least of a channel becomes 0, and the largest 1.
    """
    images = images.astype(np.float32) * settings.std + settings.mean
    if settings.pixel_dtype != "float32":
        return images
    finite = np.where(np.isfinite(images), images, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a channel without any finite pixel
        least, largest = (find(finite, axis=(0, 1, 2)) for find in (np.nanmin, np.nanmax))
    return (images - least) / np.maximum(largest - least, np.finfo(np.float32).tiny)


def _shown(pixels: np.ndarray) -> PIL.Image.Image:
    """Returns an RGB image of a size that people can see."""
    image = PIL.Image.fromarray(_rgb(pixels))
    longer = max(image.size)
    if longer > LARGEST:
        factor, method = LARGEST / longer, PIL.Image.Resampling.LANCZOS
    else:
        factor, method = math.ceil(SMALLEST / longer), PIL.Image.Resampling.NEAREST
    return image.resize([max(1, round(side * factor)) for side in image.size], method)


def _rgb(pixels: np.ndarray) -> np.ndarray:
    """Returns [height, width, 3] uint8."""
    if np.issubdtype(pixels.dtype, np.floating):
        # NaN becomes black.
        pixels = np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255
        pixels = (pixels + 0.5).astype(np.uint8)
    pixels = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., :1]
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy()


def colors_of(masks: np.ndarray) -> np.ndarray:
    """Returns a colour for each value: [n, height, width, 3] uint8."""
    values, places = np.unique(masks, return_inverse=True)
    # Steps of the golden ratio give neighbouring values very different hues.
    colors = [
        colorsys.hsv_to_rgb(value * 0.618034 % 1, 0.7, 1.0) if value else (0, 0, 0)
        for value in values.tolist()
    ]
    return (np.array(colors) * 255).astype(np.uint8)[places.reshape(masks.shape)]


def _side_by_side(one: PIL.Image.Image, other: PIL.Image.Image) -> PIL.Image.Image:
    both = PIL.Image.new(
        "RGB", (one.width + GAP + other.width, max(one.height, other.height)), PAPER
    )
    both.paste(one, (0, 0))
    both.paste(other, (one.width + GAP, 0))
    return both


def _cut(caption: str, font: PIL.ImageFont.ImageFont, width: int) -> str:
    """Returns the caption in one line, cut to the width."""
    caption = cleaned(caption)
    if font.getlength(caption) <= width:
        return caption
    while caption and font.getlength(caption + "...") > width:
        caption = caption[:-1]
    return caption.rstrip() + "..."
