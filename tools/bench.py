"""How fast tfaccel is beside its rivals: the table of ratios, each row alone or all.

    uv run --extra gpu python tools/bench.py --jpegs=/data/imagenet --mnist=/data/mnist_png \\
        --output=tools/results
    uv run --extra gpu python tools/bench.py --rows=S1,S3 --ours='{"steps_per_execution": 10}'
    uv run python tools/bench.py --table

Rows and goals are in tools/bench_arms/rows.py. `--rows` takes names or the beginnings of names; by
default all that the machine's GPUs allow. Each arm is a process that is set up once; then stretches
of all arms of a row take turns: steps that are dropped, and steps that are timed. The median of an
arm's stretches counts, and the best arm of each side; one that is far behind that is left out.
Each row's JSON file, written after each turn, holds every arm's settings, hardware, versions and
stretches, the command and the date.

Without GPUs, rows for one run on the CPU, where they say whether this program works, and no more.
Imports no TensorFlow and no torch. The last line of standard output is JSON. Exit codes: 0 done, 1
a row failed (the others went on), 2 a mistake in the call, 130 or 143 interrupted.
"""

import argparse
import ast
import dataclasses
import datetime
import json
import pathlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence

from bench_arms.arm_process import ArmError, ArmProcess
from bench_arms.call import NO_TORCH, UsageError, exit_code, whole
from bench_arms.machine import TOOLS, environment_of, gpu_names, hardware, has_torch
from bench_arms.measure import measure_row
from bench_arms.rows import TARGET, Row, make_rows
from bench_arms.speed_table import short_lines, speed_table

from tfaccel.common.errors import did_you_mean

ARMS, RESULTS = TOOLS / "bench_arms", TOOLS / "results"
LIMIT_S = 1200  # for an arm to be set up (max-autotune takes 8 minutes), and for a stretch
OF_DRIVER = {"program", "gpus", "processes", "environment"}  # settings that no arm reads
OF_SETUP = {"precision", "xla", "setup", "environment"}  # settings of an arm's whole process
WORK = ("steps", "drop", "batch", "image_size", "model")  # of every arm
FOLDERS = {"jpegs": ".", "mnist": "training"}  # of those that need them, and what is in them


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or prints the table, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    if options.table:
        rows, folder = make_rows(batch=options.batch), options.output or RESULTS
        print(speed_table(rows, folder), short_lines(rows, folder), sep="\n\n")
        return 0
    return exit_code("bench", lambda: measure(options, arguments))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=lambda text: text.split(","), help="e.g. S1,E; default: all")
    add("--gpus", type=whole(0), help="of this machine; default: all")
    add("--jpegs", type=pathlib.Path, help="a folder of JPEG files, at any depth")
    add("--mnist", type=pathlib.Path, help="a folder as write_mnist_png.py makes it")
    add("--output", type=pathlib.Path, help="a folder for a JSON file per row; default: none")
    add("--torch-python", default=sys.executable, help="the interpreter that has torch")
    add(
        "--ours",
        type=settings_of_ours,
        default={},
        help="JSON, merged into our arms' settings; what is for tfaccel.setup also into those of "
        "rivals that are tfaccel",
    )
    add("--repeats", type=whole(1), default=3, help="stretches of each arm")
    add("--steps", type=whole(1), default=300, help="of a stretch that are timed")
    add("--drop", type=whole(1), default=50, help="of a stretch that are not; and of an epoch")
    add(
        "--batch",
        type=whole(1),
        default=256,
        help="images of a step on each GPU; of MNIST 10 times",
    )
    add("--image-size", type=whole(1), default=224, help="height and width; not of MNIST")
    add("--model", default="resnet50", help="of keras.applications; not of MNIST")
    add("--table", action="store_true", help="print the table of --output, and measure nothing")
    return parser.parse_args(arguments)


