"""The tool that compares the loaders' pixels with Pillow's."""

import concurrent.futures
import sys

import numpy as np
import PIL.Image
import pytest
from loaded_tool import loaded


@pytest.fixture(scope="module")
def tool():
    with loaded("compare_decoders") as module:
        yield module


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
    monkeypatch.setattr(tool, "compared", lambda files, loaders: [cells])
    output = tmp_path / "found.md"
    monkeypatch.setattr(sys, "argv", ["it", str(tmp_path), f"--output={output}"])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 1
    assert "Silent differences: grey.png, palette.bmp." in capsys.readouterr().out
    assert "| 61 |" in output.read_text()


def test_an_interrupted_run_keeps_its_rows(tool, paths, monkeypatch, tmp_path):
    def interrupted(files, loaders):
        yield {paths[0]: ["0"] * 9}
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "compared", interrupted)
    output = tmp_path / "found.md"
    monkeypatch.setattr(sys, "argv", ["it", str(tmp_path), f"--output={output}"])
    with pytest.raises(KeyboardInterrupt):
        tool.main()
    said, _, *table = output.read_text().splitlines()
    assert said.startswith("3 files, of which Pillow decodes 3, and 2 are not compared yet; ")
    assert len(table) == 3
    assert "| 1 | grey.png |" in table[2]


def test_the_cells_of_each_batch_are_given_as_soon_as_it_is_read(tool, paths, monkeypatch):
    class AtOnce:
        def __init__(self, num_processes):
            self.num_processes = num_processes

        def submit(self, function, *arguments):
            done = concurrent.futures.Future()
            done.set_result(function(*arguments))
            return done

    monkeypatch.setattr(tool, "MAX_FILES", 2)
    monkeypatch.setattr(tool, "rows_of", lambda paths, size, loaders: {each: [] for each in paths})
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", AtOnce)
    files = [tool.File(each, "", (8, 8)) for each in paths]
    assert [len(each) for each in tool.compared(files, ["memory"])] == [2, 3]
    assert list(tool.compared([], ["memory"])) == [{}]
