"""The command that searches a config's fields with Optuna."""

import datetime
import pathlib

from absl import flags

from tfaccel.cli.asked_experiment import parse_checked
from tfaccel.cli.command import OF_CONFIG, command
from tfaccel.cli.flags import folder_to_be
from tfaccel.common import run_log
from tfaccel.common.errors import UserError
from tfaccel.common.extras import how_to_add, is_installed
from tfaccel.common.flags import Flag
from tfaccel.common.local_path import local_path
from tfaccel.common.tables import show_json
from tfaccel.process.signals import exiting_on_sigterm
from tfaccel.training.trackers import check_installed


@command(
    summary="search the best values of a config's fields with Optuna, one training a trial",
    takes=OF_CONFIG,
    about="""
        Calls suggest(trial, config) of your file for each trial, and trains the config in a process
        of its own, on one GPU. As many trials run at once as there are GPUs. Optuna's pruner ends
        bad trials early, by the value of train.monitor after each epoch. The config of the best
        trial is best.py in the workdir, and the result is one line of JSON.

        The same command continues a search that was stopped or killed, and its trials from their
        newest checkpoints. Several processes, also on several hosts, may search in one workdir.
        Needs the extra `optuna`.""",
    flags=(
        Flag(
            "space",
            None,
            "a Python file with suggest(trial, config), and perhaps an Optuna `sampler` and "
            "`pruner`",
            shown="FILE",
        ),
        Flag(
            "trials",
            20,
            "the trials of the whole search, also over several processes and starts",
            at_least=1,
        ),
        Flag(
            "jobs",
            None,
            "trials at once; default: one on each GPU, or one on the CPU",
            shown="N",
            kind=int,
            at_least=1,
        ),
        Flag("workdir", None, "the search's folder; default: runs/search-NAME-TIME", shown="DIR"),
    ),
    examples=(
        "tfaccel search --config=configs/digits.py --space=space.py \\\n"
        "    --trials=20 --workdir=runs/search",
    ),
)
def search(values: flags.FlagValues, file: str) -> int:
    """Searches, and prints the best trial as one JSON line."""
    if not is_installed("optuna"):
        raise UserError(
            "optuna is not installed, but the search needs it; add the extra: "
            f"{how_to_add('optuna')}"
        )
    if not values.space:
        raise UserError(
            "no space; give a Python file with suggest(trial, config): --space=space.py "
            "(`tfaccel help search` has an example)"
        )
    config = parse_checked(values.config)
    check_installed(config.log.trackers or ())
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = pathlib.Path(file.partition(":")[0]).stem
    workdir = folder_to_be("workdir", values.workdir or f"runs/search-{name}-{time}").absolute()
    from tfaccel.diagnostics.search import run, space  # they import Optuna

    said = space.read(local_path(values.space))
    run_log.show()
    with exiting_on_sigterm():
        how = {"workdir": workdir, "trials": values.trials, "jobs": values.jobs}
        show_json(run.search(values.config, said, **how))
    return 0
