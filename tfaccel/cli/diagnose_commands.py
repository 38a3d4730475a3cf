"""The commands that examine data, model, speed and the machine. They keep no trained weights."""

import json
import pathlib
import shlex

from absl import flags
from ml_collections import config_flags

from tfaccel.cli.asked_experiment import parse_checked
from tfaccel.cli.command import OF_CONFIG, command
from tfaccel.cli.flags import folder_to_be, new_file, whole
from tfaccel.common import run_log
from tfaccel.common.checks import check_int
from tfaccel.common.errors import UserError
from tfaccel.common.flags import Flag
from tfaccel.common.local_path import local_path
from tfaccel.common.tables import show, show_json
from tfaccel.config import RuntimeConfig
from tfaccel.diagnostics.lint.script_text import read_text
from tfaccel.process import waits
from tfaccel.process.signals import exiting_on_sigterm
from tfaccel.process.start_noise import start_tensorflow


@command(
    summary="check all images, and check what the loader gives each replica",
    takes=OF_CONFIG,
    about="""
        Decodes every image once, in parallel, and lists those that cannot be used for training:
        missing, unreadable, empty, truncated, not an image, animated and more. A second audit
        decodes only files that have changed. The command then runs two dry epochs with the real
        loader and this machine's replicas. They show whether each image appears once, whether the
        order changes, and whether replicas draw different random numbers. Nothing is trained. The
        exit code is 1 if there is a bad file (unless bad_files=skip) or the loader is wrong.""",
    flags=(
        Flag(
            "report",
            None,
            "a new text file for the list of severity, kind, path and cause; by default a file in "
            "the cache folder",
            shown="FILE",
        ),
        Flag(
            "contact-sheet",
            None,
            "a new PNG with augmented training images and their labels",
            shown="FILE.png",
        ),
    ),
    examples=(
        "tfaccel audit --config=configs/digits.py",
        "tfaccel audit --config=configs/digits.py --contact-sheet=digits.png",
    ),
)
def audit(values: flags.FlagValues, _: str) -> int:
    """Audits the data of the config and returns 1 if something is wrong."""
    report, sheet = (new_file(name, values[name].value) for name in ("report", "contact-sheet"))
    if sheet and sheet.suffix.lower() != ".png":
        raise UserError(f"contact-sheet {sheet} would be a PNG; give a file that ends in .png")
    if sheet and sheet == report:
        raise UserError(f"report and contact-sheet are both {sheet}; give two files")
    config = parse_checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics.audit.run import run

    return 0 if run(config, report=report, sheet=sheet) else 1


@command(
    summary="check that this machine's replicas train like one device",
    about="""
        Trains small models on this machine's replicas, or on those of all ranks of `tfaccel
        launch`. Trains them on one device with plain Keras, too, and compares the two: loss,
        weights, clipping, accumulation, batch norm, a partial batch, a GAN of two optimizers, an
        averaged copy of the weights, a masked loss, attention, overflow on each replica, save and
        load, XLA. Prints a row for each check. The exit code is 1 if a check fails. This takes
        minutes, mostly for compilation.""",
    flags=(
        Flag(
            "gpu_ids",
            None,
            "GPUs to test, e.g. 0,1; empty for two CPU devices; default: all GPUs",
            shown="IDS",
        ),
        Flag("precision", ("float32", "mixed_float16", "mixed_bfloat16"), "Keras dtype policies"),
        Flag(
            "xla",
            "both",
            "steps with XLA (on), without XLA (off), or both",
            choices=("both", "on", "off"),
        ),
        Flag("output", None, "a new JSON file for the results", shown="FILE"),
    ),
    examples=("tfaccel selftest", "tfaccel selftest --precision=mixed_float16 --xla=on"),
)
def selftest(values: flags.FlagValues, _: list[str]) -> int:
    """Checks the replicas, prints a row for each check, and returns 1 if any failed."""
    config, precisions, output = checked_selftest(values)
    start_tensorflow()
    from tfaccel.diagnostics import selftest as selftest_room

    for each in precisions:
        if each not in selftest_room.SMALL:
            known = ", ".join(selftest_room.SMALL)
            raise UserError(f"precision={each!r} has no tolerances to test with; use {known}")
    xla = {"both": (False, True), "on": (True,), "off": (False,)}[values.xla]
    return selftest_room.report(config, precisions=precisions, xla=xla, output=output)


