"""MLflow: a run's params, metrics and artefacts.

It takes the server from MLFLOW_TRACKING_URI, else MLflow's own default, the file `mlflow.db` in the
current folder. `mlflow ui` shows it.

    tracker = MLflow(project=None)

If your script has begun a run itself (`with mlflow.start_run():`), that run is used and stays open.
"""

import contextlib
import logging
import os
import pathlib
import time
import urllib.parse
from collections.abc import Iterator

import psutil

from tfaccel.common.errors import RunError
from tfaccel.common.redact import shown
from tfaccel.common.version import __version__
from tfaccel.training.logs import Record
from tfaccel.training.trackers import Tracker, flat, in_a_line, metrics_of

log = logging.getLogger("tfaccel")

PROCESS = "tfaccel.process"  # a tag
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
PARAMS_AT_ONCE = 100  # servers refuse more
# MLflow's own limits are for a server that was reached before: it tries a wrong address for 275 s.
# With these, one that never answers is given up after 15 s, and one that refuses after 3 s.
FIRST_CALL = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
LOCAL = ("", "file", "sqlite")  # schemes of addresses without a server


class MLflow(Tracker):
    """A run of MLflow."""

    key, name = "mlflow", "MLflow"

    def __init__(self, *, project: str | None):
        """Takes the name of the experiment, which is made if there is none."""
        import mlflow  # noqa: F401  here, because 4 s (2 CPU cores, 2026-11-30) are no training

        self._project, self._is_own, self._client = project, False, None

    def prepare(self) -> None:
        """Makes the experiment and, for a local file, the tables of the data base.

        Two processes that made them at the same time would disturb each other.

        Raises:
          RunError: MLflow refuses the address, or its server cannot be reached.
        """
        import mlflow

        _reach()
        if name := self._project or os.environ.get("MLFLOW_EXPERIMENT_NAME"):
            mlflow.set_experiment(name)
        else:
            mlflow.MlflowClient().search_experiments(max_results=1)

    def begin(
        self, before: str | None, *, name: str, config: dict, folder: pathlib.Path
    ) -> str | None:
        """Begins a run or goes on with one, and logs the settings as params.

        Raises:
          RunError: MLflow refuses the address, or its server cannot be reached.
        """
        import mlflow

        _reach()
        active = mlflow.active_run()
        self._is_own = active is None
        if active is None:
            if self._project and not before:
                mlflow.set_experiment(self._project)
            active = mlflow.start_run(run_id=before, run_name=None if before else name)
        self._client, self._id = mlflow.MlflowClient(), active.info.run_id
        self._end_what_was_killed(active.info.experiment_id)
        self._log_settings({key: str(each) for key, each in flat(config).items()}, folder)
        return self._id

    def _end_what_was_killed(self, experiment: str) -> None:
        """Marks the experiment's runs as failed whose process on this machine was killed."""
        try:
            running = self._client.search_runs([experiment], "attributes.status = 'RUNNING'")
            for each in running:
                if each.info.run_id != self._id and _is_gone(each.data.tags.get(PROCESS, "")):
                    self._client.set_terminated(each.info.run_id, STATUS["failed"])
                    log.info("trackers: MLflow's run %s was killed; it failed", each.info.run_id)
        except Exception as error:  # of a server that others use, too; the run itself is good
            log.warning("trackers: killed runs of MLflow stay as they are (%s)", error)

    def _log_settings(self, settings: dict[str, str], folder: pathlib.Path) -> None:
        """Logs settings as params. MLflow never changes a param, so a changed one is a tag."""
        from mlflow.entities import Param, RunTag

        there = self._client.get_run(self._id).data.params
        params = [Param(key, each) for key, each in settings.items() if key not in there]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + PARAMS_AT_ONCE])
        changed = {
            f"changed.{key}": each for key, each in settings.items() if there.get(key, each) != each
        }
        own = {"tfaccel.version": __version__, "tfaccel.workdir": str(folder)}
        own[PROCESS] = _this_process()
        tags = [RunTag(key, each) for key, each in (own | changed).items()]
        for first in range(0, len(tags), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, tags=tags[first : first + PARAMS_AT_ONCE])

    def log(self, record: Record) -> None:
        """Logs a metric for each number, at the record's step."""
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), int(record["step"])
        metrics = [Metric(key, each, now, step) for key, each in metrics_of(record).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def export(self, path: pathlib.Path) -> None:
        """Copies the files to the run's artefacts."""
        self._client.log_artifacts(self._id, str(path), artifact_path=f"export/{path.name}")

    def end(self, outcome: str) -> None:
        """Sets the run's status."""
        import mlflow

        if not self._is_own or self._client is None:
            return
        active = mlflow.active_run()  # of this thread
        if active is not None and active.info.run_id == self._id:
            mlflow.end_run(STATUS[outcome])
        else:
            self._client.set_terminated(self._id, STATUS[outcome])


def _reach() -> None:
    """Calls the server once, so that a wrong address ends the run soon.

    Raises:
      RunError: MLflow refuses the address, or its server cannot be reached.
    """
    import mlflow

    address = mlflow.get_tracking_uri()
    try:
        with _with_environment(FIRST_CALL):
            mlflow.MlflowClient().search_experiments(max_results=1)
    except Exception as error:
        words, named = in_a_line(error), shown(address)
        if urllib.parse.urlsplit(address).scheme in LOCAL:
            raise RunError(
                f"MLflow cannot use {named}: {words} (the address is MLFLOW_TRACKING_URI)"
            ) from error
        if _is_unreachable(error):
            raise RunError(
                f"MLflow's server at {named} cannot be reached ({words}); correct "
                "MLFLOW_TRACKING_URI, start the server, or leave mlflow out of the trackers. For a "
                "server that starts slowly, set MLFLOW_HTTP_REQUEST_TIMEOUT=60 (seconds)"
            ) from error
        log.info("trackers: MLflow's first call failed, which may pass (%s)", words)


@contextlib.contextmanager
def _with_environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables that the user has not set, and removes them at the end."""
    added = {name: each for name, each in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _is_unreachable(error: BaseException | None) -> bool:
    """Returns whether no answer came: no connection, no such host, or a timeout.

    A server that answers "too many requests" can be reached. MLflow waits for it.
    """
    from requests.exceptions import ConnectionError as NoConnection
    from requests.exceptions import Timeout

    while error is not None:
        if isinstance(error, NoConnection | Timeout):
            return True
        error = error.__cause__ or error.__context__
    return False


def _this_process() -> str:
    """Returns words that name this process among all that a machine runs until it stops."""
    return f"{_place()} {os.getpid()} {psutil.Process().create_time():.2f}"


def _is_gone(process: str) -> bool:
    """Returns whether a process of these words has ended; False if nothing says so."""
    *place, pid, created = process.split() or ("", "", "")
    if " ".join(place) != _place():
        return False  # of another machine or container, or of a time before the machine stopped
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(created)) > 1
    except psutil.NoSuchProcess:
        return True
    except (ValueError, psutil.Error):
        return False


def _place() -> str:
    """Returns words for this start of the machine, and for the container."""
    started = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{started} {os.stat('/proc/self/ns/pid').st_ino}"
