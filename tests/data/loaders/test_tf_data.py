"""TfDataStream against reference.py, on the CPU and, with -m gpu, on a GPU."""

import gc
import pathlib
import re
import shutil
import weakref

import numpy as np
import PIL.Image
import pytest
import reference
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, ImageConfig
from tfaccel.config.presets import preset
from tfaccel.data.feed import Feed
from tfaccel.data.loaders import faults
from tfaccel.data.loaders.tf_data import TfDataStream
from tfaccel.data.loaders.tf_image import windowed
from tfaccel.data.placement import Placement
from tfaccel.data.shards import Plan
from tfaccel.data.source import Blobs, ImageSource, UnreadableError
from tfaccel.runtime.devices import Device

CPU = Device("/cpu:0", None)
IMAGES = ImageConfig(image_size=(20, 16), mean=0.5, std=0.5)
EVERY_DRAW = preset(
    "imagenet_color", crop_area=(0.3, 1.0), rotation_degrees=30.0, shift_pixels=3, hue_degrees=30.0
)
SOME_DRAWS = AugmentConfig(window="random_crop", horizontal_flip=True, contrast=0.3)
# Windows are kept as whole grey levels. The images are normalised by a half.
HALF_LEVEL = 0.51 / 127.5


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    return CPU if request.param == "cpu" else Device("/gpu:0", 0)


@pytest.fixture(scope="module")
def pixels():
    """17 smooth images of 24 to 90 pixels, some of them long and narrow."""
    random = np.random.default_rng(0)
    sizes = [tuple(each) for each in random.integers(24, 90, (13, 2)).tolist()]
    return [
        np.asarray(
            PIL.Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(
                (width, height), PIL.Image.Resampling.BICUBIC
            )
        )
        for height, width in [*sizes, (20, 90), (90, 20), (20, 20), (21, 25)]
    ]


@pytest.fixture(scope="module")
def source(pixels, tmp_path_factory):
    """Them as PNG files."""
    return files_of(pixels, tmp_path_factory.mktemp("png"))


@pytest.fixture(scope="module")
def drawn(source):
    """Ten batches of them, on the CPU."""
    return batches(stream_of(source, IMAGES, SOME_DRAWS, rows=5), 10)


def drawn_on(device, source, drawn):
    """The same batches, on a device."""
    if device == CPU:
        return drawn
    return batches(stream_of(source, IMAGES, SOME_DRAWS, rows=5, device=device), 10)


def files_of(pixels, root, suffix="png", **settings):
    root.mkdir(exist_ok=True)
    names = []
    for index, image in enumerate(pixels):
        names.append(str(root / f"{index:02d}.{suffix}"))
        PIL.Image.fromarray(image).save(names[-1], **settings)
    return ImageSource(Blobs(tuple(names)), np.arange(len(pixels), dtype=np.int32) % 3)


def pairs_of(inputs, targets, root):
    images, targets = (
        files_of(each, root / name).images for each, name in ((inputs, "in"), (targets, "out"))
    )
    return ImageSource(images, None, targets=targets)


def stream_of(source, images, augment, *, rows=None, device=CPU, dtype="float32", **settings):
    plan = Plan(len(source), rows or len(source), num_replicas=1, seed=3, shuffle=rows is not None)
    feed = Feed(plan, augment, images.image_size, replica_index=0, **settings)
    placement = Placement(device, num_threads=2, seed=0)
    return TfDataStream(source, images, feed=feed, placement=placement, dtype=dtype)


def first_batch(source, augment, images=IMAGES, **settings):
    return tuple(each.numpy() for each in next(stream_of(source, images, augment, **settings)))


def batches(stream, number):
    return [tuple(each.numpy() for each in next(stream)) for _ in range(number)]


def expected(pixels, augment, images=IMAGES, targets=None):
    """What the reference makes of the first batch of all images, in their order."""
    draws = Feed(
        Plan(len(pixels), len(pixels), 1, seed=3), augment, images.image_size, replica_index=0
    ).draws(0)
    rows = [
        reference.example(
            each,
            images,
            augment,
            {kind: values[row] for kind, values in draws.items()},
            None if targets is None else targets[row],
        )
        for row, each in enumerate(pixels)
    ]
    return np.stack(rows) if targets is None else [np.stack(each) for each in zip(*rows)]  # noqa: B905


