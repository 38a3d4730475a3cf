"""`tfaccel doctor` and `tfaccel.doctor.examine`, as a user calls them."""

import dataclasses
import json
import subprocess
import sys
import types

import pytest
from test_checks_gpus import H200, TWO

from tfaccel.cli import main
from tfaccel.diagnostics import doctor
from tfaccel.diagnostics.doctor.facts.child import Answers
from tfaccel.diagnostics.doctor.table import Table, error, ok


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tfaccel", "doctor", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main.cli()
        return exit_.value.code, *capsys.readouterr()

    return run


def test_quick_imports_no_tensorflow():
    program = (
        "import sys, tfaccel, tfaccel.cli.main as main\n"
        "tfaccel.doctor.examine\n"
        "sys.argv = ['tfaccel', 'doctor', '--quick', '--json']\n"
        "try: main.cli()\n"
        "finally: assert not {'tensorflow', 'keras', 'nvidia.dali'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == (1 if said["errors"] else 0)
    names = [each["name"] for each in said["checks"]]
    assert {"TensorFlow", "DALI plugin", "driver", "memory", "open files"} <= set(names)
    assert any("TensorFlow" in each for each in said["left_out"])


@pytest.mark.parametrize(("finding", "code"), [(ok("x", "y"), 0), (error("x", "y", "z"), 1)])
def test_the_exit_code_is_of_the_findings(monkeypatch, command, finding, code):
    asked = []

    def examine(**arguments):
        asked.append(arguments)
        return Table((finding,))

    monkeypatch.setattr(doctor, "examine", examine)
    exit_code, out, _ = command("--quick", "--data=/x")
    assert exit_code == code
    assert out.startswith(finding.status)
    assert asked == [{"quick": True, "data": "/x"}]


MISTAKES = [
    (["--data=/no/such/folder"], "data /no/such/folder is not a folder"),
    (["--quik"], "there is no flag --quik of `tfaccel doctor`; did you mean --quick?"),
    (["now"], "doctor takes no argument 'now'"),
    (["--quick", "--data=/tmp"], "--quick reads no data"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_in_the_call_is_one_line_and_exit_code_2(command, arguments, words):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_help_names_every_flag_in_100_columns(command):
    code, out, err = command("--help")
    assert (code, err) == (0, "")
    for flag in ("--quick", "--json", "--data"):
        assert flag in out
    assert max(map(len, out.splitlines())) <= 100


class Answer:
    def __init__(self, told):
        self.answers = lambda: told
        self.child = types.SimpleNamespace(end=lambda: None)


def test_a_full_examination_puts_what_children_told_into_its_lines(monkeypatch, tmp_path):
    planted = {
        "trial": Answers({"TensorFlow": {}, "DALI": {}}, {"DALI plugin": "was ended by SIGABRT"}),
        "nvml": Answers({"driver": None}),
        "disk": Answers({}, {"data": "gave no answer within 15 s"}),
    }

    def start(module, arguments, *, seconds):
        return Answer(planted[module.rpartition(".")[2]])

    monkeypatch.setattr(doctor.child, "start", start)
    table = doctor.examine(data=tmp_path)
    lines = {each.name: each for each in table.findings}
    assert "SIGABRT" in lines["DALI plugin"].found
    assert "gave no answer" in lines["data"].found
    assert table.exit_code == 1
    assert table.left_out == ()


def test_b15_direct_storage_has_a_line_in_json_where_there_is_a_gpu(monkeypatch, command):
    gpu = {"gpus": [dataclasses.asdict(H200)], "links": []}
    told = Answers({"driver": {"version": "580.95.05", "cuda": (13, 0)}, "GPUs": gpu})
    monkeypatch.setattr(doctor.child, "start", lambda *_, **__: Answer(told))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    checks = json.loads(command("--quick", "--json")[1])["checks"]
    (line,) = [each for each in checks if each["name"] == "GDS"]
    assert (line["status"], line["fix"]) == ("ok", "")
    assert line["found"].startswith("GPUDirect Storage: ")


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_the_network_of_nccl_is_told_where_a_job_has_several_gpus(monkeypatch, num_gpus):
    gpus = [dataclasses.asdict(each) for each in TWO[:num_gpus]]
    links = [[0, 1, "NVLink"]] if num_gpus > 1 else []
    driver = {"version": "580.95.05", "cuda": (13, 0)}
    told = Answers({"driver": driver, "GPUs": {"gpus": gpus, "links": links}})
    monkeypatch.setattr(doctor.child, "start", lambda *_, **__: Answer(told))
    for name in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    names = [each.name for each in doctor.examine(quick=True).findings]
    assert "network" in names
    assert {"NCCL interface", "InfiniBand"} & set(names) == (
        {"NCCL interface", "InfiniBand"} if num_gpus > 1 else set()
    )


@pytest.mark.slow
def test_the_whole_examination_of_this_machine_finds_no_error(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100_000))
    table = doctor.examine(data=tmp_path)
    assert table.exit_code == 0, str(table)
