"""The commands that train, launch, export, predict and plot."""

import contextlib
import dataclasses
import datetime
import os
import pathlib
from collections.abc import Iterator

from absl import flags

from tfaccel.cli.asked_experiment import check_experiment, check_run
from tfaccel.cli.command import OF_CONFIG, command, topic_of
from tfaccel.cli.diagnose_commands import checked_selftest, selftest
from tfaccel.cli.flags import folder_to_be, new_file, one_workdir
from tfaccel.common.checks import check_number
from tfaccel.common.errors import UserError
from tfaccel.common.flags import Flag
from tfaccel.common.local_path import local_path
from tfaccel.common.run_log import summary
from tfaccel.common.tables import show, show_json
from tfaccel.config import (
    CHECKPOINTS,
    COMPUTES_IN,
    LITERT,
    LOADERS,
    PIXEL_DTYPES,
    WEIGHTS,
    ExportConfig,
    RuntimeConfig,
    parse,
)
from tfaccel.experiment.row_files import ENDINGS, form_of
from tfaccel.launch import options
from tfaccel.launch.options import FLAGS
from tfaccel.process.start_noise import start_tensorflow
from tfaccel.runtime.cluster import find
from tfaccel.runtime.cluster.addresses import FIRST_PORT, LAST_PORT
from tfaccel.runtime.cluster.ray import undo_legacy_keras
from tfaccel.training.trackers import check_installed
from tfaccel.training.workdir import RESUMES, check_usable, read_config, workdirs_in

# The loaders that read each file when its row is due, and keep no image.
FILE_LOADERS = tuple(each for each in LOADERS if each not in ("auto", "memory", "cache"))


@command(
    summary="train, test and export the experiment of a config file",
    takes=OF_CONFIG,
    about="""
        Trains, tests after every epoch, exports the model, and prints the result as one line of
        JSON. On SIGTERM, SIGUSR1 or Ctrl-C the run saves a checkpoint and stops with exit code
        checkpoint.exit_code. A second signal ends it at once.""",
    flags=(
        Flag(
            "workdir",
            None,
            "the folder of the run's files; default: runs/NAME-TIME. If the folder has a run that "
            "was stopped, the same command continues from its newest checkpoint. Several workers "
            "need one shared folder",
            shown="DIR",
        ),
        Flag(
            "resume",
            "auto",
            'continue from the newest checkpoint if there is one; "required": fail if there is '
            'none; "never": fail if there is a run',
            choices=RESUMES,
        ),
        Flag(
            "accept_changes",
            False,
            "continue from a checkpoint even if the config or the data have changed since",
        ),
        Flag(
            "dry-run",
            False,
            "train two steps; print for every process its worker index, GPUs, replicas and share "
            "of a batch, and for several replicas the scaling to expect; write nothing",
        ),
        Flag(
            "workers",
            None,
            "the addresses of all workers, the chief's first. By default they come from TF_CONFIG, "
            "Slurm or Open MPI; without those the process is the only worker",
            shown="HOST:PORT,...",
            kind=tuple,
        ),
        Flag(
            "worker-index",
            None,
            "the index of this process in --workers, from 0. Slurm and Open MPI set it themselves",
            shown="N",
            kind=int,
        ),
    ),
    examples=(
        "tfaccel train --config=configs/digits.py",
        "tfaccel train --config=configs/mnist.py --config.data.root=/mnist",
        "tfaccel train --config=configs/digits.py --config.train.epochs=3",
        "tfaccel train --config=configs/mnist.py --config.runtime.gpu_ids=0",
        "tfaccel train --config=configs/digits.py --workdir=runs/a",
        "tfaccel train --config=configs/digits.py --dry-run",
    ),
    shows_fields=True,
)
def train(values: flags.FlagValues, file: str) -> int:
    """Trains the experiment and prints the result as one JSON line."""
    config, workdir = parse(values.config), values.workdir
    check_installed(config.log.trackers or ())
    if values.resume == "required" and not workdir:
        raise UserError("--resume=required without --workdir; add the workdir of the run to resume")
    undo_legacy_keras(os.environ)
    dry, index = values["dry-run"].value, values["worker-index"].value
    cluster = find(os.environ, workers=values.workers, worker_index=index)
    if not workdir and not dry and cluster.num_workers > 1:
        raise UserError(
            f"no --workdir with {cluster.num_workers} workers ({cluster.source}); give every "
            "worker the same --workdir, on a file system that they share"
        )
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = pathlib.Path(file.partition(":")[0]).stem
    workdir = check_usable(pathlib.Path(workdir or f"runs/{name}-{time}"), resume=values.resume)
    if dry:
        check_experiment(config)
        start_tensorflow()
        from tfaccel.experiment.dry_run import dry_run

        # One write, because other workers may write to the same terminal.
        show(dry_run(config, workdir=workdir, cluster=cluster), end="")
        return 0
    check_run(config, workdir)
    start_tensorflow()
    from tfaccel.experiment import train as train_room

    result = train_room.run(
        config,
        workdir=workdir,
        cluster=cluster,
        resume=values.resume,
        accept_changes=values.accept_changes,
    )
    if cluster.is_chief:  # the result is the same on every worker
        show_json(result)
    return 0


