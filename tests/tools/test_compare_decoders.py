"""The tool that compares the loaders' pixels with Pillow's."""

import importlib.util
import pathlib
import sys

import numpy as np
import PIL.Image
import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "compare_decoders.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compare_decoders", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def paths(tmp_path):
    """A grey image, the same with a palette, and one of 16 bits."""
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    pictures = {
        "grey.png": PIL.Image.fromarray(grey),
        "palette.bmp": PIL.Image.fromarray(np.stack([grey, grey.T, 255 - grey], -1)).quantize(),
        "deep.png": PIL.Image.fromarray(grey * np.uint16(257)),
    }
    for name, picture in pictures.items():
        picture.save(tmp_path / name)
    return [tmp_path / name for name in pictures]


def test_each_loader_gives_pixels_or_refuses(tool, paths):
    def cells(use, loader):
        return tool.cells_of(paths, (8, 8), use, loader)

    assert cells("1 channel", "memory") == ["0", "0", "refused"]
    assert cells("1 channel", "dali_cpu") == ["0", "refused", "refused"]
    assert cells("mask", "memory") == ["0", "refused", "refused"]


def test_a_silent_difference_is_found_and_ends_with_1(tool, paths, monkeypatch, tmp_path, capsys):
    two_off = lambda source, images, loader: np.full((len(source), 8, 8, 1), 2.0)  # noqa: E731
    monkeypatch.setattr(tool, "streamed", two_off)
    # What is read although it would be refused as the loader opens is silent, too.
    assert tool.cells_of(paths, (8, 8), "1 channel", "tf_data") == ["61", "silent", "silent"]
    cells = {paths[0]: ["61"] + ["0"] * 8, paths[1]: ["0"] * 8 + ["silent"], paths[2]: ["0"] * 9}
    monkeypatch.setattr(tool, "compared", lambda files, loaders: cells)
    output = tmp_path / "found.md"
    monkeypatch.setattr(sys, "argv", ["it", str(tmp_path), f"--output={output}"])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 1
    assert "Silent differences: grey.png, palette.bmp." in capsys.readouterr().out
    assert "| 61 |" in output.read_text()
