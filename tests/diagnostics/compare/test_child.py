"""What a variant's process does within: warming up, its losses, its stretches."""

import json
import types

import psutil
import pytest

from tfaccel.diagnostics.compare import child
from tfaccel.diagnostics.compare.child import Stretches
from tfaccel.diagnostics.compare.pace import Pace, Settings, warm_up_steps

SETTINGS = Settings(steps=50, lead_in=5, warm_up=10, repeats=5)


@pytest.mark.parametrize(
    ("epoch_steps", "execution_steps", "expected"),
    [
        (5004, 10, 10),  # no epoch ends in what is timed
        (23, 1, 23),  # a partial batch is compiled at its end
        (4, 4, 10),
        (285, 1, 285),
        (286, 1, 10),
        (310, 10, 310),  # lead-ins are whole executions
    ],
)
def test_warming_up_goes_past_an_epochs_end_where_one_comes(epoch_steps, execution_steps, expected):
    pace = Pace(1.0, 1.0, epoch_steps, execution_steps)
    assert warm_up_steps(SETTINGS, pace) == expected


class Loader:
    """Five steps an epoch, the last of them partial."""

    num_batches, global_batch_size, num_examples = 5, 10, 43
    position, waited_s = 0, 0.0

    @property
    def next_position(self):
        return self.position


def test_each_executions_own_loss_comes_out_of_keras_mean(tmp_path):
    settings = Settings(steps=4, lead_in=2, warm_up=3, repeats=3)
    loader = Loader()
    callback = Stretches(loader, settings, tmp_path)
    callback.set_model(types.SimpleNamespace(steps_per_execution=1))
    for number in range(3):
        (tmp_path / f"go-{number}").touch()  # so that it never waits
    callback.on_train_begin()
    own, images = [float(each) for each in range(30, 0, -1)], [10, 10, 10, 10, 3]
    for epoch in range(4):
        callback.on_epoch_begin(epoch)
        total = count = 0
        for step in range(5):
            loss = own[loader.position]
            loader.position += 1
            total, count = total + loss * images[step], count + images[step]
            callback.on_train_batch_end(step, {"loss": total / count})
    said = [json.loads((tmp_path / name).read_text()) for name in ("ready.json", "result-0.json")]
    # Warming up goes to the first epoch's end; then two steps lead in, and four are timed.
    assert [len(each["losses"]) for each in said] == [5, 6]
    assert [*said[0]["losses"], *said[1]["losses"]] == pytest.approx(own[:11])
    assert said[0]["first_step_s"] > 0
    assert said[0]["pace"]["epoch_steps"] == 5
    assert said[1]["images_per_second"] > 0


def test_slow_steps_have_short_stretches_and_little_warming_up(tmp_path, monkeypatch):
    born = psutil.Process().create_time()
    settings = SETTINGS._replace(variants=8, left_s=600.0)
    loader, now = Loader(), [0.0]
    # Its process began ten seconds before its first step's end.
    monkeypatch.setattr(child, "time", types.SimpleNamespace(time=lambda: born + 10.0))
    loader.num_batches, loader.num_examples = 100, 1000
    callback = Stretches(loader, settings, tmp_path, clock=lambda: now[0])
    callback.set_model(types.SimpleNamespace(steps_per_execution=1))
    for number in range(3):
        (tmp_path / f"go-{number}").touch()
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    for step in range(20):
        now[0] += 1.0  # a step takes a second
        loader.position += 1
        callback.on_train_batch_end(step, {"loss": 1.0})
    said = [json.loads((tmp_path / name).read_text()) for name in ("ready.json", "result-0.json")]
    assert said[0]["pace"]["step_s"] == 1.0
    assert json.loads((tmp_path / "pace.json").read_text()) == said[0]["pace"]
    assert len(said[0]["losses"]) == 3  # in place of an epoch of 100
    assert len(said[1]["losses"]) < 10
    assert said[1]["images_per_second"] == 10.0
