"""Images of 16 bits, floats and any number of channels: each loader against a slow reference.

The reference is NumPy and Pillow in floating point, on pixels that the test itself has written.
"""

import io
import tarfile

import numpy as np
import PIL.Image
import pytest
import reference
import tensorflow as tf
from raster_files import noise, write_png16, write_tiff

from tfaccel.common.errors import UserError
from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
from tfaccel.data import images as image_data
from tfaccel.data import sources
from tfaccel.data.placement import Placement
from tfaccel.data.source import ImageSource, UnreadableError
from tfaccel.runtime.devices import Device, Runtime

CPU = Runtime((Device("/cpu:0", None),), "float32", xla=False, seed=0, loader_threads=2)
NUM = 6


def _png8(path, pixels):
    PIL.Image.fromarray(pixels).save(path)


def _planar(path, pixels):
    write_tiff(path, pixels, planar=True, packing="tiff_adobe_deflate", rows=5)


def _tiled(path, pixels):
    write_tiff(path, pixels, packing="tiff_lzw", predictor=2, tile=(16, 16))


FORMS = {
    "png, 16-bit grey": (".png", write_png16, "uint16", 1),
    "png, 16-bit grey and opacity": (".png", write_png16, "uint16", 2),
    "png, 16-bit RGB": (".png", write_png16, "uint16", 3),
    "png, 16-bit RGBA": (".png", write_png16, "uint16", 4),
    "png, 8-bit RGBA": (".png", _png8, "uint8", 4),
    "tiff, 8-bit, 5 channels": (".tif", write_tiff, "uint8", 5),
    "tiff, 16-bit, 5 channels, planar": (".tiff", _planar, "uint16", 5),
    "tiff, 16-bit, 3 channels, tiles": (".tif", _tiled, "uint16", 3),
    "tiff, float, 5 channels": (".tif", write_tiff, "float32", 5),
    "npy, 8-bit RGB": (".npy", np.save, "uint8", 3),
    "npy, 16-bit, 7 channels": (".npy", np.save, "uint16", 7),
    "npy, float, grey": (".npy", np.save, "float32", 1),
}
LOADERS = ("memory", "cache", "tf_data")


def _source(tmp_path, form, size=(21, 34), num=NUM):
    suffix, write, dtype, channels = FORMS[form]
    shape = size if channels == 1 and "npy" in form else (*size, channels)
    pixels = [noise(shape, dtype, seed) for seed in range(num)]
    for index, each in enumerate(pixels):
        folder = tmp_path / "images" / str(index % 2)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"{index}{suffix}", each)
    order = [*range(0, num, 2), *range(1, num, 2)]
    images = [pixels[index].reshape(*size, channels) for index in order]
    return sources.class_folders(tmp_path / "images"), images, dtype, channels


def _settings(dtype, channels, loader, size=(21, 34), **changes):
    mean = [0.5 - 0.05 * each for each in range(channels)]
    std = [0.25 + 0.05 * each for each in range(channels)]
    how = {"mean": mean, "std": std, "loader": loader, "global_batch_size": NUM}
    how |= {"channels": channels, "pixel_dtype": dtype, "image_size": size}
    return ImageConfig(**how | changes)


def _open(source, images, augment=None, **settings):
    how = {"shuffle": False, "num_replicas": 1, "runtime": CPU, "num_local": 1, "num_threads": 2}
    augment = augment or AugmentConfig()
    return image_data.open_images(source, images, augment, dali=DaliConfig(), **how | settings)


def _batch(data):
    stream = data.stream(Placement(CPU.devices[0], 2, 0), data.feed(0))
    return [each.numpy() for each in next(stream)]


def _normalised(pixels, images):
    scale = {"uint8": 255, "uint16": 65535, "float32": 1}[images.pixel_dtype]
    return (pixels.astype(np.float64) / scale - images.mean) / images.std


@pytest.mark.parametrize("loader", ["memory", "cache"])
@pytest.mark.parametrize("form", FORMS)
def test_decoded_images_are_the_stored_pixels(tmp_path, form, loader):
    source, pixels, dtype, channels = _source(tmp_path, form)
    decoded = _open(source, _settings(dtype, channels, loader)).source.images
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded, pixels)


QUICK = {
    ("png, 16-bit RGB", "memory"),
    ("tiff, float, 5 channels", "cache"),
    ("png, 16-bit grey and opacity", "tf_data"),
    ("tiff, 16-bit, 5 channels, planar", "tf_data"),
    ("npy, 8-bit RGB", "tf_data"),
}
ALL = [
    pytest.param(form, loader, marks=() if (form, loader) in QUICK else pytest.mark.slow)
    for form in FORMS
    for loader in LOADERS
]


