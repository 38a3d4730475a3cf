"""Measures row T2: the seconds of CIFAR-10 training to 94%, compared with airbench in PyTorch.

    uv run --extra gpu python tools/bench_cifar.py --root=/data/cifar10 \\
        --torch-python=TORCH/bin/python --epochs=4 --repeats=1
    uv run --extra gpu python tools/bench_cifar.py --root=/data/cifar10 \\
        --torch-python=TORCH/bin/python --rivals=bfloat16 --output=tools/results

The first command shows within minutes which settings of the rival are quick. The second command
measures the row. The root holds train/<class>/*.jpg and test/<class>/*.jpg.

Our side is `tfaccel train` with configs/cifar10.py, as a user would run it. The rival is
tools/bench_arms/torch_cifar.py, with the method of cifar10-airbench. The sides take turns. Each run
has its own process and empty compile caches.

The seconds are the training time until the first test with 94%, or null if no test reached it. They
do not include decoding, which is reported separately. They include the tests: our side tests after
each epoch, but the rival only after the last one, so its seconds are those of all epochs. Use
`--rival=--evaluate-each-epoch` to test the rival after each epoch. There are two ratios of medians:

    ratio                       without compilation: our side counts the epochs after the first one,
                                scaled to all; the rival compiles before its clock starts, as
                                airbench does
    ratio with compilation      everything, from an empty cache

--output is the folder of a JSON file, which is written after each run. If you can use a machine
only for minutes at a time, repeat the call with --repeats=1 --add, which adds a run to the file.

The program imports neither TensorFlow nor torch. The last line of standard output is JSON. Exit
codes: 0 done; 1 an arm failed; 2 a mistake in the call; 130 or 143 interrupted.
"""

import argparse
import csv
import datetime
import json
import pathlib
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence

from bench_arms.arm_process import ArmError, said_last
from bench_arms.call import NO_TORCH, UsageError, exit_code, whole
from bench_arms.machine import TOOLS, environment_of, gpu_names, hardware, has_torch

from tfaccel.process.child import Child, how_it_ended

