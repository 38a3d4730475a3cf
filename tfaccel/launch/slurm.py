"""A job for Slurm: a batch script with one launcher on each node, which is queued again if need be.

Takes what `tfaccel launch --engine=slurm` was asked for; gives the script, and submits it.

    print(script(options, command))     # --print
    run(options, command)               # writes it into the log folder, then sbatch

Where a node is lost, the launchers of the others end, and the job may end with them before Slurm's
own --requeue knows of the loss. So the script asks for it, by the exit code; whichever comes first
counts as one of --max-restarts.
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

# How long before the time limit all ranks are asked to save and stop.
SAVE_S = 120

# For a launcher to hear that another has ended, beside what its flags allow.
MARGIN_S = 5

SCRIPT = """#!/bin/bash
# Written by `tfaccel launch --engine=slurm`. To run it once more: sbatch {file}
{directives}

# How often Slurm has begun this job again: because of what is below, or because it lost a node.
restarts=${{SLURM_RESTART_COUNT:-0}}
max_restarts={max_restarts}
if (( restarts > max_restarts )); then
  echo "tfaccel: this is restart $restarts, of at most $max_restarts: the job ends" >&2
  exit 1
fi

# A secret by which the launchers of this job know each other.
TFACCEL_LAUNCH_TOKEN=$(od -An -N16 -tx8 /dev/urandom | tr -d ' ')
export TFACCEL_LAUNCH_TOKEN

# One launcher on each node, with all its cores. When one ends, the others end with its exit code;
# if they do not, Slurm ends them. (--kill-on-bad-exit=1 would not wait, and make 143 of a 2.)
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait={wait_s} \\
  {launcher} \\
  --log-dir={log_dir}/"$SLURM_JOB_ID-$restarts" \\
  {command}
code=$?

# 0: done. 2: a mistake in the call. 130: Ctrl-C. 143: a signal or the time limit; all is saved.
case $code in 0|2|130) exit $code ;; esac
if (( restarts < max_restarts )); then
  echo "tfaccel: exit code $code; restart $(( restarts + 1 )), of at most $max_restarts" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""

# What the script says itself, or cannot do: a job array has one workdir for all its jobs.
OURS = {
    *("array", "chdir", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"),
    *("no-requeue", "requeue", "signal", "wrap"),
}


def run(options: Options, command: Sequence[str]) -> int:
    """Prints the script or submits it, and returns the exit code.

    Args:
      options: what the flags say.
      command: what each rank runs.

    Raises:
      UserError: a flag cannot be written into a script, or Slurm refuses the job.
    """
    text = script(options, command)
    if options.prints:
        warn_of_secrets(command)
        print(text, end="")
        return 0
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        # It holds the command with all that was given to it.
        replace(_file(options), text.encode(), mode=0o600)
    except OSError as error:
        raise UserError(
            f"the batch script {_file(options)} {not_written(error, options.log_dir)}, or give "
            "another --log-dir"
        ) from error
    number = _submit(_file(options))
    log.info("launch: Slurm has job %s; `scancel %s` ends it", number, number)
    output = str(options.log_dir / f"slurm-{number}.log")
    print(json.dumps({"job": number, "script": str(_file(options)), "output": output}))
    return 0


def script(options: Options, command: Sequence[str]) -> str:
    """Returns the batch script.

    Args:
      options: what the flags say.
      command: what each rank runs.

    Raises:
      UserError: a flag cannot be written into it.
    """
    if not re.fullmatch(r"[\w.-]+", options.name):
        raise UserError(
            f"--name={options.name!r}; expected letters, digits, '.', '_' and '-' alone"
        )
    for path in (options.log_dir, pathlib.Path.cwd()):
        if not re.fullmatch(r"[\w/.,:=@+-]+", str(path)):
            raise UserError(
                f"folder {str(path)!r} cannot stand in a batch script; use letters, digits and "
                "any of /.,:=@+-_ alone"
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
    """Returns sbatch's options out of --sbatch, each as --name or --name=value.

    Raises:
      UserError: one is something else, or is the script's own.
    """
    given = text.split()
    for each in given:
        matched = re.fullmatch(r"--([a-z][a-z-]+)(=[\w.,:/@%+=*\[\]-]+)?", each)
        if not matched:
            raise UserError(
                f"--sbatch has {each!r}; expected sbatch's options as --name=value, with a space "
                "between two, e.g. --sbatch='--partition=gpu --time=8:00:00'"
            )
        if matched[1] in OURS:
            raise UserError(f"--sbatch has {each!r}, which the script settles itself; leave it out")
    return given


def _file(options: Options) -> pathlib.Path:
    return options.log_dir / f"{options.name}.sbatch"


def _submit(file: pathlib.Path) -> str:
    """Returns the number that Slurm gives the job.

    Raises:
      UserError: it gives none.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(
            "there is no sbatch here; submit from a machine of the cluster, or write the script "
            "with --print"
        ) from error
    if done.returncode:
        raise UserError(f"Slurm refuses {file} ({done.stderr.strip()}); see --sbatch")
    return done.stdout.strip().partition(";")[0]
