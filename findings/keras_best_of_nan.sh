#!/usr/bin/env bash
# Keras: if the monitored value is NaN in the first epoch, EarlyStopping and ModelCheckpoint treat it as the best for ever.
#
# Version: keras 3.15.1 (with tensorflow-cpu 2.21.0), Python 3.11 to 3.13.
#
# Behaviour: both callbacks accept the first value as the best, even if it is NaN. No number compares as less than
# NaN, so a good loss in a later epoch never counts as an improvement. ModelCheckpoint(save_best_only=True) saves
# only epoch 1. EarlyStopping(restore_best_weights=True) stops when its patience is over, and restores the weights
# of epoch 1. A NaN in a later epoch does no harm.
#
# Output seen for the validation losses NaN, 3, 2, 1 and 3, NaN, 2, 1, with a patience of 2:
#   NaN first: saved after epochs [1], stopped after epoch 3, weights of epoch 1
#   NaN later: saved after epochs [1, 3, 4], not stopped, weights of epoch 4
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0

TF_CPP_MIN_LOG_LEVEL=3 WORK="$work" "$work/env/bin/python" - <<'PY'
import os
import pathlib
import sys

import keras
import numpy as np


def outcome(name, losses):
    """Gives the callbacks these validation losses; the only weight of the model is the epoch's number."""
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    model.compile(optimizer="sgd", loss="mse")
    folder = pathlib.Path(os.environ["WORK"]) / name.replace(" ", "-")
    folder.mkdir()
    saving = keras.callbacks.ModelCheckpoint(
        folder / "{epoch}.weights.h5", save_best_only=True, save_weights_only=True
    )
    stopping = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    callbacks = keras.callbacks.CallbackList([saving, stopping], model=model)
    callbacks.on_train_begin()
    stopped = "not stopped"
    model.stop_training = False
    for epoch, loss in enumerate(losses):
        model.set_weights([np.full((1, 1), epoch + 1.0)])
        callbacks.on_epoch_begin(epoch)
        callbacks.on_epoch_end(epoch, {"val_loss": loss})
        if model.stop_training:
            stopped = f"stopped after epoch {epoch + 1}"
            break
    callbacks.on_train_end()
    saved = sorted(int(file.name.split(".")[0]) for file in folder.iterdir())
    weights = int(model.get_weights()[0].item())
    return f"{name}: saved after epochs {saved}, {stopped}, weights of epoch {weights}"


nan = float("nan")
found = [outcome("NaN first", [nan, 3.0, 2.0, 1.0]), outcome("NaN later", [3.0, nan, 2.0, 1.0])]
print("\n".join(found))
expected = [
    "NaN first: saved after epochs [1], stopped after epoch 3, weights of epoch 1",
    "NaN later: saved after epochs [1, 3, 4], not stopped, weights of epoch 4",
]
sys.exit(0 if found == expected else 1)
PY
