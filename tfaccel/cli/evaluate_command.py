"""The command that examines what a trained network does with each image."""

import pathlib

from absl import flags

from tfaccel.cli.command import command
from tfaccel.cli.flags import folder_to_be, one_workdir
from tfaccel.common.errors import UserError
from tfaccel.common.flags import Flag
from tfaccel.common.local_path import local_path
from tfaccel.common.tables import show
from tfaccel.config import LOADERS, WEIGHTS, RuntimeConfig
from tfaccel.process.start_noise import start_tensorflow
from tfaccel.training.workdir import read_config

SPLITS = ("test", "train")


@command(
    summary="show which images a trained run gets wrong: metrics, confusions, calibration",
    takes="WORKDIR [flags]",
    about="""
        Runs the network of a run over its test images, or over others, with the run's own loader
        and on all GPUs. Each image counts once. Prints the figures, and writes a new folder with
        the tables, the pictures and a page, report.html, that holds all of it. The run may still be
        training.

        Classes: accuracy, top 5, precision, recall and F1 of each class, log loss, the confusion
        matrix, the calibration error, and the images of the highest loss. Several classes an image:
        average precision, AUC, F1 and the best threshold of each class, and the same of the rest.
        Numbers: MAE, RMSE and R squared of each, and the images of the largest errors. Masks: IoU
        of each class, and the worst images with mask and prediction. Pairs of images: PSNR, and the
        worst images. images.csv has a row for each image.""",
    flags=(
        Flag("workdir", None, "the workdir of a run of `tfaccel train`", shown="DIR"),
        Flag(
            "split",
            "test",
            'the run\'s "test" or "train" images; both are seen as the run tests them',
            choices=SPLITS,
        ),
        Flag(
            "data",
            None,
            "other images: a folder or a list of the run's layout, with the run's classes",
            shown="PATH",
        ),
        Flag("targets", None, "with --data, for pairs: the folder of the targets", shown="DIR"),
        Flag("root", None, "the folder of the run's data, if it has moved", shown="DIR"),
        Flag(
            "checkpoint",
            "best",
            '"best" according to train.monitor (or the newest, if none has a score), "newest", or '
            "the number of a step",
        ),
        Flag(
            "export",
            None,
            "an export, or a folder of exports, whose newest is used: its model.keras in place of "
            "a checkpoint",
            shown="DIR",
        ),
        Flag(
            "weights",
            None,
            '"trained", or "average" (the default if the run keeps one by ema_momentum)',
            shown="trained",
            choices=WEIGHTS,
        ),
        Flag(
            "loader",
            None,
            "another loader, if the run's own does not work here; any value of data.loader",
            shown="dali_cpu",
            choices=LOADERS,
        ),
        Flag(
            "bad-files",
            None,
            '"skip" leaves out files that cannot be read, and lists them; "error" stops at the '
            "first one. By default as the run has it",
            shown="skip",
            choices=("error", "skip"),
        ),
        Flag(
            "gpu-ids", None, "other GPUs than the run's, e.g. 0,1; empty for the CPU", shown="IDS"
        ),
        Flag(
            "global-batch-size",
            None,
            "images of a step over all GPUs, in place of the run's",
            shown="N",
            kind=int,
            at_least=1,
        ),
        Flag(
            "out",
            None,
            "the folder for reports 1, 2, 3 and so on; default: evaluation in the workdir",
            shown="DIR",
        ),
        Flag("json", False, "print the figures as JSON, not as tables"),
    ),
    examples=(
        "tfaccel evaluate --workdir=runs/digits",
        "tfaccel evaluate runs/digits --split=train",
        "tfaccel evaluate runs/digits --data=new_photos --bad-files=skip",
    ),
)
def evaluate(values: flags.FlagValues, given: list[str]) -> int:
    """Evaluates the run of the workdir, and prints the figures and the page's path."""
    # Check as much as possible before TensorFlow starts, which takes seconds.
    workdir = one_workdir("evaluate", values, given)
    trained = read_config(workdir)
    checkpoint = values.checkpoint
    is_step = checkpoint.removeprefix("step-").isdecimal()
    if checkpoint not in ("best", "newest") and not is_step:
        raise UserError(
            f"--checkpoint={checkpoint}; expected 'best', 'newest' or the number of a step, e.g. "
            "--checkpoint=1200"
        )
    if values.export is not None and (values["checkpoint"].present or values.weights):
        other = "checkpoint" if values["checkpoint"].present else "weights"
        raise UserError(f"--export has its own weights; remove --{other}, or --export")
    export = None
    if values.export is not None:
        from tfaccel.export.asked_images import find_export

        export = find_export(local_path(values.export))
    elif not any((workdir / "checkpoints").glob("step-*")):
        raise UserError(
            f"{workdir / 'checkpoints'} has no checkpoint; give the workdir of a run that has "
            "saved one, or an export by --export=DIR"
        )
    gpu_ids = values["gpu-ids"].value
    from tfaccel.experiment.evaluate.asked import Asked

    asked = Asked(
        split=values.split,
        data=values.data and pathlib.Path(values.data),
        targets=values.targets and pathlib.Path(values.targets),
        root=values.root,
        checkpoint=checkpoint.removeprefix("step-"),
        export=export,
        weights=values.weights,
        loader=values.loader,
        bad_files=values["bad-files"].value,
        gpu_ids=None if gpu_ids is None else RuntimeConfig(gpu_ids=gpu_ids).gpu_ids,
        global_batch_size=values["global-batch-size"].value,
    )
    config = asked.applied_to(trained)
    out = folder_to_be("out", values.out) if values.out else None
    from tfaccel.data.there import check_there  # imports NumPy

    check_there(config.data, "train" if values.split == "train" else "test")
    start_tensorflow()
    from tfaccel.experiment.evaluate.run import evaluate as evaluated

    report, folder = evaluated(workdir, asked, out=out)
    if values.json:
        show(report.as_json())
    else:
        show(report)
        show(f"\n{folder / 'report.html'}")
    return 0
