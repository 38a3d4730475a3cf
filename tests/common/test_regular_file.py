"""FIFOs, sockets and devices in the place of files: each is named, and none is waited for."""

import functools
import io
import os
import socket
import tarfile
import threading

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.cli import flags as cli_flags
from tfaccel.common.regular_file import is_special, open_regular, read_regular
from tfaccel.data import sources
from tfaccel.data.loaders import cache
from tfaccel.data.scan import files
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.diagnostics.lint import lint
from tfaccel.experiment.models import weights
from tfaccel.export import card, predict
from tfaccel.training import workdir
from tfaccel.training.checkpoint import manifest
from tfaccel.training.logs import csv, json_lines

PATIENCE_S = 20  # many times what any of this takes


def in_time(function):
    """What the function returns or raises; a failure, not a hang, where it waits."""
    ended, found = threading.Event(), {}

    def run():
        try:
            found["value"] = function()
        except BaseException as error:
            found["error"] = error
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(PATIENCE_S), "it waits for a FIFO"
    if "error" in found:
        raise found["error"]
    return found["value"]


def make(kind, path):
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            folder = os.open(path.parent, os.O_PATH)  # a socket's own path may have 107 bytes
            try:
                bound.bind(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.fixture(params=["fifo", "socket", "device"])
def special(request, tmp_path):
    """Makes such a file of a name, below the test's folder."""
    return lambda name: make(request.param, tmp_path / name)


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (4, 4)).save(path)


def test_it_is_refused_when_it_is_opened(special):
    path = special("z.png")
    assert is_special(path)
    for read in (open_regular, read_regular):
        with pytest.raises(OSError, match=r"not a regular file|No such device or address"):
            in_time(functools.partial(read, path))


OPENED = {
    "list.csv": sources.image_list,
    "images.npy": lambda path: sources.arrays(path, np.zeros(1, int)),
    "train.tar": sources.webdataset,
    "train.tfrecord": sources.tfrecord,
    "script.py": lint.in_script,
    "model.weights.h5": lambda path: weights.begin_from(str(path), None),
    "config.py": lambda path: cli_flags._one_file("train", [str(path)], []),
}


@pytest.mark.parametrize("name", OPENED)
def test_what_a_user_names_is_refused_in_a_sentence(special, name):
    path = special(name)
    with pytest.raises(UserError, match=rf"{name}.*(regular|no file|No such device)"):
        in_time(lambda: OPENED[name](path))


def test_a_class_folder_leaves_it_out_and_says_so(special, tmp_path, caplog):
    picture(tmp_path / "a" / "0.png")
    special("a/z.png")
    source = in_time(lambda: sources.class_folders(tmp_path))
    assert [os.path.basename(each) for each in source.images.files] == ["0.png"]
    assert "z.png, which is a FIFO, a device or a socket" in caplog.text


def test_a_folder_of_pairs_leaves_it_out_and_says_so(special, tmp_path, caplog):
    for side in ("in", "out"):
        picture(tmp_path / side / "0.png")
        special(f"{side}/z.png")
    source = in_time(lambda: sources.image_pairs(tmp_path / "in", tmp_path / "out"))
    assert len(source) == 1
    assert "out/z.png is not a regular file" in caplog.text


def test_class_folders_of_arrays_leave_it_out(special, tmp_path):
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "0.npy", np.zeros((2, 2, 3), np.uint8))
    special("a/z.npy")
    assert len(in_time(lambda: sources.npy_folders(tmp_path))) == 1


