"""A trained model whose prediction is a few numbers for each image, computed on the replicas.

`scored` takes a run, a trained model and a function of a batch. The model's outputs stay on the
devices, because those of all images may not fit in memory. Only the function's results are kept.

    scores = scored(run, model, Classes(num_named=5)).predict(loader, verbose=0)
    scores["loss"]          # [num_examples] float32, in the loader's order, each example once
"""

from collections.abc import Callable

import keras
import numpy as np

from tfaccel.data.distribute import Loader
from tfaccel.run import Run


class Scored(keras.Model):
    """A model whose prediction is a function of inputs, targets and outputs."""

    def __init__(self, model: keras.Model, function: Callable):
        """Takes the trained model and the function."""
        super().__init__(name=f"scores_of_{model.name}")
        self.scored, self.function = model, function

    def call(self, inputs):
        """Returns the outputs of the model itself."""
        return self.scored(inputs, training=False)

    def predict_step(self, data):
        """Returns the function's results for a batch of a loader."""
        inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self.scored(inputs, training=False)
        return self.function(inputs, targets, outputs)


def scored(run: Run, model: keras.Model, function: Callable, *, per_execution: int = 1) -> Scored:
    """Returns the compiled model. Its `predict` leaves out a loader's padding rows.

    Args:
      run: the process's run, in whose scope the model was built.
      model: the trained model.
      function: takes inputs, targets and outputs of a batch, and returns a dict of [rows, ...].
      per_execution: the batches of one launch.
    """
    with run.scope():
        made = Scored(model, function)
    run.compile(made, steps_per_execution=per_execution)
    return made


def read_of(loader: Loader) -> np.ndarray:
    """Returns the indices of a loader's examples that have scores: [n] int64, in order.

    An image that could be read at the start may have become unreadable since.
    """
    return np.delete(np.arange(loader.num_examples), np.array(sorted(loader.lost), int))
