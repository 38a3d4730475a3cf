"""Two processes that train alike give XLA the same text, so the compile cache has the second's."""

import concurrent.futures

import pytest
from conftest import in_new_process

# The kernels are for GPUs, but XLA writes the text before it refuses to compile them for a CPU.
PROGRAM = """
import os
os.environ["XLA_FLAGS"] = "--xla_dump_to=dump --xla_dump_hlo_as_text"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.chdir({folder!r})
import keras
import numpy as np
import tensorflow as tf
import tfaccel
from tensorflow.compiler.tf2xla.python import xla
from tfaccel.keras_internals.replica import Replica
from tfaccel.step.attention.choose import Attentions
from tfaccel.step.gelu.choose import Gelus
from tfaccel.step.layer_norm.choose import LayerNorms

layers, call_module, plain = keras.layers, xla.call_module, Replica.layer_kernels
xla.call_module = lambda *a, **k: call_module(*a, **dict(k, disabled_checks=["platform"]))
kernels = dict(attention=Attentions(), gelu=Gelus(), norm_kernels=LayerNorms(), on_gpu=True)
Replica.layer_kernels = property(lambda self: plain.fget(self) | kernels)

def build():
    x = inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(50, 64, mask_zero=True)(x)
    for _ in range(2):
        x += layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x)
        x += layers.Dense(64)(layers.Dense(128, activation="gelu")(x))
    x = layers.BatchNormalization()(layers.Conv1D(32, 3)(x))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))

ids = np.ones((48, 32), np.int32)
run = tfaccel.setup(precision={precision!r}, xla=True, seed=1)
with run.scope():
    model = build()
run.compile(
    model,
    keras.optimizers.AdamW(1e-3, use_ema=True, global_clipnorm=1.0),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    steps_per_execution=3,
)
for call in (model.fit, model.evaluate):
    try:
        call(ids, ids[:, 0], batch_size=4, verbose=0)
    except tf.errors.NotFoundError:
        continue
    raise AssertionError("a CPU has no such kernels")
"""


def texts(folder, precision):
    """Returns the programs that XLA was given in a new process."""
    folder.mkdir()
    in_new_process(PROGRAM.format(folder=str(folder), precision=precision))
    return sorted(each.read_text() for each in folder.glob("dump/*before_optimizations.txt"))


@pytest.mark.parametrize(
    "precision", [pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "mixed_float16"]
)
def test_two_processes_have_the_same_programs(tmp_path, precision):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        folders = (tmp_path / "first", tmp_path / "second")
        first, second = pool.map(texts, folders, [precision] * 2)
    assert len([each for each in first if len(each) > 100_000]) == 2  # of fit and of evaluate
    assert first == second


BEGUN = """
import os
os.environ["XLA_FLAGS"] = "--xla_dump_to=dump --xla_dump_hlo_as_text"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.chdir({folder!r})
import time
import keras
import numpy as np
import tfaccel

run = tfaccel.setup(xla=True, seed=1, begin_without_xla={begin})
layers = keras.layers
with run.scope():
    model = keras.Sequential([
        keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(),
        layers.GlobalAveragePooling2D(), layers.Dropout(0.1), layers.Dense(3)])
run.compile(
    model,
    keras.optimizers.AdamW(1e-3, use_ema=True, global_clipnorm=1.0),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    steps_per_execution=2,
)
images, labels = np.ones((24, 8, 8, 3), np.float32), np.zeros(24, np.int32)

class Waits(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        while model.train_function.is_without_xla_yet and epoch and {begin}:
            time.sleep(0.1)
            if not model.train_function._step._at_once._aside.runs:
                break

model.fit(images, labels, batch_size=4, epochs=2, verbose=0, callbacks=[Waits()])
assert not model.train_function.is_without_xla_yet
"""


def test_a_training_that_began_without_xla_has_the_program_of_one_that_waited(tmp_path):
    def steps(begin):
        folder = tmp_path / str(begin)
        folder.mkdir()
        in_new_process(BEGUN.format(folder=str(folder), begin=begin))
        found = [each.read_text() for each in folder.glob("dump/*before_optimizations.txt")]
        return sorted(each for each in found if len(each) > 20_000)

    begun, waited = steps(True), steps(False)
    assert len(waited) == 1
    assert begun == waited
