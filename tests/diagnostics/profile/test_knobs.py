"""What a search may turn: loaders that keep the pixels, and no more threads than cores."""

import dataclasses

import numpy as np
import PIL.Image
import pytest

from tfaccel import sources
from tfaccel.config import AugmentConfig, Config, DataConfig
from tfaccel.diagnostics.profile.knobs import make_knobs, placements_of, with_changes
from tfaccel.runtime.devices import Device

CPU = Device("/cpu:0", None)
STRETCHED = Config(data=DataConfig(image_size=(8, 8), channels=1))


def placements(config, source):
    return placements_of(config, source, device=CPU, num_threads=1)


def test_loaders_of_these_data_on_this_device(folder):
    source = sources.class_folders(folder)
    assert placements(STRETCHED, source) == ("dali_cpu", "tf_data", "memory", "cache")
    # What is stored has one size: pixels would be others without it.
    stored = with_changes(STRETCHED, {"data.stored_size": (10, 10)})
    assert placements(stored, source) == ("memory", "cache")
    arrays = sources.arrays(np.zeros((4, 8, 8, 1), np.uint8), np.zeros(4, np.int32))
    assert placements(STRETCHED, arrays) == ("memory", "cache")


def test_windows_of_images_of_many_sizes_are_decoded_anew(tmp_path):
    for index, side in enumerate((20, 30)):
        path = tmp_path / "a" / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.new("L", (side, side)).save(path)
    cut = dataclasses.replace(STRETCHED, train_images=AugmentConfig(window="random_crop"))
    assert placements(cut, sources.class_folders(tmp_path)) == ("dali_cpu", "tf_data")


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, (1,)), (2, (1, 2)), (10, (1, 2, 3, 4, 6, 8, 10))]
)
def test_threads_up_to_the_cores(cores, threads):
    knobs = {each.name: each for each in make_knobs(placements=("tf_data",), cores=cores)}
    assert knobs["dali.threads"].values == threads
    assert not knobs["dali.hw_decoder_load"].applies({"data.loader": "dali_cpu"})
    assert knobs["dali.prefetch_batches"].applies({"data.loader": "dali_cpu"})


def test_changes_are_checked_as_an_experiment_is():
    changed = with_changes(STRETCHED, {"dali.threads": 4, "data.loader": "cache"})
    assert (changed.dali.threads, changed.data.loader) == (4, "cache")
    assert STRETCHED.dali.threads is None
    with pytest.raises(ValueError, match="threads=0"):
        with_changes(STRETCHED, {"dali.threads": 0})
