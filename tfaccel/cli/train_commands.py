"""The commands that train, launch, export, predict and plot."""

import dataclasses
import datetime
import os
import pathlib

from absl import flags

from tfaccel.cli.asked_experiment import look_at, look_at_run
from tfaccel.cli.command import OF_CONFIG, command, topic_of
from tfaccel.cli.flags import folder_to_be
from tfaccel.common.errors import UserError
from tfaccel.common.flags import Flag
from tfaccel.common.local_path import check_local, local_path
from tfaccel.common.tables import show, show_json
from tfaccel.config import (
    CHECKPOINTS,
    COMPUTES_IN,
    LOADERS,
    PIXEL_DTYPES,
    WEIGHTS,
    Config,
    ExportConfig,
    parse,
)
from tfaccel.launch import options
from tfaccel.launch.options import FLAGS
from tfaccel.process.start_noise import start_tensorflow
from tfaccel.runtime.cluster import Cluster, find
from tfaccel.runtime.cluster.addresses import FIRST_PORT, LAST_PORT
from tfaccel.runtime.cluster.ray import undo_legacy_keras
from tfaccel.training.workdir import RESUMES, check_usable, read_config, workdir_of, workdirs_in


@command(
    summary="train, measure and export what a config file says",
    takes=OF_CONFIG,
    about="""
        Trains, tests after every epoch, exports the model, and prints the result as one line of
        JSON. SIGTERM, SIGUSR1 and Ctrl-C let it save and stop, with exit code checkpoint.exit_code;
        a second one ends it at once.""",
    flags=(
        Flag(
            "workdir",
            None,
            "a folder for what the run leaves; runs/NAME-TIME by default. Where it holds a run "
            "that was stopped, the same command goes on from its newest checkpoint. Several "
            "workers need one that they share",
            shown="DIR",
        ),
        Flag(
            "resume",
            "auto",
            'go on from the newest checkpoint if there is one; "required" is an error if there is '
            'none, "never" is an error if there is a run',
            choices=RESUMES,
        ),
        Flag(
            "accept_changes",
            False,
            "go on from a checkpoint although the config or the data have changed since",
        ),
        Flag(
            "dry-run",
            False,
            "train two steps and print, in every process, which worker it is, its GPUs and "
            "replicas, and its share of a batch; write nothing",
        ),
        Flag(
            "workers",
            None,
            "the addresses of all workers, the chief's first. Without it TF_CONFIG says, or Slurm "
            "or Open MPI, which started this process, or it is one of its own",
            shown="HOST:PORT,...",
            kind=tuple,
        ),
        Flag(
            "worker-index",
            None,
            "which of them this process is, from 0, unless Slurm or Open MPI says",
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
    """Trains what the flags say and prints the result as one JSON line."""
    config, workdir = parse(values.config), values.workdir
    if values.resume == "required" and not workdir:
        raise UserError("--resume=required without --workdir; say which run to go on with")
    undo_legacy_keras(os.environ)
    dry, index = values["dry-run"].value, values["worker-index"].value
    cluster = find(os.environ, workers=values.workers, worker_index=index)
    if not workdir and not dry and cluster.num_workers > 1:
        raise UserError(
            f"no --workdir with {cluster.num_workers} workers ({cluster.source}); give all the "
            "same, which they share"
        )
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = pathlib.Path(file.partition(":")[0]).stem
    workdir = check_usable(pathlib.Path(workdir or f"runs/{name}-{time}"), resume=values.resume)
    if dry:
        look_at(config)
        return _train_dry(config, workdir, cluster)
    look_at_run(config, workdir)
    start_tensorflow()
    from tfaccel.experiment import train as train_room

    result = train_room.run(
        config,
        workdir=workdir,
        cluster=cluster,
        resume=values.resume,
        accept_changes=values.accept_changes,
    )
    if cluster.is_chief:  # the others would say the same
        show_json(result)
    return 0


def _train_dry(config: Config, workdir: pathlib.Path, cluster: Cluster) -> int:
    start_tensorflow()
    from tfaccel.experiment.dry_run import dry_run

    # In one piece: other workers may write to the same terminal.
    show(dry_run(config, workdir=workdir, cluster=cluster), end="")
    return 0


@command(
    summary="draw loss, metrics and throughput of one or more runs",
    takes="WORKDIR... [flags]",
    about="""
        Draws loss, metrics and images per second of one or more runs over their epochs, finished or
        not. Each run has a colour; test images are the full line, training the dashed one. The
        heading and the legend say in which settings the runs differ. A folder of workdirs stands
        for all runs in it.""",
    flags=(
        Flag(
            "output",
            "plot.png",
            "a new .png, or .html: one page with the picture and a table, that needs no other file",
        ),
    ),
    examples=(
        "tfaccel plot runs/digits-20261121-094702",
        "tfaccel plot runs/a runs/b --output=curves.html",
    ),
)
def plot(values: flags.FlagValues, given: list[str]) -> int:
    """Draws the runs whose workdirs are given, and prints the picture's path."""
    if not given:
        raise UserError("no workdir; name one or more, e.g. `tfaccel plot runs/a runs/b`")
    output = local_path(values.output)
    from tfaccel.diagnostics import plot as plot_room

    plot_room.plot([each for path in given for each in workdirs_in(path)], output)
    show(output)
    return 0


@command(
    summary="write a run's model for serving, and prove that it answers as the trained one does",
    takes="WORKDIR [flags]",
    about="""
        Writes a run's model as a SavedModel that needs neither tfaccel nor DALI, as the next
        version below --out. It takes pixels (serving_default) or JPEG and PNG files
        (predict_bytes), which it decodes, resizes and normalises as the run's evaluation does, and
        answers in float32. Then, in a process of its own, asks it about test images, and compares
        pixels, outputs and top-1 with the trained model behind the run's own loader: where they
        differ too much, it says in which step, and nothing is exported. tfaccel.json beside it has
        class names, preprocessing and these figures. Training exports in the same way, with these
        defaults.""",
    flags=(
        Flag(
            "workdir",
            None,
            "the folder of a run of `tfaccel train`, which may still be training",
            shown="DIR",
        ),
        Flag(
            "out",
            None,
            "a folder of versions, 1, 2, 3 and so on; DIR/export of the run by default",
            shown="DIR",
        ),
        Flag(
            "checkpoint",
            None,
            '"newest", or "best" by the run\'s monitor; by default what training itself exports: '
            "the newest or, of a run that may stop early, the best",
            shown="newest",
            choices=CHECKPOINTS,
        ),
        Flag(
            "weights",
            None,
            '"trained", or "average" if the run keeps one (ema_momentum), then the default',
            shown="trained",
            choices=WEIGHTS,
        ),
        Flag("samples", ExportConfig.samples, "test images to compare, spread over all of them"),
        Flag(
            "computes-in",
            ExportConfig.computes_in,
            'the precision that the run trained in, or "float32", which CPUs compute much faster '
            "than float16",
            choices=COMPUTES_IN,
        ),
        Flag(
            "pixel-dtype",
            ExportConfig.pixel_dtype,
            'type of the pixels, 0 to 255, that serving_default takes: "float32" or "uint8"',
            choices=PIXEL_DTYPES,
        ),
        Flag("xla", False, "compile the model where it is served, anew for each number of rows"),
        Flag(
            "onnx",
            False,
            "write model.onnx, too, from pixels to answers, in float32 (the extra `onnx`)",
        ),
        Flag(
            "root",
            None,
            "the folder of the data, if they are no longer where the run found them",
            shown="DIR",
        ),
        Flag(
            "loader",
            None,
            "the loader of the test images, if the run's own cannot be had here, as without a GPU; "
            "any of the config's data.loader",
            shown="dali_cpu",
            choices=LOADERS,
        ),
    ),
    examples=(
        "tfaccel export --workdir=runs/a",
        "tfaccel export --workdir=runs/a --computes-in=float32 --onnx",
        "tfaccel export runs/a --out=served/flowers",
    ),
)
def export(values: flags.FlagValues, given: list[str]) -> int:
    """Exports the run in the workdir that is named, and prints the folder of the export."""
    if given and (values.workdir or len(given) > 1):
        raise UserError(
            f"'{given[-1]}' is no flag of export, which takes one workdir: see `tfaccel export "
            "--help`"
        )
    given = given or [values.workdir]
    if not given[0]:
        raise UserError("no workdir; name the run, e.g. `tfaccel export --workdir=runs/a`")
    workdir = workdir_of(given[0])
    trained = read_config(workdir)
    averages = trained.train.ema_momentum is not None
    config = ExportConfig(
        samples=values.samples,
        pixel_dtype=values["pixel-dtype"].value,
        computes_in=values["computes-in"].value,
        weights=values.weights or ("average" if averages else "trained"),
        xla=values.xla,
        onnx=values.onnx,
    )
    if values.weights == "average" and not averages:
        raise UserError(
            f"--weights=average, but the run in {workdir} kept no average of its weights "
            "(train.ema_momentum); leave out --weights"
        )
    out = folder_to_be("out", values.out or str(workdir / "export"))
    if not any((workdir / "checkpoints").glob("step-*")):
        raise UserError(
            f"{workdir / 'checkpoints'} has no checkpoint; give the workdir of a run that has "
            "saved one"
        )
    from tfaccel.data.there import check_there  # it imports NumPy

    moved = {"root": values.root, "loader": values.loader}
    changes = {name: each for name, each in moved.items() if each}
    for split in ("train", "test"):
        check_there(dataclasses.replace(trained.data, **changes), split)
    start_tensorflow()
    from tfaccel.experiment.export_run import export_run

    show(export_run(workdir, out, config, checkpoint=values.checkpoint, **moved))
    return 0


@command(
    summary="name the classes of image files, by an export alone",
    takes="--model=DIR IMAGE|FOLDER... [flags]",
    about="""
        Prints the likeliest classes of each image file and their probabilities. Needs the export
        alone, and none of the run's data. A file that cannot be read or decoded is an error of its
        own; the others are answered, and the exit code is 1.

        A folder stands for all images in it and below it. In a file or a pipe each image has one
        line.""",
    flags=(
        Flag(
            "model",
            None,
            "a run's workdir, an export, or the folder of its versions, of which the last is taken",
            shown="DIR",
        ),
        Flag("top", 3, "how many classes for each file", at_least=1),
        Flag("json", False, "print a line of JSON for each file: path, error, classes"),
    ),
    examples=(
        "tfaccel predict --model=runs/a cat.jpg dog.png photographs/",
        "tfaccel predict --model=served/flowers/3 --json photographs/*.jpg",
    ),
)
def predict(values: flags.FlagValues, paths: list[str]) -> int:
    """Prints the classes of the image files that are named; returns 1 if one cannot be read."""
    if not values.model or not paths:
        missing = "files" if values.model else "model"
        raise UserError(f"no {missing}; e.g. `tfaccel predict --model=runs/a cat.jpg`")
    # All that can be known without TensorFlow, which takes seconds to start.
    for each in (values.model, *paths):
        check_local(each)
    from tfaccel.export.asked_images import find_export, image_files

    folder, paths = find_export(pathlib.Path(values.model)), image_files(paths)
    start_tensorflow()
    from tfaccel.export.predict import Predictor

    predictor, failed = Predictor(folder), False
    for each in predictor(paths):
        failed |= each.error is not None
        if values.json:
            show_json(each.as_dict(predictor.class_names, values.top))
        else:
            show(each.line(predictor.class_names, values.top))
    return int(failed)


PORTS = f"{FIRST_PORT} to {LAST_PORT}"
LAUNCH_WARNING = f"""  --help=all has all flags, the exit codes, and how to close the ports.

  WARNING: TensorFlow's ports between ranks, {PORTS}, have no password.
  Run several ranks on a private network alone, or close the ports to others.
"""
LAUNCH_MORE = f"""  SIGTERM, SIGUSR1, Ctrl-C and a lost terminal (SIGHUP, as SIGTERM) are passed
  on: the ranks save and stop, and the exit code is theirs, 143. A second one
  ends them at once. Exit codes else: 0 done, 2 a mistake in the call, 128 + n
  where signal n ended a rank, 1 where a rank or a machine fell silent.

  A script is watched by its calls of tfaccel: one that never calls
  `tfaccel.setup` and `fit` counts as one that never starts. A loop of your own
  calls `tfaccel.beat(step=...)` before each step.

  WARNING: TensorFlow's ports between ranks have no password, and on each
  machine they listen on all interfaces, of one machine's ranks too. Whoever
  reaches one can read and write files as you. Run several ranks on a private
  network alone, or close the ports, {PORTS}, to all but the job's
  machines, here 10.0.0.0/24:
    nft add table inet tfaccel
    nft add chain inet tfaccel in '{{ type filter hook input priority 0; }}'
    nft add rule inet tfaccel in iif lo accept
    nft add rule inet tfaccel in ip saddr 10.0.0.0/24 accept
    nft add rule inet tfaccel in tcp dport {FIRST_PORT}-{LAST_PORT} drop
  Ranks of one machine need no network at all: `unshare --net --map-root-user sh
  -c 'ip link set lo up; exec tfaccel launch ...'`. Who may join as a node is
  settled by a secret in TFACCEL_LAUNCH_TOKEN, the same on all machines.
"""


@command(
    summary="run many processes of one job, on one machine or several, and watch them",
    takes="[flags] train --config=FILE --workdir=DIR [flags of train]\n"
    "[flags] SCRIPT.py [arguments]",
    about="""
        Starts the ranks of one job, each a process that trains on its share of every batch, and
        watches them. Where one fails, never starts or makes no progress, all are ended, with the
        reason and the last lines of the one at fault; with --max-restarts they start again from the
        last checkpoint. On several machines, start it once on each, with the same flags but
        --node-rank; inside a step of Slurm with one task for each node, nodes and addresses are
        known.""",
    flags=FLAGS,
    examples=(
        "tfaccel launch --nproc-per-node=2 train \\\n  --config=configs/digits.py --workdir=runs/a",
    ),
    warning=LAUNCH_WARNING,
    more=LAUNCH_MORE,
    runs_command=True,
)
def launch(own: list[str], command_line: list[str]) -> int:
    """Runs a command in many processes and returns the job's exit code."""
    from tfaccel import launch as launch_room

    asked, argv = options.parse([*own, *command_line], os.environ)
    if asked.engine == "local" and argv[0] == "train" and topic_of(argv[1:]) is None:
        # Told once and now, not by each rank when TensorFlow has started.
        values, _ = train.parse(argv[1:])
        config = parse(values.config)
        if values["dry-run"].value:
            look_at(config)
        else:
            look_at_run(config, check_usable(pathlib.Path(values.workdir), resume=values.resume))
    return launch_room.launch(asked, argv)
