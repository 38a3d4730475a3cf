"""Times arms of your choice beside each other, on one GPU, and prints a table.

tools/bench.py compares tfaccel with its rivals. This program compares versions of
tfaccel's code, or settings. Use it before a change lands:

    mkdir /tmp/old
    git archive OLD_COMMIT tfaccel | tar x -C /tmp/old
    python tools/bench_beside.py --network=resnet50 --network=vit_b16 \\
        --arm='old={"tree": "/tmp/old"}' --arm='new={}'
    python tools/bench_beside.py --network=bert --trace=out --torch-python=python3 \\
        --arm='ours={}' --arm='plain={"setup": {"flash_attention": false}}' \\
        --arm='torch={"program": "torch_networks.py"}'

Each arm trains each network, in a process of its own. Its JSON object has these settings:

    tree         the folder that has the package tfaccel; default: this checkout
    program      a program of tools/bench_arms: ours_networks.py (default) or torch_networks.py
    environment  an object with environment variables for the process
    only         a list of the networks that this arm trains; default: all
    others       settings of the program, which its first lines list

--precision holds for the arms of ours_networks.py. All arms are set up at the same time, which is
quicker than one after another. This can spoil XLA's autotuning; --one-by-one avoids that. Then the
arms train their stretches in turns. With --trace=FOLDER, each arm of tfaccel trains one more
stretch under TensorFlow's profiler. The folder then has a table of the kernels of each of these
arms, NETWORK.ARM.txt, by tools/kernel_table.py. The last line of standard output is JSON. Exit
codes: 0 done; 1 an arm failed; 2 a mistake in the call.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from bench_arms import networks
from bench_arms.arm_process import ArmError, ArmProcess
from bench_arms.call import UsageError, check_arm, exit_code, whole
from bench_arms.machine import TOOLS, environment_of, gpu_names, hardware

OURS = "ours_networks.py"
PROGRAMS = (OURS, "torch_networks.py")
OWN = {"tree", "program", "environment", "only"}  # settings of this program, not of an arm's
LIMIT_S = 560
TRACE_S = 30  # that a traced stretch and its table take


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and returns the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    return exit_code("bench_beside", lambda: measure(options))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--network", action="append", choices=networks.NETWORKS, required=True, help="repeat it")
    add("--arm", action="append", type=named, required=True, help="NAME={JSON}; repeat it")
    add("--precision", default="mixed_bfloat16", help="of tfaccel's arms; default: mixed_bfloat16")
    add("--repeats", type=whole(1), default=3, help="stretches of each arm")
    add("--trace", type=pathlib.Path, help="a folder for tables of kernels")
    add("--torch-python", default=sys.executable, help="the Python interpreter that has torch")
    add(
        "--time-limit", type=whole(1), help="seconds, after which stretches and traces are left out"
    )
    add("--one-by-one", action="store_true", help="set up one arm after another")
    add("--smoke", action="store_true", help="tiny networks, also on a CPU")
    return parser.parse_args(arguments)


def named(text: str) -> tuple[str, dict]:
    """Parses NAME={JSON}."""
    name, is_there, settings = text.partition("=")
    try:
        found = json.loads(settings)
    except json.JSONDecodeError:
        found = None
    if not is_there or not name or not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected NAME={{JSON object}}, such as new={{}}"
        )
    return name, found


def measure(options: argparse.Namespace) -> int:
    """Sets the arms up, trains their stretches in turns, and prints the table."""
    started = time.monotonic()
    names = [name for name, _ in options.arm]
    if len({*names}) < len(names):
        raise UsageError(f"--arm: two arms have one name; received {', '.join(names)}")
    for name, settings in options.arm:
        program = settings.get("program", OURS)
        if program not in PROGRAMS:
            expected = f"expected {' or '.join(PROGRAMS)}"
            raise UsageError(f"--arm: {name} has the program {program!r}; {expected}")
        check_arm(name, settings, program=program, others=OWN)
    if options.trace is not None:
        options.trace.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms, facts, stretches = {}, {}, {}
        for network in options.network:
            for name, settings in options.arm:
                if network not in settings.get("only", [network]):
                    continue
                key = (network, name)
                arms[key] = stack.enter_context(start(key, settings, options, scratch))
                if options.one_by_one:
                    facts[key] = arms[key].ready(limit_s=LIMIT_S)
        failed = wait_for(arms, facts)
        try:
            for _ in range(options.repeats):
                turn = time.monotonic()
                for key, arm in arms.items():
                    stretches.setdefault(key, []).append(arm.stretch(limit_s=LIMIT_S))
                if not has_time(options, started, seconds=time.monotonic() - turn):
                    break
        finally:  # so that an interruption loses nothing
            for network in options.network:
                for line in table(network, stretches):
                    print(line, flush=True)
        if options.trace is not None:
            for key, arm in arms.items():
                if "trace" in facts[key]["settings"] and has_time(options, started, TRACE_S):
                    write_kernels(".".join(key), arm, facts[key]["settings"]["trace"], options)
    result = {
        "failed": [".".join(key) for key in failed],
        "hardware": hardware(gpu_names(), num_used=1),
        "stretches": {".".join(key): each for key, each in stretches.items()},
        "arms": {".".join(key): each for key, each in facts.items()},
    }
    print(json.dumps(result))
    return 1 if failed else 0


def has_time(options: argparse.Namespace, started: float, seconds: float) -> bool:
    """Returns whether the time limit leaves so many seconds; says so if it does not."""
    if options.time_limit is None or time.monotonic() - started + seconds <= options.time_limit:
        return True
    print(f"--time-limit: {options.time_limit} s are over, and what is left is not run", flush=True)
    return False


def wait_for(arms: dict, facts: dict) -> list:
    """Waits until all arms are set up; takes out the arms that fail, and returns their keys."""
    failed = []
    for key, arm in [*arms.items()]:
        try:
            if key not in facts:
                facts[key] = arm.ready(limit_s=LIMIT_S)
        except ArmError as error:
            print(f"{'.'.join(key)}: {error}", flush=True)
            failed.append(key)
            del arms[key]
            continue
        seconds = facts[key]["seconds_to_first_step"]
        print(f"{'.'.join(key)}: {seconds:.0f} s to its first step", flush=True)
    return failed


def start(
    key: tuple[str, str], own: dict, options: argparse.Namespace, scratch: pathlib.Path
) -> ArmProcess:
    """Starts the process of an arm."""
    network, _ = key
    facts = networks.find(network, tiny=options.smoke)
    own = {"program": OURS, "tree": str(TOOLS.parent), "environment": {}} | own
    tree, program, added = (own.pop(each) for each in ("tree", "program", "environment"))
    own.pop("only", None)
    work = {
        "network": network,
        "tiny": options.smoke,
        "batch": facts.batch,
        "size": facts.size,
        "drop": networks.TINY_STEPS if options.smoke else networks.DROP,
        "steps": facts.steps,
    }
    if program == "torch_networks.py":
        python = options.torch_python
        settings = {"dtype": "bfloat16", "attention": "chosen", "mode": "default"}
        environment = environment_of(1, python=python)
    else:
        python = sys.executable
        settings = {
            "precision": options.precision,
            "xla": None,
            "epoch_steps": facts.epoch_steps,
            "steps_per_execution": "epoch",
        }
        environment = environment_of(1)
        environment["PYTHONPATH"] = f"{tree}:{environment['PYTHONPATH']}"
        if options.trace is not None:
            settings["trace"] = str(scratch / ".".join(key))
            settings["trace_after"] = options.repeats
    return ArmProcess(
        ".".join(key),
        [python, str(TOOLS / "bench_arms" / program)],
        work | settings | own,
        environment=environment | added,
    )


def table(network: str, stretches: dict) -> list[str]:
    """Returns a Markdown table of a network's arms."""
    names = [name for each, name in stretches if each == network]
    if not names:
        return []
    lines = [
        f"| {network} | ms of a step, each stretch | median | beside {names[0]} | peak MiB |",
        "|---|---|---|---|---|",
    ]
    first = None
    for name in names:
        found = stretches[network, name]
        times = [each["step_ms"] for each in found]
        middle = statistics.median(times)
        first = first or middle
        memory = max(each["peak_memory_mib"] or 0 for each in found)
        each = ", ".join(f"{time:.2f}" for time in times)
        lines.append(f"| {name} | {each} | {middle:.2f} | {middle / first:.4f} | {memory:,.0f} |")
    return lines


def write_kernels(name: str, arm: ArmProcess, profile: str, options: argparse.Namespace) -> None:
    """Trains one more stretch, which is profiled, and writes the table of its kernels."""
    steps = arm.stretch(limit_s=LIMIT_S)["timed_steps"]
    command = [sys.executable, str(TOOLS / "kernel_table.py"), profile, f"--steps={steps}"]
    with open(options.trace / f"{name}.txt", "w") as output:
        subprocess.run([*command, "--kernels=60"], stdout=output, check=False)


if __name__ == "__main__":
    sys.exit(main())