@pytest.mark.parametrize(
    ("window", "suffix"),
    [
        ("stretch", "jpg"),
        ("resized_center_crop", "png"),
        ("center_crop", "jpg"),
        ("random_crop", "jpg"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("stretch", "png"),
                ("resized_center_crop", "jpg"),
                ("center_crop", "png"),
                ("random_crop", "png"),
            ]
        ),
    ],
)
def test_windows_are_exact(pixels, tmp_path, device, window, suffix):
    turned = PIL.Image.Exif()
    turned[0x0112] = 6  # what cameras say of a portrait: images are used as they are stored
    source = files_of(pixels, tmp_path, suffix, exif=turned)
    decoded = [np.asarray(PIL.Image.open(file)) for file in source.images.files]
    augment = AugmentConfig(window=window)
    image, label = first_batch(source, augment, device=device)
    np.testing.assert_allclose(image, expected(decoded, augment), atol=HALF_LEVEL)
    np.testing.assert_array_equal(label, np.arange(17) % 3)


# Where a random window shrinks to more than half it is resized without averaging, and JPEGs are
# decoded fast: colours are not interpolated, and at an eighth it is off by four of its pixels.
FAST = {"png": (1.2 / 127.5, 0.3 / 127.5), "jpg": (12 / 127.5, 1.5 / 127.5)}  # at most, mean


@pytest.mark.parametrize(
    ("size", "suffix"),
    [
        ((20, 16), "jpg"),
        ((320, 400), "jpg"),
        pytest.param((20, 16), "png", marks=pytest.mark.slow),
        pytest.param((320, 400), "png", marks=pytest.mark.slow),
        *(
            pytest.param(size, suffix, marks=pytest.mark.slow)
            for size in ((60, 60), (170, 150))
            for suffix in ("png", "jpg")
        ),
    ],
)
def test_random_resized_windows(tmp_path, size, suffix):
    # JPEGs are decoded at an eighth for the first size, for the last one as they are.
    random = np.random.default_rng(0)
    coarse = [random.integers(0, 256, (3, 3, 3), dtype=np.uint8) for _ in range(6)]
    smooth = [
        np.asarray(PIL.Image.fromarray(each).resize((400, 300 + index), 3))
        for index, each in enumerate(coarse)
    ]
    source = files_of(smooth, tmp_path, suffix, quality=95)
    decoded = [np.asarray(PIL.Image.open(file)) for file in source.images.files]
    augment, images = preset("imagenet"), ImageConfig(image_size=size, mean=0.5, std=0.5)
    image, _ = first_batch(source, augment, images)
    difference = np.abs(image - expected(decoded, augment, images))
    most, mean = FAST[suffix]
    assert difference.max() < most
    assert difference.mean() < mean


def test_everything_at_once(pixels, source, drawn, device):
    image, _ = first_batch(source, EVERY_DRAW, device=device)
    difference = np.abs(image - expected(pixels, EVERY_DRAW))
    assert difference.max() < 16 / 127.5  # what plain resizing differs by, in steep colours
    assert difference.mean() < 1 / 127.5
    [(whole, _), *_] = drawn_on(device, source, drawn)
    half, _ = first_batch(source, SOME_DRAWS, rows=5, device=device, dtype="float16")
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, whole.astype(np.float16))


@pytest.mark.parametrize("channels", [1, 3])
def test_formats_and_modes_are_mixed(pixels, tmp_path, channels):
    names = ["a.jpg", "b.png", "c.bmp", "d.gif", "e.webp", "f.png", "g.png", "h.png", "i.bmp"]
    names += ["j.jpg", "k.png", "l.txt"]  # by content
    modes = {"f.png": "L", "g.png": "RGBA", "h.png": "P", "i.bmp": "L", "j.jpg": "L", "k.png": "LA"}
    decoded = []
    for name, image in zip(names, pixels, strict=False):
        image = PIL.Image.fromarray(image).convert(modes.get(name, "RGB"))
        settings = {"lossless": True} if name == "e.webp" else {"quality": 95}
        file_format = "PNG" if name == "l.txt" else None
        image.save(tmp_path / name, format=file_format, **settings)
        grey = PIL.Image.open(tmp_path / name).convert("L" if channels == 1 else "RGB")
        decoded.append(np.asarray(grey).reshape(*image.size[::-1], channels))
    files = tuple(str(tmp_path / name) for name in names)
    source = ImageSource(Blobs(files), np.zeros(len(names), np.int32))
    images = ImageConfig(image_size=(20, 16), channels=channels, mean=0.5, std=0.5)
    image, _ = first_batch(source, AugmentConfig(), images)
    wanted = expected(decoded, AugmentConfig(), images)
    # A grey JPEG's own lightness is finer than that of its colours, once rounded.
    tolerance = [(2 if name == "a.jpg" else 1) * HALF_LEVEL for name in names]
    for row, name in enumerate(names):
        np.testing.assert_allclose(image[row], wanted[row], atol=tolerance[row], err_msg=name)


