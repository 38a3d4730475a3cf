"""Trains the programs of tests/programs on stock Keras and here, and writes how far they differ.

    python tools/train_programs.py
    python tools/train_programs.py "DCGAN" "mean teacher" --replicas 1,2

Stock Keras trains each program on one device without XLA. tfaccel trains it on each number of
`--replicas`, without XLA and with it. Replicas are the machine's GPUs if it has enough of them, and
else CPU devices. A GPU computes without TensorFloat-32, so that float32 is compared as float32.

A new process trains each `--group` of programs, so that memory stays small. If it ends or takes
more than `--timeout_s` seconds for one training, that training has failed, and another process goes
on with the next program.

The table is written after every training. With names, only their rows are written anew: all other
rows of the file stay. A cell is:
  same            all logs and variables are equal within the tolerance
  a number        the largest relative difference
  an error        the name of the exception: "refused" for a UserError
  the process ends

Exit codes: 0 all cells are the same; 1 some are not; 2 a mistake in the call.
"""

import argparse
import datetime
import itertools
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading

from tfaccel.process.signals import exiting_on_sigterm

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))  # for `programs`
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
SAME, REFUSED, ENDS = "same", "refused", "the process ends"
STOCK = "stock Keras"


def main(arguments: list[str] | None = None) -> int:
    """Trains the programs, writes the table, and returns the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.child:
        child(options.names, options.replicas)
        return 0
    described = next(run(["--child", "--replicas", text(options.replicas)], timeout_s=120))
    programs = described["programs"]
    unknown = [name for name in options.names if name not in programs]
    if unknown:
        print(f"no program {unknown[0]!r}; there are: {', '.join(programs)}", file=sys.stderr)
        return 2
    output = options.output or ROOT / "tools" / "results" / f"programs-{described['name']}.md"
    columns = columns_of(options.replicas)
    kept = rows_in(output, columns) if options.names else {}
    is_same = True
    with exiting_on_sigterm():
        for name, cells in trained(options.names or list(programs), options, columns):
            kept[name] = row(programs[name], cells, columns)
            is_same = is_same and all(each == SAME for each, _ in cells.values())
            rows = [kept[each] for each in programs if each in kept]
            output.write_text(table(rows, columns, described["where"]))
            if len(cells) == 1 + len(columns):
                print(kept[name], flush=True)
    return 0 if is_same else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of programs; all if there are none")
    parser.add_argument("--replicas", type=counts, default=(1, 2, 3), help="such as 1,2,4")
    parser.add_argument("--group", type=int, default=8, help="programs of a process")
    parser.add_argument("--timeout_s", type=int, default=300, help="of one training")
    parser.add_argument("--output", type=pathlib.Path, help="a file in tools/results if left out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def counts(text: str) -> tuple[int, ...]:
    """Returns the numbers of replicas in "1,2,3"."""
    return tuple(int(each) for each in text.split(","))


def text(replicas: tuple[int, ...]) -> str:
    """Returns the numbers of replicas as the option has them."""
    return ",".join(map(str, replicas))


# The table.


def columns_of(replicas: tuple[int, ...]) -> list[str]:
    """Returns the names of the columns of trainings here."""
    return [f"{each}{with_xla}" for with_xla in ("", ", XLA") for each in replicas]


def head(columns: list[str]) -> str:
    """Returns the table's first line."""
    return f"| program | source | {STOCK} | {' | '.join(columns)} | difference | tolerance |"


def table(rows: list[str], columns: list[str], where: str) -> str:
    """Returns the file's text."""
    title = (
        f"`python tools/train_programs.py` ({where}). Columns with a number have the number of "
        "replicas. The difference is the largest relative one of a log or variable in the row."
    )
    line = "|---" * (5 + len(columns)) + "|"
    return "\n".join([title, "", head(columns), line, *rows, ""])


def row(program: dict, cells: dict[str, tuple[str, float]], columns: list[str]) -> str:
    """Returns a program's line, with empty cells for what is not trained yet."""
    figures = [figure for _, figure in cells.values() if figure is not None]
    largest = f"{max(figures):.1g}" if figures else ""
    stock = cells.get(STOCK, ("",))[0]
    if program["stock_fails"]:
        stock = f"by hand: {program['stock_fails']}"
    found = [cells.get(each, ("",))[0] for each in columns]
    first = [program["name"], program["source"], {SAME: "trains"}.get(stock, stock)]
    return f"| {' | '.join([*first, *found, largest, format(program['rtol'], '.0e')])} |"


def rows_in(output: pathlib.Path, columns: list[str]) -> dict[str, str]:
    """Returns the lines of a table by program; none if it has other columns or does not exist."""
    lines = output.read_text().splitlines() if output.exists() else []
    if head(columns) not in lines:
        return {}
    return {line.split(" | ")[0][2:]: line for line in lines[lines.index(head(columns)) + 2 :]}


# The parent's part: processes, and what they print.


