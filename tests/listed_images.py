"""Grey images and a list of their labels: several classes an image, and numbers.

root = write_listed(tmp_path, 12)
source = sources.image_list(root / "list.csv", label_columns=["a", "b"], task="multilabel")
files_of(root, 12)         # their paths
"""

import numpy as np
import PIL.Image

SIZE = {"image_size": (10, 8), "channels": 1}


def write_listed(root, num):
    """Writes the images and list.csv, which has columns of both kinds, and returns the folder.

    "a", "b" and "error" are 0 or 1. "x" and "image" are numbers.
    """
    random = np.random.default_rng(0)
    lines = ["path,a,b,error,x,image"]
    for index in range(num):
        pixels = random.integers(0, 256, (10, 8), dtype=np.uint8)
        name = f"{index:02d}.png"
        PIL.Image.fromarray(pixels).save(root / name)
        lines.append(f"{name},{index % 2},{index // 4 % 2},0,{index / 2},{index}")
    (root / "list.csv").write_text("\n".join(lines))
    return root


def files_of(root, num):
    """The paths of the images, as text."""
    return [str(root / f"{index:02d}.png") for index in range(num)]


def pixels_of(file):
    """The pixels of an image, [10, 8, 1] float32 0..1, as a loader gives them."""
    return np.asarray(PIL.Image.open(file))[..., None] / np.float32(255)
