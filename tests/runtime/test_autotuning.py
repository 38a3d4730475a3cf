import gzip
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import types

import pytest
from conftest import new_process

from tfaccel.runtime import autotuning, xla_device

DECIDES = {"packages": {"tensorflow": "2.21.0"}, "gpus": ["H200"], "tf32": True}
FILE, CHOICE = 3, 22  # the versions that XLA of TensorFlow 2.21 wrote on an H200


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--a=b")
    monkeypatch.setattr(autotuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(autotuning, "_begun", [])
    return tmp_path / "tfaccel" / "autotuning"


def begin(decides=DECIDES):
    """As another process does; returns the files that XLA would read and write there."""
    autotuning._begun.clear()
    autotuning.use(decides)
    flags = os.environ["XLA_FLAGS"]
    assert flags.startswith("--a=b ")
    paths = [re.search(rf"--{name}=(\S+)", flags) for name in (autotuning.READ, autotuning.WRITE)]
    return [pathlib.Path(each[1]) if each else None for each in paths]


def written(path, results, *, versions=(FILE, CHOICE), device="H200"):
    """Writes choices as XLA does: {operation: choice}."""
    results = [
        {"device": device, "hlo": hlo, "result": result, "version": versions[1]}
        for hlo, result in results.items()
    ]
    data = autotuning._results()(version=versions[0], results=results).SerializeToString()
    path.write_bytes(data)
    return data


def read(path):
    return {
        each.hlo: each.result
        for each in autotuning._results().FromString(path.read_bytes()).results
    }


def test_the_class_reads_xlas_bytes():
    # version: 3, results {device: "d", hlo: "h", result {field 1: 7}, version: 22}
    entry = b"\x0a\x01d" + b"\x12\x01h" + b"\x1a\x02\x08\x07" + b"\x20\x16"
    data = b"\x08\x03" + b"\x22" + bytes([len(entry)]) + entry
    found = autotuning._results().FromString(data)
    assert (found.version, found.results[0].hlo, found.results[0].result) == (3, "h", b"\x08\x07")
    assert found.SerializeToString() == data


def test_the_next_process_reads_what_all_before_wrote(caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    first, own = begin()
    assert first is None  # XLA would fail for an empty file
    _, other = begin()  # at the same time
    assert own != other
    written(own, {"conv": b"1", "dot": b"2"})
    written(other, {"conv": b"3", "add": b"4"})
    kept, third = begin()
    assert read(kept)["dot"] == b"2"
    assert read(kept)["add"] == b"4"
    chosen = read(kept)["conv"]
    assert chosen in (b"1", b"3")
    assert not own.exists()
    assert not other.exists()
    assert "; 3 are there, 0 of them from the package" in caplog.text

    # A choice that was kept stays, also if a process that was slow writes another one.
    written(third, {"conv": b"9", "new": b"5"})
    kept, _ = begin()
    assert read(kept) == {"conv": chosen, "dot": b"2", "add": b"4", "new": b"5"}
    assert oct(kept.parent.stat().st_mode & 0o777) == "0o700"


def test_other_settings_have_other_choices():
    _, own = begin()
    written(own, {"conv": b"1"})
    for other in ({"tf32": False}, {"gpus": ["H100"]}, {"packages": {"tensorflow": "2.22.0"}}):
        assert begin(DECIDES | other)[0] is None
    assert begin()[0] is not None


@pytest.mark.parametrize("kind", ["cut", "noise", "no version", "empty"])
def test_a_file_that_xla_would_refuse_is_not_read(kind):
    _, own = begin()
    data = written(own, {"conv" * 40: b"1"}, versions=(0 if kind == "no version" else FILE, CHOICE))
    if kind == "cut":  # another process is still writing it
        own.write_bytes(data[:-7])
    if kind == "noise":
        own.write_bytes(b"\xff" * 90)
    if kind == "empty":
        own.write_bytes(b"")
    assert begin()[0] is None
    assert own.exists()
    os.utime(own, (0, time.time() - 2 * autotuning.DAY_S))
    assert begin()[0] is None
    assert not own.exists()


def test_all_files_that_xla_reads_have_one_version(tmp_path):
    _, own = begin()
    written(own, {"conv": b"1"})
    kept, other = begin()
    assert autotuning.read(kept).version == FILE
    for versions in ((FILE + 1, CHOICE), (FILE, CHOICE + 1)):
        written(other, {"dot": b"2"}, versions=versions)
        kept, other = begin()
        assert read(kept) == {"conv": b"1"}


def test_a_damaged_kept_file_is_replaced():
    _, own = begin()
    written(own, {"conv": b"1"})
    kept, own = begin()
    kept.write_bytes(b"\xff" * 90)
    written(own, {"dot": b"1"})
    kept, _ = begin()
    assert read(kept) == {"dot": b"1"}


def test_too_many_choices_are_removed(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    _, own = begin()
    written(own, {"conv": b"1" * 500})
    monkeypatch.setattr(autotuning, "MOST_BYTES", 100)
    begin()
    assert "removed 1 kept choices" in caplog.text


def test_the_packages_choices_are_used_where_they_fit(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    folder = tmp_path / "shipped"
    folder.mkdir()
    data = written(tmp_path / "x.pb", {"conv": b"1", "dot": b"2"})
    (folder / "h200.pb.gz").write_bytes(gzip.compress(data))
    (folder / "h200.json").write_text(json.dumps({"packages": DECIDES["packages"]}))
    kept, own = begin()
    assert read(kept) == {"conv": b"1", "dot": b"2"}
    assert "; 2 are there, 2 of them from the package" in caplog.text
    assert begin(DECIDES | {"packages": {"tensorflow": "2.22.0"}})[0] is None

    # The machine's own choices come first.
    kept.unlink()
    written(own, {"conv": b"7"})
    kept, _ = begin()
    assert read(kept) == {"conv": b"7", "dot": b"2"}
    assert "; 2 are there, 1 of them from the package" in caplog.text


OF_H200 = "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 4814 GB/s, L2 cache: 60 MB"
OF_H100 = OF_H200.replace("4814", "3352").replace("60 MB", "50 MB")
OF_ANOTHER = OF_H100.replace("132", "114")


def test_a_gpu_gets_the_products_of_a_sibling(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    folder = tmp_path / "shipped"
    folder.mkdir()
    choices = {"{ a conv(b, c) }": b"1", "{ a dot(b, c) }": b"2"}
    data = written(tmp_path / "x.pb", choices, device=f"{OF_H200}, DNN version: 9.28.0")
    (folder / "h200.pb.gz").write_bytes(gzip.compress(data))
    (folder / "h200.json").write_text(json.dumps({"packages": DECIDES["packages"]}))

    def kept_for(gpu, **other):
        autotuning._begun.clear()
        caplog.clear()
        autotuning.use(DECIDES | other, gpu=gpu)
        path = pathlib.Path(re.search(rf"{autotuning.READ}=(\S+)", os.environ["XLA_FLAGS"])[1])
        found = autotuning.read(path).results
        return {each.device: each.hlo for each in found if "H200" not in each.device}, len(found)

    devices, number = kept_for(OF_H100, gpus=["H100"])
    assert devices[f"{OF_H100}, DNN version: 9.28.0"] == "{ a dot(b, c) }"
    assert number == 3
    assert "3 are there, 3 of them from the package" in caplog.text
    assert "1 choices of the package were made on a GPU with as many cores" in caplog.text
    assert kept_for(OF_H100, gpus=["H100"])[1] == 3  # nothing twice

    for gpu in (OF_H200, OF_ANOTHER, None):
        assert kept_for(gpu, gpus=[gpu])[1] == 2
        assert "as many cores" not in caplog.text


def test_products_in_float16_get_the_choices_of_those_in_bfloat16(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    folder = tmp_path / "shipped"
    folder.mkdir()
    choices = {
        "bf16[2] dot(bf16[2])": b"1",
        "f32[2] dot(bf16[2])": b"2",
        "f16[2] dot(bf16[2])": b"3",  # of both
        "f32[2] dot(f32[2])": b"4",
        "bf16[2] custom-call(bf16[2])": b"5",  # cuDNN's choices are for one dtype
        "bf16[3] dot(bf16[3])": b"6",
        "f16[3] dot(f16[3])": b"7",  # XLA timed this one
    }
    data = written(tmp_path / "x.pb", choices)
    (folder / "h200.pb.gz").write_bytes(gzip.compress(data))
    (folder / "h200.json").write_text(json.dumps({"packages": DECIDES["packages"]}))
    kept, _ = begin()
    added = {"f16[2] dot(f16[2])": b"1", "f32[2] dot(f16[2])": b"2"}
    assert read(kept) == choices | added
    assert "9 are there, 9 of them from the package" in caplog.text
    assert "2 choices of the package for products in bfloat16 serve those in float16" in caplog.text


def test_a_second_setup_keeps_the_files():
    autotuning.use(DECIDES)
    flags = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] += " --c=d"
    autotuning.use(DECIDES)
    own = flags.removeprefix("--a=b ")
    assert os.environ["XLA_FLAGS"] == f"--a=b --c=d {own}"


def test_a_second_setup_with_other_settings_is_said_to_change_nothing(caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    autotuning.use(DECIDES)
    flags = os.environ["XLA_FLAGS"]
    autotuning.use(DECIDES)
    assert autotuning.OF_FIRST_SETUP not in caplog.text
    autotuning.use(DECIDES | {"tf32": False})
    assert os.environ["XLA_FLAGS"] == flags
    autotuning.leave_out("deterministic=True is set")
    assert caplog.text.count(autotuning.OF_FIRST_SETUP) == 2
    assert "although deterministic=True is set" in caplog.text


def test_a_child_process_has_files_of_its_own():
    begin()
    parents = os.environ["XLA_FLAGS"]
    assert autotuning.without_ours(parents) == "--a=b"
    begin()
    assert os.environ["XLA_FLAGS"].count(autotuning.WRITE) == 1
    assert os.environ["XLA_FLAGS"] != parents
    autotuning._begun.clear()
    autotuning.leave_out("a test wants it")
    assert os.environ["XLA_FLAGS"] == "--a=b"


@pytest.mark.parametrize("name", [autotuning.READ, autotuning.WRITE])
def test_the_users_own_file_stays(monkeypatch, name, own_cache):
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=/tmp/own.pb")
    autotuning.use(DECIDES)
    assert os.environ["XLA_FLAGS"] == f"--{name}=/tmp/own.pb"
    assert not own_cache.exists()


@pytest.mark.parametrize("kind", ["blank", "file in the way", "full disk"])
def test_what_prevents_it_is_said(tmp_path, monkeypatch, caplog, kind):
    caplog.set_level(logging.INFO, "tfaccel")
    if kind == "blank":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a b"))
    elif kind == "file in the way":
        (tmp_path / "tfaccel").write_text("")
    else:
        full = types.SimpleNamespace(free=1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    autotuning.use(DECIDES)
    assert os.environ["XLA_FLAGS"] == "--a=b"
    assert "no choices are kept, because" in caplog.text


JOIN = """
import sys, time
from tfaccel.runtime import autotuning, xla_device
time.sleep(max(0, float(sys.argv[1]) - time.time()))
for _ in range(20):
    autotuning._begun.clear()
    autotuning.use({"tf32": True})
"""


def test_processes_that_begin_at_once_lose_nothing(own_cache):
    autotuning.use({"tf32": True})
    (folder,) = [each for each in own_cache.iterdir() if each.is_dir()]
    operations = {f"conv {num}": b"1" for num in range(60)}
    for num, each in enumerate(operations):
        written(folder / f"{num}-0.pb", {each: b"1"})
    start = str(time.time() + 8)
    both = [subprocess.Popen([sys.executable, "-c", JOIN, start]) for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    assert read(folder / autotuning.KEPT) == operations


PROGRAM = """
import keras, numpy as np, tfaccel
run = tfaccel.setup(precision="mixed_bfloat16")
with run.scope():
    model = keras.Sequential([
        keras.Input((32, 32, 8)), keras.layers.Conv2D(64, 3), keras.layers.Flatten(),
        keras.layers.Dense(256, activation="relu"), keras.layers.Dense(8)])
run.compile(model, "sgd", "mse")
x, y = np.ones((64, 32, 32, 8), np.float32), np.ones((64, 8), np.float32)
model.fit(x, y, batch_size=32, verbose=0)
"""


def _results_in(path):
    return autotuning.read(path).results


@pytest.mark.gpu
def test_xla_reads_what_it_wrote(own_cache, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")

    def tuned():
        done = new_process(PROGRAM, TF_CPP_MIN_LOG_LEVEL="0", TFACCEL_VERBOSE="1")
        assert done.returncode == 0, done.stderr
        (folder,) = [each for each in own_cache.iterdir() if each.is_dir()]
        (own,) = folder.glob("*-*.pb")
        shutil.rmtree(own_cache.parent / "xla")  # else nothing would be compiled
        # XLA writes the parts of a choice in any order
        return done.stderr, {each: sorted(choice) for each, choice in read(own).items()}

    _, first = tuned()
    assert first
    (device,) = {each.device for path in own_cache.rglob("*.pb") for each in _results_in(path)}
    assert device.startswith(f"{xla_device.described(0)}, DNN version: ")
    said, second = tuned()
    assert "Autotune results loaded from file" in said
    assert second == first  # nothing was timed again