def trained(names: list[str], options, columns: list[str]):
    """Yields (name, its cells so far) after each training.

    A cell is its text and its figure, which is None where nothing was compared.
    """
    for start in range(0, len(names), options.group):
        left = names[start : start + options.group]
        while left:
            cells = {}
            command = ["--child", "--replicas", text(options.replicas), *left]
            for result in run(command, timeout_s=options.timeout_s):
                if result.get("program") != left[0]:
                    continue
                cells[result["column"]] = result["cell"], result["figure"]
                yield left[0], cells
                if len(cells) == 1 + len(columns):
                    left, cells = left[1:], {}
                if not left:
                    break
            if left:  # the process ended in this program's next training
                missing = [each for each in (STOCK, *columns) if each not in cells]
                yield left[0], cells | dict.fromkeys(missing, (ENDS, None))
                left = left[1:]


def run(arguments: list[str], *, timeout_s: int):
    """Yields what a child prints, until it ends or prints nothing for so long."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = queue.SimpleQueue()

        def read():
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            while (line := lines.get(timeout=timeout_s)) is not None:
                if line.startswith("{"):
                    yield json.loads(line)
        except queue.Empty:
            print(f"nothing for {timeout_s} s", file=sys.stderr)
        finally:
            process.kill()


# The child's part: it trains, and prints a line of JSON for each training.


def child(names: list[str], replicas: tuple[int, ...]) -> None:
    """Trains the programs in turn; without names it prints which there are, and the machine."""
    devices = start(max(replicas))
    import keras
    from programs import harness

    if not names:
        programs = {
            each.name: {key: getattr(each, key) for key in ("name", "source", "rtol")}
            | {"stock_fails": each.stock_fails}
            for each in harness.PROGRAMS.values()
        }
        name, where = machine(devices)
        print(json.dumps({"programs": programs, "name": name, "where": where}), flush=True)
        return
    strategies = {each: strategy_of(devices[:each]) for each in replicas}
    for name in names:
        program = harness.PROGRAMS[name]
        wanted = said(program, STOCK, lambda each=program: harness.by_stock_keras(each), None)
        for xla, each in itertools.product((False, True), replicas):
            column = f"{each}, XLA" if xla else str(each)
            train = lambda: harness.here(program, strategies[each], xla=xla)  # noqa: B023, E731
            said(program, column, train, wanted)
        keras.utils.clear_session()


def said(program, column: str, train, wanted):
    """Trains, prints the cell, and returns what was trained; None if it failed.

    What the program does wrong may raise anything.
    """
    from programs import harness

    from tfaccel.common.errors import UserError

    got, figure = None, None
    try:
        got = train()
        if column == STOCK:
            cell = SAME
        elif wanted is None:
            cell = "no reference"
        else:
            figure, where = harness.difference(got, wanted)
            cell = SAME if figure <= program.rtol else f"{figure:.1g}"
            if cell != SAME:
                print(f"{program.name}, {column}: {figure:.1g} in {where}", file=sys.stderr)
    except UserError as error:
        cell = REFUSED
        print(f"{program.name}, {column}: {error}", file=sys.stderr)
    except Exception as error:
        cell = type(error).__name__
        print(f"{program.name}, {column}: {cell}: {str(error)[:300]}", file=sys.stderr)
    result = {"program": program.name, "column": column, "cell": cell, "figure": figure}
    print(json.dumps(result), flush=True)
    return got


def start(num_replicas: int) -> tuple[str, ...]:
    """Starts so many devices: GPUs if there are enough, and else CPU devices."""
    from tfaccel.runtime.devices import load_cuda_libraries

    load_cuda_libraries()
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if len(gpus) >= num_replicas:
        return tuple(f"/gpu:{index}" for index in range(num_replicas))
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    several = [tf.config.LogicalDeviceConfiguration()] * num_replicas
    tf.config.set_logical_device_configuration(cpu, several)
    return tuple(f"/cpu:{index}" for index in range(num_replicas))


def strategy_of(devices: tuple[str, ...]):
    """Returns a strategy whose collectives are apart from those of other numbers of replicas."""
    import tensorflow as tf

    class Strategy(tf.distribute.MirroredStrategy):
        _collective_key_base = 1000 * len(devices)

    return Strategy(list(devices))


def machine(devices: tuple[str, ...]) -> tuple[str, str]:
    """Returns the machine for a file's name, and in words with versions and the date."""
    from tfaccel.runtime.devices import describe_environment

    found = describe_environment()
    versions = ", ".join(f"{each} {found['packages'][each]}" for each in ("tensorflow", "keras"))
    when = datetime.date.today().isoformat()
    if "gpu" in devices[0]:
        gpu = found["gpus"][0]["name"].removeprefix("NVIDIA ")
        return (
            f"{len(devices)}x{gpu.replace(' ', '-')}",
            f"{len(devices)} {gpu}, {versions}, {when}",
        )
    cores = found["cpu_cores"]
    return f"{cores}-cores", f"{cores} CPU cores, {versions}, {when}"


if __name__ == "__main__":
    sys.exit(main())