def checked_selftest(
    values: flags.FlagValues,
) -> tuple[RuntimeConfig, tuple[str, ...], pathlib.Path | None]:
    """Returns the devices, the precisions and the output of `tfaccel selftest`'s flags.

    Raises:
      UserError: a value is wrong.
    """
    config = RuntimeConfig(gpu_ids=values.gpu_ids)
    if not values.precision:
        raise UserError("--precision is empty; give at least one, e.g. --precision=float32")
    precisions = tuple(RuntimeConfig(precision=each).precision for each in values.precision)
    return config, precisions, new_file("output", values.output)


@command(
    summary="find the largest batch that fits in the GPUs' memory",
    takes=OF_CONFIG,
    about="""
        Finds the largest global batch size, a multiple of 8, that fits in the GPUs' memory. It
        trains a few steps at one size after another, each in a process of its own. DALI's memory
        is counted, and 5% stays free. Prints the size, and the flag to use, as JSON. Each size
        takes about as long as the start and the first steps of a run.""",
    flags=(
        Flag(
            "keep-batch",
            False,
            "keep the config's batch size, and find the cheapest setting with which it fits: "
            "accumulation_steps, remat, shard_states, or two of them. Prints the settings, the "
            "seconds of a step, and these as a multiple of the plain step's",
        ),
    ),
    examples=("tfaccel autobatch --config=configs/mnist.py \\\n  --config.data.root=/data/mnist",),
)
def autobatch(values: flags.FlagValues, _: str) -> int:
    """Prints the largest batch size that fits, or the cheapest way to keep one, as JSON."""
    config = parse_checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics import auto_batch

    if values["keep-batch"].value:
        saving = auto_batch.auto_saving(config)
        times = {} if saving.times is None else {"times_plain_step": round(saving.times, 3)}
        show_json(
            {"settings": saving.settings, "step_s": saving.step_s, **times, "flag": saving.flags}
        )
        return 0
    batch = auto_batch.auto_batch(config)
    flag = f"--config.data.global_batch_size={batch}"
    if config.data.batch_per_replica is not None:
        flag += " --config.data.batch_per_replica=None"
    show_json({"global_batch_size": batch, "flag": flag})
    return 0


@command(
    summary="show what half precision loses of the gradients, layer by layer",
    takes=OF_CONFIG,
    about="""
        Computes the gradients of the first training batch with the config's model, before its
        first step. If the model computes in half precision, a table shows for each layer the share
        of the gradients that become 0, at several loss scales. A second table shows the error when
        replicas sum their gradients in float16 or bfloat16 (--config.step.allreduce_dtype): the
        norm of the difference from the sum in float64, divided by the norm of that sum, and the
        share of the elements that become 0. Nothing is trained.

        In a script or notebook, use tfaccel.gradient_underflow(model, batch) and
        tfaccel.allreduce_error(model, batch, num_replicas=8).""",
    flags=(
        Flag(
            "replicas",
            None,
            "replicas that sum; each gets an equal part of the batch. By default those of this "
            "machine, but at least 2",
            shown="N",
            kind=int,
        ),
        Flag("json", False, 'print one JSON object, {"underflow", "allreduce"}'),
    ),
    examples=(
        "tfaccel underflow --config=configs/digits.py --replicas=8",
        "tfaccel underflow --config=configs/digits.py \\\n"
        "  --config.runtime.precision=mixed_bfloat16",
    ),
)
def underflow(values: flags.FlagValues, _: str) -> int:
    """Prints what half precision loses of the config's gradients."""
    if values.replicas is not None:
        check_int("replicas", values.replicas, at_least=2)
    config = parse_checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics import gradients

    found = gradients.reports(config, num_replicas=values.replicas)
    if values.json:
        show_json({name: report.as_dict() for name, report in found.items()})
    else:
        show("\n\n".join(map(str, found.values())))
    return 0


@command(
    summary="check the machine and what is installed on it",
    about="""
        Checks Python, TensorFlow, Keras, DALI and its plugin, the driver, CUDA libraries, GPUs, the
        processes that use their memory, links between GPUs, cores, memory, limits, disks, GPUDirect
        Storage and environment variables. Prints a line for each: ok, warning or error, with what
        was expected and how to fix it. The exit code is 1 if there is an error. TensorFlow and DALI
        start in a process of their own, so that a crash of theirs is a line of the table, too.""",
    flags=(
        Flag("quick", False, "check for a few seconds only, and do not start TensorFlow or DALI"),
        Flag(
            "json",
            False,
            "print one JSON object, "
            '{"checks": [{"name", "status", "found", "fix"}, ...], "errors", '
            '"warnings", "left_out"}',
        ),
        Flag(
            "data",
            None,
            "also measure how fast files in FOLDER are read: up to 256 MiB in 5 seconds",
            shown="FOLDER",
        ),
    ),
    examples=("tfaccel doctor", "tfaccel doctor --quick", "tfaccel doctor --data=/data/imagenet"),
)
def doctor(values: flags.FlagValues, _: list[str]) -> int:
    """Checks this machine, prints a line for each check, and returns 1 if one is an error."""
    if values.data == "":
        raise UserError("--data= is empty; give a folder, or remove the flag")
    from tfaccel.diagnostics import doctor as doctor_room

    run_log.show()
    with waits.on("examining this machine"):
        table = doctor_room.examine(quick=values.quick, data=values.data)
    show(table.as_json() if values.json else table)
    return table.exit_code


