"""Finds the largest batch that a network trains with on one GPU, in several ways, and its speed.

    python tools/bench_memory.py --network=vit_l16 --arm='plain={}' \\
        --arm='blocks={"step": {"remat": "blocks"}}' --output=tools/results --time-limit=580

Each arm trains the network (a key of bench_arms/networks.py) at two small batches, and the peaks of
its memory give a line: what each row takes, and what the batch does not change. The largest batch
on this line comes next. If it does not fit, the batch gets smaller by 4%, up to four times. So the
result is a batch that did train, and at most 4% below one that did not, or as large as the line
allows. Batches are multiples of 8.

An arm's JSON object has settings of bench_arms/ours_networks.py. Its own setting "guess" is a batch
that takes the place of the two small ones, each of which is a start with its compilation. If the
guess fits at once, a larger batch may fit, too.

The rows of a step lie on the GPU, and two steps' rows count as memory. A line says what each batch
gave. The table has the largest batches, how they compare with the first arm's, and rows/s at that
batch. --output gets memory-NETWORK-HARDWARE.json. Exit codes: 0
done; 1 an arm failed, or the time limit was reached; 2 a mistake in the call.
"""

import argparse
import datetime
import functools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from bench_arms import networks
from bench_arms.arm_process import ArmError, ArmProcess
from bench_arms.call import UsageError, check_arm, exit_code, whole
from bench_arms.machine import TOOLS, environment_of, gpu_names, hardware
from bench_arms.time_limit import TimeLimit
from bench_beside import named

PROGRAM = "ours_networks.py"
LIMIT_S = 560  # for each answer of an arm
MULTIPLE = 8
SHARE = 0.95  # of the GPU's memory that the line may fill; TensorFlow's pool is a little smaller
SMALLER = 0.96
MOST_TRIES = 5
STEPS = 4  # timed ones; a large batch takes seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    return exit_code("bench_memory", lambda: measure(options, given))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--network", choices=networks.NETWORKS, required=True)
    add("--arm", action="append", type=named, required=True, help="NAME={JSON}; repeat it")
    add("--precision", default="mixed_bfloat16", help="default: mixed_bfloat16")
    add(
        "--start",
        type=whole(MULTIPLE),
        default=64,
        help="the first batch; the second is its double",
    )
    add("--repeats", type=whole(1), default=3, help="stretches at the largest batch")
    add("--output", type=pathlib.Path, help="a folder for the JSON file; default: write none")
    add("--time-limit", type=whole(1), help="seconds, after which the program ends")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Finds each arm's largest batch; prints the table and writes the file."""
    limit = TimeLimit(LIMIT_S, ends=time.monotonic() + (options.time_limit or math.inf))
    for name, settings in options.arm:
        check_arm(name, settings, program=PROGRAM, others={"guess"})
        guess = settings.get("guess", MULTIPLE)
        if type(guess) is not int or guess < MULTIPLE:
            expected = f"expected a number of rows of at least {MULTIPLE}"
            raise UsageError(f"--arm: {name} has the guess {guess!r}; {expected}")
    gpus = gpu_names()
    if not gpus:
        raise UsageError("this machine has no GPU whose memory could be measured")
    found, failed = {}, False
    for name, settings in options.arm:
        try:
            others = {key: value for key, value in settings.items() if key != "guess"}
            train = functools.partial(trained, settings=others, options=options, limit=limit)
            print(f"{name}:", flush=True)
            found[name] = largest(train, options, limit, guess=settings.get("guess"))
        except (ArmError, TimeoutError) as error:
            print(f"{name}: {error}", flush=True)
            failed = True
    for line in table(found):
        print(line, flush=True)
    if options.output is not None:
        used = hardware(gpus, num_used=1)
        result = {
            "network": options.network,
            "precision": options.precision,
            "hardware": used,
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python tools/bench_memory.py", *arguments]),
            "arms": found,
        }
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"memory-{options.network}-{used}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


