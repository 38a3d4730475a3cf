"""`tfaccel.allreduce_error`: what a sum of gradients over replicas loses in half precision.

Takes a compiled model and a batch; returns a table, and does not change the model.

    print(tfaccel.allreduce_error(model, (x, y), num_replicas=8))

`StepConfig(allreduce_dtype=...)` chooses the dtype. The batch is cut into a part for each replica.
The gradients of the parts are those of a training step, and are added one after the other. Each
sum is rounded to the dtype, as in a ring of replicas. The reference adds the same gradients in
float64.
"""

import dataclasses
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.checks import check_int
from tfaccel.common.errors import UserError
from tfaccel.common.report import Grid, Report
from tfaccel.common.tables import in_figures
from tfaccel.diagnostics.underflow import by_layer, compiled_like, on_first_replica, scale_of
from tfaccel.keras_internals.copies import without_training_state
from tfaccel.keras_internals.model_view import optimizers_of
from tfaccel.step.totals import ROWS_UNIT

DTYPES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class SumError:
    """The error of one layer's summed gradients in one dtype.

    Attributes:
      error: the norm of the difference from the sum in float64, divided by the norm of that sum;
        None if the sum is infinite or NaN, which training would skip or stop at.
      lost: the share (0..1) of the elements that are 0 but should not be.
    """

    error: float | None
    lost: float


@dataclasses.dataclass(frozen=True)
class LayerSumError:
    """The errors of one layer's summed gradients.

    Attributes:
      name: the layer's name, or its path if layers are nested.
      num_elements: the number of elements of its trainable weights.
      of_dtype: for each dtype of DTYPES, its error.
    """

    name: str
    num_elements: int
    of_dtype: dict[str, SumError]


@dataclasses.dataclass(frozen=True, repr=False)
class AllreduceError(Report):
    """The errors of a model's summed gradients.

    Attributes:
      model: the model's name.
      num_replicas: the number of parts that are summed.
      loss_scale: the factor of the loss, which float16 needs; 1 without a loss scale.
      layers: the layers with trainable weights, in order.
      whole: all layers together.
    """

    model: str
    num_replicas: int
    loss_scale: float
    layers: tuple[LayerSumError, ...]
    whole: LayerSumError

    def parts(self):
        """Yields the table of the layers' errors."""
        yield (
            f"gradients summed over {self.num_replicas} replicas: {self.model}, loss scale "
            f"{in_figures(self.loss_scale)}"
        )
        heads = ["error of the sum in"]
        for dtype in DTYPES:
            heads += [dtype, "lost"]
        rows = [(each.name, *_cells(each)) for each in (*self.layers, self.whole)]
        yield Grid(tuple(heads), rows, right=range(1, len(heads)))


def allreduce_error(model: keras.Model, batch: tuple, *, num_replicas: int = 2) -> AllreduceError:
    """Returns the error of each layer's gradients when replicas sum them in half precision.

    Args:
      model: a compiled model with a loss, of any policy. If its optimizer has a loss scale, the
        loss is multiplied by it.
      batch: (x, y) or (x, y, weight), as `fit` takes it or as a loader's iterator gives it. If it
        holds the batches of several replicas, the first replica's batch is used.
      num_replicas: the number of replicas. Each gets an equal part of the batch's rows; remaining
        rows are left out.

    Raises:
      UserError: the model is not compiled or cannot be created from its config, or the batch has
        fewer rows than there are replicas.
    """
    check_int("num_replicas", num_replicas, at_least=2)
    if not getattr(model, "loss", None):
        raise UserError("allreduce_error needs a model with a loss; compile the model with one")
    batch = tf.nest.map_structure(on_first_replica, keras.utils.unpack_x_y_sample_weight(batch))
    num_rows = tf.nest.flatten(batch)[0].shape[0]
    if num_rows < num_replicas:
        raise UserError(
            f"the batch has {num_rows} rows for {num_replicas} replicas; use a larger batch, or "
            "fewer replicas"
        )
    scale = max(scale_of(each) or 1.0 for each in optimizers_of(model.optimizer))
    copy = compiled_like(model, without_training_state(model))
    gradients = _gradients(copy, batch, num_rows // num_replicas, scale)
    sums = _Sums(len(model.trainable_variables))
    for index in range(num_replicas):
        sums.add(gradients(tf.constant(index)))
    *layers, whole = (
        LayerSumError(name, num_elements, sums.errors(members))
        for name, num_elements, members in by_layer(model)
    )
    return AllreduceError(model.name, num_replicas, scale, tuple(layers), whole)


def _gradients(model: keras.Model, batch: tuple, num_rows: int, scale: float):
    """Returns a function of a replica's index that returns its gradients as replicas send them."""

    rows = num_rows / ROWS_UNIT

    @tf.function(autograph=False)
    def gradients(index):
        start = index * num_rows
        x, y, weight = tf.nest.map_structure(
            lambda each: None if each is None else each[start : start + num_rows], batch
        )
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), weight) * scale
        found = tape.gradient(
            loss, model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return [tf.convert_to_tensor(each) * tf.cast(rows, each.dtype) for each in found]

    return gradients


class _Sums:
    """Sums of gradients in float64 and in each dtype of DTYPES, weight by weight."""

    def __init__(self, num_weights: int):
        self._exact = [0.0] * num_weights
        self._rounded = {dtype: [None] * num_weights for dtype in DTYPES}

    def add(self, gradients: Iterable[tf.Tensor]) -> None:
        """Adds a replica's gradients."""
        for index, each in enumerate(gradients):
            self._exact[index] = self._exact[index] + each.numpy().astype(np.float64)
            for dtype, sums in self._rounded.items():
                sent = tf.cast(each, dtype)
                sums[index] = sent if sums[index] is None else sums[index] + sent

    def errors(self, members: Iterable[int]) -> dict[str, SumError]:
        """Returns the errors of the weights with these indices, as one vector."""
        exact = np.concatenate([self._exact[each].ravel() for each in members])
        return {dtype: _error(exact, self._vector(dtype, members)) for dtype in DTYPES}

    def _vector(self, dtype: str, members: Iterable[int]) -> np.ndarray:
        parts = [tf.cast(self._rounded[dtype][each], tf.float64) for each in members]
        return np.concatenate([each.numpy().ravel() for each in parts])


def _error(exact: np.ndarray, found: np.ndarray) -> SumError:
    lost = float(np.mean((found == 0) & (exact != 0)))
    if not np.isfinite(found).all():
        return SumError(None, lost)
    norm = np.linalg.norm(exact)
    return SumError(float(np.linalg.norm(found - exact) / norm) if norm else 0.0, lost)


def _cells(layer: LayerSumError) -> Iterable[str]:
    for each in layer.of_dtype.values():
        yield "overflow" if each.error is None else f"{each.error:.3%}"
        yield f"{each.lost:.2%}"