@command(
    summary="find mistakes in model, data and step, and what leaves Tensor Cores idle",
    takes=OF_CONFIG,
    about="""
        Builds the model and opens the data, but decodes and trains nothing. Finds mistakes, and
        settings that leave Tensor Cores idle or slow the input down: sizes that are not multiples
        of 8 (16 in int8), a short last batch, float16 outputs, NCHW, layers without an activation
        between them, inputs and outputs that do not match the data, layers outside the scope, no
        shuffling, no XLA, waits for Python, batch norm over few rows. Prints for each finding
        where, why, the expected gain as a part of the model's arithmetic, and the fix. The exit
        code is 1 if there is an error, and 0 if there are only warnings and notes.

        In a script or notebook, use tfaccel.lint(model, dataset) with any Keras model.""",
    flags=(
        Flag(
            "script",
            None,
            "also check this Python file, without running it: a loader passed to a model, waits "
            "for the device in a loop, code that Python cannot parse",
            shown="FILE",
        ),
        Flag(
            "fix",
            False,
            "pad a Dense head to whole tiles, and cut the padding off its output, so that outputs "
            "stay the same. Measure a step before and after on this machine. Print both times, and "
            "the flags that fix the other findings. Also measure activations that cost more than "
            "ReLU. No file is written",
        ),
        Flag(
            "json",
            False,
            "print one JSON object, "
            '{"about", "findings": [{"severity", "where", "what", "why", "gain", '
            '"fix", "change"}, ...], "errors", "warnings", "notes", "remarks"}, plus "fix" with '
            '--fix; "change" is a flag of `tfaccel train`, or null',
        ),
    ),
    examples=(
        "tfaccel lint --config=configs/mnist.py --config.data.root=/mnist",
        "tfaccel lint --config=configs/digits.py --fix",
    ),
)
def lint(values: flags.FlagValues, _: str) -> int:
    """Checks the model, data and step of the config, and returns 1 if there is an error."""
    if values.script == "":
        raise UserError("--script= is empty; give a Python file, or remove the flag")
    script = local_path(values.script) if values.script else None
    if script:
        read_text(script)  # an unreadable file raises at once
    config = parse_checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics.lint.run import run

    table = run(config, script=script)
    if values.json:
        fixed = {"fix": table.fix().as_dict()} if values.fix else {}
        show(json.dumps(table.as_dict() | fixed, indent=2))
        return table.exit_code
    show(table)
    if values.fix:
        with waits.on("compiling and timing steps, before and after"):
            fixed = table.fix()
        show(f"\n{fixed}")
        flags_of_rest = "".join(f"\n  {each}" for each in table.changes)
        if flags_of_rest:
            show(f"\nflags of `tfaccel train` for the rest (no file was written):{flags_of_rest}")
    return table.exit_code