def test_pairs_stay_aligned_over_three_epochs(pixels, tmp_path, device):
    source = pairs_of(pixels, pixels, tmp_path)
    augment = preset("imagenet", vertical_flip=True, rotation_degrees=30.0)
    stream = stream_of(source, IMAGES, augment, rows=5, device=device)
    for image, target in batches(stream, 3 * 4):
        assert image.std() > 0.1
        np.testing.assert_array_equal(image, target)


@pytest.mark.parametrize(
    "window",
    [
        pytest.param("stretch", marks=pytest.mark.slow),
        pytest.param("random_crop", marks=pytest.mark.slow),
        "random_resized_crop",
    ],
)
def test_masks_share_all_draws_but_color(pixels, tmp_path, window):
    masks = [np.arange(each[..., 0].size).reshape(each.shape[:2]) % 251 for each in pixels]
    masks = [each.astype(np.uint8) for each in masks]
    source = pairs_of(pixels, masks, tmp_path)
    of_window = {} if window == "random_resized_crop" else {"crop_area": AugmentConfig.crop_area}
    augment = AugmentConfig(**{**vars(EVERY_DRAW), **of_window, "window": window})
    normal = {"mean": 0.5, "std": 0.5}
    images = ImageConfig(image_size=(20, 16), targets="mask", ignore_class=255, **normal)
    image, mask = first_batch(source, augment, images)
    wanted, wanted_mask = expected(
        pixels, augment, images, targets=[each[..., None] for each in masks]
    )
    # Pairs are decoded and resized exactly; a half level is then warped and coloured.
    np.testing.assert_allclose(image, wanted, atol=4 * HALF_LEVEL)
    assert mask.dtype == np.uint8
    # In float32, a point just between two pixels falls to either.
    assert (mask != wanted_mask).mean() < 1e-2


@pytest.mark.parametrize("of_pairs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranges_of_bytes_give_what_files_give(source, tmp_path, of_pairs):
    data = [pathlib.Path(file).read_bytes() for file in source.images.files]
    (tmp_path / "all").write_bytes(b"".join(b"between" + each for each in data))
    sizes = np.array([len(each) for each in data])
    blobs = Blobs(
        (str(tmp_path / "all"),),
        np.zeros(len(data), np.int32),
        np.cumsum(sizes + 7) - sizes,
        sizes,
    )
    ranges = ImageSource(blobs, source.labels)
    if of_pairs:
        source = ImageSource(source.images, None, targets=source.images)
        ranges = ImageSource(blobs, None, targets=blobs)
    one, other = (
        batches(stream_of(each, IMAGES, SOME_DRAWS, rows=5), 6) for each in (source, ranges)
    )
    for batch, same in zip(one, other, strict=True):
        for value, wanted in zip(batch, same, strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_a_stream_that_starts_in_the_middle_goes_on_alike(source, drawn, device):
    late = stream_of(source, IMAGES, SOME_DRAWS, rows=5, first=6, device=device)
    for one, other in zip(drawn_on(device, source, drawn)[6:], batches(late, 4), strict=True):
        for value, wanted in zip(one, other, strict=True):
            np.testing.assert_array_equal(value, wanted)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Device("/cpu:1", None), marks=pytest.mark.slow),
        Device("/cpu:1", 0),  # stands for a GPU, on which batches are finished
        pytest.param(Device("/gpu:0", 0), marks=pytest.mark.gpu),
    ],
)
def test_batches_are_on_the_replicas_device(source, drawn, other):
    stream = stream_of(source, IMAGES, SOME_DRAWS, rows=5, device=other)
    for wanted in drawn:
        image, label = next(stream)
        assert image.device.endswith(other.name[1:].upper())
        assert label.device.endswith(other.name[1:].upper())
        np.testing.assert_allclose(image, wanted[0], atol=1e-3)
        np.testing.assert_array_equal(label, wanted[1])


def cut(path):
    path.write_bytes(path.read_bytes()[:200])


def scribble(path):
    path.write_text("not an image")