@pytest.mark.parametrize(("form", "loader"), ALL)
def test_images_that_are_not_resized_are_exact(tmp_path, form, loader):
    source, pixels, dtype, channels = _source(tmp_path, form)
    images = _settings(dtype, channels, loader)
    data = _open(source, images)
    found, labels = _batch(data)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    for mine, theirs in zip(found, pixels, strict=True):
        np.testing.assert_allclose(mine, _normalised(theirs, images), rtol=2e-6, atol=2e-6)
    if dtype == "float32":
        assert data.pixel_range is None
    else:
        ends = [(level - np.array(images.mean)) / images.std for level in (0, 1)]
        np.testing.assert_allclose(data.pixel_range, (np.min(ends), np.max(ends)))


def _resized(pixels, size):
    """Antialiased bilinear, channel by channel, in floating point."""
    channels = [
        np.asarray(PIL.Image.fromarray(each.astype(np.float32)).resize(size[::-1], 2), np.float64)
        for each in np.moveaxis(pixels, -1, 0)
    ]
    return np.stack(channels, axis=-1)


@pytest.mark.parametrize("loader", ["memory", "tf_data"])
@pytest.mark.parametrize("form", ["png, 16-bit RGB", "tiff, float, 5 channels"])
def test_resized_images_are_those_of_pillow_in_floats(tmp_path, form, loader):
    source, pixels, dtype, channels = _source(tmp_path, form)
    images = _settings(dtype, channels, loader, size=(13, 17))
    found, _ = _batch(_open(source, images))
    one_level = np.array(1 if dtype == "float32" else 65535) * images.std
    for mine, theirs in zip(found, pixels, strict=True):
        wanted = _normalised(_resized(theirs, (13, 17)), images)
        limit = 1e-4 if dtype == "float32" else 1.01 / one_level.min() * 1.01 + 1e-5
        assert np.abs(mine - wanted).max() < limit


@pytest.mark.parametrize(
    ("dtype", "loader"),
    [
        ("uint16", "memory"),
        ("float32", "tf_data"),
        pytest.param("uint16", "tf_data", marks=pytest.mark.slow),
        pytest.param("float32", "memory", marks=pytest.mark.slow),
    ],
)
def test_random_windows_mirrors_and_turns_are_those_of_the_reference(tmp_path, loader, dtype):
    form = "tiff, 16-bit, 5 channels, planar" if dtype == "uint16" else "tiff, float, 5 channels"
    source, pixels, dtype, channels = _source(tmp_path, form)
    augment = AugmentConfig(
        window="random_crop", horizontal_flip=True, vertical_flip=True, rotation_degrees=20
    )
    images = _settings(dtype, channels, loader, size=(12, 16))
    data = _open(source, images, augment)
    found, _ = _batch(data)
    feed = data.feed(0)
    ids, drawn = feed.rows(0).ids, feed.draws(0)
    scale = 65535 if dtype == "uint16" else 1
    for row, index in enumerate(ids):
        of_row = {kind: each[row] for kind, each in drawn.items()}
        where = reference.window((21, 34), images.image_size, augment, of_row)
        moved = reference.geometry(pixels[index].astype(np.float64), where, images, of_row)
        wanted = (moved / scale - images.mean) / images.std
        np.testing.assert_allclose(found[row], wanted, atol=2e-3 if dtype == "float32" else 5e-4)


@pytest.mark.parametrize("loader", ["memory", "tf_data"])
def test_brightness_and_contrast_suit_five_channels_of_16_bits(tmp_path, loader):
    source, pixels, dtype, channels = _source(tmp_path, "tiff, 16-bit, 5 channels, planar")
    augment = AugmentConfig(brightness=0.5, contrast=0.5)
    images = _settings(dtype, channels, loader)
    data = _open(source, images, augment)
    found, _ = _batch(data)
    drawn, middle = data.feed(0).draws(0)["color"], 128 / 255 * 65535
    for mine, theirs, (brightness, contrast, *_) in zip(found, pixels, drawn, strict=True):
        changed = ((theirs - middle) * float(contrast) + middle) * float(brightness)
        wanted = _normalised(changed.clip(0, 65535), images)
        np.testing.assert_allclose(mine, wanted, atol=2e-5)


