"""Predicts a mask, or a restored image, for each image file, and writes it as a PNG file.

    for each in write_pictures(Export(folder), ["a/1.jpg"], ["1.png"], pathlib.Path("masks")):
        print(each.path, each.error or each.shares)

A mask has the number of a pixel's class as its value, and a palette, so that it can be looked at
and trained on: `targets="mask"` reads the same numbers from it.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import PIL.Image

from tfaccel.common.report import in_lines
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.export import card
from tfaccel.export.picture_folder import PictureFolder
from tfaccel.export.predict import ROWS, Export, refusal

BYTES = 2**26  # of the answers to one request


@dataclasses.dataclass(frozen=True)
class Picture:
    """What was written for one file.

    Attributes:
      path: the path as given.
      written: the PNG file; None after an error.
      shares: for a mask, the part of its pixels that each class has, [classes] float64, or None.
      error: why the file cannot be read or decoded; None if it can.
    """

    path: str
    written: pathlib.Path | None = None
    shares: np.ndarray | None = None
    error: str | None = None

    def line(self, most: int, names: Sequence[str] = ()) -> str:
        """Returns the same as text for people, with the `most` largest classes of a mask.

        `names` are those of all classes; without them, a class is shown as its number.
        """
        if self.error is not None:
            return in_lines(f"{self.path}: {self.error}", rest="  ")
        said = f"{self.path}: {self.written}"
        if self.shares is not None:
            order = np.argsort(-self.shares, kind="stable")[:most]
            names = names or [str(each) for each in range(len(self.shares))]
            shown = ((names[each], self.shares[each]) for each in order if self.shares[each])
            said += f": {', '.join(f'{name} {share:.1%}' for name, share in shown)}"
        return in_lines(said, rest="  ")


def write_pictures(
    export: Export, paths: Sequence[str], names: Sequence[str], output: pathlib.Path
) -> Iterator[Picture]:
    """Writes a PNG file for each image that can be decoded, and yields what was written.

    A mask has the size of its image, if the network saw the whole image (the window "stretch").
    Otherwise it has the size of the network's window, as a restored image always has.

    If an earlier call was stopped, the pictures that it wrote are left out.

    Args:
      export: an export of a network for masks or of a restoring network.
      paths: the image files.
      names: the name of each PNG file, below `output`.
      output: a new folder, or one that a stopped call began.

    Raises:
      UserError: the export predicts neither masks nor images, or the folder is another one.
      RunError: a file cannot be written.
    """
    name = _picture_of(export)
    common = os.path.commonpath([os.path.dirname(os.path.abspath(each)) for each in paths])
    folder = PictureFolder(
        output, settings={"model": card.read(export.folder), "folder of the images": common}
    )
    with folder.held():
        left = [index for index, each in enumerate(names) if not folder.has(each)]
        if num_there := len(names) - len(left):
            summary("predict: continues after %s", counted(num_there, "image"))
        paths, names = [paths[each] for each in left], [names[each] for each in left]
        yield from _written(export, name, paths, names, folder)
        folder.finish()


def _written(
    export: Export, name: str, paths: Sequence[str], names: Sequence[str], folder: PictureFolder
) -> Iterator[Picture]:
    """Writes the pictures that are missing: the answer `name` to each image."""
    *size, channels = export.shapes[name][1:]
    rows = max(1, min(ROWS, BYTES // (4 * channels * size[0] * size[1])))
    is_whole = card.read(export.folder).get("preprocessing", {}).get("window") == "stretch"
    answers = export.ask(paths, name, rows=rows)
    for path, to, answer in zip(paths, names, answers, strict=True):
        if isinstance(answer, str):
            yield Picture(path, error=answer)
            continue
        shares = None
        if name == "image":
            picture = _image(answer)
        else:
            classes = answer.argmax(axis=-1).astype(np.uint8)
            shares = np.bincount(classes.ravel(), minlength=channels) / classes.size
            picture = _mask(classes, PIL.Image.open(path).size if is_whole else None)
        yield Picture(path, folder.save(picture, to), shares)


def _picture_of(export: Export) -> str:
    for name in ("image", "probabilities"):
        if len(export.shapes.get(name, ())) == 4:
            return name
    raise refusal(export, "masks or images")


def _image(pixels: np.ndarray) -> PIL.Image.Image:
    """Returns [height, width, channels] float32, 0 to 255, as an image."""
    levels = np.rint(pixels).clip(0, 255).astype(np.uint8)
    return PIL.Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)


def _mask(classes: np.ndarray, size: tuple[int, int] | None) -> PIL.Image.Image:
    """Returns [height, width] uint8 as an image with a palette, of (width, height) if given."""
    mask = PIL.Image.fromarray(classes)
    if size is not None:
        mask = mask.resize(size, PIL.Image.Resampling.NEAREST)
    mask.putpalette(palette())
    return mask


def palette() -> bytes:
    """Returns red, green and blue for each of 256 classes.

    They are Pascal VOC's (VOClabelcolormap.m of its development kit): bits 0, 3 and 6 of a class
    are the highest bits of red, bits 1, 4 and 7 those of green, and bits 2 and 5 those of blue.
    """
    colours = np.zeros((256, 3), np.uint8)
    classes = np.arange(256)
    for bit in range(8):
        colours[:, bit % 3] |= (((classes >> bit) & 1) << (7 - bit // 3)).astype(np.uint8)
    return colours.tobytes()
