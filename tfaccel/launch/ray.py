"""A job on a Ray cluster: Ray starts one launcher on each node, and restarts them after a fault.

`run` returns the job's exit code. It needs the extra `ray`, the package and the workdir on all
nodes, and a running cluster:

    ray start --head                            # and `ray start --address=HOST:PORT` on others
    tfaccel launch --engine=ray --nnodes=2 --max-restarts=3 train ...

Ray's TensorflowTrainer finds the nodes. The launchers meet at the address of worker 0 in its
TF_CONFIG. The trainer also sets TF_USE_LEGACY_KERAS, with which Keras 3 does not start, so it is
removed. Ctrl-C ends all ranks at once, and progress since the last checkpoint is lost.
"""

import json
import logging
import os
import pathlib
import queue
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from tfaccel.common.errors import RunError, UserError
from tfaccel.launch.gang import NEVER_AGAIN
from tfaccel.launch.options import Options, flags_of
from tfaccel.launch.rendezvous import TOKEN_VARIABLE
from tfaccel.launch.scheduler import PORT_VARIABLE
from tfaccel.process.child import dying_with_this

log = logging.getLogger("tfaccel")


def run(options: Options, command: Sequence[str]) -> int:
    """Runs the job on the existing cluster, and returns its exit code.

    The launcher of a node gets all its cores and GPUs.

    Raises:
      UserError: Ray is not installed, or there is no cluster.
      RunError: Ray gave up the job for another reason.
    """
    _connect()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    resources = _of_a_node()
    log.info("launch: Ray: %d nodes with %s each", options.num_nodes, resources)
    trainer = TensorflowTrainer(
        _launch,
        train_loop_config={
            "flags": [*flags_of(options), f"--log-dir={options.log_dir}"],
            "command": list(command),
            "folder": str(pathlib.Path.cwd()),
            "token": secrets.token_hex(16),
        },
        scaling_config=ScalingConfig(
            num_workers=options.num_nodes,
            use_gpu="GPU" in resources,
            resources_per_worker=resources,
            placement_strategy="STRICT_SPREAD" if options.num_nodes > 1 else "PACK",
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(options.log_dir),
            failure_config=FailureConfig(max_failures=options.max_restarts),
        ),
    )
    return _in_thread(lambda: _exit_code(trainer))


def _connect() -> None:
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "--engine=ray without Ray; install the extra: pip install 'tfaccel[ray]'"
        ) from error
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
    except ConnectionError as error:
        raise UserError(
            "there is no Ray cluster here; start one with `ray start --head`, or set RAY_ADDRESS "
            "to the address of one"
        ) from error


def _of_a_node() -> dict[str, float]:
    """Returns the cores and GPUs that every node has. If some nodes have GPUs, only those count.

    Raises:
      UserError: no node is alive.
    """
    import ray

    nodes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    nodes = [each for each in nodes if each.get("GPU")] or nodes
    if not nodes:
        raise UserError("no node of the Ray cluster is alive; see `ray status`")
    return {
        name: min(each.get(name, 0) for each in nodes)
        for name in ("CPU", "GPU")
        if nodes[0].get(name)
    }


def _in_thread(call: Callable[[], int]) -> int:
    """Returns the result of `call`. In the main thread, Ray would turn Ctrl-C into exit code 1."""
    outcomes = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((call(), None))
        except Exception as error:
            outcomes.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    result, error = outcomes.get()
    if error:
        raise error
    return result


def _exit_code(trainer) -> int:
    """Runs the trainer to its end, and returns the launchers' exit code.

    Raises:
      RunError: Ray failed without an exit code of a launcher.
    """
    from ray.train import TrainingFailedError

    try:
        return trainer.fit().return_value
    except TrainingFailedError as error:
        codes = re.findall(r"launcher ended with exit code (\d+)", str(error))
        if not codes:
            raise RunError(f"Ray gave up: {error}") from error
        return int(codes[0])


def _launch(job: dict) -> int:
    """Runs one node's launcher in a worker of Ray, and returns its exit code.

    Raises:
      RunError: Ray should restart the job.
    """
    environment = dict(os.environ)
    environment.pop("TF_USE_LEGACY_KERAS", None)  # the trainer sets it, for Keras 2
    tf_config = json.loads(environment.pop("TF_CONFIG"))
    host, _, port = tf_config["cluster"]["worker"][0].rpartition(":")
    place = [
        f"--node-rank={tf_config['task']['index']}",
        f"--master-addr={host.strip('[]')}",
        f"--master-port={port}",
    ]
    launcher = [sys.executable, "-m", "tfaccel", "launch", *job["flags"], *place, *job["command"]]
    # The launcher dies with this thread, and its ranks with it.
    done = subprocess.run(
        dying_with_this(launcher),
        env=environment | {TOKEN_VARIABLE: job["token"], PORT_VARIABLE: "Ray"},
        cwd=job["folder"],
    )
    if done.returncode not in NEVER_AGAIN:
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode  # for a signal
        raise RunError(f"launcher ended with exit code {code}")
    return done.returncode
