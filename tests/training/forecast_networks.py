"""Small networks for test_memory_forecast.py, which trains them in a process of its own."""

import json
import pathlib
import re

import keras
import numpy as np
from keras import layers

import tfaccel
from tfaccel.training.memory_forecast import forecast_of

ROWS = 128


def residual():
    """Convolutions, batch norm and sums."""
    x = image = keras.Input((32, 32, 3))
    for index in range(3):
        before = x
        x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Add()([before, x]) if index else x
    return keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def transformer():
    """Attention, layer norm and GELU."""
    image = keras.Input((32, 32, 3))
    x = layers.Dense(64)(layers.Reshape((64, 48))(image))
    for _ in range(1):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(y, y)])
        y = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    return keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def dense():
    """More weights than activations."""
    image = keras.Input((32, 32, 3))
    x = layers.Flatten()(image)
    for _ in range(4):
        x = layers.Dense(512, activation="relu")(x)
    return keras.Model(image, layers.Dense(10)(x))


BYTES_USED = re.compile(r"Total bytes(?: used)?: (\d+)")  # without "used" in TensorFlow 2.22


def main(folder, *names):
    """Prints, as JSON, each network's forecast and what XLA's report in the folder says."""
    folder, figures = pathlib.Path(folder), {}
    run = tfaccel.setup(xla=True, gpu_ids=())
    for make in (globals()[each] for each in names):
        with run.scope():
            model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        run.compile(model, "adam", loss)
        images, labels = np.zeros((ROWS, 32, 32, 3), "float32"), np.zeros(ROWS, "int32")
        model.fit(images, labels, batch_size=ROWS, verbose=0)
        reports = [*folder.glob("*memory-usage-report.txt")]
        used = [int(each) for own in reports for each in BYTES_USED.findall(own.read_text())]
        figures[make.__name__] = forecast_of(model).plan.total, max(used)
        for each in folder.iterdir():
            each.unlink()
    print(json.dumps(figures))
