import gzip
import json
import struct

import numpy as np
import PIL.Image
import pytest
from loaded_tool import loaded


@pytest.fixture(scope="module")
def tool():
    with loaded("write_mnist_png") as module:
        yield module


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


@pytest.fixture
def source(tmp_path):
    """Both splits as IDX files, training gzipped, testing not and with a dot in the names."""
    folder = tmp_path / "idx"
    folder.mkdir()
    random = np.random.default_rng(0)
    arrays = {}
    for prefix, count in (("train", 12), ("t10k", 5)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[prefix] = images, (np.arange(count) % 3).astype(np.uint8)
    for kind, array in zip(("images-idx3", "labels-idx1"), arrays["train"], strict=True):
        (folder / f"train-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    for kind, array in zip(("images.idx3", "labels.idx1"), arrays["t10k"], strict=True):
        (folder / f"t10k-{kind}-ubyte").write_bytes(idx(array))
    return folder, arrays


def test_writes_each_image_below_its_label(tool, source, tmp_path, capsys):
    folder, arrays = source
    assert tool.main([f"--out={tmp_path / 'png'}", f"--idx={folder}"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["training"], said["testing"]) == (12, 5)
    for split, prefix in (("training", "train"), ("testing", "t10k")):
        images, labels = arrays[prefix]
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            file = tmp_path / "png" / split / str(label) / f"{index:05d}.png"
            np.testing.assert_array_equal(np.asarray(PIL.Image.open(file)), image)


def test_keras_is_the_other_source(tool, source, tmp_path, monkeypatch, capsys):
    import keras

    _, arrays = source
    monkeypatch.setattr(
        keras.datasets.mnist, "load_data", lambda: (arrays["train"], arrays["t10k"])
    )
    assert tool.main([f"--out={tmp_path / 'png'}"]) == 0
    assert len(list((tmp_path / "png").glob("*/*/*.png"))) == 17


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "train-labels-idx1-ubyte.gz").unlink(), "no train-labels"),
        (lambda folder: (folder / "t10k-images.idx3-ubyte").write_bytes(b"PNG!"), "not an IDX"),
        (lambda folder: (folder / "t10k-images.idx3-ubyte").write_bytes(b""), "not an IDX"),
        (lambda folder: _cut(folder / "t10k-images.idx3-ubyte", 100), "its header says 3920"),
        (lambda folder: _cut(folder / "t10k-images.idx3-ubyte", 6), "its header says"),
        (lambda folder: _cut(folder / "train-images-idx3-ubyte.gz", 50), "cannot be unpacked"),
    ],
)
def test_a_spoilt_source_is_one_line_and_code_2(tool, source, tmp_path, capsys, spoil, words):
    folder, _ = source
    spoil(folder)
    assert tool.main([f"--out={tmp_path / 'png'}", f"--idx={folder}"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "png").exists()


def test_without_a_network_the_other_source_is_named(tool, tmp_path, monkeypatch, capsys):
    import keras

    def fail():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", fail)
    assert tool.main([f"--out={tmp_path / 'png'}"]) == 2
    assert "URL fetch failure; use --idx" in capsys.readouterr().err


def _cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


def test_an_existing_folder_is_not_mixed_up(tool, source, tmp_path, capsys):
    (tmp_path / "png" / "training").mkdir(parents=True)
    assert tool.main([f"--out={tmp_path / 'png'}", f"--idx={source[0]}"]) == 2
    assert "exists; remove it, or use another --out" in capsys.readouterr().err
