"""What README and the pages tell people to type: every command and every Python block is run.

The default suite reads each command's flags and runs the Python blocks that are quick. With
`-m slow`, each page is followed from top to bottom in an empty folder with a few images.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from tfaccel.cli import main, pages

ROOT = pathlib.Path(__file__).parents[1]
FILES = {"readme": ROOT / "README.md"} | {
    topic: pages.ROOT / file for topic, file in pages.PAGES.items()
}
# Pages whose Python needs what their commands made, another process or a large network, or is much
# like README's script or like other tests.
SLOW = {"export", "notebook", "transfer", "own-images", "segmentation", "text"}
# Pages whose Python and commands need the library of an extra.
EXTRAS = {"trackers": "mlflow", "search": "optuna"}
# Commands of other programs, by how they begin, and why no test runs them.
OTHERS = {
    "pip install": "it installs packages",
    "docker run": "the page says that it was not run",
    "curl": "the page says that it was not run, or tests/export/test_serve.py asks so",
    "mkdir": "the page says that it was not run",
    "cp": "the page says that it was not run",
    "uv run --extra serve python -m tfaccel.export.serve": "tests/export/test_serve.py starts it",
    "uv run pytest": "it is this suite",
    "uv run --extra ray pytest": "it is this suite",
    "uv run ruff": "CI runs it",
    "uv run python tools/write_mnist_png.py": "it downloads MNIST; tests/tools runs it",
    "uv run python tools/unpack_engines.py": "it needs Debian's packages; tests/engines uses it",
}
# What starts a command on several hosts, and is no part of it.
STARTERS = re.compile(
    r"^(uv run( --extra \w+)?|srun( -\S+)+|mpirun( -n 2| --\S+( \S+:\S+| none)?)+) "
)
# A page that needs the network or other images is run with these words instead.
INSTEAD = {'weights="imagenet"': "weights=None"}
# Commands that need several hosts, a store or data that somebody else has.
ELSEWHERE = r"10\.0\.0\.1|slurm|srun|mpirun|engine=ray|://|tensorflow_datasets"
CACHE = "~/.cache"  # which conftest.py puts elsewhere


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, or the commands of a table."""

    language: str
    text: str
    line: int


def blocks(text):
    """Yields the blocks of a page, in order."""
    for found in re.finditer(r"^```(\w+)\n(.*?)^```$|^\|.*\| `(.+)` \|$", text, re.S | re.M):
        line = text[: found.start()].count("\n") + 1
        if found[1]:
            yield Block(found[1], found[2], line)
        elif re.match(r"(uv run|tfaccel|srun|mpirun) ", found[3]):
            yield Block("bash", found[3].split("`")[0], line)


def commands(block):
    """Yields the commands of a block, each on one line; `a && b` are two."""
    joined = re.sub(r"\s+#.*", "", block.text.replace("\\\n", ""))
    for line in re.split(r"\n(?!    )| && ", joined.strip()):
        yield re.sub(r"^\w+=\S+ ", "", re.sub(r"\s+", " ", line).strip())


def arguments_of(command):
    """Returns what follows `tfaccel` in a command; None for another program's."""
    rest = STARTERS.sub("", command)
    return shlex.split(rest)[1:] if rest.startswith("tfaccel ") else None