@command(
    summary="measure whether step or loader limits a run, and search for better loader settings",
    takes=OF_CONFIG,
    about="""
        Measures three rates in images/s over all replicas: of the step alone, on one batch that
        stays on the device; of the loader alone; and of the run, which does both as `tfaccel train`
        does. Reports whether the step or the loader limits the run, by how much, what is lost
        between the two, and what to do. The trained weights are not kept. This takes about half a
        minute plus the time to compile the step.

        In a script or notebook, use tfaccel.profile(model, loader).""",
    flags=(
        Flag(
            "seconds",
            5.0,
            "seconds for each measurement; the first steps are not measured",
        ),
        Flag(
            "trace",
            None,
            "also write TensorFlow's profile of about ten steps, with each operation on the host "
            "and the devices. TensorBoard shows it if the package xprof is installed",
            shown="FOLDER",
        ),
        Flag(
            "search",
            False,
            "then try other loader settings: the loader (of dali_gpu, dali_cpu, tf_data, memory "
            "and cache, those that give the same pixels), threads, batches prepared ahead, and the "
            "hardware decoder's share. Settings are changed one at a time, each in a process of "
            "its own. A setting that seems faster is measured three times, in turn with the "
            "previous one. It is kept if its slowest measurement beats the other's fastest, or its "
            "first is 1.5 times as fast. At the end the best is measured against the start again",
        ),
        Flag(
            "minutes",
            None,
            "time limit of the search in minutes: a run that would end later is not started",
            shown="10",
            kind=float,
        ),
        Flag(
            "memory-mib",
            None,
            "reject settings that use more than N MiB of a GPU's memory, over all processes (on "
            "the CPU: of this machine's memory, by the run alone)",
            shown="N",
            kind=float,
        ),
        Flag(
            "out",
            None,
            "if the search finds better settings, write them to a new config file, which imports "
            "--config",
            shown="FILE.py",
        ),
        Flag(
            "json",
            False,
            "print one JSON object, "
            '{"setup", "images_per_second", "verdict", "memory_mib", "trace"}, '
            'plus "search" with --search',
        ),
    ),
    examples=(
        "tfaccel profile --config=configs/digits.py --trace=/tmp/trace",
        "tfaccel profile --config=configs/digits.py --search --out=tuned.py",
    ),
)
def profile(values: flags.FlagValues, file: str) -> int:
    """Measures what limits the run of the config, and searches for better settings if asked to."""
    from tfaccel.diagnostics.profile.options import Options

    options = Options(
        config_file=file,
        trace=values.trace,
        search=values.search,
        json=values.json,
        seconds=values.seconds,
        minutes=values.minutes,
        memory_mib=values["memory-mib"].value,
        out=new_file("out", values.out),
    )
    if options.trace:
        folder_to_be("trace", options.trace)
    config = parse_checked(values.config)
    start_tensorflow()
    from tfaccel.diagnostics.profile.command import report

    return report(config, options)


@command(
    summary="compare plain training with XLA, mixed precision, DALI and more GPUs, by speed",
    takes=OF_CONFIG,
    about="""
        Trains some steps of one job (data, batch, seed, recipe) in the plain way: tf.data, float32
        without TF32, no XLA, one GPU. Then it adds one thing at a time to the fastest way so far:
        XLA, TF32, mixed_float16, mixed_bfloat16, DALI, images in memory, more GPUs (which share the
        batch). Loaders are tried first if the plain way mostly waits for batches. Each way runs in
        a process of its own and is timed in turn with the fastest so far. It is kept if the middle
        half of its timings is faster and its losses agree with those of plain training. A way that
        was nearly as fast is tried once more if the fastest has changed since. A way that was less
        than half as fast at first is not timed again. At the end the fastest is measured against
        plain training once more. Pure float16 is shown as the upper limit and never chosen. A way
        that fails has a row with the reason.

        Prints the table, and the command that trains in the fastest way. The exit code is 1 if
        nothing ran, or if --minutes was too short for a second way; the message then says how many
        minutes are enough. After Ctrl-C or SIGTERM, --out has the report of what was measured.

        In a notebook, use tfaccel.compare(config, minutes=10) with what get_config() returns.""",
    flags=(
        Flag("steps", 50.0, "steps of one timing; a good number takes about a second or more"),
        Flag("repeats", 5.0, "timings of each way to train, at least 3"),
        Flag(
            "minutes",
            60.0,
            "time limit in minutes: a way to train that would end later is left out, and the "
            "report lists it. A better estimate of the time is printed after the plain way. On a "
            "GPU each way takes about a minute, half of it for compilation without any cache",
        ),
        Flag("grid", False, "measure every combination"),
        Flag(
            "out",
            None,
            "a new folder for report.html (one file with pictures), report.md, results.json, "
            "speed.png, losses.png and the output of each process",
            shown="FOLDER",
        ),
        Flag("json", False, "print results.json, not the table"),
    ),
    examples=("tfaccel compare --config=configs/digits.py --minutes=6 --out=report",),
)
def compare(values: flags.FlagValues, file: str) -> int:
    """Compares all ways to train the config on this machine, and returns 1 if none of them ran."""
    from tfaccel.diagnostics.compare import run

    config = parse_checked(values.config)
    overrides = config_flags.get_override_values(values["config"]).items()
    with exiting_on_sigterm():
        comparison = run.compare(
            config,
            steps=whole(values.steps),
            repeats=whole(values.repeats),
            minutes=values.minutes,
            grid=values.grid,
            out=values.out,
            command=shlex.join(
                ["tfaccel", "train", f"--config={file}"]
                + [f"--config.{name}={value}" for name, value in overrides]
            ),
            name=file,
        )
    show(json.dumps(comparison.as_dict(), indent=1) if values.json else comparison)
    if values.out and not values.json:
        show(f"\n{pathlib.Path(values.out) / 'report.html'}")
    return comparison.exit_code
