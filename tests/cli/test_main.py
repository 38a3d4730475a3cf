"""The command: help, mistakes, and what a run prints and leaves."""

import json
import logging
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
import types

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import NotRehearsed
from packaging.version import Version

from tfaccel import launch
from tfaccel.cli import fields, main
from tfaccel.cli import flags as cli_flags
from tfaccel.common.errors import UserError
from tfaccel.config import all_fields, parse
from tfaccel.diagnostics.compare import run as comparison_run
from tfaccel.experiment import fit, train
from tfaccel.export.rehearsal import Rehearsal
from tfaccel.run import Run

REPOSITORY = pathlib.Path(__file__).parents[2]
DIGITS = f"--config={REPOSITORY}/configs/digits.py:smoke"
MNIST = f"--config={REPOSITORY}/configs/mnist.py:smoke"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The folder of the digits, which are written once: they are some 1,800 files."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, cache):
    """Runs `tfaccel ...` in this process; returns exit code, standard output and error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tfaccel", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main.cli()
        return exit_.value.code, *capsys.readouterr()

    yield run
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def no_rehearsal(monkeypatch):
    """A run does not check its export before it trains, which takes a second."""
    monkeypatch.setattr(train, "rehearse", lambda *_, **__: NotRehearsed(None))


@pytest.fixture
def splits(folder, tmp_path):
    """A root with the small images to train and to test on."""
    root = tmp_path / "data"
    for split in ("training", "testing"):
        shutil.copytree(folder, root / split)
    return root


def test_help_lists_commands_with_an_example_each(command):
    for arguments in ((), ("--help",), ("-h",)):
        code, out, err = command(*arguments)
        assert (code, err) == (0, "")
        for name in main.COMMANDS:
            assert f"    tfaccel {name}" in out


def test_help_of_train_lists_every_field_if_asked_for_all(command):
    code, out, _ = command("train", "--help=all")
    assert code == 0
    for each in all_fields():
        assert f"  --config.{each}=" in out


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_of_a_command_has_all_its_flags_and_examples_that_it_takes(command, name):
    _, out, _ = command(name, "--help=all")
    stated = main.COMMANDS[name]
    for each in stated.flags:
        assert f"  {each.head}" in out
    for example in stated.examples:
        assert example.splitlines()[0] in out
        on_one_line = example.replace("\\\n", "").replace("configs/", f"{REPOSITORY}/configs/")
        words = shlex.split(on_one_line)
        assert words[:2] == ["tfaccel", name]
        stated.parse(words[2:])  # or a UserError


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_is_of_two_screens_at_most(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 75
    assert command(name, "--help=all")[0] == 0


def test_common_fields_exist_and_a_topic_is_a_section(command):
    assert set(fields.COMMON) <= set(all_fields())
    for topic in fields.TOPICS[1:]:
        for name in ("train", "lint"):
            _, out, _ = command(name, f"--help={topic}")
            for each in all_fields():
                assert (f"  --config.{each}=" in out) == each.startswith(f"{topic}.")
    code, _, err = command("train", "--help=trian")
    assert (code, "no help on 'trian'; did you mean 'train'?" in err) == (2, True)


def test_help_of_selftest_lists_every_flag(command):
    code, out, err = command("selftest", "--help")
    assert (code, err) == (0, "")
    for flag in ("gpu_ids", "precision", "xla", "output"):
        assert f"--{flag}" in out
    assert "mixed_float16" in out


@pytest.mark.parametrize("name", ["", *main.COMMANDS])
def test_help_is_of_80_columns(command, name):
    code, out, _ = command(*name.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80


HELP_AND_ERRORS = [
    ["--help"],
    ["train", "--help"],
    ["train", "--confg=x"],
    ["selftest", "--help"],
    ["selftest", "--xla=x"],
]


# What else is imported would be waited for: TensorFlow takes seconds, NumPy a tenth of one.
LIGHT = {"absl", "cython_runtime", "ml_collections", "tfaccel", "yaml"}


def test_help_and_flag_errors_import_little_and_no_tensorflow():
    program = f"""