def trained(
    batch: int,
    *,
    settings: dict,
    options: argparse.Namespace,
    limit: TimeLimit,
    repeats: int = 1,
) -> dict:
    """Trains stretches at a batch; returns the settings, the peak in MiB and rows/s.

    Raises:
      ArmError: it failed, for example because the memory is full.
    """
    network = networks.find(options.network, tiny=False)
    work = {
        "network": options.network,
        "tiny": False,
        "batch": batch,
        "size": network.size,
        "drop": 2,
        "steps": STEPS,
        "epoch_steps": 2,
        "steps_per_execution": "epoch",
        "precision": options.precision,
        "xla": None,
    }
    command = [sys.executable, str(TOOLS / "bench_arms" / PROGRAM)]
    with ArmProcess(
        f"{batch} rows", command, work | settings, environment=environment_of(1)
    ) as arm:
        facts = arm.ready(limit_s=max(1, limit.left()))
        stretches = [arm.stretch(limit_s=max(1, limit.left())) for _ in range(repeats)]
    peak = max(each["peak_memory_mib"] for each in stretches)
    rates = [each["rows_per_second"] for each in stretches]
    print(
        f"  {batch:,} rows: {peak:,.0f} MiB at the peak, {statistics.median(rates):,.0f} rows/s, "
        f"first step after {facts['seconds_to_first_step']:.0f} s",
        flush=True,
    )
    return {
        "batch": batch,
        "peak_memory_mib": peak,
        "rows_per_second": rates,
        "seconds_to_first_step": facts["seconds_to_first_step"],
        "settings": facts["settings"],
        "environment": facts["environment"],
    }


def largest(
    train: Callable[[int], dict],
    options: argparse.Namespace,
    limit: TimeLimit,
    *,
    guess: int | None = None,
) -> dict:
    """Returns what `train` gave for the largest batch, with the batches that were tried.

    Raises:
      ArmError: a small batch, or every batch on the line, did not train.
      TimeoutError: the time limit was reached before a batch on the line had trained.
    """
    tried, batch = [], guess
    if batch is None:
        tried = [train(options.start), train(2 * options.start)]
        memory_mib = tried[0]["environment"]["gpus"][0]["memory_mib"]
        batch = on_line(tried, limit_mib=SHARE * memory_mib)
    refused = []
    for _ in range(MOST_TRIES):
        if not limit.allows(0):
            raise TimeoutError(f"--time-limit is over; batches of {batch} rows were not tried")
        try:
            best = train(batch, repeats=options.repeats)
        except ArmError as error:
            if len(refused) == MOST_TRIES - 1 or not is_out_of_memory(str(error)):
                raise
            print(f"  {batch:,} rows: out of memory", flush=True)
            refused.append(batch)
            batch = int(SMALLER * batch) // MULTIPLE * MULTIPLE
        else:
            break
    return best | {
        "refused": refused,
        "line": [{key: each[key] for key in ("batch", "peak_memory_mib")} for each in tried],
    }


def is_out_of_memory(message: str) -> bool:
    """Returns whether an arm ended because the GPU's memory is full."""
    words = ("out of memory", "OOM", "RESOURCE_EXHAUSTED", "ResourceExhausted")
    return any(each in message for each in words)


def on_line(tried: Sequence[dict], *, limit_mib: float) -> int:
    """Returns the largest batch whose memory is below a limit, by the line through two peaks."""
    (few, low), (many, high) = ((each["batch"], each["peak_memory_mib"]) for each in tried)
    each_row = (high - low) / (many - few)
    if each_row <= 0:
        raise ArmError(f"{many} rows took no more memory than {few}; use a larger --start")
    batch = int((limit_mib - low) / each_row + few)
    return max(batch // MULTIPLE * MULTIPLE, MULTIPLE)


def table(found: dict) -> list[str]:
    """Returns a Markdown table of the arms."""
    lines = [
        "| way | largest batch | beside the first | MiB at the peak | rows/s | beside the first |",
        "|---|---|---|---|---|---|",
    ]
    first = None
    for name, each in found.items():
        rate = statistics.median(each["rows_per_second"])
        first = first or (each["batch"], rate)
        lines.append(
            f"| {name} | {each['batch']:,} | {each['batch'] / first[0]:.2f} | "
            f"{each['peak_memory_mib']:,.0f} | {rate:,.0f} | {rate / first[1]:.2f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
