"""What is written is read back by TensorBoard itself: by both of its readers."""

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.context import RequestContext
from tensorboard.data.server_ingester import SubprocessServerDataIngester, get_server_binary
from tensorboard.util import grpc_util, tensor_util

from tfaccel.training.logs.tensorboard import TensorBoard


def in_python(folder):
    """Returns {(run, tag): [(step, value)]} by the reader that is TensorBoard's last resort."""
    charts = {}
    for run in folder.iterdir():
        reader = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
        for tag in reader.Tags()["tensors"]:
            charts[run.name, tag] = [
                (each.step, float(tensor_util.make_ndarray(each.tensor_proto)))
                for each in reader.Tensors(tag)
            ]
    return charts


def in_rust(folder):
    """Returns the same by the reader that is its default."""
    server = SubprocessServerDataIngester(
        server_binary=get_server_binary(),
        logdir=str(folder),
        reload_interval=60,
        channel_creds_type=grpc_util.ChannelCredsType.LOCAL,
        samples_per_plugin={"scalars": 0},
    )
    server.start()  # returns once it has read all there is
    read = server.data_provider.read_scalars(
        RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000
    )
    return {
        (run, tag): [(each.step, each.value) for each in charts]
        for run, tags in read.items()
        for tag, charts in tags.items()
    }


def record(step, epoch, loss):
    return {"step": step, "epoch": epoch, "seconds": 1.5, "images": 8 * step, "loss": loss}


def write(writer, steps, *, loss):
    """Writes records of a run of ten steps an epoch: every tenth step is an epoch's."""
    for step in steps:
        if step % 10:
            writer.steps(record(step, step // 10 + 1, loss))
        else:
            writer.epoch(record(step, step // 10, loss) | {"val_loss": loss / 2})


def wanted(before, after):
    """The charts of a run that wrote some steps with the loss 1, and then others with 2."""
    both = [(step, 1.0) for step in before] + [(step, 2.0) for step in after]
    epochs = [each for each in both if each[0] % 10 == 0]
    numbers = [(step, step / 10) for step, _ in epochs]
    return {
        ("train", "batch_loss"): [each for each in both if each[0] % 10],
        ("train", "epoch_loss"): epochs,
        ("train", "epoch"): numbers,
        ("validation", "epoch_loss"): [(step, loss / 2) for step, loss in epochs],
        ("validation", "epoch"): numbers,
    }


@pytest.mark.parametrize("read", [in_python, in_rust])
@pytest.mark.parametrize(
    ("step", "epoch", "kept"),
    [
        (12, 1, [4, 8, 10]),
        (10, 1, [4, 8, 10]),
        (10, 0, [4, 8]),  # its steps are done, its validation is not
        (4, 0, [4]),
    ],
)
def test_both_readers_see_no_step_twice_after_a_resume(step, epoch, kept, read, tmp_path):
    writer = TensorBoard(tmp_path)
    write(writer, [4, 8, 10, 14, 18, 20, 24], loss=1.0)
    # As a kill leaves it: the last record torn, the file not closed.
    file = next((tmp_path / "train").iterdir())
    file.write_bytes(file.read_bytes()[:-7])
    again = TensorBoard(tmp_path)
    again.resume_at(step=step, epoch=epoch)
    after = [each for each in (10, 16, 20, 26) if each // 10 > epoch or each > step]
    write(again, after, loss=2.0)
    assert read(tmp_path) == wanted(kept, after)


def test_a_new_run_begins_anew(tmp_path):
    write(TensorBoard(tmp_path), [4, 8, 10], loss=1.0)
    write(TensorBoard(tmp_path), [2, 10], loss=2.0)
    assert in_python(tmp_path) == wanted([], [2, 10])


def test_a_clock_that_goes_back_leaves_the_order(tmp_path, monkeypatch):
    write(TensorBoard(tmp_path), [4, 10], loss=1.0)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    again = TensorBoard(tmp_path)
    again.resume_at(step=10, epoch=1)
    write(again, [14, 20], loss=2.0)
    assert in_python(tmp_path) == wanted([4, 10], [14, 20])


def test_it_goes_on_in_the_same_process(tmp_path):
    writer = TensorBoard(tmp_path)
    write(writer, [4, 10, 14], loss=1.0)
    writer.resume_at(step=12, epoch=1)
    write(writer, [18, 20], loss=2.0)
    assert in_python(tmp_path) == wanted([4, 10], [18, 20])


def test_files_that_are_not_ours_stay(tmp_path):
    other = tmp_path / "train" / "events.out.tfevents.1.host"
    other.parent.mkdir()
    other.write_bytes(b"theirs")
    write(TensorBoard(tmp_path), [4], loss=1.0)
    assert other.read_bytes() == b"theirs"


def test_damage_ends_a_file(tmp_path):
    writer = TensorBoard(tmp_path)
    write(writer, [4, 8], loss=1.0)
    file = next((tmp_path / "train").iterdir())
    file.write_bytes(file.read_bytes() + b"\1" + bytes(7) + b"crc!\377crc!")
    writer.resume_at(step=100, epoch=10)
    assert in_python(tmp_path) == {("train", "batch_loss"): [(4, 1.0), (8, 1.0)]}