@command(
    summary="draw loss, metrics and throughput of one or more runs",
    takes="WORKDIR... [flags]",
    about="""
        Draws loss, metrics and images per second over the epochs of one or more runs, finished or
        not. Each run has a colour. Full lines are test images, dashed lines are training images.
        The heading and the legend name the settings in which the runs differ. A folder of workdirs
        stands for all runs in it.""",
    flags=(
        Flag(
            "output",
            "plot.png",
            "a new .png, or a .html page with the picture and a table in one file",
        ),
    ),
    examples=(
        "tfaccel plot runs/digits-20261121-094702",
        "tfaccel plot runs/a runs/b --output=curves.html",
    ),
)
def plot(values: flags.FlagValues, given: list[str]) -> int:
    """Draws the runs of the workdirs and prints the picture's path."""
    if not given:
        raise UserError("no workdir; give one or more, e.g. `tfaccel plot runs/a runs/b`")
    output = local_path(values.output)
    from tfaccel.diagnostics import plot as plot_room

    plot_room.plot([each for path in given for each in workdirs_in(path)], output)
    show(output)
    return 0


@command(
    summary="export a run's model for serving, and check its answers against the trained model",
    takes="WORKDIR [flags]",
    about="""
        Writes a run's model as a SavedModel, as the next version in --out. It needs neither tfaccel
        nor DALI. It takes pixels (serving_default), or JPEG and PNG files (predict_bytes), which it
        decodes, resizes and normalises like the run's test images. Its answers are float32. The
        command then loads it in a process of its own and gives it test images. It compares pixels,
        outputs and top-1 with the trained model behind the run's own loader. If they differ too
        much, it reports at which stage, and exports nothing. tfaccel.json in the export has the
        class names, the preprocessing and these results. Training exports in the same way with the
        default flags.""",
    flags=(
        Flag(
            "workdir",
            None,
            "the workdir of a run of `tfaccel train`, which may still be training",
            shown="DIR",
        ),
        Flag(
            "out",
            None,
            "the folder for versions 1, 2, 3 and so on; default: export in the workdir",
            shown="DIR",
        ),
        Flag(
            "checkpoint",
            None,
            'checkpoint to export: "newest", or "best" according to train.monitor. Default: the '
            "newest, or the best if the run has early stopping",
            shown="newest",
            choices=CHECKPOINTS,
        ),
        Flag(
            "weights",
            None,
            '"trained", or "average" (the default if the run keeps one by ema_momentum)',
            shown="trained",
            choices=WEIGHTS,
        ),
        Flag("samples", ExportConfig.samples, "number of test images to compare"),
        Flag(
            "computes-in",
            ExportConfig.computes_in,
            '"policy" for the precision of the run, or "float32", which is much faster than '
            "float16 on CPUs",
            choices=COMPUTES_IN,
        ),
        Flag(
            "pixel-dtype",
            ExportConfig.pixel_dtype,
            'data type of the pixels that serving_default takes: "float32", or "uint8" or "uint16" '
            "for images of 8 or 16 bits",
            choices=PIXEL_DTYPES,
        ),
        Flag("xla", False, "compile with XLA where the model is served, once per batch size"),
        Flag(
            "onnx",
            False,
            "also write model.onnx, from pixels to answers, in float32 (needs the extra `onnx`)",
        ),
        Flag(
            "litert",
            None,
            "also write model.tflite for LiteRT, from pixels to answers: with weights of float32 "
            "or float16, or in integers of 8 bits that are calibrated on test images",
            choices=LITERT,
        ),
        Flag(
            "root",
            None,
            "the folder of the data, if it has moved since the run",
            shown="DIR",
        ),
        Flag(
            "loader",
            None,
            "the loader of the test images, if the run's own does not work here, for example "
            "without a GPU; any value of data.loader",
            shown="dali_cpu",
            choices=LOADERS,
        ),
    ),
    examples=(
        "tfaccel export --workdir=runs/a",
        "tfaccel export --workdir=runs/a --computes-in=float32 --onnx",
        "tfaccel export --workdir=runs/a --litert=int8",
        "tfaccel export runs/a --out=served/flowers",
    ),
)
def export(values: flags.FlagValues, given: list[str]) -> int:
    """Exports the run of the workdir and prints the folder of the export."""
    workdir = one_workdir("export", values, given)
    trained = read_config(workdir)
    averages = trained.train.ema_momentum is not None
    config = ExportConfig(
        samples=values.samples,
        pixel_dtype=values["pixel-dtype"].value,
        computes_in=values["computes-in"].value,
        weights=values.weights or ("average" if averages else "trained"),
        xla=values.xla,
        onnx=values.onnx,
        litert=values.litert,
    )
    if values.weights == "average" and not averages:
        raise UserError(
            f"--weights=average, but the run in {workdir} kept no average of its weights "
            "(train.ema_momentum); remove --weights"
        )
    out = folder_to_be("out", values.out or str(workdir / "export"))
    if not any((workdir / "checkpoints").glob("step-*")):
        raise UserError(
            f"{workdir / 'checkpoints'} has no checkpoint; give the workdir of a run that has "
            "saved one"
        )
    from tfaccel.data.there import check_there  # imports NumPy

    moved = {"root": values.root, "loader": values.loader}
    changes = {name: each for name, each in moved.items() if each}
    for split in ("train", "test"):
        check_there(dataclasses.replace(trained.data, **changes), split)
    start_tensorflow()
    from tfaccel.experiment.export_run import export_run

    show(export_run(workdir, out, config, checkpoint=values.checkpoint, **moved))
    return 0


