"""A program is never silent for more than five seconds: each thing that may take long is a wait."""

import keras
import numpy as np
import pytest
from conftest import on_terminal

import tfaccel
from tfaccel.process import waits

SLOW = """
import time
import keras
import numpy as np
import tfaccel

class Slow(keras.layers.Layer):
    seconds = 0

    def call(self, x):
        time.sleep(self.seconds)
        return x

run = tfaccel.setup(gpu_ids=())
with run.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), Slow()])
Slow.seconds = 6
run.compile(model, "sgd", "mse")
x, y = np.ones((64, 4), "f4"), np.ones((64, 2), "f4")
model.fit(x, y, epochs=2, validation_data=(x, y), verbose=0)
model.predict(x, verbose=0)
run.export(model, {folder!r})
"""


def small(run):
    with run.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    run.compile(model, "sgd", "mse")
    return model


def test_what_may_take_long_is_a_wait(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(waits.Wait, "_end", lambda wait: ended.append(wait.what))
    run = tfaccel.setup(gpu_ids=())
    model = small(run)
    x, y = np.ones((64, 4), "f4"), np.ones((64, 2), "f4")
    examples = run.examples([*zip(x, y, strict=True)], global_batch_size=16)
    checkpoints = run.checkpoints(tmp_path / "checkpoints")
    model.fit(examples, validation_data=(x, y), callbacks=[checkpoints], verbose=0)
    model.predict(x, verbose=0)
    run.export(model, tmp_path / "export")
    model = small(run)
    checkpoints = run.checkpoints(tmp_path / "checkpoints")
    model.fit(examples, epochs=2, callbacks=[checkpoints], verbose=0)
    assert set(ended) >= {
        "preparing the step",
        "building the model from the shapes of a batch",
        *(f"tracing the {each}" for each in ("training step", "test step", "prediction")),
        *(f"TensorFlow builds the {each}" for each in ("training step", "test step", "prediction")),
        *("running a training step", "running a test step", "running a prediction"),
        *("writing the checkpoint", "reading the checkpoint"),
        *("preparing the export", "writing the export"),
        "comparing the export's answers, in a process of its own",
    }
    assert not waits._waits


@pytest.mark.slow
def test_the_terminal_is_never_silent_for_more_than_five_seconds(tmp_path):
    program = SLOW.format(folder=str(tmp_path / "export"))
    shown = on_terminal(program, TF_CPP_MIN_LOG_LEVEL="3", XDG_CACHE_HOME=str(tmp_path))
    text = "".join(each for _, each in shown)
    for each in ("training step", "test step", "prediction", "export"):
        assert each in text
    assert max(seconds for seconds, _ in shown) <= 5