def test_the_scan_names_it(special, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    picture(tmp_path / "0.png")
    blobs = Blobs((str(tmp_path / "0.png"), str(special("z.png"))))
    source = ImageSource(blobs, np.zeros(2, np.int32), ("a",))
    report = in_time(lambda: files.scan_files(source, num_workers=1, progress=False))
    assert [each.kind for each in report.faults] == ["unreadable"]


def tar_of(path):
    data = io.BytesIO()
    PIL.Image.new("RGB", (4, 4)).save(data, "PNG")
    with tarfile.open(path, "w") as tar:
        for name, content in (("0.png", data.getvalue()), ("0.cls", b"0")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_an_index_that_is_none_is_passed_over(special, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tar_of(tmp_path / "x.tar")
    special("x.idx")
    assert len(in_time(lambda: sources.webdataset(tmp_path / "x.tar"))) == 1


def test_a_spoilt_cache_is_made_anew(special, tmp_path, caplog):
    picture(tmp_path / "0.png")
    blobs = Blobs((str(tmp_path / "0.png"),))
    source = ImageSource(blobs, np.zeros(1, np.int32), ("a",))
    settings = {"stored_size": (4, 4), "channels": 3, "targets": "image", "num_threads": 1}
    cache.cached(source, folder=tmp_path / "kept", **settings)
    cache._checked.clear()
    (array,) = (tmp_path / "kept").rglob("images.npy")
    array.unlink()
    special(str(array.relative_to(tmp_path)))
    again = in_time(lambda: cache.cached(source, folder=tmp_path / "kept", **settings))
    assert again.images.shape == (1, 4, 4, 3)
    assert "is damaged" in caplog.text


def test_an_export_of_which_a_file_is_none_is_refused(special, tmp_path, monkeypatch):
    monkeypatch.setattr(predict.card, "read", lambda folder: {"class_names": ["a"]})
    monkeypatch.setattr(predict, "find_export", lambda model: model)
    special("saved_model.pb")
    with pytest.raises(UserError, match=r"cannot be loaded .*not a regular file"):
        in_time(lambda: predict.Predictor(tmp_path))


def test_what_a_run_left_is_not_waited_for(special, tmp_path):
    special(card.NAME)
    with pytest.raises(UserError, match="cannot be read"):
        in_time(lambda: card.read(tmp_path))
    special(manifest.MANIFEST)
    with pytest.raises(OSError, match=r"regular|No such device"):
        in_time(lambda: manifest.read_manifest(tmp_path))
    for name, read in (("log.csv", csv.read), ("log.jsonl", json_lines.read)):
        with pytest.raises(OSError, match=r"regular|No such device"):
            in_time(functools.partial(read, special(name)))
    assert in_time(lambda: workdir._read(special("config.json"))) is None
    assert "error" in vars(in_time(lambda: _Read(predict._read(str(special("it.png"))))))


class _Read:
    def __init__(self, found):
        if isinstance(found, str):
            self.error = found


def listed(folder, names):
    table = folder / "list.csv"
    table.write_text("path,label\n" + "".join(f"{name},a\n" for name in names))
    return sources.image_list(table)


@pytest.mark.parametrize("loader", ["dali_cpu", "tf_data"])
def test_a_later_line_of_a_list_is_named_when_it_is_read(tmp_path, loader):
    from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
    from tfaccel.data.feed import Feed
    from tfaccel.data.loaders.dali import DaliStream
    from tfaccel.data.loaders.tf_data import TfDataStream
    from tfaccel.data.placement import Placement
    from tfaccel.data.shards import Plan
    from tfaccel.runtime.devices import Device

    picture(tmp_path / "0.png")
    os.mkfifo(tmp_path / "z.png")
    source = listed(tmp_path, ["0.png", "z.png"])
    feed = Feed(Plan(2, 2, 1), AugmentConfig(), (4, 4), 0)
    settings = {
        "feed": feed,
        "placement": Placement(Device("/cpu:0", None), num_threads=1, seed=0),
        "dtype": "float32",
    }
    images = ImageConfig(image_size=(4, 4))
    dali = {"dali": DaliConfig(), "decode_on_gpu": False} if loader == "dali_cpu" else {}
    make_stream = DaliStream if dali else TfDataStream
    with pytest.raises(UserError, match=r"1 of 2 images just read .*z\.png \(not a regular file"):
        in_time(lambda: next(make_stream(source, images, **settings, **dali)))


def test_a_file_of_bytes_is_read(tmp_path):
    path = tmp_path / "plain"
    assert not is_special(path)
    path.write_bytes(b"abc")
    assert not is_special(path)
    assert read_regular(path) == b"abc"