GOAL, TARGET = 1.5, 0.94
RIVALS = {
    "bfloat16": ["--precision=bfloat16"],
    "bfloat16-autotune": ["--precision=bfloat16", "--mode=max-autotune"],
    "half": ["--precision=half"],
    "half-autotune": ["--precision=half", "--mode=max-autotune"],
    "half-eager": ["--precision=half", "--mode=eager"],  # as in airbench96
}
FACTS = {
    "row": "T2",
    "compared": "seconds of CIFAR-10 training to 94% / cifar10-airbench's method in PyTorch",
    "measure": "seconds_to_target",
    "goal": GOAL,
    "gpus": 1,
    "tests": "ours after each epoch; the rival's after the last, unless its settings ask for each",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the row, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    gpus = gpu_names()[:1]
    facts = FACTS | {
        "hardware": hardware(gpus, num_used=1),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "tools/bench_cifar.py", *arguments]),
    }
    return exit_code("bench_cifar", lambda: measure(options, facts, num_gpus=len(gpus)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--root", type=pathlib.Path, required=True, help="has train/<class>/*.jpg and test/")
    add("--epochs", type=whole(1), default=130, help="epochs of both sides")
    add("--repeats", type=whole(1), default=3, help="runs of each arm")
    add(
        "--rivals",
        type=lambda text: text.split(","),
        default=[*RIVALS],
        help=f"the rival's settings to run, separated by commas; default: {','.join(RIVALS)}",
    )
    add("--ours", type=list_of_flags, default=[], help="a JSON list of flags for tfaccel train")
    add("--rival", action="append", default=[], help="one more flag for torch_cifar.py")
    add("--torch-python", default=sys.executable, help="the Python interpreter that has torch")
    add("--output", type=pathlib.Path, help="a folder for the JSON file; default: write no file")
    add("--add", action="store_true", help="keep the runs in the JSON file, and add to them")
    return parser.parse_args(arguments)


def list_of_flags(text: str) -> list[str]:
    """Parses the JSON list of --ours."""
    given = json.loads(text)
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a JSON list of flags")
    return given


def check(options: argparse.Namespace) -> None:
    """Raises UsageError for a folder, setting or package that is missing."""
    for name in ("train", "test"):
        if not (options.root / name).is_dir():
            raise UsageError(
                f"--root={options.root} has no folder {name}; give the folder above train and test"
            )
    for name in options.rivals:
        if name not in RIVALS:
            known = ", ".join(RIVALS)
            raise UsageError(f"--rivals={name}: there is no such setting; use some of {known}")
    if not has_torch(options.torch_python):
        raise UsageError(NO_TORCH.format(options.torch_python))
    if options.add and options.output is None:
        raise UsageError("--add needs --output, the folder of the JSON file to add to")


def measure(options: argparse.Namespace, facts: dict, *, num_gpus: int) -> int:
    """Runs all arms in turn, writes and prints the result after each run, and returns 0."""
    check(options)
    path = options.output and options.output / f"speed-T2-{facts['hardware']}.json"
    arms = arms_of(options)
    runs = kept_runs(path, arms) if options.add else {}
    for _ in range(options.repeats):
        for name, command in arms.items():
            with tempfile.TemporaryDirectory() as scratch:
                found = run_arm(name, command, pathlib.Path(scratch), num_gpus=num_gpus)
            runs.setdefault(name, []).append(found)
            print(f"{name}: {brief(found)}", flush=True)
            result = facts | result_of(recorded(arms), runs)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: result[name] for name in ("ratio", "ratio with compilation")}))
    return 0


def arms_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the command of each arm, by name; ours is first, and still lacks its --workdir."""
    ours = [sys.executable, "-m", "tfaccel", "train", "--config=configs/cifar10.py"]
    ours += [f"--config.data.root={options.root.absolute()}"]
    ours += [f"--config.train.epochs={options.epochs}", *options.ours]
    rival = [options.torch_python, "tools/bench_arms/torch_cifar.py"]
    rival += [f"--root={options.root.absolute()}", f"--epochs={options.epochs}"]
    rival += [f"--target={TARGET}"]
    return {"ours": ours} | {
        name: [*rival, *RIVALS[name], *options.rival] for name in options.rivals
    }


# A run.


def run_arm(name: str, command: list[str], scratch: pathlib.Path, *, num_gpus: int) -> dict:
    """Runs an arm in its own process, and returns the figures of the run.

    Args:
      name: the name of the arm.
      command: the command of the arm.
      scratch: an empty folder for compile caches and logs.
      num_gpus: the number of GPUs that the arm sees, 1 or 0.

    Raises:
      ArmError: the run failed.
    """
    is_ours, workdir, log = name == "ours", scratch / "run", scratch / "log.txt"
    command = [*command, f"--workdir={workdir}"] if is_ours else command
    caches = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    own = environment_of(num_gpus, python=command[0])
    environment = own | {each: str(scratch / each) for each in caches}
    with (
        open(log, "wb") as errors,
        open(scratch / "out.txt", "wb") as output,
        Child(command, stdout=output, stderr=errors, env=environment, cwd=TOOLS.parent) as child,
    ):
        child.wait()
    if child.exit_code() != 0:
        raise ArmError(f"arm '{name}' {how_it_ended(child.exit_code())}{said_last(log)}")
    return of_ours(workdir) if is_ours else of_rival((scratch / "out.txt").read_text())


def of_ours(workdir: pathlib.Path) -> dict:
    """Returns the figures of a run of `tfaccel train`, from its workdir."""
    with open(workdir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    ends = [float(each["seconds"]) for each in rows]
    accuracies = [float(each["val_accuracy"]) for each in rows]
    reached = next((i for i, each in enumerate(accuracies, 1) if each >= TARGET), None)
    result = json.loads((workdir / "result.json").read_text())
    return {
        "training_seconds": without_first(ends, len(ends)),
        "seconds_to_target": without_first(ends, reached),
        "training_seconds_with_compilation": ends[-1],
        "seconds_to_target_with_compilation": None if reached is None else ends[reached - 1],
        "epochs_to_target": reached,
        "test_accuracy": accuracies[-1],
        "test_accuracies": accuracies,
        "epoch_ends_s": ends,
        "result": {name: each for name, each in result.items() if name != "export"},
        "settings": json.loads((workdir / "config.json").read_text()),
        "environment": json.loads((workdir / "environment.json").read_text()),
    }


def without_first(ends: Sequence[float], epochs: int | None) -> float | None:
    """Returns the seconds of some epochs, as if the first one had not compiled.

    The first epoch counts as much as the mean of the others.

    Args:
      ends: seconds from the start to the end of each epoch of the run.
      epochs: the number of epochs to count; None if the target was not reached.

    Returns:
      Seconds; None if `epochs` is None, or if the run has only one epoch.
    """
    if epochs is None or len(ends) < 2:
        return None
    last = max(epochs, 2)
    return (ends[last - 1] - ends[0]) / (last - 1) * epochs


def of_rival(printed: str) -> dict:
    """Returns the figures of a run of torch_cifar.py, from its lines of JSON."""
    found = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    for name in ("training_seconds", "seconds_to_target"):
        seconds = found[name]
        found[f"{name}_with_compilation"] = seconds and seconds + found["compile_seconds"]
    return found


def brief(run: dict) -> str:
    """Returns the main figures of a run in one line."""
    names = ("test_accuracy", "training_seconds", "seconds_to_target")
    names += ("seconds_to_target_with_compilation",)
    return ", ".join(f"{name} {run[name]}" for name in names)


# The file.


def kept_runs(path: pathlib.Path, arms: dict[str, list[str]]) -> dict[str, list]:
    """Returns the runs in a JSON file; none if it does not exist.

    Raises:
      UsageError: the file is from other arms or other flags.
    """
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    known = before["arms"] | before["rivals"]
    if {name: each["command"] for name, each in known.items()} != recorded(arms):
        raise UsageError(
            f"--add: {path} has runs of other arms or flags; use the same ones, or another --output"
        )
    return {name: each["runs"] for name, each in known.items()}


def recorded(arms: dict[str, list[str]]) -> dict[str, list[str]]:
    """Returns the commands without the path of the interpreter."""
    return {name: ["python", *command[1:]] for name, command in arms.items()}


def result_of(arms: dict[str, list[str]], runs: dict[str, list[dict]]) -> dict:
    """Returns the ratios, and the runs of each arm.

    Args:
      arms: the commands by name.
      runs: the runs so far, by the name of the arm.
    """
    sides = {name: side_of(arms[name], each) for name, each in runs.items()}
    ours, rivals = sides.pop("ours"), sides
    ratios = {
        "ratio": ratio_of(ours, rivals, "seconds_to_target"),
        "ratio with compilation": ratio_of(ours, rivals, "seconds_to_target_with_compilation"),
        # The time of all epochs, whether or not they reached the target.
        "ratio of training": ratio_of(ours, rivals, "training_seconds"),
    }
    ratio = ratios["ratio"]
    return ratios | {
        "is_met": ratio is not None and ratio <= GOAL,
        "repeats": min(len(each) for each in runs.values()),
        "environment": ours["runs"][0]["environment"],
        "arms": {"ours": ours},
        "rivals": rivals,
    }


def side_of(command: list[str], runs: list[dict]) -> dict:
    """Returns an arm's runs and their medians; a median is None if a run has no such value."""
    medians = {}
    for name in ("training_seconds", "seconds_to_target", "test_accuracy"):
        for each in (name, f"{name}_with_compilation"):
            if each in runs[0]:
                values = [run[each] for run in runs]
                medians[each] = None if None in values else statistics.median(values)
    return {"command": command, "medians": medians, "runs": runs}


def ratio_of(ours: dict, rivals: dict[str, dict], name: str) -> float | None:
    """Returns our median divided by the best rival's; None if a side has no median."""
    known = [each["medians"][name] for each in rivals.values()]
    best = min((each for each in known if each is not None), default=None)
    own = ours["medians"][name]
    return None if own is None or best is None else own / best


if __name__ == "__main__":
    sys.exit(main())
