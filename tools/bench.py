"""Measures how fast tfaccel is compared with its rivals, and prints a table of ratios.

    uv run --extra gpu python tools/bench.py --jpegs=/data/imagenet --mnist=/data/mnist_png \\
        --output=tools/results
    uv run --extra gpu python tools/bench.py --rows=S1,S3 --ours='{"steps_per_execution": 10}'
    uv run python tools/bench.py --table

tools/bench_arms/rows.py has the rows and their goals. A row compares two sides, tfaccel and a
rival. Each side has one or more arms: an arm is a process with certain settings, which is set up
once. In a turn, each arm of a row trains one stretch: some untimed steps, then the timed steps. The
value of an arm is the median of its stretches, and the value of a side is that of its best arm. An
arm that is far behind the best of its side gets no further turns.

`--rows` takes names of rows, or the beginnings of names. By default, all rows run for which the
machine has enough GPUs. The JSON file of a row has the command, the date, and the settings,
hardware, versions and stretches of every arm. It is written after each turn.

The rows C, V (images) and L (tokens) train networks of many kinds beside the same ones in compiled
PyTorch, and Z trains one beside itself with another setting. tools/bench_arms/networks.py has their
sizes. The flags for the work, such as --batch, do not change them. Each arm of V and L has an empty
compile cache, so that the time of its first step counts what is compiled. A line for each arm has
its rows/s, ms of a step, spread of the stretches, peak memory, and start. The row has the ratio of
rows/s and the ratio of peak memory. The batches on the device do not count as memory, and the rival
with the least memory counts.

The rows C measure starts: the seconds to the end of the first step, to full speed, and, in rows C1
to C4, to the 1,000th step. Each arm is a process with empty compile caches, one after another. Ours
starts again with the caches that it filled: this arm is called "warm", and does not count for the
ratio. Ours runs 10 steps in an execution, and its first step is the end of the first execution.

    python tools/bench.py --rows=V7,L1 --torch-python=python3 --output=out --time-limit=580
    python tools/bench.py --rows=V,L --smoke --torch-python=python3

--together sets up all arms of a row at the same time, except in the rows of seconds to the first
step. It is for a machine that you have for a short time. The first steps come later, because the
arms share the cores. An arm may choose slower kernels, because it times them while others use the
GPU. Compare a row with the same row set up arm by arm before you trust it.

A time limit leaves out first the arms that are not set up in time, and then turns. An arm of a big
network takes one to three minutes to be set up, and one with max-autotune up to ten. --caches keeps
what the arms of V and L compile, also of arms that were not set up in time. A second call with the
same folder then sets them up within a minute. Its seconds to the first step are not those of a
first start, and the row's file says that caches were kept.

On a machine without GPUs, the other rows for one GPU run on the CPU. This only shows that the
program works. The program imports neither TensorFlow nor torch. The last line of standard output is
JSON.
Exit codes: 0 done; 1 a row failed, and the others were measured; 2 a mistake in the call; 130 or
143 interrupted.
"""

import argparse
import dataclasses
import datetime
import json
import math
import pathlib
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from bench_arms.arm_lines import arm_lines
from bench_arms.arm_process import ArmError, ArmProcess
from bench_arms.call import NO_PACKAGE, NO_TORCH, UsageError, exit_code, listed_settings, whole
from bench_arms.machine import (
    TOOLS,
    environment_of,
    gpu_names,
    hardware,
    has_packages,
    has_torch,
)
from bench_arms.measure import measure_row
from bench_arms.rows import ROWS_RATE, START, TARGET, Row, make_rows
from bench_arms.speed_table import short_lines, speed_table
from bench_arms.starts import CACHES
from bench_arms.time_limit import TimeLimit

from tfaccel.common.errors import did_you_mean

