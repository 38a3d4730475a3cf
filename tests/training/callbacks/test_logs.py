import itertools
import json
import logging

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of

from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
from tfaccel.data import sources
from tfaccel.data.distribute import Loader
from tfaccel.data.images import open_images
from tfaccel.runtime.devices import Device, Runtime
from tfaccel.runtime.gpu_usage import Usage
from tfaccel.training.callbacks.logs import Logs, learning_rate_of
from tfaccel.training.callbacks.throughput import Throughput
from tfaccel.training.logs import Writer
from tfaccel.training.logs.contact_sheet import MARGIN
from tfaccel.training.logs.writers import make_writers

NUM_STEPS = 5  # of 37 images in batches of 8, of which the last has 5


def make_loader(folder, num_replicas=1, **settings):
    devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
    runtime = Runtime(devices, "float32", xla=False, seed=0, loader_threads=1)
    images = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8, "loader": "dali_cpu"}
    data = open_images(
        sources.class_folders(folder),
        ImageConfig(**images | settings),
        AugmentConfig(),
        shuffle=True,
        num_replicas=num_replicas,
        runtime=runtime,
        num_local=1,
        num_threads=1,
        dali=DaliConfig(),
    )
    strategy = strategy_of(num_replicas)
    return Loader(data, devices=devices, seed=0, num_threads=1, first_replica=0, strategy=strategy)


