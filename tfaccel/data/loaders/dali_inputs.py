"""Makes the inputs of a DALI pipeline: a batch's encoded images, labels, windows and draws.

`make_reader` takes the source and a Feed, and returns a function from a batch's number to its
inputs. Python computes in NumPy whatever it can, because an operator on numbers costs DALI 0.2 to
0.5 ms for 256 rows (2 cores, 2026-11-22).

    read = make_reader(source, images, feed=feed, num_threads=4, fed=collections.deque(maxlen=3))
    read(0)["corner"]                     # [rows, 2] int32
"""

import collections
import concurrent.futures
from collections.abc import Callable

import numpy as np
from nvidia.dali.tensors import TensorListCPU

from tfaccel.common.errors import UserError
from tfaccel.config import ImageConfig
from tfaccel.data.draws import LEVEL_KINDS
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import faults
from tfaccel.data.loaders.dali_bytes import make_file_reader
from tfaccel.data.loaders.dali_graph import COLORS, MIRRORS
from tfaccel.data.loaders.decode import two_sizes
from tfaccel.data.loaders.windows import windows
from tfaccel.data.source import ImageSource, fed_labels
from tfaccel.data.sources.kinds import Unseen, agreed, are_usual
from tfaccel.data.stores.ahead import Ahead


def make_reader(
    source: ImageSource,
    images: ImageConfig,
    *,
    feed: Feed,
    num_threads: int,
    fed: collections.deque,
) -> Callable[[int], dict[str, np.ndarray | TensorListCPU]]:
    """Returns a function that reads a batch from its number, and returns these inputs by name:

      image: the encoded images, in DALI's form.
      label: [rows] int64, or [rows, labels] float32; for pairs instead target, like image.
      corner, size: [rows, 2] int32, the window's (top, left) and (height, width) in source pixels;
        missing if single images are taken whole.
      warp: [rows, 2, 3] float32, if the feed draws it; see `draws.kinds`.
      vertical, horizontal: [rows] int32, if images are mirrored in that direction without a warp.
      brightness, contrast, and for three channels saturation and hue: [rows] float32, if drawn.
      policy, blur, levels, erase: as in `draws.kinds`, if drawn.

    The function is called with consecutive numbers.

    Args:
      source: the encoded images.
      images: size and channels of the batches.
      feed: the examples and draws of each batch.
      num_threads: number of threads that read.
      fed: receives the ids of each batch; its maxlen covers all batches in the pipeline.

    Raises:
      UnreadableError: the function raises it for images that DALI reads differently from Pillow.
      UserError: the function raises it if the sizes of a pair differ, or as in `make_file_reader`.
      OSError, RuntimeError: as in `make_file_reader`.
    """
    augment, is_pair = feed.augment, source.targets is not None
    cuts = is_pair or augment.window != "stretch"
    settings = {"rows": feed.plan.rows_per_replica, "num_threads": num_threads}
    read_images = make_file_reader(source.images, with_sizes=cuts, **settings)
    if is_pair:
        read_targets = make_file_reader(source.targets, with_sizes=True, **settings)
    else:
        labels = fed_labels(source)
    held = collections.deque(maxlen=fed.maxlen)  # encoded images, which the pipeline does not copy
    unseen, pool = Unseen(len(source)), concurrent.futures.ThreadPoolExecutor(num_threads)
    ahead = Ahead(source, feed)

    def read(number):
        ahead(number)
        ids, draws = feed.rows(number).ids, feed.draws(number)
        fed.append(ids)
        inputs, is_new = {}, unseen.among(ids, number)
        for part in filter(None, (source.images, source.targets)):
            part.check_files(ids[is_new], pool, num_threads=num_threads)  # DALI hangs on a FIFO
        inputs["image"], heads, sizes = read_images(ids)
        odd = _odd(inputs["image"], heads, is_new, is_mask=False)
        if is_pair:
            inputs["target"], heads, target_sizes = read_targets(ids)
            odd += _odd(inputs["target"], heads, is_new, is_mask=images.targets == "mask")
        if odd:
            bad = np.unique(ids[odd]).tolist()
            raise faults.unfit_error(source, images, bad, num_read=len(ids))
        if is_pair:
            for row in np.flatnonzero((sizes != target_sizes).any(axis=1)):
                raise UserError(two_sizes(source, ids[row], sizes[row], target_sizes[row]))
        else:
            inputs["label"] = labels[ids]
        held.append(tuple(inputs.values()))
        drawn = draws.pop("window", None)
        if cuts:
            found = windows(sizes, images.image_size, augment, drawn)
            inputs["corner"], inputs["size"] = found
        return inputs | _operator_arguments(draws, feed, images)

    return read


def _odd(encoded: TensorListCPU, heads: np.ndarray, is_new: np.ndarray, *, is_mask) -> list[int]:
    """Returns the new rows of a batch with an image that DALI does not read as Pillow does.

    Most of 256 images are known from their first bytes in 0.1 ms; each other one takes 20 us or
    more.
    """
    rows = np.flatnonzero(is_new & ~are_usual(heads, are_masks=is_mask)).tolist()
    return [row for row in rows if not agreed(bytes(encoded.at(row)), is_mask=is_mask)]


def _operator_arguments(draws: dict[str, np.ndarray], feed: Feed, images: ImageConfig) -> dict:
    """Returns the draws as the operators take them, and no unused ones: DALI would refuse them."""
    taken = {name: each for name, each in draws.items() if name in ("warp", *LEVEL_KINDS)}
    if "mirror" in draws:
        mirrors = dict(zip(MIRRORS, draws["mirror"].T, strict=True))
        asked = {"vertical": feed.augment.vertical_flip, "horizontal": feed.augment.horizontal_flip}
        taken |= {name: mirror for name, mirror in mirrors.items() if asked[name]}
    if "color" in draws:
        taken |= zip(COLORS[images.channels], draws["color"].T, strict=False)  # grey has two
    return {name: np.ascontiguousarray(values) for name, values in taken.items()}
