import io

import numpy as np
import PIL.Image
import pytest

from tfaccel import sources
from tfaccel.data.source import ArraySource, spread
from tfaccel.export.samples import JPEG_SIGNATURE, PNG_SIGNATURE, take_samples

GREY = {"image_size": (12, 10), "channels": 1, "global_batch_size": 4}


def test_they_are_spread_over_all_classes():
    assert spread(9, 3).tolist() == [0, 4, 8]
    assert spread(3, 9).tolist() == [0, 1, 2]
    assert spread(1, 1).tolist() == [0]


def of_file(encoded):
    return np.asarray(PIL.Image.open(io.BytesIO(encoded)))


@pytest.mark.parametrize("loader", ["dali_cpu", "tf_data", "memory", "cache"])
def test_files_and_what_the_loader_makes_of_them(setup, folder, in_file_order, loader):
    run = setup()
    loader = run.image_folder(folder, **GREY, mean=0.5, std=0.25, loader=loader)
    taken = take_samples(loader.data, run.runtime, 7)
    wanted = in_file_order[0][spread(37, 7)]
    assert len(taken) == 7
    np.testing.assert_array_equal([of_file(each) for each in taken.encoded], wanted)
    normalised = (wanted[..., None] / 255 - 0.5) / 0.25
    np.testing.assert_allclose(taken.inputs, normalised, atol=1e-2)  # DALI: half a grey level
    assert taken.names[0].endswith("00.png")
    # The loader itself is where it was.
    assert loader.position == 0


def test_arrays_become_files(setup, images):
    run = setup()
    source = ArraySource(images[..., None], np.arange(37) % 3, ("a", "b", "c"))
    taken = take_samples(run.loader(source, **GREY).data, run.runtime, 37)
    np.testing.assert_array_equal([of_file(each) for each in taken.encoded], images)
    assert taken.names[5] == "image 5"
    assert taken.source is None


def test_other_formats_become_png_of_the_same_pixels(setup, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    for kind in ("bmp", "png", "webp"):
        (tmp_path / "a").mkdir(exist_ok=True)
        PIL.Image.fromarray(pixels).save(tmp_path / "a" / f"x.{kind}", lossless=True)
    PIL.Image.fromarray(pixels).save(tmp_path / "a" / "y.jpg")
    run = setup()
    source = sources.class_folders(tmp_path)
    loader = run.loader(source, image_size=(12, 10), global_batch_size=4)
    taken = take_samples(loader.data, run.runtime, 4)
    for encoded in taken.encoded[:3]:
        assert encoded.startswith(PNG_SIGNATURE)
        np.testing.assert_array_equal(of_file(encoded), pixels)
    assert taken.encoded[3].startswith(JPEG_SIGNATURE)
