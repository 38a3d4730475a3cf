"""The audit of a small experiment, as `tfaccel audit` runs it."""

import numpy as np
import PIL.Image
import pytest

from tfaccel import sources
from tfaccel.common.errors import UserError
from tfaccel.config import default_config, parse
from tfaccel.diagnostics.audit import run


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
    config.data.update(
        root=str(tmp_path), source="pairs", targets="mask", ignore_class=255, image_size=(8, 8)
    )
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


def test_bad_files_are_named_with_their_causes(config, tmp_path, capsys):
    (tmp_path / "in" / "0.png").write_bytes(b"no image")
    assert not run.run(parse(config), report=None, sheet=None)
    said = capsys.readouterr().out
    assert f"  bad: {tmp_path / 'in' / '0.png'}: " in said


SETTINGS = {"image_size": (8, 8), "channels": 1, "global_batch_size": 4}


def test_a_script_has_its_loader_proved(setup, folder):
    run = setup(xla=False)
    source = sources.class_folders(folder)
    found = run.audit(source, shuffle=True, augment="mnist", last_batch="drop", **SETTINGS)
    assert found.ok, str(found)
    assert str(found).startswith(f"the loader is sound: {len(source)} examples, 2 epochs")
    said = {each.name: each.text for each in found.findings}
    assert "a new order in every epoch" in said["order"]
    assert "different draws" in said["draws"]
    assert "as expected without shuffling" in str(run.audit(source, **SETTINGS))


def test_a_loader_at_fault_is_named_in_a_script(setup, folder, monkeypatch):
    run = setup(xla=False)
    loader = run.loader
    monkeypatch.setattr(
        run, "loader", lambda shuffle, **settings: loader(shuffle=False, **settings)
    )
    found = run.audit(sources.class_folders(folder), shuffle=True, **SETTINGS)
    assert not found.ok
    assert "nothing shuffles" in str(found)


def test_a_script_s_source_is_one_of_ours(setup, folder):
    with pytest.raises(UserError, match="expected a source from tfaccel"):
        setup(xla=False).audit(str(folder), **SETTINGS)