@command(
    summary="predict classes, numbers, masks or images with an exported model",
    takes="--model=DIR IMAGE|FOLDER... [flags]",
    about="""
        Prints the most likely classes of each image file and their probabilities. If an image may
        have several classes, it prints all that are likely enough, and for a regression it prints
        the numbers. It needs only the export, not the run's data. A file that cannot be read or
        decoded has an error in its place; the other files are still read, and the exit code is 1.

        A folder stands for all images in it and its sub-folders. If the output is a file or a pipe,
        each image has one line.

        With --output, very many images are predicted fast, by a loader and on all GPUs, and written
        to a CSV or Parquet file with one row for each image. If an image may have several classes,
        a row has the probability of each class (probability_NAME), and for a regression each number
        (predicted_NAME). A call that was stopped continues if you repeat it.

        A network for masks, or one that restores images, needs --output=DIR. The new folder gets a
        PNG file for each image. The pixels of a mask are the numbers of the classes. This call
        continues likewise.""",
    flags=(
        Flag(
            "model",
            None,
            "a run's workdir, an export, or a folder of versions, where the newest is used",
            shown="DIR",
        ),
        Flag("top", 3, "number of classes to print for each file", at_least=1),
        Flag(
            "threshold",
            0.5,
            "for several classes an image, the least probability of a class that is printed",
        ),
        Flag("json", False, "print JSON for each file: path, error, classes or numbers"),
        Flag(
            "output",
            None,
            "a new .csv or .parquet file for the rows of very many images (Parquet needs the extra "
            "`parquet`); a new folder for masks or images",
            shown="FILE|DIR",
        ),
        Flag(
            "loader",
            None,
            "with --output: how to decode; by default DALI on the GPU, or on the CPU without one",
            shown="dali_cpu",
            choices=FILE_LOADERS,
        ),
        Flag("gpu-ids", None, "with --output: GPUs, e.g. 0,1; empty for the CPU", shown="IDS"),
        Flag(
            "global-batch-size",
            None,
            "with --output: images of a step over all GPUs; about 256 by default",
            shown="N",
            kind=int,
            at_least=1,
        ),
    ),
    examples=(
        "tfaccel predict --model=runs/a cat.jpg dog.png photographs/",
        "tfaccel predict --model=served/flowers/3 --json photographs/*.jpg",
        "tfaccel predict --model=runs/a --output=answers.csv photographs/",
        "tfaccel predict --model=runs/a --output=answers.parquet photographs/",
        "tfaccel predict --model=runs/street --output=masks photographs/",
    ),
)
def predict(values: flags.FlagValues, paths: list[str]) -> int:
    """Prints the answers for the image files, or writes them; returns 1 if a file is unreadable."""
    if not values.model or not paths:
        missing = "files" if values.model else "model"
        raise UserError(f"no {missing} given; e.g. `tfaccel predict --model=runs/a cat.jpg`")
    check_number("threshold", values.threshold, at_least=0, at_most=1)
    # Check as much as possible before TensorFlow starts, which takes seconds.
    for each in (values.model, *paths):
        local_path(each)  # or a UserError
    output = _output_of(values)
    from tfaccel.export.asked_images import find_export, image_files

    folder, paths = find_export(pathlib.Path(values.model)), image_files(paths)
    if output and not _is_of_rows(output):
        return _predict_pictures(values, folder, paths, output)
    if output:
        _check_choice_of_classes(values, folder)
        gpu_ids, batch = values["gpu-ids"].value, values["global-batch-size"].value
        gpu_ids = None if gpu_ids is None else RuntimeConfig(gpu_ids=gpu_ids).gpu_ids
        once = {}
        for each in paths:
            once.setdefault(os.path.abspath(each), each)  # a file that is given twice has one row
        paths = list(once.values())
        start_tensorflow()
        from tfaccel.experiment.predict_many import predict_many

        how = {"loader": values.loader, "gpu_ids": gpu_ids, "global_batch_size": batch}
        with _tells_how_to_continue():
            num_errors = predict_many(folder, paths, output, top=values.top, **how)
        show(output)
        return int(num_errors > 0)
    _check_prints_choice(values, folder)
    start_tensorflow()
    from tfaccel.export.predict import Predictor

    predictor, failed = Predictor(folder), False
    least = {"threshold": values.threshold} if predictor.task == "multilabel" else {}
    for each in predictor(paths):
        failed |= each.error is not None
        if values.json:
            show_json(each.as_dict(predictor.class_names, values.top, **least))
        else:
            show(each.line(predictor.class_names, values.top, **least))
    return int(failed)


