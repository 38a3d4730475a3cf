"""Validates with the moving average of the weights, and then restores the weights bit for bit.

Takes an optimizer with `use_ema`, which `config.train.ema_momentum` sets.

    model.fit(train, validation_data=test, callbacks=[EMA()])    # val_loss is the average's

At the end of `fit`, Keras itself replaces the weights by the average. The average covers the
updates that were applied, not those that loss scaling skipped. Batch norm's statistics are not
averaged: they are a moving average already.
"""

import contextlib
from collections.abc import Iterator

import keras

from tfaccel.common.errors import UserError
from tfaccel.keras_internals.model_view import optimizers_of
from tfaccel.keras_internals.optimizers import averaged_weights
from tfaccel.keras_internals.sharded_states import is_sharded
from tfaccel.keras_internals.variables import components


class EMA(keras.callbacks.Callback):
    """Replaces the weights by their average while `fit` or `evaluate` measures the model.

    Keras's own SwapEMAWeights swaps by adding and subtracting, which rounds the weights.
    """

    def __init__(self):
        """Starts with the weights in their place."""
        super().__init__()
        self._is_swapped = False

    def on_train_begin(self, logs=None):
        """Starts the average at the weights, in case the first updates are all skipped.

        Raises:
          UserError: the optimizer keeps no average.
        """
        self.on_test_end()  # an error may have ended a validation while they were swapped
        if self._num_updates() == 0:
            for weight, average in self._pairs():
                average.assign(weight)
            for weight, average in self._sharded():
                average.put(components(weight)[0])

    def on_test_begin(self, logs=None):
        """Swaps weights and averages."""
        if not self._is_swapped and self._num_updates() > 0:
            self._swap()

    def on_test_end(self, logs=None):
        """Swaps them back."""
        if self._is_swapped:
            self._swap()

    def is_in_weights(self) -> bool:
        """Returns whether the weights are the averages already, as after `fit`.

        It asks only where other workers, which may not call this, have slices of the averages.

        Raises:
          UserError: they have, and the weights are no averages.
        """
        others = [each for each in self._sharded() if not each[1].is_here]
        if all(average.is_of(components(weight)[0]) for weight, average in others):
            return bool(others)
        others[0][1].check_is_here()
        return False

    def _num_updates(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    def _swap(self) -> None:
        for weight, average in self._pairs():
            before = weight.read_value()
            weight.assign(average)
            average.assign(before)
        for weight, average in self._sharded():
            own = components(weight)
            whole, before = average.gathered(self.model.distribute_strategy), own[0].read_value()
            for each in own:
                each.assign(whole)
            average.put(before)
        self._is_swapped = not self._is_swapped

    def _pairs(self) -> list[tuple]:
        """Returns (weight, average) for every replica of this process, as `tf.Variable`s."""
        return [
            pair
            for optimizer in check_averages(self.model)
            for weight, average in averaged_weights(optimizer)
            if not is_sharded(average)
            for pair in zip(components(weight), components(average), strict=True)
        ]

    def _sharded(self) -> list[tuple]:
        """Returns (weight, average), as Keras variables, where each replica has a slice of it."""
        return [
            (weight, average)
            for optimizer in check_averages(self.model)
            for weight, average in averaged_weights(optimizer)
            if is_sharded(average)
        ]


def check_averages(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of a model that keep an average of its weights.

    Raises:
      UserError: none does, or the model is not compiled.
    """
    optimizer = getattr(model, "optimizer", None)
    averaging = [each for each in optimizers_of(optimizer) if each.use_ema]
    if not averaging:
        what = (
            f"the optimizer {optimizer.name}" if optimizer else f"model {model.name}, not compiled,"
        )
        raise UserError(
            f"{what} keeps no average of the weights; set ema_momentum, e.g. 0.999 (for a Keras "
            "optimizer: use_ema=True)"
        )
    return averaging


@contextlib.contextmanager
def averages_of(model: keras.Model) -> Iterator[None]:
    """Replaces the model's weights by their averages within the context.

    Raises:
      UserError: the model's optimizer keeps no average, or other workers have slices of it.
    """
    averages = EMA()
    averages.set_model(model)
    if averages.is_in_weights():
        yield
        return
    averages.on_test_begin()
    try:
        yield
    finally:
        averages.on_test_end()