import sys
before = set(sys.modules)
import tfaccel.cli.main as main
for arguments in {HELP_AND_ERRORS}:
    sys.argv = ["tfaccel", *arguments]
    try:
        main.cli()
    except SystemExit as exit_:
        ours = {{each.partition(".")[0] for each in set(sys.modules) - before}}
        heavy = {{each for each in ours - sys.stdlib_module_names if not each.startswith("_")}}
        print(arguments, exit_.code, heavy - {LIGHT}, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = [f"{each} {2 if 'x' in each[-1] else 0} set()" for each in HELP_AND_ERRORS]
    assert [each for each in done.stderr.splitlines() if each.startswith("[")] == ends


# What is wrong, and words of the one line that says so.
CALLS = [
    (["tran"], "there is no command 'tran'; did you mean 'train'?"),
    (["train"], "no config; add one"),
    (["train", f"--confg={DIGITS}"], "there is no flag --confg; did you mean --config?"),
    (["lint", "--script=mine.py"], "e.g. `tfaccel lint --config=configs/digits.py`"),
    (["train", "--config=configs/nope.py"], "config file configs/nope.py does not exist"),
    (["train", f"--config={REPOSITORY}/configs/digit.py"], "did you mean '"),
    (["train", f"--config={REPOSITORY}/pyproject.toml"], "pyproject.toml: SyntaxError"),
    (["train", "configs/digits.py"], "train --config=configs/digits.py`"),
    (["train", DIGITS.replace(":smoke", ":smok")], "digits.py: there is no size 'smok'; did you"),
    (["train", DIGITS, "--config.data.rooot=x"], "no field 'data.rooot'; did you mean 'data.root'"),
    (["train", DIGITS, "--config.dat.root=x"], "no field 'dat.root'; did you mean 'data.root'"),
    (["train", DIGITS, "--noconfig.runtime.xl"], "did you mean 'runtime.xla'"),
    (
        ["train", DIGITS, "--config.train.epochs=many"],
        "error: flag --config.train.epochs=many: exp",
    ),
    (["train", DIGITS, "--worker-index=abc"], "worker-index=abc: expected a whole number"),
    (["train", DIGITS, "--dry-run=maybe"], "error: flag --dry-run=maybe: expected true or false"),
    (["train", DIGITS, "--resume=maybe"], "error: flag --resume=maybe: value should be one of"),
    (
        ["train", DIGITS, MNIST, "--config.runtime.xla=0"],
        "mnist.py:smoke; expected one config file",
    ),
    (["train", DIGITS, "--config", "x.py"], "and x.py; expected one config file"),
    (["train", f"--config={REPOSITORY}/configs"], "configs is a folder; did you mean '"),
    (["train", DIGITS, "--wrokdir=x"], "there is no flag --wrokdir of"),
    (["train", DIGITS, "somewhere"], "'somewhere' is not a flag"),
    (["train", DIGITS, "--config.data.global_batch_size=0"], "global_batch_size=0; expected"),
    (["train", DIGITS, "--config.data.image_size=8"], "image_size=(8,); expected (height, width)"),
    (["train", DIGITS, "--config.data.image_size=0,8"], "image_size=(0, 8); expected"),
    (["train", DIGITS, "--config.data.image_size=2,2"], "mnist_cnn does not take images of 2x2"),
    (["train", DIGITS, "--config.runtime.gpu_ids=99"], "gpu_ids=(99,) asks for GPU 99"),
    (["train", DIGITS, "--config.model.name=resnet5"], "no model 'resnet5'; did you mean"),
    (["train", DIGITS, "--config.train.optimizer=adm"], "no optimizer 'adm'; did you mean"),
    (["train", DIGITS, "--config.train.monitor=val_acuracy"], "did you mean 'val_accuracy'"),
    (["train", DIGITS, "--config.log.trackers=mlfow"], "no tracker 'mlfow'; did you mean 'mlflow'"),
    (["lint", DIGITS, "--config.train.monitor=val_acuracy"], "did you mean 'val_accuracy'"),
    (["lint", DIGITS, "--config.train.optimizer=adm"], "no optimizer 'adm'; did you mean"),
    (["lint", DIGITS, "--config.model.weights=/no/where"], "weights='/no/where' is no file"),
    (["train", DIGITS, f"--workdir={__file__}"], "test_main.py is a file; give another --workdir"),
    (["train", MNIST, "--config.data.root=/no/where"], "image folder /no/where/training does not"),
    (["train", DIGITS, "--workers=a:1,b:1", "--worker-index=0"], "no --workdir with 2 workers ("),
    (["train", DIGITS, "--workers=a:1,b:1"], "worker_index=None with 2 workers; expected the"),
    (["train", DIGITS, "--workers="], "workers is empty; give host:port of each"),
    (["train", DIGITS, "--worker-index=1"], "worker_index=1 without workers; give host:port"),
    (["selftes"], "there is no command 'selftes'; did you mean 'selftest'?"),
    (["selftest", "here"], "selftest takes no argument 'here'; see `tfaccel selftest --help`"),
    (["selftest", "--outptu=x"], "no flag --outptu of `tfaccel selftest`; did you mean --output"),
    (["selftest", "--xla=maybe"], "<both|on|off>"),
    (["selftest", "--precision=fp16"], "precision='fp16'; expected one of float32"),
    (["selftest", "--precision=float32,fp8"], "precision='fp8'; expected one of float32"),
    (["selftest", "--precision=O3"], "precision='float16' has no tolerances to test with; use"),
    (["selftest", "--gpu_ids=first"], "gpu_ids='first'; expected GPU indices"),
    (["selftest", "--output=/no/where/x.json"], "output /no/where/x.json cannot be written (No"),
    (["selftest", "--output=."], "exists; give a new file"),
    (["audit", DIGITS, "--contact-sheet=x.txt"], "x.txt would be a PNG; give a file that ends in"),
    (["audit", DIGITS, "--contact-sheet=x.png", "--report=x.png"], "x.png; give two files"),
    (["doctor", "--data="], "--data= is empty; give a folder"),
    (["launch", "--max-restarts=x", "train"], "max-restarts=x: expected a whole number"),
]


@pytest.mark.parametrize(("arguments", "words"), CALLS, ids=[words for _, words in CALLS])
def test_a_mistake_is_one_line_and_code_2_and_leaves_nothing(command, tmp_path, arguments, words):
    code, out, err = command(*arguments)
    line = err.splitlines()[-1]
    assert code == 2
    assert line.startswith("tfaccel: error: ")
    assert words in line
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "runs").exists()


