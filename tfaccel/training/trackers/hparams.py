"""TensorBoard's page HPARAMS: a run's settings, and how it ended.

The run's folder is the page's "session". TensorBoard takes the metrics from the event files in the
folders `train` and `validation` below it.

    hparams = HParams(workdir / "tensorboard")
"""

import pathlib
import time

from tfaccel.common.own_files import replace
from tfaccel.training.trackers import Tracker, flat

# TensorBoard reads the files of a folder in the order of their names.
FILE = "events.out.tfevents.0000000001.tfaccel-hparams"


class HParams(Tracker):
    """An event file with the settings at its beginning and the outcome at its end.

    It has no run with an id, and the records are TensorBoard's already.
    """

    key, name = "hparams", "TensorBoard's hparams"

    def __init__(self, folder: pathlib.Path):
        """Takes the folder of the run's event files."""
        self._folder, self._begun = folder, b""

    def begin(
        self, before: str | None, *, name: str, config: dict, folder: pathlib.Path
    ) -> str | None:
        """Writes the settings in place of those of an earlier start."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        from tfaccel.training.logs.event_files import event_bytes

        values = {key: _value(each) for key, each in flat(config).items()}
        settings = hparams_pb(values, trial_id=str(folder))
        self._begun = event_bytes(Event(file_version="brain.Event:2", wall_time=time.time()))
        self._begun += event_bytes(Event(wall_time=time.time(), summary=settings))
        self._folder.mkdir(parents=True, exist_ok=True)
        replace(self._folder / FILE, self._begun)
        return None

    def end(self, outcome: str) -> None:
        """Writes the outcome after the settings."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
        from tensorboard.plugins.hparams.summary import session_end_pb

        from tfaccel.training.logs.event_files import event_bytes

        if not self._begun:
            return
        ended = session_end_pb(STATUS_SUCCESS if outcome == "finished" else STATUS_FAILURE)
        # TensorBoard makes TensorFlow's kind of summary, which its own kind of event does not take.
        summary = Summary.FromString(ended.SerializeToString())
        event = Event(wall_time=time.time(), summary=summary)
        replace(self._folder / FILE, self._begun + event_bytes(event))


def _value(setting: object) -> bool | float | str:
    """Returns a setting in a form that the page takes."""
    if isinstance(setting, bool | int | float | str):
        return setting
    return ",".join(map(str, setting)) if isinstance(setting, list | tuple) else str(setting)
