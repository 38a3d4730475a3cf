"""The audit of a small experiment, as `tfaccel audit` runs it."""

import numpy as np
import PIL.Image
import pytest

from tfaccel.audit import run
from tfaccel.config import default_config, parse


@pytest.fixture
def config(tmp_path, setup):
    """Grey inputs and masks of three classes, in pairs, on the CPU."""
    random = np.random.default_rng(0)
    for name, end in (("in", 256), ("out", 3)):
        (tmp_path / name).mkdir()
        for index in range(3):
            pixels = random.integers(end, size=(8, 8), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
    config = default_config()
    config.data.update(root=str(tmp_path), source="pairs", targets="mask", image_size=(8, 8))
    config.data.update(train="in", train_targets="out", test="in", test_targets="out")
    config.data.global_batch_size = 2
    config.runtime.gpu_ids = ()
    return config


def test_masks_are_sound_and_shown_in_colour(config, tmp_path, capsys):
    sheet = tmp_path / "sheet.png"
    assert run.run(parse(config), report=tmp_path / "bad.txt", sheet=sheet)
    assert capsys.readouterr().out.count("the loader is sound: 3 examples") == 2
    with PIL.Image.open(sheet) as image:
        colors = [color for _, color in image.getcolors(2**16)]
    assert len([each for each in colors if len(set(each)) > 1]) == 2  # one for each class but 0
