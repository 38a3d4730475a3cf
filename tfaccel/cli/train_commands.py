"""The commands that train, launch, export, predict and plot."""

import dataclasses
import datetime
import os
import pathlib

from absl import flags
from ml_collections import config_flags

from tfaccel.cli import help as help_texts
from tfaccel.cli.asked_experiment import look_at, look_at_run
from tfaccel.cli.flags import (
    before_command,
    config_apart,
    folder_to_be,
    is_help,
    parse_config_flags,
    parse_own_flags,
)
from tfaccel.cli.flags import topic as topic_of
from tfaccel.common.errors import UserError
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
    default_config,
    parse,
)
from tfaccel.process.start_noise import start_tensorflow
from tfaccel.runtime.cluster import Cluster, find
from tfaccel.runtime.cluster.ray import undo_legacy_keras
from tfaccel.training.workdir import (
    check_usable,
    read_config,
    workdir_of,
    workdirs_in,
)


def train(arguments: list[str]) -> int:
    """Trains what the flags say and prints the result as one JSON line."""
    if (topic := topic_of(arguments)) is not None:
        show(_train_help([each for each in arguments if not is_help(each)], topic), end="")
        return 0
    values, file = parse_config_flags("train", arguments, paths=("workdir",), trains=True)
    config, workdir = parse(values.config), values.workdir
    if values.resume == "required" and not workdir:
        raise UserError("--resume=required without --workdir; say which run to go on with")
    undo_legacy_keras(os.environ)
    dry, index = values["dry-run"].value, values["worker-index"].value
    cluster = find(os.environ, workers=values.workers, worker_index=index)
    if not workdir and cluster.num_workers > 1:
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


def plot(arguments: list[str]) -> int:
    """Draws the runs whose workdirs are given, and prints the picture's path."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow the workdirs
    flags.DEFINE_string("output", "plot.png", "A new PNG or HTML file.", flag_values=values)
    given = parse_own_flags("plot", values, arguments, takes_paths=True)
    if not given:
        raise UserError("no workdir; name one or more, e.g. `tfaccel plot runs/a runs/b`")
    output = local_path(values.output)
    from tfaccel.diagnostics import plot as plot_room

    plot_room.plot([each for path in given for each in workdirs_in(path)], output)
    show(output)
    return 0


def export(arguments: list[str]) -> int:
    """Exports the run in the workdir that is named, and prints the folder of the export."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "Of the run.", flag_values=values)
    flags.DEFINE_string("out", None, "A folder of versions.", flag_values=values)
    flags.DEFINE_string("root", None, "Of the data.", flag_values=values)
    flags.DEFINE_enum("loader", None, LOADERS, "Of test images.", flag_values=values)
    flags.DEFINE_enum("checkpoint", None, CHECKPOINTS, "Which.", flag_values=values)
    flags.DEFINE_enum("weights", None, WEIGHTS, "Which.", flag_values=values)
    flags.DEFINE_enum("pixel-dtype", "float32", PIXEL_DTYPES, "Of pixels.", flag_values=values)
    flags.DEFINE_enum("computes-in", "policy", COMPUTES_IN, "Precision.", flag_values=values)
    flags.DEFINE_integer("samples", 256, "Images to compare.", flag_values=values)
    for switch in ("xla", "onnx"):
        flags.DEFINE_bool(switch, False, "Off by default.", flag_values=values)
    values.set_gnu_getopt(True)  # flags may follow the workdir
    given = parse_own_flags("export", values, arguments, takes_paths=True)
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


def predict(arguments: list[str]) -> int:
    """Prints the classes of the image files that are named; returns 1 if one cannot be read."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow the files
    flags.DEFINE_string("model", None, "An export.", flag_values=values)
    flags.DEFINE_integer("top", 3, "Classes for each.", lower_bound=1, flag_values=values)
    flags.DEFINE_bool("json", False, "A line of JSON for each.", flag_values=values)
    paths = parse_own_flags("predict", values, arguments, takes_paths=True)
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


def launch(arguments: list[str]) -> int:
    """Runs a command in many processes and returns the job's exit code."""
    from tfaccel import launch as launch_room
    from tfaccel.launch import options

    own, command = before_command(arguments, options.make_flags())
    if (topic := topic_of(own)) is not None:
        help_texts.check_topic(topic, ("all",))
        print(help_texts.of_launch(whole=topic == "all"), end="")
        return 0
    asked, command = options.parse([*own, *command], os.environ)
    if asked.engine == "local" and command[0] == "train" and topic_of(command[1:]) is None:
        # Told once and now, not by each rank when TensorFlow has started.
        values, _ = parse_config_flags("train", command[1:], paths=("workdir",), trains=True)
        look_at_run(
            parse(values.config),
            check_usable(pathlib.Path(values.workdir), resume=values.resume),
        )
    return launch_room.launch(asked, command)


def _train_help(arguments: list[str], topic: str) -> str:
    """Returns the help, with the values of the config file and flags that are given, if one is."""
    if not config_apart(arguments)[0]:
        return help_texts.of_train(default_config(), "they are by default", topic)
    values, file = parse_config_flags("train", arguments, paths=("workdir",), trains=True)
    changed = config_flags.get_override_values(values["config"])
    source = f"{file} and the other flags say" if changed else f"{file} says"
    return help_texts.of_train(values.config, source, topic)
