"""Whether this machine can train: what is installed, what there is, and whether it fits.

Facts are gathered (facts/), partly in children that may abort or hang; checks (checks/), which are
pure functions of them, make a line each, with what to do.

    print(tfaccel.doctor.examine(data="/data/imagenet"))    # in a notebook, it shows as a table

No line needs TensorFlow in this process.
"""

import contextlib
import os
import pathlib

from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.diagnostics.doctor.checks import cuda, gpus, host, links, packages, variables
from tfaccel.diagnostics.doctor.facts import child
from tfaccel.diagnostics.doctor.facts import host as host_facts
from tfaccel.diagnostics.doctor.facts.disk import Reading
from tfaccel.diagnostics.doctor.facts.gpus import from_told, visible
from tfaccel.diagnostics.doctor.facts.packages import installed
from tfaccel.diagnostics.doctor.table import Finding, Table

NVML_S = 10
QUICK_NVML_S = 3
TRIAL_S = 180  # the first start on a new GPU compiles kernels for a minute or more
READING_S = 5
QUICK_LEAVES_OUT = "TensorFlow's start on the devices, the plugin's loading (without --quick)"
NO_DATA = "disk speed at the data (--data=FOLDER)"


def examine(*, quick: bool = False, data: str | os.PathLike | None = None) -> Table:
    """Returns a line for all that training needs.

    Args:
      quick: start neither TensorFlow nor DALI, which takes about ten seconds, nor read data.
      data: a folder of images or shards, whose reading is timed; by default none is.

    Raises:
      UserError: data is no folder.
    """
    folder = _folder(data, quick=quick)
    environment = dict(os.environ)

    # ----- Facts.
    with contextlib.ExitStack() as stack:
        asked = child.start(f"{__name__}.facts.nvml", {}, seconds=QUICK_NVML_S if quick else NVML_S)
        stack.callback(asked.end)  # Ctrl-C leaves none behind
        there, machine = installed(), host_facts.look(environment)
        all_gpus = from_told(asked.told())  # before the trial, which would be seen to hold memory
        seen = visible(all_gpus, environment)
        tried = None if quick else child.start(f"{__name__}.facts.trial", {}, seconds=TRIAL_S)
        if tried:
            stack.callback(tried.end)
        told = tried.told() if tried else None

    # ----- Findings, from the ground up.
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    python, tensorflow, *rest = packages.check(
        there,
        told,
        environment=environment,
        keras_backend=machine.keras_backend,
        has_gpu=bool(seen.gpus),
    )
    on_bus = 0 if hidden else machine.gpus_on_bus
    engines = told.facts.get("nvJPEG") if told else None
    found = [
        python,
        cuda.driver(all_gpus, there, num_on_bus=on_bus, quick=quick),
        cuda.libraries(seen, there, told, environment),
        tensorflow,
        *([cuda.devices(seen, told)] if told else []),
        *rest,
        *gpus.check(seen, there.build, own_pid=os.getpid(), engines=engines),
        links.nccl(seen, there, told),
        *filter(None, [links.nvlink(seen)]),
        *host.check(machine, num_gpus=len(seen.gpus)),
        *([_data(folder)] if folder else []),
        *variables.check(environment, len(all_gpus.gpus), num_visible=len(seen.gpus)),
    ]
    left_out = [QUICK_LEAVES_OUT] if quick else []
    return Table(tuple(found), tuple(left_out if folder else [*left_out, NO_DATA]))


def _folder(data: str | os.PathLike | None, *, quick: bool) -> pathlib.Path | None:
    if data is None:
        return None
    if quick:
        raise UserError("--quick reads no data; leave out --quick, or --data")
    folder = local_path(data).absolute()
    if not os.path.isdir(folder):  # nor one that may be looked into
        raise UserError(f"data {folder} is no folder; give the one that the images are in")
    return folder


def _data(folder: pathlib.Path) -> Finding:
    """Reads data last, when the trial no longer takes the cores."""
    arguments = {"folder": str(folder), "seconds": READING_S}
    told = child.start(f"{__name__}.facts.disk", arguments, seconds=3 * READING_S).told()
    reading = told.facts.get("data")
    problem = told.why_not("data") or told.failed.get("start")
    return host.data(folder, Reading(**reading) if reading else None, problem)
