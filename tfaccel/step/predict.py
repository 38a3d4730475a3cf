"""Prediction over all replicas."""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.keras_internals import stateful
from tfaccel.keras_internals.function_names import alike, own_numbers
from tfaccel.keras_internals.layer_paths import layer_paths
from tfaccel.keras_internals.model_view import runs_eagerly
from tfaccel.keras_internals.one_replica import as_replica
from tfaccel.keras_internals.rematerialized import without_remat
from tfaccel.keras_internals.replica import Replica
from tfaccel.keras_internals.stateful import local_batches_alike
from tfaccel.process import waits
from tfaccel.step import eager, in_xla
from tfaccel.step import totals as totals_lib
from tfaccel.step.recoverable import Recoverable
from tfaccel.step.replica_steps import compiled, on_each
from tfaccel.step.shapes import telling_rows


class Predict:
    """Prediction over all replicas, as a function of a list of batches; rows keep their order."""

    def __init__(
        self, model, strategy, replicas: list[Replica], choice: in_xla.Choice, said: set[str]
    ):
        """Takes the model, its replicas, whether XLA compiles, and what eager steps have said."""
        self._model, self._strategy, self._replicas = model, strategy, replicas
        # A model's own `predict_step` builds the layers that it calls itself.
        self._is_keras_step = type(model).predict_step is keras.Model.predict_step
        self._choice, self._numbers = choice, own_numbers()
        self._made = []  # has the function after the first call
        self._in_lanes, self._said = eager.met_by_lanes(replicas), said

    def _run(self, parts: list) -> list:
        if not self._made:
            self._made.append(alike(self._make(xla=self._choice.on), self._numbers))
        return self._made[0](parts)

    def _make(self, *, xla: bool, eagerly: bool = False) -> Callable:
        """Returns the function that predicts the parts of a batch."""
        model, replicas = self._model, self._in_lanes if eagerly else self._replicas
        several_workers = self._strategy.num_replicas_in_sync > len(replicas)

        def predict(replica: Replica, batch):
            with (
                as_replica(model, replica),
                stateful.own_rows(model, replica, totals_lib.num_rows(batch)),
                layer_paths(xla=xla, all_reduce=None, **replica.layer_kernels),
                without_remat(),
                telling_rows(self._strategy, [batch]),
            ):
                return model.predict_step(batch)

        def function_of(replica: Replica) -> Callable:
            own = functools.partial(predict, replica)
            if eagerly:
                return own
            return compiled(replica, own) if xla else tf.function(own, autograph=False)

        functions = [function_of(each) for each in replicas]

        def rows_of(replica: Replica, function: Callable, batch, stand_in):
            rows = totals_lib.outputs_of(function, batch, stand_in)
            return tf.nest.map_structure(replica.all_gather, rows) if several_workers else rows

        def run(batches):
            stand_in = totals_lib.stand_in_of(batches)
            counts = [totals_lib.num_rows(each) for each in batches]
            stateful.note_cut(model, counts, num_replicas=replicas[0].num_replicas)
            calls = [
                functools.partial(rows_of, *each, stand_in)
                for each in zip(replicas, functions, batches, strict=True)
            ]
            outputs = (functools.partial(eager.in_lanes, model) if eagerly else on_each)(
                replicas, calls
            )
            stateful.share(model, replicas)
            return outputs[:1] if several_workers else outputs

        if eagerly:
            return run
        compile_ = functools.partial(tf.function, autograph=False)
        # Each model has a function of its own, or TensorFlow warns of retracing.
        run = functools.partial(waits.traced(run, "prediction", xla=xla))
        return Recoverable(compile_, run, model) if xla else compile_(run)

    def __call__(self, batches: list):
        """Returns the predictions for the rows of all batches."""
        outputs = []
        for batch in batches:
            parts = local_batches_alike(self._model, self._strategy, batch, len(self._replicas))
            if not self._model.built and self._is_keras_step:
                _build(self._model, parts[0])
            if runs_eagerly(self._model):
                with eager.said_once(self._said):
                    eager.say()
                    outputs += self._make(xla=False, eagerly=True)(eager.as_tensors(parts))
                continue
            run = functools.partial(self._run, parts)
            with waits.on("running a prediction", of=self._model.name, is_usual=True):
                outputs += self._choice.run(run, parts, forget=self._made.clear)
        return tf.nest.map_structure(lambda *each: tf.concat(each, axis=0), *outputs)


def _build(model, batch) -> None:
    """Creates the variables in the strategy's scope, as Keras does before `fit` and `evaluate`."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with model.distribute_strategy.scope():
        model(keras.tree.map_structure(lambda each: keras.KerasTensor(each.shape, each.dtype), x))
