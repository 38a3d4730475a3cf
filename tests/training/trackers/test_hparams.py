"""The settings and the outcome are read back by TensorBoard's own page HPARAMS."""

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.get_experiment import Handler as Experiment
from tensorboard.plugins.hparams.list_session_groups import Handler as Sessions

from tfaccel.training.logs.tensorboard import TensorBoard
from tfaccel.training.trackers.hparams import HParams


class Base:
    """What the page needs of TensorBoard."""

    sampling_hints = None

    def __init__(self, folder):
        multiplexer = EventMultiplexer(tensor_size_guidance={metadata.PLUGIN_NAME: 0})
        multiplexer.AddRunsFromDirectory(str(folder)).Reload()
        self.data_provider = MultiplexerDataProvider(multiplexer, str(folder))


def page(folder):
    """Returns the experiment, and the session groups, as the page shows them."""
    context, request = Context(Base(folder)), RequestContext()
    experiment = Experiment(request, context, "", api_pb2.GetExperimentRequest()).run()
    infos = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=9,
        allowed_statuses=[
            api_pb2.STATUS_UNKNOWN,
            api_pb2.STATUS_SUCCESS,
            api_pb2.STATUS_FAILURE,
            api_pb2.STATUS_RUNNING,
        ],
    )
    for each in experiment.metric_infos:
        infos.col_params.add(metric=each.name)
    return experiment, Sessions(request, context, "", infos).run().session_groups


def write(folder, *, rate, outcome):
    config = {"train": {"rate": rate, "nesterov": True, "monitor": None, "epochs": [1, 2]}}
    hparams, board = HParams(folder / "tensorboard"), TensorBoard(folder / "tensorboard")
    hparams.begin(None, name="a", config=config, folder=folder)
    board.epoch({"step": 10, "epoch": 1, "loss": 0.5, "val_loss": rate})
    board.close()
    if outcome:
        hparams.end(outcome)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("finished", api_pb2.STATUS_SUCCESS),
        ("stopped", api_pb2.STATUS_FAILURE),
        (None, api_pb2.STATUS_UNKNOWN),
    ],
)
def test_the_page_has_settings_metrics_and_outcome(tmp_path, outcome, status):
    write(tmp_path / "a", rate=0.25, outcome=outcome)
    write(tmp_path / "b", rate=0.5, outcome="finished")
    experiment, groups = page(tmp_path)
    names = {each.name for each in experiment.hparam_infos}
    assert names == {"train.rate", "train.nesterov", "train.monitor", "train.epochs"}
    first = next(each for each in groups if each.hparams["train.rate"].number_value == 0.25)
    assert first.hparams["train.nesterov"].bool_value is True
    assert first.hparams["train.monitor"].string_value == "None"
    assert first.hparams["train.epochs"].string_value == "1,2"
    assert [each.status for each in first.sessions] == [status]
    values = {(each.name.group, each.name.tag): each.value for each in first.metric_values}
    assert values["validation", "epoch_loss"] == 0.25
    assert values["train", "epoch_loss"] == 0.5


def test_another_start_replaces_the_settings(tmp_path):
    write(tmp_path / "a", rate=0.25, outcome="stopped")
    write(tmp_path / "a", rate=0.5, outcome="finished")
    _, (group,) = page(tmp_path)
    assert group.hparams["train.rate"].number_value == 0.5
    assert [each.status for each in group.sessions] == [api_pb2.STATUS_SUCCESS]