def _predict_pictures(
    values: flags.FlagValues, folder: pathlib.Path, paths: list[str], output: pathlib.Path
) -> int:
    """Writes a mask or an image for each file; returns 1 if a file cannot be read."""
    from tfaccel.export import card
    from tfaccel.export.asked_images import picture_names

    facts = card.read(folder)
    if facts.get("class_names") or facts.get("answers") == "numbers":
        form_of(output)  # raises a UserError: rows go into no folder
    for name in ("threshold", "loader", "gpu-ids", "global-batch-size"):
        if values[name].present:
            raise UserError(
                f"--{name} with --output={output}, a folder of pictures; remove --{name}"
            )
    names = picture_names(paths)
    start_tensorflow()
    from tfaccel.export.predict import Export
    from tfaccel.export.predict_pictures import write_pictures

    failed = False
    with _tells_how_to_continue():
        for each in write_pictures(Export(folder), paths, names, output):
            failed |= each.error is not None
            show(each.line(values.top, facts.get("target_names") or ()))
    return int(failed)


@contextlib.contextmanager
def _tells_how_to_continue() -> Iterator[None]:
    """Says after Ctrl-C that the output so far is kept."""
    try:
        yield
    except KeyboardInterrupt:
        summary("predict: stopped; what is done is kept, and the same command continues")
        raise


def _is_of_rows(output: pathlib.Path) -> bool:
    return output.suffix.lower() in ENDINGS


def _output_of(values: flags.FlagValues) -> pathlib.Path | None:
    """Returns the new file for rows, or the new folder for pictures; None without one.

    Raises:
      UserError: it exists, Parquet cannot be written, or flags do not suit each other.
    """
    if values.output is None:
        for name in ("loader", "gpu-ids", "global-batch-size"):
            if values[name].value is not None:
                raise UserError(f"--{name} without --output; add --output=FILE.csv, or remove it")
        return None
    if values.json:
        raise UserError("--json and --output, which writes rows or pictures; remove --json")
    from tfaccel.export.picture_folder import is_begun

    output = local_path(values.output).absolute()
    if _is_of_rows(output) or not is_begun(output):  # a begun folder is continued
        expected = "a new file" if _is_of_rows(output) else "a new folder, or a new .csv file"
        output = new_file("output", values.output, expected=expected)
    if _is_of_rows(output):
        form_of(output)  # or a UserError
    return output


def _check_prints_choice(values: flags.FlagValues, folder: pathlib.Path) -> None:
    """Raises UserError for flags that would change nothing in the printed answers."""
    from tfaccel.export import card

    task = card.read(folder).get("task") or "classes"  # which older exports do not say
    if values["threshold"].present and task != "multilabel":
        raise UserError(
            f"--threshold={values.threshold}, but {folder} gives "
            f"{'numbers' if task == 'regression' else 'one class'} for an image, and --threshold "
            "chooses among several classes; remove --threshold"
        )
    if values["top"].present and task != "classes":
        what, use = "numbers, which are all printed", ""
        if task == "multilabel":
            what, use = "several classes, which --threshold chooses", ", or use --threshold"
        raise UserError(f"--top={values.top}, but {folder} gives {what}; remove --top{use}")