def settings_of_ours(text: str) -> dict:
    """Returns the JSON object of --ours, of settings that the arm has."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a JSON object of settings")
    known = listed_settings("ours.py") | OF_DRIVER
    for name in given:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no '{name}'{did_you_mean(name, known)}")
    return given


def listed_settings(program: str) -> set[str]:
    """Returns the names of the settings that an arm's program lists in its docstring."""
    docstring = ast.get_docstring(ast.parse((ARMS / program).read_text()))
    lines = re.findall(r"^    ((?:\w+, )*\w+)(?: |$)", docstring, re.M)
    return {name for line in lines for name in line.split(", ")}


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measures the rows that can be, writes and prints what came of it."""
    gpus = gpu_names()
    num_gpus = len(gpus) if options.gpus is None else options.gpus
    if num_gpus > len(gpus):
        raise UsageError(f"--gpus={num_gpus}, but {len(gpus)} are here; ask for no more")
    ratios, failed = {}, False
    for row in chosen(options.rows, make_rows(batch=options.batch)):
        facts = facts_of(row, hardware=hardware(gpus[:num_gpus], num_used=row.gpus))
        facts["command"] = shlex.join(["python", "tools/bench.py", *arguments])
        label = f"{row.name} on {facts['hardware']}"
        reason = lacking(row, options, num_gpus)
        if reason:
            print(f"{label}: not run: {reason}", flush=True)
            if num_gpus >= row.gpus and row.measure != TARGET:
                keep_reason(facts | {"not run": reason}, options.output)
            continue
        try:
            for found in measure_with(row, options, num_gpus):
                ratios[label] = found["ratio"]
                so_far = f"after {found['repeats']} of {options.repeats} turns"
                print(f"{label}: {found['ratio']:.4g}; goal {row.goal:g}; {so_far}", flush=True)
                if options.output:
                    write(facts | found, options.output)
        except ArmError as error:
            print(f"bench: error: {label}: {error}", file=sys.stderr, flush=True)
            failed = True
    print(json.dumps(ratios))
    return 1 if failed else 0


def facts_of(row: Row, *, hardware: str) -> dict:
    """Returns what is known of a row before it is run, for its file."""
    return {
        "row": row.name,
        "compared": row.compared,
        "measure": row.measure,
        "goal": row.goal,
        "gpus": row.gpus,
        "hardware": hardware,
        "date": datetime.date.today().isoformat(),
    }


def measure_with(row: Row, options: argparse.Namespace, num_gpus: int) -> Iterator[dict]:
    """Yields what came of a row so far, in this machine's processes."""
    with tempfile.TemporaryDirectory() as scratch:

        def start(name, settings, environment):
            num_seen = settings.get("gpus", min(num_gpus, 1))
            added = environment | settings.get("environment", {})
            command = command_of(settings, torch_python=options.torch_python, scratch=scratch)
            own = environment_of(num_seen, python=command[0])
            return ArmProcess(name, command, settings, environment=own | added)

        row = with_work(row, options)
        yield from measure_row(row, start, repeats=options.repeats, limit_s=LIMIT_S)


def with_work(row: Row, options: argparse.Namespace) -> Row:
    """Returns the row with all settings of each arm."""
    work = {name: getattr(options, name) for name in WORK}
    work |= {name: str(getattr(options, name).absolute()) for name in {*row.needs} & {*FOLDERS}}
    # Where tfaccel is compared with itself, both sides' processes are set up alike.
    setup = {name: value for name, value in options.ours.items() if name in OF_SETUP}
    return dataclasses.replace(
        row,
        ours={name: work | with_ours(each, options.ours) for name, each in row.ours.items()},
        rivals={
            name: work | with_ours(each, setup if each["program"] == "ours.py" else {})
            for name, each in row.rivals.items()
        },
    )


def with_ours(settings: dict, ours: dict) -> dict:
    """Returns an arm's settings with those of --ours, which add to its environment."""
    merged = settings | ours
    if "environment" in merged:
        own, added = (each.get("environment", {}) for each in (settings, ours))
        merged["environment"] = own | added
    return merged


def command_of(settings: dict, *, torch_python: str, scratch: str) -> list[str]:
    """Returns the command of an arm."""
    program = str(ARMS / settings["program"])
    if settings.get("processes"):
        launch = [sys.executable, "-m", "tfaccel", "launch", f"--log-dir={scratch}", "--grace=5"]
        return [*launch, f"--nproc-per-node={settings['processes']}", program]
    is_torch = settings["program"].startswith("torch")
    return [torch_python if is_torch else sys.executable, program]


def chosen(names: Sequence[str] | None, rows: Sequence[Row]) -> list[Row]:
    """Returns the rows whose names begin as one of `names`; all where there is none."""
    for name in names or ():
        if not any(row.name.startswith(name) for row in rows):
            known = ", ".join(dict.fromkeys(row.name for row in rows))
            raise UsageError(f"--rows={name}: there is no such row; give of {known}")
    return [row for row in rows if names is None or row.name.startswith(tuple(names))]


def lacking(row: Row, options: argparse.Namespace, num_gpus: int) -> str | None:
    """Returns what a row would need to be run, or None."""
    can_be_on_cpu = row.gpus == 1 and "gpu" not in row.needs
    if num_gpus < row.gpus and not (num_gpus == 0 and can_be_on_cpu):
        return f"needs {row.gpus} GPU{'s' if row.gpus > 1 else ''}, {num_gpus} to be used here"
    if row.measure == TARGET:
        return "tools/bench_cifar.py measures it"
    for name in {*row.needs} & {*FOLDERS}:
        if getattr(options, name) is None:
            return f"needs --{name}=DIR"
        if not (getattr(options, name) / FOLDERS[name]).is_dir():
            within = "" if FOLDERS[name] == "." else f" with {FOLDERS[name]} in it"
            return f"--{name}={getattr(options, name)} is no folder{within}"
    if "torch" in row.needs and not has_torch(options.torch_python):
        return NO_TORCH.format(options.torch_python)
    return None


def keep_reason(facts: dict, folder: pathlib.Path | None) -> None:
    """Writes why a row was not run on this machine, unless it was before."""
    if folder and not path_of(facts, folder).exists():
        write(facts, folder)


def write(result: dict, folder: pathlib.Path) -> None:
    """Writes a row's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path_of(result, folder).write_text(json.dumps(result, indent=2) + "\n")


def path_of(result: dict, folder: pathlib.Path) -> pathlib.Path:
    """Returns the file of a row on a machine."""
    return folder / f"speed-{result['row']}-{result['hardware']}.json"


if __name__ == "__main__":
    sys.exit(main())