@pytest.mark.parametrize(
    ("spoil", "which"),
    [
        (cut, "in"),
        (scribble, "out"),
        pytest.param(pathlib.Path.unlink, "in", marks=pytest.mark.slow),
        (pathlib.Path.unlink, "out"),
        pytest.param(cut, "out", marks=pytest.mark.slow),
        pytest.param(scribble, "in", marks=pytest.mark.slow),
    ],
)
def test_bad_files_are_named_with_their_ids(pixels, tmp_path, spoil, which):
    source = pairs_of(pixels, pixels, tmp_path)
    names = [tmp_path / which / f"{index:02d}.png" for index in (5, 11)]
    for path in names:
        spoil(path)
    message = f"2 of 17 images just read cannot be decoded, first {re.escape(str(names[0]))} \\("
    with pytest.raises(UnreadableError, match=message) as raised:
        first_batch(source, AugmentConfig())
    assert raised.value.ids == (5, 11)


def test_ranges_that_cannot_be_read_are_named(source, tmp_path):
    shutil.copy(source.images.files[0], tmp_path / "all")
    size = (tmp_path / "all").stat().st_size
    blobs = Blobs(
        (str(tmp_path / "all"),),
        np.zeros(2, np.int32),
        np.array([0, 0]),
        np.array([size, size + 1]),  # more than there is
    )
    with pytest.raises(UnreadableError, match="1 of 2 images") as raised:
        stream_of(ImageSource(blobs, np.zeros(2, np.int32)), IMAGES, AugmentConfig())
    assert raised.value.ids == (1,)


def test_formats_that_tensorflow_has_not_are_named(pixels, tmp_path):
    files = files_of(pixels, tmp_path).images.files
    PIL.Image.fromarray(pixels[3]).save(tmp_path / "03.png", format="TIFF")
    source = ImageSource(Blobs(files), np.zeros(len(files), np.int32))
    with pytest.raises(
        UnreadableError, match=r"TensorFlow cannot decode 1 of 17 .*03\.png .*another loader"
    ) as raised:
        first_batch(source, AugmentConfig())
    assert raised.value.ids == (3,)


def test_cmyk_is_made_grey_as_pillow_does(pixels, tmp_path):
    picture = PIL.Image.fromarray(pixels[3]).convert("CMYK")
    picture.save(tmp_path / "cmyk.jpg", quality=95)
    data = (tmp_path / "cmyk.jpg").read_bytes()
    right = np.asarray(PIL.Image.open(tmp_path / "cmyk.jpg").convert("L"))
    images = ImageConfig(image_size=right.shape, channels=1)
    grey, _ = windowed(data, None, images=images, augment=AugmentConfig())
    assert np.abs(grey.numpy()[..., 0].astype(int) - right).max() <= 2


def test_a_sixteen_bit_png_is_named_wherever_it_is(pixels, tmp_path):
    files = files_of(pixels, tmp_path).images.files
    PIL.Image.fromarray(np.full((20, 16), 999, np.uint16)).save(files[3])
    source = ImageSource(Blobs(files), np.zeros(len(files), np.int32))
    with pytest.raises(UnreadableError, match=r"of a kind .*03\.png"):
        first_batch(source, AugmentConfig())


def test_full_memory_is_no_images_fault(source, monkeypatch):
    full = tf.errors.ResourceExhaustedError(None, None, "out of memory")
    monkeypatch.setattr(faults, "undecodable", lambda *_: pytest.fail("an image is looked at"))
    settings = {"fed": [[3]], "refused": None, "decoder": "TensorFlow"}
    context = faults.named(source, IMAGES, AugmentConfig(), **settings)
    with pytest.raises(tf.errors.ResourceExhaustedError), context:
        raise full


@pytest.mark.parametrize(
    "window", [pytest.param("center_crop", marks=pytest.mark.slow), "random_crop"]
)
def test_a_pair_of_two_sizes_and_a_small_image_are_named(pixels, tmp_path, window):
    source = pairs_of(pixels, [*pixels[:-1], pixels[-1][:-1]], tmp_path)
    with pytest.raises(
        UserError, match=r"in/16.png has 21x25 .*out/16.png has 20x25; expected the"
    ):
        first_batch(source, AugmentConfig())
    source = ImageSource(source.images, np.zeros(17, np.int32))
    images = ImageConfig(image_size=(21, 20))
    with pytest.raises(UserError, match=r"13.png has 20x90 .*less than the 21x20 "):
        first_batch(source, AugmentConfig(window=window), images)


def test_what_is_dropped_is_freed(source, device, quick_collector):
    mine = ImageSource(Blobs(tuple(source.images.files)), source.labels.copy())
    stream = stream_of(mine, IMAGES, AugmentConfig(), rows=5, device=device)
    next(stream)
    freed = weakref.ref(stream), weakref.ref(stream._stream._held[0]), weakref.ref(mine)
    del stream, mine
    gc.collect()
    assert [each() for each in freed] == [None] * 3
    tf.zeros([])  # the runtime is well