def _check_choice_of_classes(values: flags.FlagValues, folder: pathlib.Path) -> None:
    """Raises UserError for flags that choose classes, where each row has all of them."""
    if values["threshold"].present:
        raise UserError(
            f"--threshold={values.threshold} with --output, whose rows have probabilities and no "
            "choice by them; remove --threshold"
        )
    from tfaccel.export import card

    task = card.read(folder).get("task")
    if values["top"].present and task in ("multilabel", "regression"):
        raise UserError(
            f"--top={values.top}, but the rows of --output have a column for each "
            f"{'class' if task == 'multilabel' else 'number'} of this export; remove --top"
        )


PORTS = f"{FIRST_PORT} to {LAST_PORT}"
LAUNCH_WARNING = f"""  --help=all shows all flags, the exit codes, and how to close the ports.

  WARNING: TensorFlow's ports between ranks, {PORTS}, have no password.
  Run several ranks only on a private network, or close the ports to others.
"""
LAUNCH_MORE = f"""  SIGTERM, SIGUSR1, Ctrl-C and a lost terminal (SIGHUP, sent as SIGTERM) are
  passed on to the ranks. The ranks save and stop, and the exit code is theirs,
  143. A second signal ends them at once. Other exit codes: 0 done, 2 a mistake
  in the call, 128 + n if signal n ended a rank, 1 if a rank or a machine fell
  silent.

  A script is watched through its calls of tfaccel. A script that never calls
  `tfaccel.setup` and `fit` is treated as one that never starts. In a training
  loop of your own, call `tfaccel.beat(step=...)` before each step.

  WARNING: TensorFlow's ports between ranks have no password. They listen on all
  interfaces of each machine, even if all ranks run on one machine. Whoever
  reaches a port can read and write files as you. Run several ranks only on a
  private network, or close the ports, {PORTS}, to all machines outside
  the job. If the job's machines are 10.0.0.0/24:
    nft add table inet tfaccel
    nft add chain inet tfaccel in '{{ type filter hook input priority 0; }}'
    nft add rule inet tfaccel in iif lo accept
    nft add rule inet tfaccel in ip saddr 10.0.0.0/24 accept
    nft add rule inet tfaccel in tcp dport {FIRST_PORT}-{LAST_PORT} drop
  Ranks of one machine need no network: `unshare --net --map-root-user sh
  -c 'ip link set lo up; exec tfaccel launch ...'`. A secret in
  TFACCEL_LAUNCH_TOKEN, the same on all machines, decides who may join as a
  node.
"""


@command(
    summary="run and watch the processes of one job, on one or several machines",
    takes="[flags] train --config=FILE --workdir=DIR [flags of train]\n"
    "[flags] SCRIPT.py [arguments]\n"
    "[flags] selftest [flags of selftest]",
    about="""
        Starts the ranks of one job and watches them. A rank is a process that trains on its share
        of every batch. If a rank fails, never starts or makes no progress, all ranks are ended, and
        the reason and the last lines of the faulty rank are printed. With --max-restarts they start
        again from the last checkpoint. On several machines, start the command once on each, with
        the same flags except --node-rank. Inside a Slurm step with one task per node, nodes and
        addresses are known and need no flags.""",
    flags=FLAGS,
    examples=(
        "tfaccel launch --nproc-per-node=2 train \\\n  --config=configs/digits.py --workdir=runs/a",
        "tfaccel launch --nproc-per-node=2 selftest",
    ),
    warning=LAUNCH_WARNING,
    more=LAUNCH_MORE,
    runs_command=True,
)
def launch(own: list[str], command_line: list[str]) -> int:
    """Runs a command in several processes and returns the job's exit code."""
    from tfaccel import launch as launch_room

    asked, argv = options.parse([*own, *command_line], os.environ)
    if asked.engine != "local" or topic_of(argv[1:]) is not None:
        return launch_room.launch(asked, argv)
    # Mistakes are reported once here, not by each rank after TensorFlow's start.
    if argv[0] == "selftest":
        checked_selftest(selftest.parse(argv[1:])[0])
    elif argv[0] == "train":
        values, _ = train.parse(argv[1:])
        config, workdir = parse(values.config), values.workdir
        if workdir:  # a dry run needs none
            workdir = check_usable(pathlib.Path(workdir), resume=values.resume)
        if values["dry-run"].value:
            check_experiment(config)
        else:
            check_run(config, workdir)
    return launch_room.launch(asked, argv)
