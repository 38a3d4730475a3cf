"""A data set to plain facts. It is iterated only where nothing else says how many classes it has.

Takes a tf.data.Dataset, a tfaccel Loader, a Keras PyDataset, or arrays (x, y).

    data, specs = read_data((x, y), batch_size=64)

Private names relied on:
  TensorFlow 2.21: Dataset._inputs(), and `_batch_size` and `_drop_remainder` of what `batch` gives.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfaccel.data.distribute import Loader
from tfaccel.errors import UserError
from tfaccel.linter.facts import Data

NUM_BATCHES = 8  # that are looked at for labels, which tf.data may have to decode images for
KERAS_BATCH = 32  # of `fit` on arrays


def read_data(dataset, *, batch_size: int | None = None, num_classes: int | None = None) -> tuple:
    """Returns the facts of a data set, and the specs of its inputs, batch included.

    Args:
      dataset: any of those above; None for no data.
      batch_size: of arrays: what `fit` is given; 32, as there, by default.
      num_classes: where it is known; None to look.

    Raises:
      UserError: it is something else.
    """
    if dataset is None:
        return Data(num_classes=num_classes), ()
    if isinstance(dataset, Loader):
        data, specs = _of_loader(dataset)
    elif isinstance(dataset, tf.data.Dataset):
        data, specs = _of_tf_data(dataset, look=num_classes is None)
    elif isinstance(dataset, keras.utils.PyDataset):
        data, specs = _of_py_dataset(dataset)
    elif _is_array(dataset) or (isinstance(dataset, tuple | list | dict) and len(dataset) > 0):
        data, specs = _of_arrays(dataset, batch_size or KERAS_BATCH)
    else:
        raise UserError(
            f"dataset={type(dataset).__name__}; expected a tf.data.Dataset, a tfaccel loader, a "
            "keras.utils.PyDataset, or arrays (x, y)"
        )
    few = data.num_examples and data.num_examples < (data.global_batch_size or 0)
    if few and data.last_batch == "smaller":  # they are one batch
        data = dataclasses.replace(data, global_batch_size=data.num_examples)
    if num_classes is not None:
        data = dataclasses.replace(data, num_classes=num_classes, num_labels=None)
    return data, specs


def _of_loader(loader: Loader) -> tuple:
    plan = loader.data.plan
    of_specs, specs = _of_specs(loader.element_spec)
    return Data(
        **of_specs,
        num_classes=len(loader.class_names) or None,
        num_examples=plan.num_examples,
        # Where there are fewer examples, a padded batch is no larger than they are.
        global_batch_size=specs[0].shape[0] * plan.num_replicas
        if specs
        else plan.global_batch_size,
        last_batch=plan.last_batch,
        shuffles=getattr(plan, "shuffle", None),
        is_tfaccel=True,
    ), specs


def _of_tf_data(dataset: tf.data.Dataset, *, look: bool) -> tuple:
    steps = list(_steps(dataset))
    batches = _last_batching(steps)
    of_specs, specs = _of_specs(dataset.element_spec)
    batch, num_examples, drops = None, None, False
    if batches is not None:
        batch = int(tf.get_static_value(batches._batch_size))
        before = batches._inputs()[0].cardinality().numpy() if batches._inputs() else -1
        num_examples = int(before) if before > 0 else None
        drops = bool(tf.get_static_value(batches._drop_remainder))
    data = Data(
        **of_specs,
        num_examples=num_examples,
        global_batch_size=batch,
        last_batch="drop" if drops else "smaller",
        shuffles=_shuffles(steps),
    )
    if look and batches is not None and _has_labels(data):
        drawn = list(itertools.islice(dataset, NUM_BATCHES + 1))
        labels = [_targets(each) for each in drawn[:NUM_BATCHES]]
        data = _with_labels(
            data, np.concatenate([np.ravel(each) for each in labels if each is not None])
        )
        return dataclasses.replace(
            data, num_labels=None if len(drawn) <= NUM_BATCHES else data.num_labels
        ), specs
    return data, specs


def _steps(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a data set and what it is made of, the last step first."""
    left = [dataset]
    while left:
        each = left.pop()
        yield each
        left += each._inputs()


