import io

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.config import ImageConfig
from tfaccel.config.presets import preset
from tfaccel.data import choose, one_size
from tfaccel.data.choose import choose_loader
from tfaccel.data.source import ArraySource, Blobs, ImageSource
from tfaccel.runtime.devices import Device

CPU, GPU = Device("/cpu:0", None), Device("/gpu:0", 0)
MIB = 2**20


@pytest.fixture
def source(tmp_path):
    """Makes a source of images, all of the given size or of two sizes, of one format."""

    def make(*sizes, suffix=".png"):
        files = []
        for index in range(6):
            path = tmp_path / f"{index}{suffix}"
            PIL.Image.new("RGB", sizes[index % len(sizes)]).save(path)
            files.append(str(path))
        return ImageSource(Blobs(tuple(files)), np.zeros(6, np.int32), ("a",))

    return make


@pytest.fixture
def free(monkeypatch):
    """Says how much memory is free."""
    return lambda num_bytes: monkeypatch.setattr(choose, "free_bytes", lambda *_: num_bytes)


def chosen(source, device, *, augment="none", **images):
    images = ImageConfig(**{"image_size": (8, 8), **images})
    return choose_loader(source, images, preset(augment), device=device)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_what_fits_and_loses_nothing_is_kept_in_memory(source, free, device):
    free(100 * MIB)
    loader, reason, stored = chosen(source((16, 12), (9, 7)), device)
    assert loader == "memory"
    assert "resized to the same pixels in every epoch; all 6 images take 0 MiB of 100 MiB" in reason
    assert stored == (8, 8)
    loader, reason, stored = chosen(source((16, 12)), device, augment="imagenet")
    assert loader == "memory"
    assert "one size, 12x16" in reason
    assert stored == (12, 16)


@pytest.mark.parametrize(("device", "loader"), [(CPU, "tf_data"), (GPU, "dali_gpu")])
def test_windows_out_of_many_sizes_are_decoded_anew(source, free, device, loader):
    free(100 * MIB)
    found, reason, _ = chosen(source((16, 12), (9, 7)), device, augment="imagenet")
    assert found == loader
    assert "cut out of images of many sizes" in reason


@pytest.mark.parametrize(("device", "loader"), [(CPU, "tf_data"), (GPU, "dali_gpu")])
def test_what_does_not_fit_is_decoded_anew(source, free, device, loader):
    free(3 * 6 * 8 * 8 * 3)  # a quarter of it is less than the images need
    found, reason, _ = chosen(source((16, 12)), device)
    assert found == loader
    assert "would take" in reason


@pytest.mark.parametrize("suffix", [".tiff", ".bmp"])
def test_dali_decodes_on_the_cpu_what_tensorflow_does_not(source, free, suffix):
    free(0)
    other, png = (tuple(source((16, 12), suffix=each).images.files) for each in (suffix, ".png"))
    # However late the only one comes.
    many = ImageSource(Blobs(png * 2000 + other[:1]), np.zeros(12001, np.int32), ("a",))
    for mixed in (source((16, 12), suffix=suffix), many):
        loader, reason, _ = chosen(mixed, CPU)
        assert loader == "dali_cpu"
        assert f"TensorFlow does not decode every {suffix}" in reason


def test_one_image_of_another_size_is_seen(source, free, tmp_path):
    free(100 * MIB)
    same = source((16, 12))
    PIL.Image.new("RGB", (12, 16)).save(tmp_path / "3.png")
    many = ImageSource(Blobs(tuple(same.images.files) * 20), np.zeros(120, np.int32), ("a",))
    assert chosen(many, CPU, augment="imagenet")[0] == "tf_data"


def test_headers_are_read_once(source, free, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(one_size, "LEAST_KEPT", 1)
    free(100 * MIB)
    same = source((16, 12))
    many = ImageSource(Blobs(tuple(same.images.files) * 20), np.zeros(120, np.int32), ("a",))
    first = chosen(many, CPU, augment="imagenet")
    assert first[0] == "memory"

    def never(*arguments, **settings):
        raise AssertionError("headers were read again")

    with monkeypatch.context() as patch:
        patch.setattr(one_size, "image_sizes", never)
        assert chosen(many, CPU, augment="imagenet") == first
        # Nor are all of them where images would not fit.
        [place] = (tmp_path / "cache" / "tfaccel" / "sizes").iterdir()
        place.unlink()
        free(100)
        assert chosen(many, CPU, augment="imagenet")[0] == "tf_data"
    free(100 * MIB)
    place.write_text("[" * 200_000)
    assert chosen(many, CPU, augment="imagenet") == first
    assert "is damaged" in caplog.text
    PIL.Image.new("RGB", (12, 16)).save(tmp_path / "3.png")  # a changed file is read again
    assert chosen(many, CPU, augment="imagenet")[0] == "tf_data"


def test_what_was_asked_for_is_taken(source):
    for loader in ("dali_cpu", "tf_data"):
        assert chosen(source((16, 12)), CPU, loader=loader) == (loader, "you asked for it", None)
    for loader in ("memory", "cache"):
        assert chosen(source((16, 12)), CPU, loader=loader)[::2] == (loader, (8, 8))
        images = {"loader": loader, "augment": "imagenet"}
        assert chosen(source((16, 12)), CPU, **images).stored_size == (12, 16)
        with pytest.raises(UserError, match=f"'{loader}' keeps images of one size, but window="):
            chosen(source((16, 12), (9, 7)), CPU, **images)
    with pytest.raises(UserError, match="'dali_gpu' needs a GPU"):
        chosen(source((16, 12)), CPU, loader="dali_gpu")


@pytest.mark.parametrize(("form", "loader"), [("TIFF", "dali_cpu"), ("PNG", "tf_data")])
def test_images_in_a_shard_are_known_by_their_bytes(free, tmp_path, form, loader):
    shard = tmp_path / "x.tar"  # its bytes alone count here
    encoded = io.BytesIO()
    PIL.Image.new("RGB", (16, 12)).save(encoded, form)
    data = encoded.getvalue()
    shard.write_bytes(data * 3)
    ranges = np.zeros(3, np.int32), np.arange(3) * len(data), np.full(3, len(data))
    packed = ImageSource(Blobs((str(shard),), *ranges), np.zeros(3, np.int32), ("a",))
    free(0)
    assert chosen(packed, CPU).loader == loader


def test_arrays_stay_mapped_where_they_do_not_fit(free):
    arrays = ArraySource(np.zeros((10, 64, 64, 3), np.uint8), np.zeros(10, np.int32), ("a",))
    free(MIB)
    assert chosen(arrays, GPU)[0] == "memory"
    free(1000)
    assert chosen(arrays, GPU)[0] == "cache"
    with pytest.raises(UserError, match="decodes files, but the source is decoded arrays"):
        chosen(arrays, GPU, loader="tf_data")
