"""Checks whether this machine can train: what is installed, and whether the parts work together.

The modules in facts/ gather facts. Some of them ask child processes, which may abort or hang. The
modules in checks/ are pure functions that turn facts into one line each, with a fix.

    print(tfaccel.doctor.examine(data="/data/imagenet"))    # a notebook shows it as a table

This process never imports TensorFlow.
"""

import contextlib
import os
import pathlib
from collections.abc import Mapping

from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.diagnostics.doctor.checks import (
    cuda,
    gpus,
    host,
    infiniband,
    links,
    nccl_interface,
    network,
    packages,
    variables,
)
from tfaccel.diagnostics.doctor.checks import nccl_settings as settings_checks
from tfaccel.diagnostics.doctor.facts import child
from tfaccel.diagnostics.doctor.facts import host as host_facts
from tfaccel.diagnostics.doctor.facts.disk import Reading
from tfaccel.diagnostics.doctor.facts.gpus import from_answers, visible
from tfaccel.diagnostics.doctor.facts.infiniband import read_cards
from tfaccel.diagnostics.doctor.facts.nccl_settings import nccl_settings
from tfaccel.diagnostics.doctor.facts.network import read_network
from tfaccel.diagnostics.doctor.facts.packages import installed
from tfaccel.diagnostics.doctor.facts.workers import Workers, hosts, workers_of
from tfaccel.diagnostics.doctor.table import Finding, Table
from tfaccel.runtime import cluster

NVML_S = 10
QUICK_NVML_S = 3
TRIAL_S = 180  # the first start on a new GPU compiles kernels for a minute or more
READING_S = 5
NAME_SERVER_S = 5
SKIPPED_BY_QUICK = "starting TensorFlow on the devices, loading the plugin (run without --quick)"
NO_DATA = "disk speed of the data (pass --data=FOLDER)"


def examine(*, quick: bool = False, data: str | os.PathLike | None = None) -> Table:
    """Checks everything that training needs and returns one line for each check.

    Args:
      quick: skips the start of TensorFlow and DALI, which takes about ten seconds. It cannot be
        combined with data.
      data: a folder of images or shards. If it is given, its files are read to measure their speed.

    Raises:
      UserError: data is not a folder, or it is combined with quick.
    """
    folder = _folder(data, quick=quick)
    environment = dict(os.environ)

    # ----- Facts.
    with contextlib.ExitStack() as stack:
        nvml_s = QUICK_NVML_S if quick else NVML_S
        nvml = child.start(f"{__name__}.facts.nvml", {}, seconds=nvml_s)
        stack.callback(nvml.child.end)  # Ctrl-C leaves no child behind
        packages_found, machine = installed(), host_facts.read_host(environment)
        # Before the trial starts, because NVML would list the trial as a holder of GPU memory.
        all_gpus = from_answers(nvml.answers())
        visible_gpus = visible(all_gpus, environment)
        answers = None
        if not quick:
            trial = child.start(f"{__name__}.facts.trial", {}, seconds=TRIAL_S)
            stack.callback(trial.child.end)
            answers = trial.answers()

    # ----- Findings, from the driver upwards.
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    python, tensorflow, *rest = packages.check(
        packages_found,
        answers,
        environment=environment,
        keras_backend=machine.keras_backend,
        has_gpu=bool(visible_gpus.gpus),
    )
    on_bus = 0 if hidden else machine.gpus_on_bus
    engines = answers.facts.get("nvJPEG") if answers else None
    findings = [
        python,
        cuda.driver(all_gpus, packages_found, num_on_bus=on_bus, quick=quick),
        cuda.libraries(visible_gpus, packages_found, answers, environment),
        tensorflow,
        *([cuda.devices(visible_gpus, answers)] if answers else []),
        *rest,
        *gpus.check(visible_gpus, packages_found.build, own_pid=os.getpid(), engines=engines),
        links.nccl(visible_gpus, packages_found, answers),
        *filter(None, [links.nvlink(visible_gpus)]),
        *_network(environment, num_gpus=len(visible_gpus.gpus)),
        *host.check(machine, num_gpus=len(visible_gpus.gpus)),
        *([_data(folder)] if folder else []),
        *variables.check(environment, len(all_gpus.gpus), num_visible=len(visible_gpus.gpus)),
    ]
    skipped = [SKIPPED_BY_QUICK] if quick else []
    return Table(tuple(findings), tuple(skipped if folder else [*skipped, NO_DATA]))


def _folder(data: str | os.PathLike | None, *, quick: bool) -> pathlib.Path | None:
    if data is None:
        return None
    if quick:
        raise UserError("--quick reads no data; remove --quick or --data")
    folder = local_path(data).absolute()
    if not os.path.isdir(folder):  # also False for a folder that this user may not enter
        raise UserError(f"data {folder} is not a folder; pass the folder that holds the images")
    return folder


def _network(environment: Mapping[str, str], *, num_gpus: int) -> list[Finding]:
    """Checks what decides how this host reaches others. NCCL is for several GPUs of a job."""
    facts, cards, settings = read_network(), read_cards(), nccl_settings(environment)
    workers = _workers(environment)
    has_other_hosts = workers is not None and workers.has_other_hosts
    is_needed = num_gpus > 1 or (num_gpus == 1 and workers is not None)
    found = [
        network.check(facts, workers),
        nccl_interface.check(
            facts,
            workers,
            settings,
            is_needed=is_needed,
            uses_cards=infiniband.uses_cards(cards, settings),
        ),
    ]
    if is_needed:
        found.append(infiniband.check(cards, facts, settings, has_other_hosts=has_other_hosts))
    found += settings_checks.check(settings, is_needed=is_needed, has_other_hosts=has_other_hosts)
    return [each for each in found if each]


def _workers(environment: Mapping[str, str]) -> Workers | None:
    """Returns the hosts of the job in the environment; None if it names no job of several."""
    try:
        job = cluster.find(environment)
    except UserError:
        return None  # each run raises this error, and it says what is wrong
    if job.num_workers == 1:
        return None
    own, others = hosts(job)
    arguments = {"own": own, "others": others}
    asked = child.start(f"{__name__}.facts.workers", arguments, seconds=NAME_SERVER_S)
    return workers_of(job, asked.answers())


def _data(folder: pathlib.Path) -> Finding:
    """Measures how fast the data is read. This runs last, when the trial has freed the cores."""
    arguments = {"folder": str(folder), "seconds": READING_S}
    answers = child.start(f"{__name__}.facts.disk", arguments, seconds=3 * READING_S).answers()
    reading = answers.facts.get("data")
    problem = answers.why_not("data") or answers.failed.get("start")
    return host.data(folder, Reading(**reading) if reading else None, problem)