def plant_empty_folder(root):
    shutil.rmtree(root / "training")
    (root / "training").mkdir()
    return "training is empty; expected one folder of images per class"


def plant_wrong_suffix(root):
    (root / "training" / "a" / "notes.txt").write_text("not an image")
    return "holds 'notes.txt', which is not an image; expected only images"


def plant_text_as_image(root):
    (root / "training" / "a" / "00.png").write_text("not an image")
    return "00.png cannot be read as an image"


def plant_text_in_the_middle(root):
    # Shuffled, so that it is decoded in the first batch of some seeds and later in others.
    (root / "training" / "b" / "16.png").write_text("not an image")
    return "b/16.png cannot be read as an image (not an image"


def plant_cut_image(root):
    file = root / "training" / "b" / "16.png"
    file.write_bytes(file.read_bytes()[:70])
    return "b/16.png ("


def plant_vanished_class(root):
    shutil.rmtree(root / "training" / "c")
    return "testing has the class 'c', which is not among the 2 class_names, a, b"


@pytest.mark.parametrize(
    "plant",
    [
        plant_empty_folder,
        plant_wrong_suffix,
        plant_text_as_image,
        plant_text_in_the_middle,
        plant_cut_image,
        plant_vanished_class,
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_wrong_data_is_one_line_and_code_2(command, splits, plant, seed):
    words = plant(splits)
    code, _, err = command(
        "train",
        MNIST,
        f"--config.data.root={splits}",
        "--config.data.global_batch_size=4",
        f"--config.runtime.seed={seed}",
    )
    assert code == 2, err
    assert "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("tfaccel: error: ")
    assert words in line


def test_a_batch_of_more_than_all_images_is_said_and_the_rate_is_of_what_a_step_has(
    command, caplog, no_rehearsal
):
    size, base = "--config.data.global_batch_size=5000", "--config.train.base_batch_size=256"
    with caplog.at_level(logging.INFO, logger="tfaccel"):
        code, _, err = command(
            "train", DIGITS, size, base, "--config.runtime.xla=False", "--dry-run"
        )
    assert code == 0, err
    assert "each step has all 1437 examples, fewer than 5000" in caplog.text
    assert "1 steps of 1437 an epoch" in caplog.text
    assert "x 1437/256" in caplog.text


def test_a_run_whose_reader_has_gone_is_done(monkeypatch, tmp_path):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr("tfaccel.experiment.train.run", lambda *_, **__: {"steps": 1})
    with open(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main.main(["train", DIGITS, f"--workdir={tmp_path / 'run'}"]) == 0


def test_several_workers_need_a_workdir_that_they_share(command, monkeypatch):
    task = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    code, _, err = command("train", DIGITS)
    assert code == 2
    assert "no --workdir with 2 workers (TF_CONFIG); give every worker the same --workdir" in err


def test_a_workdir_is_not_written_over(command, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.json").write_text('"precious"')
    for flag in ("--resume=never", "--resume=auto"):
        code, _, err = command("train", DIGITS, "--workdir=used", flag)
        assert code == 2
        assert "already holds" in err
        assert "give another" in err
    assert (tmp_path / "used" / "config.json").read_text() == '"precious"'
    code, _, err = command("train", DIGITS, "--workdir=new", "--resume=required")
    assert code == 2
    assert "has no checkpoints to resume from" in err
    assert not (tmp_path / "new").exists()


# What a user's own config file may be, and words of the one line that says so.
FILES = [
    ("def get_config():\n  return None", "get_config() returned None"),
    ("def make_config():\n  return None", "own.py: there is no get_config(); add one"),
    ("def get_config():\n  return {}['b']", "own.py, line 2: KeyError: 'b'"),
    ("import sys\ndef get_config():\n  sys.exit(3)", "own.py, line 3: SystemExit: 3"),
    ("import math\ndef get_config():\n  return math.foo", "line 3: AttributeError: module 'math'"),
    ("def get_config():\n  return nonsense", "name 'nonsense' is not defined"),
    (
        "import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict()",
        "lacks a field that the command line changes",
    ),
    (
        "from tfaccel.config import default_config\ndef get_config():\n  c = default_config()\n"
        "  c.train.epoch = 3\n  return c",
        "config.train has no field 'epoch'; did you mean 'epochs'",
    ),
]


@pytest.mark.parametrize(("text", "words"), FILES, ids=[words for _, words in FILES])
def test_a_wrong_config_file_is_one_line_and_code_2(command, tmp_path, text, words):
    (tmp_path / "own.py").write_text(text)
    override = "--config.train.epochs=2" if "lacks" in words else "--workdir=out"
    code, _, err = command("train", "--config=own.py", override)
    (line,) = err.splitlines()
    assert code == 2
    assert words in line
    assert len(line) < 300


def test_a_config_file_may_give_memory_as_a_number(command, tmp_path):
    (tmp_path / "own.py").write_text(
        "from tfaccel.config import default_config\ndef get_config():\n  c = default_config()\n"
        "  c.runtime.memory = 8192\n  return c"
    )
    code, _, err = command("train", "--config=own.py", "--config.train.epochs=0")
    assert (code, "epochs=0" in err) == (2, True)


def test_mistakes_in_values_and_workdir_need_no_tensorflow(tmp_path):
    (tmp_path / "file").touch()
    for arguments in (
        [DIGITS, "--config.train.epochs=0"],
        [DIGITS, f"--workdir={tmp_path}/file/x"],
    ):
        program = (
            f"import sys, tfaccel.cli.main as main; sys.argv = ['tfaccel', 'train', *{arguments}]\n"
            "try: main.cli()\n"
            "finally: assert 'tensorflow' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("tfaccel: error: ")
        assert len(done.stderr.splitlines()) == 1


def test_help_shows_the_values_of_a_config(command):
    code, out, _ = command("train", MNIST, "--help")
    assert code == 0
    assert "--config.runtime.precision=mixed_float16" in out
    assert "--config.data.image_size=28,28" in out


def test_help_shows_the_values_of_a_config_and_of_flags_however_they_are_spelt(command):
    file = MNIST.partition("=")[2]
    code, out, _ = command("train", "--help", "--config", file, "--config.train.epochs", "5")
    assert code == 0
    assert f"with the values of {file} and the other flags" in out
    assert "--config.runtime.precision=mixed_float16" in out
    assert "--config.train.epochs=5 " in out


@pytest.mark.parametrize("spelt", [("--config={}",), ("--config", "{}")])
def test_compare_says_the_command_whatever_way_its_flags_are_spelt(command, monkeypatch, spelt):
    def compare(config, *, command, **_):
        raise UserError(f"{config.train.epochs} epochs: {command}")

    monkeypatch.setattr(comparison_run, "compare", compare)
    given = [each.format(DIGITS.partition("=")[2]) for each in spelt]
    changes = ("--config.train.epochs", "3", "--noconfig.runtime.xla", "--config.runtime.gpu_ids=")
    _, _, err = command("compare", *given, *changes, "--config.data.image_size=9,9")
    said = err.strip().partition("3 epochs: tfaccel ")[2]
    assert said.startswith(f"train {DIGITS} --config.train.epochs=3 ")
    values, _ = cli_flags.parse_config_flags("train", shlex.split(said)[1:])
    config = parse(values.config)
    assert (config.train.epochs, config.runtime.xla, config.runtime.gpu_ids) == (3, False, ())
    assert config.data.image_size == (9, 9)


def test_a_launchers_flags_are_spelled_as_any_and_its_help_comes_after_them(command, monkeypatch):
    code, out, _ = command("launch", "--nproc_per_node", "2", "--help")
    assert code == 0
    assert "usage: tfaccel launch" in out
    received = []
    monkeypatch.setattr(launch, "launch", lambda *each: received.append(each) or 0)
    of_train = ("train", "--workdir=a", "--node_rank=7", "--help")  # are the command's own affair
    code, _, err = command("launch", "--nproc_per_node", "2", "--max_restarts=1", *of_train)
    assert (code, err) == (0, "")
    ((options, command_),) = received
    assert (options.num_ranks_per_node, options.max_restarts, command_) == (2, 1, of_train)


@pytest.mark.parametrize(("field", "name"), [("train.optimizer", "adm"), ("model.name", "resnet5")])
def test_a_misspelt_name_is_told_before_images_are_decoded(command, monkeypatch, field, name):
    monkeypatch.setattr(train, "open_loader", None)  # or a TypeError
    code, _, err = command("train", DIGITS, f"--config.{field}={name}")
    assert code == 2
    assert f"'{name}'; did you mean" in err


def test_a_diverged_run_says_so_and_exports_nothing(command, tmp_path, no_rehearsal):
    recipe = ("--config.train.optimizer=sgd", "--config.train.learning_rate=1e30")
    code, out, err = command("train", DIGITS, "--workdir=out", *recipe)
    assert code == 1
    assert "is not finite at step 2" in err
    assert "lower the learning rate" in err
    assert not (tmp_path / "out" / "export").exists()
    assert "{" not in out


def test_an_interrupt_is_one_line_and_code_130(command, monkeypatch, no_rehearsal):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(keras.Model, "fit", interrupt)
    code, _, err = command("train", DIGITS)
    assert code == 130
    assert err.splitlines()[-1] == "tfaccel: interrupted"


def test_a_rate_that_was_not_measured_is_null(command, monkeypatch, no_rehearsal):
    monkeypatch.setattr(Run, "export", lambda *_, **__: "nowhere")
    flags = ("--config.data.global_batch_size=1437", "--config.runtime.xla=False")
    code, out, err = command("train", DIGITS, "--workdir=out", *flags, "--config.train.epochs=1")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["images_per_second"] is None


def test_the_trial_export_does_not_count_for_the_speed(command, monkeypatch):
    late = [0.0]  # seconds that the clock is ahead

    class Slow(NotRehearsed):
        callback = Rehearsal.callback

        def begin(self):
            if not self.seconds:
                self.seconds = late[0] = 1000.0

        def check(self):
            """Finds nothing."""

        def close(self):
            """Has nothing to end."""

    monkeypatch.setattr(train, "rehearse", lambda *_, **__: Slow(None))
    clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
    monkeypatch.setattr(fit, "time", clock)
    monkeypatch.setattr(Run, "export", lambda *_, **__: "nowhere")
    code, out, err = command("train", DIGITS, "--workdir=out")
    assert code == 0, err
    assert late == [1000]
    assert json.loads(out.splitlines()[-1])["images_per_second"] > 2  # 1,437 in more than 1,000 s


def test_a_run_prints_its_result_and_leaves_its_folder(command, tmp_path, cache, caplog):
    caplog.set_level(logging.INFO, logger="tfaccel")
    code, out, err = command("train", DIGITS, "--workdir=out", "--config.train.epochs=2")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["steps"] == 46
    assert result["images_per_second"] > 0
    assert 0 < result["first_execution_seconds"] < result["seconds"]
    assert 0.5 < result["metrics"]["val_accuracy"] <= 1  # a guess is right once in ten
    assert result == json.loads((tmp_path / "out" / "result.json").read_text())

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["train"]["epochs"] == 2
    environment = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert Version(environment["packages"]["tensorflow"]) == Version(tf.__version__)
    assert len((tmp_path / "out" / "metrics.csv").read_text().splitlines()) == 1 + 2
    assert list((tmp_path / "out" / "tensorboard").glob("*/events*"))
    # Lines where there is no terminal: no bar that redraws itself.
    assert "\x1b" not in out
    assert "\b" not in out
    assert [each.split()[:2] for each in out.splitlines()[:-1]] == [
        ["epoch", "1/2"],
        ["epoch", "2/2"],
    ]
    kept = (tmp_path / "out" / "log.txt").read_text()
    for said in ("device: ", "precision: float32", "step: one function, without XLA", "export: "):
        assert said in caplog.text
        assert said in kept

    digit = next((cache / "tfaccel" / "digits" / "testing" / "3").iterdir())
    image = np.asarray(PIL.Image.open(digit), np.float32)[None, ..., None] / 255
    exported = tf.saved_model.load(result["export"])
    assert exported.serve(image)["probabilities"].shape == (1, 10)


@pytest.mark.slow  # a training of its own; tests/training/logs/test_terminal.py has the rest
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals")
def test_a_terminal_sees_where_it_is(tmp_path):
    terminal, end = os.openpty()
    arguments = ["-m", "tfaccel", "train", DIGITS, "--workdir=out"]
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=end,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env={
            **os.environ,
            "TERM": "xterm",
            "XDG_CACHE_HOME": str(tmp_path),
            "PYTHONPATH": str(REPOSITORY),
        },
    )
    os.close(end)
    seen, drawn_anew = b"", b"\r\x1b[2Kepoch "
    try:
        while drawn_anew not in seen and (chunk := os.read(terminal, 4096)):
            seen += chunk
    except OSError:
        pass  # how Linux says that the other end is closed
    finally:
        child.kill()
        child.wait()
    assert drawn_anew in seen
