import json

import pytest
from loaded_tool import loaded

from tfaccel.runtime import autotuning

with loaded("ship_autotuning") as tool:
    pass
PACKAGES = {"tensorflow": "2.21.0"}
NAME = "nvidia-h200-tensorflow-2.21.0-a661e6b9"


def keep(caches, arm, choices, **other):
    """Makes the kept choices of a process: {operation: choice}."""
    gpus = [json.dumps({"name": "NVIDIA H200", "driver": "1"})]
    decides = {"packages": PACKAGES, "gpus": gpus, "tf32": True, "xla_flags": ""} | other
    folder = caches / arm / "tfaccel" / "autotuning" / "1234"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(decides))
    made = [
        {"device": "H200", "hlo": hlo, "result": result, "version": 22}
        for hlo, result in choices.items()
    ]
    data = autotuning._results()(version=3, results=made).SerializeToString()
    (folder / "1-2.pb").write_bytes(data)


def shipped(folder):
    (path,) = folder.glob("*.json")
    assert path.name == f"{NAME}.json"
    assert json.loads(path.read_text()) == {"packages": PACKAGES}
    return {each.hlo: each.result for each in autotuning.read_shipped(path).results}


def test_choices_of_all_arms_are_joined(tmp_path, capsys):
    caches, out = tmp_path / "caches", tmp_path / "out"
    keep(caches, "a", {"conv": b"1"})
    keep(caches, "b", {"dot": b"2"})
    keep(caches, "c", {"left out": b"3"}, xla_flags="--xla_gpu_autotune_level=2")
    keep(caches, "d", {"left out": b"3"}, tf32=False)
    assert tool.main([str(caches), f"--output={out}"]) == 0
    assert shipped(out) == {"conv": b"1", "dot": b"2"}
    said = capsys.readouterr().out
    assert said.count("its settings are not the default ones") == 2
    assert json.loads(said.splitlines()[-1]) == {NAME: 2}

    # What the package has stays.
    keep(caches, "e", {"conv": b"9", "add": b"4"})
    assert tool.main([str(caches), f"--output={out}"]) == 0
    assert shipped(out) == {"conv": b"1", "dot": b"2", "add": b"4"}

    # A run that had float16's choices from the package's for bfloat16 writes them, too.
    keep(caches, "g", {"bf16[2] dot(bf16[2])": b"6"})
    assert tool.main([str(caches), f"--output={out}"]) == 0
    keep(caches, "h", {"f16[2] dot(f16[2])": b"6", "f16[2] conv": b"7"})
    assert tool.main([str(caches), f"--output={out}"]) == 0
    added = {"bf16[2] dot(bf16[2])": b"6", "f16[2] conv": b"7"}
    assert shipped(out) == {"conv": b"1", "dot": b"2", "add": b"4"} | added

    # Those of other versions have files of their own: XLA's numbers of kernels change with them.
    keep(caches, "f", {"conv": b"5"}, packages=PACKAGES | {"nvidia-cudnn-cu12": "1"})
    assert tool.main([str(caches), f"--output={out}"]) == 0
    assert len(list(out.glob("*.json"))) == len(list(out.glob("*.pb.gz"))) == 2


def test_nothing_found_is_no_success(tmp_path, capsys):
    assert tool.main([str(tmp_path), f"--output={tmp_path / 'out'}"]) == 1
    with pytest.raises(SystemExit) as stopped:
        tool.main([str(tmp_path / "missing")])
    assert stopped.value.code == 2
    assert "is not a folder" in capsys.readouterr().err
