"""What a scan lets through is decoded by every loader alike."""

import os
import pathlib

import numpy as np
import PIL.Image
import planted
import pytest

from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
from tfaccel.data.feed import Feed
from tfaccel.data.loaders.dali import DaliStream
from tfaccel.data.loaders.memory import decode_all
from tfaccel.data.loaders.tf_data import TfDataStream
from tfaccel.data.placement import Placement
from tfaccel.data.scan import files
from tfaccel.data.shards import Plan
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.runtime.devices import Device

PLACEMENT = Placement(Device("/cpu:0", None), num_threads=2, seed=0)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """All planted files, good and bad, less those that a scan finds bad, and DALI's own."""
    root = tmp_path_factory.mktemp("planted")
    contents = planted.GOOD | planted.FAULTY
    for name, data in contents.items():
        (root / name).write_bytes(data)
    paths = tuple(str(root / name) for name in contents if not name.endswith("tif"))
    source = ImageSource(Blobs(paths), np.arange(len(paths), dtype=np.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        return files.usable(source, files.scan_files(source, num_workers=2, progress=False))


def names(source):
    return [os.path.basename(each) for each in source.images.files]


@pytest.mark.parametrize(
    ("channels", "window"),
    [
        (3, "random_resized_crop"),
        (1, "resized_center_crop"),
        pytest.param(1, "random_resized_crop", marks=pytest.mark.slow),
        pytest.param(3, "resized_center_crop", marks=pytest.mark.slow),
    ],
)
def test_all_loaders_decode_it(source, channels, window):
    images, augment = ImageConfig(image_size=(16, 16), channels=channels), AugmentConfig(window)
    feed = Feed(Plan(len(source), len(source), 1), augment, (16, 16), 0)
    settings = {"feed": feed, "placement": PLACEMENT, "dtype": "float32"}
    by_dali = DaliStream(source, images, dali=DaliConfig(), decode_on_gpu=False, **settings)
    (one, labels), (other, _) = next(by_dali), next(TfDataStream(source, images, **settings))
    np.testing.assert_array_equal(labels, source.labels)
    smooth = [not name.startswith(("one_bit", "palette")) for name in names(source)]
    # Each resizes in its own way, which shows in what is dithered: see their tests.
    assert np.abs(one.numpy() - other.numpy()).mean(axis=(1, 2, 3))[smooth].max() < 8 / 255


def test_it_can_be_kept_decoded(source):
    settings = {"stored_size": (24, 32), "channels": 3, "targets": "image", "num_threads": 2}
    pixels = decode_all(source, **settings).images.astype(int)
    colored = [not name.startswith(("grey", "one_bit", "palette")) for name in names(source)]
    difference = np.abs(pixels - planted.PIXELS).mean(axis=(1, 2, 3))[colored]
    assert difference.max() < 8


def test_grey_is_made_of_the_decoded_colours(tmp_path):
    colours = np.stack([[0, 64, 255, 250], [255, 30, 0, 20], [10, 200, 90, 255]], -1)
    picture = PIL.Image.fromarray(np.tile(colours.astype(np.uint8), (4, 1, 1)))
    linear = planted.encoded(picture, "PNG")
    linear = linear[:33] + planted.png_chunk(b"sRGB", b"\0") + linear[33:]
    paths = [str(tmp_path / "linear.png"), str(tmp_path / "vivid.jpg")]
    jpeg = planted.encoded(picture, "JPEG", quality=60)
    for path, data in zip(paths, (linear, jpeg), strict=True):
        pathlib.Path(path).write_bytes(data)
    right = np.stack([np.asarray(PIL.Image.open(path).convert("L")) for path in paths])
    source = ImageSource(Blobs(tuple(paths)), np.zeros(2, np.int32), ("a",))
    images = ImageConfig(image_size=(4, 4), channels=1)
    feed = Feed(Plan(2, 2, 1), AugmentConfig(), (4, 4), 0)
    settings = {"feed": feed, "placement": PLACEMENT, "dtype": "float32"}
    by_dali = DaliStream(source, images, dali=DaliConfig(), decode_on_gpu=False, **settings)
    for stream in (by_dali, TfDataStream(source, images, **settings)):
        image, _ = next(stream)
        grey = (image.numpy() * images.std + images.mean) * 255
        assert np.abs(grey[..., 0] - right).max() <= 1.01