def _last_batching(steps: list) -> tf.data.Dataset | None:
    """Returns the step that makes the batches, if nothing takes them apart again."""
    for each in steps:
        if hasattr(each, "_batch_size"):
            return each
        if "unbatch" in type(each).__name__.lower():
            return None
    return None


def _shuffles(steps: list) -> bool | None:
    """Returns whether any step shuffles; None where a generator or files may, unseen."""
    kinds = [type(each).__name__.lower() for each in steps]
    if any("shuffle" in each for each in kinds):
        return True
    unseen = ("generator", "interleave", "flatmap")  # a generator is read by a flat map
    return None if any(word in each for each in kinds for word in unseen) else False


def _of_py_dataset(dataset: keras.utils.PyDataset) -> tuple:
    """Looks at the first batch and the last: what else there is, only reading all would say."""
    count = dataset.num_batches
    first = dataset[0]
    data, specs = _of_specs(tf.nest.map_structure(_spec, _as_tuple(first)))
    rows = specs[0].shape[0]
    examples = None
    if count:
        last = _as_tuple(dataset[count - 1])
        examples = (count - 1) * rows + len(tf.nest.flatten(last)[0])
    found = Data(**data, num_examples=examples, global_batch_size=rows, last_batch="smaller")
    labels = _targets(first)
    return _with_labels(found, labels) if _has_labels(found) else found, specs


def _of_arrays(arrays, batch_size: int) -> tuple:
    arrays = _as_tuple(arrays)
    flat = tf.nest.flatten(arrays)
    other = next((each for each in flat if not _is_array(each)), None)
    if other is not None:
        kind = type(other).__name__
        raise UserError(f"dataset has a {kind} in it; make arrays of all, np.asarray(...)")
    of_specs, specs = _of_specs(tf.nest.map_structure(_spec, arrays))
    data = Data(
        **of_specs,
        num_examples=len(flat[0]),
        global_batch_size=batch_size,
        shuffles=True,  # `fit` does, unless told not to
    )
    if not _has_labels(data):
        return data, specs
    return dataclasses.replace(_with_labels(data, _targets(arrays)), num_labels=None), specs


# What batches hold.


def _as_tuple(batch) -> tuple:
    """Returns (x,), (x, y) or (x, y, weight): a list of two arrays may be either, a dict is x."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _is_array(value) -> bool:
    return isinstance(value, np.ndarray) or tf.is_tensor(value)


def _spec(value) -> tf.TensorSpec:
    value = np.asarray(value)
    return tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))


def _of_specs(structure) -> tuple[dict, tuple]:
    """Returns what the shapes of a batch say, and the specs of its inputs."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(_as_tuple(structure))
    inputs, targets = ([e for e in tf.nest.flatten(each) if e is not None] for each in (x, y))
    known = [each for each in (*inputs, *targets) if each.shape.rank]
    return {
        "inputs": tuple(tuple(each.shape[1:]) for each in inputs if each in known),
        "targets": tuple(tuple(each.shape[1:]) for each in targets if each in known),
        "integer_targets": bool(targets) and targets[0].dtype.is_integer,
    }, tuple(each for each in inputs if each in known)


def _has_labels(data: Data) -> bool:
    """Whether the first target is one whole number for an example, or for a pixel."""
    if not data.integer_targets or not data.targets:
        return False
    return len(data.targets[0]) != 1 or data.targets[0][0] in (1, None)


def _targets(batch) -> np.ndarray | None:
    _, y, _ = keras.utils.unpack_x_y_sample_weight(_as_tuple(batch))
    flat = tf.nest.flatten(y)
    return None if y is None or not flat else np.asarray(flat[0])


def _with_labels(data: Data, labels: np.ndarray) -> Data:
    if not labels.size or not np.issubdtype(labels.dtype, np.integer):
        return data
    per_example = math.prod(each or 1 for each in data.targets[0]) or 1
    return dataclasses.replace(
        data, num_classes=int(labels.max()) + 1, num_labels=labels.size // per_example
    )