def of_language(language):
    return [
        pytest.param(block, id=f"{topic}:{block.line}")
        for topic, file in FILES.items()
        for block in blocks(file.read_text())
        if block.language == language
    ]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with configs, some photographs and some masks, as the pages name them."""
    random = np.random.default_rng(0)
    for split, number in (("training", 8), ("testing", 4)):
        for label, name in enumerate(("cat", "dog")):
            for index in range(number):
                pixels = random.integers(0, 100, (80, 100, 3), dtype=np.uint8) + 120 * label
                file = tmp_path / "photos" / split / name / f"{index + 1}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                PIL.Image.fromarray(pixels.astype(np.uint8)).save(file)
    for split in ("train", "test"):
        for index in range(4):
            mask = random.integers(0, 3, (70, 90), dtype=np.uint8)
            for kind, pixels in (("images", np.stack([mask * 80] * 3, -1)), ("masks", mask)):
                file = tmp_path / "street" / split / kind / "a" / f"{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                PIL.Image.fromarray(pixels).save(file)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    keras.config.set_dtype_policy("float32")


def run_python(block, names):
    """Runs a block, or writes it where its first line names a file."""
    text = block.text.replace(CACHE, os.environ["XDG_CACHE_HOME"])
    for written, instead in INSTEAD.items():
        text = text.replace(written, instead)
    if named := re.match(r"# (\w+\.py)\n", text):
        pathlib.Path(named[1]).write_text(text)
    else:
        exec(compile("\n" * block.line + text, "page", "exec"), names)


@pytest.mark.parametrize("block", of_language("bash"))
def test_every_command_is_one_that_the_program_takes(block, place, monkeypatch):
    # It writes 516 files.
    monkeypatch.setattr("tfaccel.data.blurred.ensure_blurred", lambda: place)
    for each in blocks(FILES["own-images"].read_text()):
        if each.language == "python" and each.text.startswith("# "):
            run_python(each, {})  # it writes the file that commands name
    best = place / "runs" / "search" / "best.py"  # what a search would write
    best.parent.mkdir(parents=True)
    best.symlink_to(ROOT / "configs" / "digits.py")
    for command in commands(block):
        arguments = arguments_of(command)
        if arguments is None:
            assert any(command.startswith(each) for each in (*OTHERS, "uv run python tools/bench"))
            continue
        if arguments[0] == "help":
            continue
        own, stated = arguments[1:], main.COMMANDS[arguments[0]]
        if stated.runs_command:
            _, inner = stated.parse(own)
            assert inner[0] in ("train", "selftest"), command
            own, stated = inner[1:], main.COMMANDS[inner[0]]
        stated.parse(own)  # or a UserError


@pytest.mark.parametrize("topic", FILES)
def test_the_python_of_a_page_runs(topic, place, export_not_saved):
    if topic in SLOW:
        pytest.skip("tested with its commands: -m slow")
    if topic in EXTRAS:
        pytest.importorskip(EXTRAS[topic], reason=f"needs the extra {EXTRAS[topic]}")
    names = {"__name__": "__main__"}
    for block in blocks(FILES[topic].read_text()):
        if block.language == "python":
            run_python(block, names)


@pytest.mark.parametrize("sign", [pytest.param("-", marks=pytest.mark.slow), "+"])
def test_the_script_of_readme_runs_as_it_was_and_as_it_becomes(sign, place):
    (block,) = [each for each in blocks(FILES["readme"].read_text()) if each.language == "diff"]
    lines = [each[1:] for each in block.text.splitlines() if each[:1] in (" ", sign, "")]
    names = {"__name__": "__main__"}
    exec(compile("\n".join(lines), "README.md", "exec"), names)
    assert len(names["model"].history.history["val_loss"]) == 5
    if sign == "-":
        return
    served = tf.saved_model.load("exported/1").signatures["serving_default"]
    assert served(image=tf.zeros((1, 96, 96, 3)))["probabilities"].shape == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("topic", FILES)
def test_a_page_is_followed_from_top_to_bottom(topic, place):
    if topic in EXTRAS:
        pytest.importorskip(EXTRAS[topic], reason=f"needs the extra {EXTRAS[topic]}")
    names = {"__name__": "__main__"}
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    for block in blocks(FILES[topic].read_text()):
        if block.language == "python":
            run_python(block, names)
        if block.language != "bash":
            continue
        for command in commands(block):
            arguments = arguments_of(command)
            needs_gpu = "--extra gpu" in command or "gpu_ids" in command
            elsewhere = re.search(ELSEWHERE, command)
            if arguments is None or (needs_gpu and not num_gpus) or elsewhere:
                continue
            if "configs/photos.py" in command and "train.epochs" not in command:
                arguments += ["--config.train.epochs=1"]  # of 30, of a ResNet-50
            cache = os.environ["XDG_CACHE_HOME"]
            arguments = [each.replace(CACHE, cache) for each in arguments]
            done = subprocess.run(
                [sys.executable, "-m", "tfaccel", *arguments],
                capture_output=True,
                text=True,
                timeout=1200,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


@pytest.mark.parametrize("topic", FILES)
def test_what_a_page_links_to_is_there(topic):
    file = FILES[topic]
    text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    anchors = {"#" + re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("#"):
            assert link in anchors
        elif "://" not in link:
            assert (file.parent / link.split("#")[0]).is_file(), link