def make_model(num_replicas=1, *, optimizer="sgd"):
    return compiled(
        lambda: keras.Sequential(
            [keras.Input((12, 10, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
        ),
        num_replicas,
        xla=False,
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


class Gpus:
    """One GPU, busier and fuller with every reading."""

    def __init__(self):
        self.num_readings = 0

    def read(self):
        self.num_readings += 1
        return (Usage(100 * self.num_readings, 1000, 0.1 * self.num_readings),)


class Kept(Writer):
    """Keeps what it is given."""

    name = "kept"

    def __init__(self, every_s=None):
        self.every_s = every_s
        self.all, self.resumed, self.is_closed = [], None, False

    def resume_at(self, *, step, epoch):
        self.resumed = step, epoch

    def steps(self, record):
        self.all.append(("steps", record))

    def epoch(self, record):
        self.all.append(("epoch", record))

    def close(self):
        self.is_closed = True

    @property
    def places(self):
        return [(kind, each["epoch"], each["step"]) for kind, each in self.all]


def fit(model, loader, writers, *, gpus=None, every_steps=2, extra=(), **settings):
    # A quarter of a second from look to look, however quick the host is.
    throughput = Throughput(loader, clock=itertools.count(0.0, 0.25).__next__)
    logs = Logs(
        writers,
        loader=loader,
        throughput=throughput,
        gpus=gpus or Gpus(),
        every_steps=every_steps,
    )
    history = model.fit(
        loader, callbacks=[throughput, logs, *extra], verbose=0, **{"epochs": 2} | settings
    )
    logs.close()
    return logs, history


def test_records_within_epochs_and_after_them(folder):
    by_steps, by_time = Kept(), Kept(every_s=1000.0)
    loader, gpus = make_loader(folder), Gpus()
    _, history = fit(
        make_model(), loader, [by_steps, by_time], validation_data=make_loader(folder), gpus=gpus
    )
    epochs = [("epoch", 1, 5), ("epoch", 2, 10)]
    first, second = [("steps", 1, 2), ("steps", 1, 4)], [("steps", 2, 7), ("steps", 2, 9)]
    assert by_steps.places == [*first, epochs[0], *second, epochs[1]]
    assert by_time.places == [("steps", 1, 1), *epochs]
    assert by_steps.is_closed
    assert by_steps.resumed is None

    records = dict(zip(by_steps.places, (each for _, each in by_steps.all), strict=True))
    assert json.loads(json.dumps(records["epoch", 1, 5])) == records["epoch", 1, 5]
    last = records["epoch", 2, 10]
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert last[name] == pytest.approx(history.history[name][1])
    assert last["images"] == 2 * 37
    assert records["steps", 2, 7]["images"] == 37 + 2 * 8
    rate = history.history["images_per_second"][1]
    assert last["images_per_second"] == pytest.approx(rate, abs=0.01)
    assert last["learning_rate"] == 0.01
    assert last["eta_s"] == 0
    assert records["epoch", 1, 5]["eta_s"] > 0
    seconds = [each["seconds"] for _, each in by_steps.all]
    assert seconds == sorted(seconds)
    for record in records.values():
        assert 0 <= record["input_wait"] <= 1
    # The first epoch was read after steps 1 (by time), 2, 4 and 5: its most, and its mean.
    assert records["epoch", 1, 5]["gpu0_memory_mib"] == 400
    assert records["epoch", 1, 5]["gpu0_utilisation"] == pytest.approx(0.25)
    assert records["steps", 1, 4]["gpu0_memory_mib"] == 300
    # The step that compiles is not timed: there is no rate of it.
    assert "images_per_second" not in by_time.all[0][1]
    assert "input_wait" not in by_time.all[0][1]


def test_rates_are_parts_of_the_time(folder, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    loader, writer = make_loader(folder), Kept()
    draw = loader._draw

    def slow_draw():
        now[0] += 3.0
        return draw()

    monkeypatch.setattr(loader, "_draw", slow_draw)
    throughput = Throughput(loader, clock=lambda: now[0])
    logs = Logs([writer], loader=loader, throughput=throughput, gpus=Gpus(), clock=lambda: now[0])

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            now[0] += 1.0

        def on_test_begin(self, logs=None):
            now[0] += 100.0

    test = make_loader(folder)
    callbacks = [Slow(), throughput, logs]
    make_model().fit(loader, validation_data=test, epochs=3, callbacks=callbacks, verbose=0)
    records = [record for kind, record in writer.all if kind == "epoch"]
    for record, timed in zip(records, (37 - 8, 37, 37), strict=True):
        steps = NUM_STEPS - (timed < 37)
        assert record["input_wait"] == pytest.approx(0.75)
        assert record["images_per_second"] == pytest.approx(timed / (4.0 * steps), abs=0.01)
    assert [each["seconds"] for each in records] == [120.0, 240.0, 360.0]
    # Two epochs of 37 images as fast as the first's last 29, and two validations.
    assert records[0]["eta_s"] == pytest.approx(2 * 37 * 16 / 29 + 200, abs=0.1)
    assert [each["eta_s"] for each in records[1:]] == [120.0, 0.0]


@pytest.mark.parametrize(
    ("epoch", "step", "places"),
    [
        (0, 3, [("steps", 1, 5), ("epoch", 1, 5), ("steps", 2, 7), ("steps", 2, 9)]),
        pytest.param(1, 0, [("steps", 2, 7), ("steps", 2, 9)], marks=pytest.mark.slow),
        (0, 5, [("epoch", 1, 5), ("steps", 2, 7), ("steps", 2, 9)]),  # its validation is to come
    ],
)
def test_a_resume_goes_on_from_its_step(epoch, step, places, folder):
    loader, writer = make_loader(folder), Kept()
    loader.start_at(epoch=epoch, step=step)
    fit(make_model(), loader, [writer], initial_epoch=epoch)
    assert writer.places == [*places, ("epoch", 2, 10)]
    assert writer.resumed == (5 * epoch + step, epoch)
    assert writer.all[-1][1]["images"] == 2 * 37


def test_time_goes_on_too(folder):
    now = [100.0]
    loader = make_loader(folder)

    def make():
        throughput = Throughput(loader)
        return Logs([], loader=loader, throughput=throughput, gpus=Gpus(), clock=lambda: now[0])

    logs = make()
    now[0] += 50.0
    state = json.loads(json.dumps(logs.get_state()))
    assert state == {"seconds": 50.0}
    now[0] += 10.0
    logs.set_state(state)  # the same process went back to a checkpoint: its time stays
    assert logs.seconds == 60.0
    again = make()
    again.set_state(state)
    now[0] += 1.0
    assert again.seconds == 51.0


def test_an_epoch_that_is_left_has_no_record(folder):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    writer = Kept()
    fit(make_model(), make_loader(folder), [writer], every_steps=1, extra=[Stop()])
    assert writer.places == [("steps", 1, 1)]


def test_a_writer_that_fails_is_named_once_and_training_goes_on(folder, caplog):
    class Full(Kept):
        name = "metrics.txt"

        def steps(self, record):
            raise OSError(28, "No space left on device")

    full, other = Full(), Kept()
    with caplog.at_level(logging.WARNING, "tfaccel"):
        fit(make_model(), make_loader(folder), [full, other])
    assert full.places == [("epoch", 1, 5), ("epoch", 2, 10)]
    assert len(other.places) == 6
    said = [each for each in caplog.messages if "metrics.txt" in each]
    assert said == [
        "logs: metrics.txt cannot be written (No space left on device); training continues, and "
        "tries again at the next record"
    ]


def test_workers_that_write_nothing_ask_no_gpu(folder):
    gpus = Gpus()
    fit(make_model(), make_loader(folder), [], gpus=gpus, epochs=1)
    assert gpus.num_readings == 0


def test_the_learning_rate_is_that_of_the_last_step():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.2, 0.3])
    for optimizer in (
        keras.optimizers.SGD(schedule),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule)),
    ):
        variable = keras.Variable(np.ones(2, "float32"))
        optimizer.build([variable])
        rates = []
        for _ in range(4):
            optimizer.apply([tf.ones(2)])
            rates.append(learning_rate_of(optimizer))
        np.testing.assert_allclose(rates, [0.1, 0.1, 0.2, 0.3])
    assert learning_rate_of(keras.optimizers.Adam(0.25)) == 0.25


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_leaves_all_its_forms(num_replicas, folder, images, tmp_path, capsys):
    loader = make_loader(folder, num_replicas, mean=0.5, std=0.25)
    writers = make_writers(tmp_path, loader=loader, num_epochs=2)
    fit(make_model(num_replicas), loader, writers, every_steps=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(each)["step"] for each in lines] == [2, 4, 5, 7, 9, 10]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 2
    assert list((tmp_path / "tensorboard").glob("train/events*"))
    said = capsys.readouterr().out.splitlines()
    assert [each[:11] for each in said] == ["epoch 1/2  ", "epoch 2/2  "]

    # The sheet shows what the first step was given, which the next epoch's loader gives again.
    with PIL.Image.open(tmp_path / "first_batch.png") as sheet:
        shown = np.asarray(sheet)
    again = make_loader(folder, 1, mean=0.5, std=0.25)
    x, y, _ = (each.numpy() for each in next(iter(again)))
    factor = 11  # of 12 pixels, to 128 and more
    first = shown[MARGIN : MARGIN + 12 * factor, MARGIN : MARGIN + 10 * factor, 0]
    pixels = np.round((x[0, ..., 0] * 0.25 + 0.5) * 255).astype(np.uint8)
    np.testing.assert_array_equal(first[::factor, ::factor], pixels)
    np.testing.assert_array_equal(loader.kept[1], y)