ARMS, RESULTS = TOOLS / "bench_arms", TOOLS / "results"
LIMIT_S = 1200  # for the setup of an arm (max-autotune takes 8 minutes), and for each stretch
OF_DRIVER = {"program", "gpus", "processes", "environment"}  # settings for this program, not an arm
OF_SETUP = {"precision", "xla", "setup", "environment"}  # settings of an arm's whole process
WORK = ("steps", "drop", "batch", "image_size", "model")  # settings of every arm
FOLDERS = {"jpegs": ".", "mnist": "training"}  # settings that are folders, and what must be in them
OF_NETWORKS = (ROWS_RATE, START)
PROGRAMS_OF_OURS = ("ours.py", "ours_networks.py")
PACKAGES_BESIDE_TORCH = ("timm", "transformers")  # that rows may need
LEAST_S = 20  # of a time limit, for a row to be begun


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the rows or prints the table, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    if options.table:
        rows, folder = make_rows(batch=options.batch), options.output or RESULTS
        print(speed_table(rows, folder), short_lines(rows, folder), sep="\n\n")
        return 0
    return exit_code("bench", lambda: measure(options, arguments))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=lambda text: text.split(","), help="for example S1,E; default: all rows")
    add("--gpus", type=whole(0), help="how many GPUs to use; default: all")
    add("--jpegs", type=pathlib.Path, help="a folder with JPEG files at any depth")
    add("--mnist", type=pathlib.Path, help="a folder that tools/write_mnist_png.py wrote")
    add(
        "--output",
        type=pathlib.Path,
        help="a folder for the JSON files, one per row; default: write no files",
    )
    add("--torch-python", default=sys.executable, help="the Python interpreter that has torch")
    add(
        "--ours",
        type=settings_of_ours,
        default={},
        help="a JSON object of settings to change in tfaccel's arms; those of tfaccel.setup also "
        "change rivals that are tfaccel",
    )
    add(
        "--leave-out",
        type=lambda text: text.split(","),
        default=[],
        metavar="WORDS",
        help="arms of the rows V and L whose name has one of these words, for example max-autotune",
    )
    add("--time-limit", type=whole(1), metavar="S", help="seconds for the call; default: no limit")
    add(
        "--caches",
        type=pathlib.Path,
        metavar="FOLDER",
        help="keep the compile caches of the arms of V and L there; default: empty ones each time",
    )
    add("--together", action="store_true", help="set up the arms of a row at the same time")
    add("--smoke", action="store_true", help="tiny networks in the rows V and L, also on a CPU")
    add("--repeats", type=whole(1), default=3, help="stretches of each arm")
    add("--steps", type=whole(1), default=300, help="timed steps in a stretch")
    add("--drop", type=whole(1), default=50, help="untimed steps in a stretch; steps per epoch")
    add(
        "--batch",
        type=whole(1),
        default=256,
        help="images of a step on each GPU; MNIST uses 10 times as many",
    )
    add("--image-size", type=whole(1), default=224, help="height and width; not for MNIST")
    add("--model", default="resnet50", help="a model of keras.applications; not for MNIST")
    add("--table", action="store_true", help="print the table from --output; measure nothing")
    return parser.parse_args(arguments)


def settings_of_ours(text: str) -> dict:
    """Parses the JSON object of --ours, and checks that the arm has each setting."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a JSON object of settings")
    known = set.union(OF_DRIVER, *map(listed_settings, PROGRAMS_OF_OURS))
    for name in given:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no setting '{name}'{did_you_mean(name, known)}")
    return given


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measures the rows that can run, writes and prints the results; returns the exit code."""
    gpus = gpu_names()
    num_gpus = len(gpus) if options.gpus is None else options.gpus
    if num_gpus > len(gpus):
        raise UsageError(
            f"--gpus={num_gpus}, but this machine has {len(gpus)}; use --gpus={len(gpus)} or fewer"
        )
    ratios, failed = {}, False
    ends = math.inf if options.time_limit is None else time.monotonic() + options.time_limit
    rows = chosen(options.rows, make_rows(batch=options.batch, tiny=options.smoke))
    for whole_row, row in [(each, without(each, options.leave_out)) for each in rows]:
        used = hardware(gpus[:num_gpus], num_used=row.gpus) + ("-smoke" if options.smoke else "")
        facts = facts_of(row, hardware=used, caches=options.caches)
        facts["command"] = shlex.join(["python", "tools/bench.py", *arguments])
        label = f"{row.name} on {facts['hardware']}"
        reason = lacking(row, options, num_gpus)
        if reason:
            print(f"{label}: not run: {reason}", flush=True)
            if num_gpus >= row.gpus and row.measure != TARGET:
                keep_reason(facts | {"not run": reason}, options.output)
            continue
        if ends - time.monotonic() < LEAST_S:
            print(f"{label}: not run: the time limit is reached", flush=True)
            continue
        try:
            for found in measure_with(row, options, num_gpus, ends):
                if row.measure in OF_NETWORKS:
                    found["without"] = without_figures(whole_row, found)
                ratios[label] = found["ratio"]
                print(f"{label}: {summary_of(row, found, options.repeats)}", flush=True)
                if options.output:
                    write(facts | found, options.output)
            if row.measure in OF_NETWORKS:
                print(*arm_lines(found), sep="\n", flush=True)
        except ArmError as error:
            print(f"bench: error: {label}: {error}", file=sys.stderr, flush=True)
            failed = True
    print(json.dumps(ratios))
    return 1 if failed else 0