def test_brightness_of_floats_has_no_limits(tmp_path):
    source, pixels, dtype, channels = _source(tmp_path, "tiff, float, 5 channels")
    images = _settings(dtype, channels, "memory")
    data = _open(source, images, AugmentConfig(brightness=0.5))
    found, _ = _batch(data)
    for mine, theirs, drawn in zip(found, pixels, data.feed(0).draws(0)["color"], strict=True):
        wanted = _normalised(theirs * float(drawn[0]), images)
        np.testing.assert_allclose(mine, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("augment", "images", "said"),
    [
        (
            {"saturation": 0.5},
            {"channels": 5},
            "saturation=0.5 with channels=5; it needs RGB or grey",
        ),
        ({"hue_degrees": 5}, {"channels": 4}, "hue_degrees=5 with channels=4"),
        ({"policy": "randaugment"}, {"channels": 5}, "policy='randaugment' with channels=5"),
        ({"blur_probability": 0.5}, {"pixel_dtype": "uint16"}, "work on the 256 grey levels"),
        ({"erase_probability": 0.5}, {"pixel_dtype": "float32"}, "work on the 256 grey levels"),
        ({"contrast": 0.5}, {"pixel_dtype": "float32"}, "needs pixels of a known range"),
    ],
)
def test_augmentation_that_does_not_suit_is_refused(tmp_path, augment, images, said):
    source, *_ = _source(tmp_path, "npy, 8-bit RGB")
    with pytest.raises(UserError, match=said):
        _open(source, ImageConfig(image_size=(9, 9), **images), AugmentConfig(**augment))


@pytest.mark.parametrize("loader", ["dali_cpu"])
@pytest.mark.parametrize("form", ["png, 16-bit RGB", "tiff, 8-bit, 5 channels", "npy, 8-bit RGB"])
def test_dali_says_at_the_start_what_it_does_not_read(tmp_path, loader, form):
    source, _, dtype, channels = _source(tmp_path, form)
    with pytest.raises(UserError, match="'dali_cpu' reads images of 8 bits with 1 or 3 channels"):
        _open(source, _settings(dtype, channels, loader))


def test_auto_chooses_a_loader_that_can(tmp_path, caplog, monkeypatch):
    source, _, dtype, channels = _source(tmp_path, "tiff, 8-bit, 5 channels")
    with caplog.at_level("INFO", logger="tfaccel"):
        assert _open(source, _settings(dtype, channels, "auto")).loader == "memory"
        monkeypatch.setattr("tfaccel.data.choose.MEMORY_SHARE", 0)
        assert _open(source, _settings(dtype, channels, "auto")).loader == "tf_data"
    assert "and DALI's loaders do not read 5 channels of uint8" in caplog.text


@pytest.mark.parametrize("loader", LOADERS)
def test_a_file_of_another_form_is_named(tmp_path, loader):
    source, *_ = _source(tmp_path, "png, 16-bit RGB")
    other = tmp_path / "images/1/3.png"
    for write, image, said in (
        (
            _png8,
            noise((21, 34, 3), "uint8"),
            "has 3 channels of uint8; expected 3 channels of uint16",
        ),
        (write_png16, noise((21, 34), "uint16"), "has 1 channel of uint16; expected 3 channels of"),
    ):
        write(other, image)
        with pytest.raises(UserError, match=f"1/3.png {said}"):
            _batch(_open(source, _settings("uint16", 3, loader)))
        skipping = _settings("uint16", 3, loader, bad_files="skip", last_batch="pad")
        data = _open(source, skipping)
        assert len(data.source) == NUM - 1


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("form", ["png, 16-bit RGB", "tiff, 8-bit, 5 channels", "npy, 8-bit RGB"])
def test_a_file_that_is_cut_short_is_named(tmp_path, loader, form):
    source, _, dtype, channels = _source(tmp_path, form)
    bad = source.images.files[4]
    with open(bad, "r+b") as file:
        file.truncate(300)
    with pytest.raises(UserError, match=f"{bad} "):
        _batch(_open(source, _settings(dtype, channels, loader)))
    data = _open(source, _settings(dtype, channels, loader, bad_files="skip"))
    assert len(data.source) == NUM - 1


@pytest.mark.parametrize("loader", ["memory", "tf_data"])
def test_a_bad_file_that_no_sample_shows_is_named_when_it_is_read(tmp_path, loader, monkeypatch):
    source, *_ = _source(tmp_path, "png, 16-bit RGB")
    _png8(tmp_path / "images/1/3.png", noise((21, 34, 3), "uint8"))
    monkeypatch.setattr(image_data, "NUM_SAMPLED", 2)  # the first and the last
    with pytest.raises(UnreadableError, match=r"1/3.png \(has 3 channels of uint8"):
        _batch(_open(source, _settings("uint16", 3, loader)))


def test_the_usual_settings_name_those_that_the_files_need(tmp_path):
    for form, name in (
        ("png, 16-bit RGB", "uint16"),
        ("tiff, 16-bit, 5 channels, planar", "uint16"),
        ("tiff, float, 5 channels", "float32"),
    ):
        source, _, _, channels = _source(tmp_path / form, form)
        with pytest.raises(UserError, match=f"set channels={channels} and pixel_dtype='{name}'"):
            _open(source, ImageConfig(image_size=(9, 9)))


