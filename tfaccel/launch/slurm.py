"""A job for Slurm: writes and submits a batch script with one launcher on each node.

    print(script(options, command))     # --print
    run(options, command)               # writes it into the log folder, then runs sbatch

If a node is lost, the launchers of the other nodes end, and the job may end with them before
Slurm's own --requeue notices the loss. Therefore the script requeues the job itself, according to
the exit code. Both kinds of restart count towards --max-restarts.
"""

import json
import logging
import math
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import UserError
from tfaccel.common.own_files import replace
from tfaccel.launch.options import Options, flags_of, warn_of_secrets

log = logging.getLogger("tfaccel")

# Seconds before the time limit at which all ranks are asked to save and stop.
SAVE_S = 120

# Seconds for a launcher to learn that another has ended, in addition to the flags' limits.
MARGIN_S = 5

SCRIPT = """#!/bin/bash
# Written by `tfaccel launch --engine=slurm`. To run it again: sbatch {file}
{directives}

# How often Slurm has restarted this job: because of the lines below, or because a node was lost.
restarts=${{SLURM_RESTART_COUNT:-0}}
max_restarts={max_restarts}
if (( restarts > max_restarts )); then
  echo "tfaccel: this is restart $restarts, but the most is $max_restarts: the job ends" >&2
  exit 1
fi

# A secret by which the launchers of this job recognize each other.
TFACCEL_LAUNCH_TOKEN=$(od -An -N16 -tx8 /dev/urandom | tr -d ' ')
export TFACCEL_LAUNCH_TOKEN

# One launcher on each node, with all its cores. When one ends, the others end with its exit code,
# or Slurm ends them. (--kill-on-bad-exit=1 would not wait, and would turn exit code 2 into 143.)
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait={wait_s} \\
  {launcher} \\
  --log-dir={log_dir}/"$SLURM_JOB_ID-$restarts" \\
  {command}
code=$?

# 0: done. 2: a mistake in the call. 130: Ctrl-C. 143: a signal or the time limit; all is saved.
case $code in 0|2|130) exit $code ;; esac
if (( restarts < max_restarts )); then
  echo "tfaccel: exit code $code; restart $(( restarts + 1 )) of at most $max_restarts" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""

# Options that the script sets itself, or does not support: a job array would share one workdir.
OURS = {
    *("array", "chdir", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"),
    *("no-requeue", "requeue", "signal", "wrap"),
}


def run(options: Options, command: Sequence[str]) -> int:
    """Prints the script or submits it, and returns the exit code.

    Raises:
      UserError: a flag cannot be written into a script, or Slurm rejects the job.
    """
    text = script(options, command)
    if options.prints:
        warn_of_secrets(command)
        print(text, end="")
        return 0
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        # Only the user can read it, because the command may contain secrets.
        replace(_file(options), text.encode(), mode=0o600)
    except OSError as error:
        raise UserError(
            f"the batch script {_file(options)} {not_written(error, options.log_dir)}, or give "
            "another --log-dir"
        ) from error
    number = _submit(_file(options))
    log.info("launch: Slurm accepted job %s; `scancel %s` ends it", number, number)
    output = str(options.log_dir / f"slurm-{number}.log")
    print(json.dumps({"job": number, "script": str(_file(options)), "output": output}))
    return 0


def script(options: Options, command: Sequence[str]) -> str:
    """Returns the batch script; see `run`."""
    if not re.fullmatch(r"[\w.-]+", options.name):
        raise UserError(f"--name={options.name!r}; expected only letters, digits, '.', '_' and '-'")
    for path in (options.log_dir, pathlib.Path.cwd()):
        if not re.fullmatch(r"[\w/.,:=@+-]+", str(path)):
            raise UserError(
                f"folder {str(path)!r} cannot be written into a batch script; use only letters, "
                "digits and any of /.,:=@+-_"
            )
    return SCRIPT.format(
        file=_file(options),
        directives="\n".join(f"#SBATCH {each}" for each in _directives(options)),
        max_restarts=options.max_restarts,
        wait_s=math.ceil(options.node_timeout_s + options.grace_s) + MARGIN_S,
        launcher=shlex.join([sys.executable, "-m", "tfaccel", "launch", *flags_of(options)]),
        log_dir=options.log_dir,
        command=shlex.join(command),
    )


def _directives(options: Options) -> list[str]:
    return [
        f"--job-name={options.name}",
        f"--nodes={options.num_nodes}",
        "--ntasks-per-node=1",
        f"--chdir={pathlib.Path.cwd()}",
        f"--output={options.log_dir}/slurm-%j.log",
        "--open-mode=append",
        f"--signal=TERM@{SAVE_S}",
        "--requeue",
        *_further(options.sbatch),
    ]


def _further(text: str) -> list[str]:
    """Returns the options of --sbatch, each as --name or --name=value.

    Raises:
      UserError: one has another form, or is set by the script.
    """
    given = text.split()
    for each in given:
        matched = re.fullmatch(r"--([a-z][a-z-]+)(=[\w.,:/@%+=*\[\]-]+)?", each)
        if not matched:
            raise UserError(
                f"--sbatch has {each!r}; expected sbatch options as --name=value, separated by "
                "spaces, e.g. --sbatch='--partition=gpu --time=8:00:00'"
            )
        if matched[1] in OURS:
            raise UserError(f"--sbatch has {each!r}, which the script sets itself; remove it")
    return given


def _file(options: Options) -> pathlib.Path:
    return options.log_dir / f"{options.name}.sbatch"


def _submit(file: pathlib.Path) -> str:
    """Submits the script and returns the number of the job.

    Raises:
      UserError: Slurm rejects it, or is not installed.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(
            "there is no sbatch here; submit from a machine of the cluster, or write the script "
            "with --print"
        ) from error
    if done.returncode:
        raise UserError(f"Slurm rejects {file} ({done.stderr.strip()}); see --sbatch")
    return done.stdout.strip().partition(";")[0]