def summary_of(row: Row, found: dict, repeats: int) -> str:
    """Returns the result of a row so far, in a line."""
    words = [f"{found['ratio']:.4g}", f"goal {row.goal:g}"]
    if found.get("memory ratio") is not None:
        goal = "" if row.memory_goal is None else f", goal {row.memory_goal:g}"
        words.append(f"memory {found['memory ratio']:.4g}{goal}")
    words += [f"without {name}" for name in found.get("without", ())]
    return "; ".join([*words, f"after {found['repeats']} of {repeats} turns"])


def without_figures(row: Row, found: dict) -> list[str]:
    """Returns the rival's arms that were left out by the call, that failed, or came too late."""
    rivals = found["rivals"]
    return [name for name in row.rivals if name not in rivals or "failed" in rivals[name]]


def without(row: Row, words: Sequence[str]) -> Row:
    """Returns a row of a network without the arms whose name has one of these words.

    Raises:
      UsageError: a side would have no arm.
    """
    if row.measure not in OF_NETWORKS:
        return row
    sides = [
        {name: arm for name, arm in arms.items() if not any(each in name for each in words)}
        for arms in (row.ours, row.rivals)
    ]
    for left, arms in zip(sides, (row.ours, row.rivals), strict=True):
        if not left:
            raise UsageError(
                f"--leave-out={','.join(words)} leaves out all of {', '.join(arms)} in row "
                f"{row.name}; each side needs an arm"
            )
    return dataclasses.replace(row, ours=sides[0], rivals=sides[1])


def facts_of(row: Row, *, hardware: str, caches: pathlib.Path | None = None) -> dict:
    """Returns the facts about a row that are known before it runs, for its file.

    Args:
      row: the row.
      hardware: the GPUs, as the file's name has them.
      caches: the folder in which the arms' compile caches are kept, if they are.
    """
    are_kept = caches is not None and row.measure == ROWS_RATE
    return {
        "row": row.name,
        "compared": row.compared,
        "measure": row.measure,
        "goal": row.goal,
        "gpus": row.gpus,
        "hardware": hardware,
        "date": datetime.date.today().isoformat(),
    } | ({"caches": "kept for a later call"} if are_kept else {})


def measure_with(
    row: Row, options: argparse.Namespace, num_gpus: int, ends: float = math.inf
) -> Iterator[dict]:
    """Measures a row in processes of this machine; yields its result so far after each turn."""
    with tempfile.TemporaryDirectory() as scratch:

        def start(name, settings, environment):
            num_seen = settings.get("gpus", min(num_gpus, 1))
            added = environment | settings.get("environment", {})
            command = command_of(settings, torch_python=options.torch_python, scratch=scratch)
            own = environment_of(num_seen, python=command[0])
            if row.measure == ROWS_RATE:
                own |= dict.fromkeys(CACHES, cache_of(f"{row.name}, {name}", options, scratch))
            return ArmProcess(name, command, settings, environment=own | added)

        row = with_work(row, options)
        limit = TimeLimit(LIMIT_S, ends=ends)
        yield from measure_row(
            row, start, repeats=options.repeats, limit=limit, together=options.together
        )