def test_jpeg_files_beside_arrays_are_named(tmp_path):
    source, *_ = _source(tmp_path, "npy, 8-bit RGB")
    PIL.Image.fromarray(noise((21, 34, 3), "uint8")).save(tmp_path / "images/0/a.jpg")
    source = sources.class_folders(tmp_path / "images")
    with pytest.raises(UserError, match=r"images has .npy files and .jpg files; beside .npy only"):
        _open(source, ImageConfig(image_size=(9, 9)))
    (tmp_path / "other/0").mkdir(parents=True)
    (tmp_path / "images/0/a.jpg").rename(tmp_path / "other/0/a.jpg")
    source = sources.class_folders(tmp_path / "other")
    with pytest.raises(UserError, match=r"a.jpg cannot be read as an image \(not a PNG, TIFF or"):
        _open(source, ImageConfig(image_size=(9, 9), pixel_dtype="uint16"))


@pytest.mark.parametrize("loader", LOADERS)
def test_masks_of_8_bits_go_with_inputs_of_any_form(tmp_path, loader):
    for name in "ab":
        for side in ("inputs", "masks"):
            (tmp_path / side).mkdir(exist_ok=True)
        write_tiff(tmp_path / "inputs" / f"{name}.tif", noise((9, 11, 5), "uint16"))
        _png8(tmp_path / "masks" / f"{name}.png", noise((9, 11), "uint8") % 3)
    source = sources.image_pairs(tmp_path / "inputs", tmp_path / "masks")
    images = _settings("uint16", 5, loader, size=(9, 11), targets="mask", global_batch_size=2)
    image, mask = _batch(_open(source, images))
    assert mask.dtype == np.uint8
    np.testing.assert_array_equal(mask[0, ..., 0], noise((9, 11), "uint8") % 3)
    wanted = _normalised(noise((9, 11, 5), "uint16"), images)
    np.testing.assert_allclose(image[0], wanted, rtol=2e-6, atol=2e-6)


def test_a_list_names_arrays_and_two_replicas_share_them(tmp_path):
    source, pixels, dtype, channels = _source(tmp_path, "npy, 16-bit, 7 channels")
    lines = [f"{file},{label}" for file, label in zip(source.images.files, "000111", strict=True)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    listed = sources.image_list(tmp_path / "list.csv")
    assert isinstance(listed, ImageSource)
    assert listed.labels.tolist() == [0, 0, 0, 1, 1, 1]
    images = _settings(dtype, channels, "tf_data")
    data = _open(listed, images, num_replicas=2)
    whole = np.empty((NUM, 21, 34, channels))
    for replica in range(2):
        feed = data.feed(replica)
        stream = data.stream(Placement(CPU.devices[0], 1, 0), feed)
        whole[feed.rows(0).ids] = next(stream)[0].numpy()
    wanted = np.stack([_normalised(each, images) for each in pixels])
    np.testing.assert_allclose(whole, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_arrays_of_other_dtypes_are_taken_as_they_are(dtype):
    pixels = noise((NUM, 8, 9, 5), dtype)
    images = _settings(dtype, 5, "memory", size=(8, 9))
    source = sources.arrays(pixels, np.zeros(NUM, int))
    found, _ = _batch(_open(source, images))
    np.testing.assert_allclose(found, _normalised(pixels, images), rtol=2e-6, atol=2e-6)
    with pytest.raises(
        UserError, match=f"the arrays have images of {dtype}; use pixel_dtype='{dtype}"
    ):
        _batch(_open(source, _settings("uint8", 5, "memory", size=(8, 9))))


@pytest.mark.parametrize("kind", ["tfrecord", "webdataset"])
def test_shards_hold_such_files_too(tmp_path, kind):
    pixels = [noise((8, 9, 5), "uint16", seed) for seed in range(4)]
    encoded = []
    for index, each in enumerate(pixels):
        write_tiff(tmp_path / "a.tif", each, planar=index % 2 == 0)
        np.save(tmp_path / "a.npy", each)
        encoded.append((tmp_path / ("a.npy" if index == 3 else "a.tif")).read_bytes())
    if kind == "tfrecord":
        with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
            for index, each in enumerate(encoded):
                image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[each]))
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[index % 2]))
                features = {"image/encoded": image, "image/class/label": label}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        source = sources.tfrecord(str(tmp_path / "a.tfrecord"))
    else:
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for index, each in enumerate(encoded):
                for ext, data in (("tif", each), ("cls", str(index % 2).encode())):
                    info = tarfile.TarInfo(f"{index:03}.{ext}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        source = sources.webdataset(str(tmp_path / "a.tar"), image_ext="tif;npy")
    for loader in ("memory", "tf_data"):
        images = _settings("uint16", 5, loader, size=(8, 9), global_batch_size=4)
        found, labels = _batch(_open(source, images))
        assert labels.tolist() == [0, 1, 0, 1]
        np.testing.assert_allclose(
            found, [_normalised(each, images) for each in pixels], rtol=2e-6, atol=2e-6
        )