def cache_of(name: str, options: argparse.Namespace, scratch: str) -> str:
    """Returns the folder for the compile caches of an arm; it is empty unless caches are kept.

    Raises:
      UsageError: --caches is not a folder, or nothing can be written there.
    """
    if options.caches is None:
        return tempfile.mkdtemp(dir=scratch)
    folder = options.caches.absolute() / re.sub(r"\W+", "-", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"--caches={options.caches}: {error.strerror}"
        raise UsageError(f"{why}; name a folder that can be written") from error
    return str(folder)


def with_work(row: Row, options: argparse.Namespace) -> Row:
    """Returns the row with the settings of the command line added to each arm.

    Raises:
      UsageError: --ours has a setting that an arm of tfaccel has not.
    """
    work = {} if row.measure in OF_NETWORKS else {name: getattr(options, name) for name in WORK}
    for program in {each["program"] for each in row.ours.values()} if options.ours else ():
        for name in options.ours.keys() - listed_settings(program) - OF_DRIVER:
            raise UsageError(f"--ours: row {row.name} has no setting '{name}'; leave it out")
    work |= {name: str(getattr(options, name).absolute()) for name in {*row.needs} & {*FOLDERS}}
    # If a row compares tfaccel with itself, the processes of both sides have the same setup.
    setup = {name: value for name, value in options.ours.items() if name in OF_SETUP}
    return dataclasses.replace(
        row,
        ours={name: work | with_ours(each, options.ours) for name, each in row.ours.items()},
        rivals={
            name: work | with_ours(each, setup if each["program"] in PROGRAMS_OF_OURS else {})
            for name, each in row.rivals.items()
        },
    )


def with_ours(settings: dict, ours: dict) -> dict:
    """Returns an arm's settings, changed by --ours; environments and setups are merged."""
    merged = settings | ours
    for name in {"environment", "setup"} & merged.keys():
        own, added = (each.get(name, {}) for each in (settings, ours))
        merged[name] = own | added
    return merged


def command_of(settings: dict, *, torch_python: str, scratch: str) -> list[str]:
    """Returns the command that starts an arm."""
    program = str(ARMS / settings["program"])
    if settings.get("processes"):
        launch = [sys.executable, "-m", "tfaccel", "launch", f"--log-dir={scratch}", "--grace=5"]
        return [*launch, f"--nproc-per-node={settings['processes']}", program]
    is_torch = settings["program"].startswith("torch")
    return [torch_python if is_torch else sys.executable, program]


def chosen(names: Sequence[str] | None, rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with a name that begins with one of `names`; all rows for None."""
    for name in names or ():
        if not any(row.name.startswith(name) for row in rows):
            known = ", ".join(dict.fromkeys(row.name for row in rows))
            raise UsageError(f"--rows={name}: there is no such row; the rows are {known}")
    return [row for row in rows if names is None or row.name.startswith(tuple(names))]


def lacking(row: Row, options: argparse.Namespace, num_gpus: int) -> str | None:
    """Returns why a row cannot run on this machine; None if it can."""
    can_be_on_cpu = row.gpus == 1 and "gpu" not in row.needs
    if num_gpus < row.gpus and not (num_gpus == 0 and can_be_on_cpu):
        return f"needs {row.gpus} GPU{'s' if row.gpus > 1 else ''}, but only {num_gpus} can be used"
    if row.measure == TARGET:
        return "tools/bench_cifar.py measures it"
    for name in {*row.needs} & {*FOLDERS}:
        if getattr(options, name) is None:
            return f"needs --{name}=DIR"
        if not (getattr(options, name) / FOLDERS[name]).is_dir():
            within = "" if FOLDERS[name] == "." else f" with {FOLDERS[name]} in it"
            return f"--{name}={getattr(options, name)} is not a folder{within}"
    if "torch" in row.needs and not has_torch(options.torch_python):
        return NO_TORCH.format(options.torch_python)
    for name in {*row.needs} & {*PACKAGES_BESIDE_TORCH}:
        if not has_packages(options.torch_python, name):
            return NO_PACKAGE.format(options.torch_python, name)
    return None


def keep_reason(facts: dict, folder: pathlib.Path | None) -> None:
    """Writes why a row did not run on this machine, unless its file exists."""
    if folder and not path_of(facts, folder).exists():
        write(facts, folder)


def write(result: dict, folder: pathlib.Path) -> None:
    """Writes the JSON file of a row."""
    folder.mkdir(parents=True, exist_ok=True)
    path_of(result, folder).write_text(json.dumps(result, indent=2) + "\n")


def path_of(result: dict, folder: pathlib.Path) -> pathlib.Path:
    """Returns the path of the JSON file of a row."""
    return folder / f"speed-{result['row']}-{result['hardware']}.json"


if __name__ == "__main__":
    sys.exit(main())
