"""Turns a data set into facts. It iterates the data only if nothing else tells the classes.

Takes a tf.data.Dataset, a tfaccel Loader, a Keras PyDataset, or arrays (x, y).

    data, specs = read_data((x, y), batch_size=64)
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.data.distribute import Loader
from tfaccel.diagnostics.lint.facts import Data, Shape, Target
from tfaccel.keras_internals.datasets import batching_of, first_input_of, steps_of

# How much is read for labels, whichever is more. tf.data may have to decode images for them.
NUM_BATCHES, NUM_EXAMPLES = 8, 512
KERAS_BATCH = 32  # the default of `fit` for arrays


def read_data(dataset, *, batch_size: int | None = None, num_classes: int | None = None) -> tuple:
    """Returns the facts of a data set, and the specs of its inputs, nested and with the batch.

    Args:
      dataset: one of the types above; None for no data.
      batch_size: the batch size for arrays, as passed to `fit`; 32 by default, as in `fit`.
      num_classes: the number of classes of the first target that holds labels; None reads labels.

    Raises:
      UserError: the type of the dataset is not supported.
    """
    if dataset is None:
        return Data(), None
    if isinstance(dataset, Loader):
        data, specs = _read_loader(dataset)
    elif isinstance(dataset, tf.data.Dataset):
        data, specs = _read_tf_data(dataset, read_labels=num_classes is None)
    elif isinstance(dataset, keras.utils.PyDataset):
        data, specs = _read_py_dataset(dataset)
    elif _is_array(dataset) or (isinstance(dataset, tuple | list | dict) and len(dataset) > 0):
        data, specs = _read_arrays(dataset, batch_size or KERAS_BATCH)
    else:
        raise UserError(
            f"dataset={type(dataset).__name__}; expected a tf.data.Dataset, a tfaccel loader, a "
            "keras.utils.PyDataset, or arrays (x, y)"
        )
    few = data.num_examples and data.num_examples < (data.global_batch_size or 0)
    if few and data.last_batch == "smaller":  # all examples are one batch
        data = dataclasses.replace(data, global_batch_size=data.num_examples)
    return data if num_classes is None else _with_classes(data, num_classes), specs


def _read_loader(loader: Loader) -> tuple:
    plan = loader.data.plan
    shapes, specs = _read_specs(loader.element_spec)
    data = Data(
        **shapes,
        num_examples=plan.num_examples,
        # If there are fewer examples than a batch, a padded batch is not larger than they are.
        global_batch_size=_rows(specs) * plan.num_replicas
        if specs is not None
        else plan.global_batch_size,
        last_batch=plan.last_batch,
        shuffles=getattr(plan, "shuffle", None),
        is_tfaccel=True,
        pixel_range=loader.pixel_range,
    )
    return _with_classes(data, len(loader.class_names)) if loader.class_names else data, specs


def _read_tf_data(dataset: tf.data.Dataset, *, read_labels: bool) -> tuple:
    steps = list(steps_of(dataset))
    batches = _last_batching(steps)
    shapes, specs = _read_specs(dataset.element_spec)
    batch, num_examples, drops = None, None, False
    if batches is not None:
        batch, drops = batching_of(batches)
        num_examples = _num_examples(dataset, batches)
    data = Data(
        **shapes,
        num_examples=num_examples,
        global_batch_size=batch,
        last_batch="drop" if drops else "smaller",
        shuffles=_shuffles(steps),
    )
    if read_labels and batches is not None and any(each.has_labels for each in data.targets):
        most = max(NUM_BATCHES, -(-NUM_EXAMPLES // batch))
        drawn = list(itertools.islice(dataset, most + 1))
        data = _with_labels(data, drawn[:most], are_all=len(drawn) <= most)
    return data, specs


def _num_examples(dataset: tf.data.Dataset, batches: tf.data.Dataset) -> int | None:
    """Returns the number of examples in the batches, or None if later steps change it."""
    examples, left = first_input_of(batches), int(dataset.cardinality())
    before = int(examples.cardinality()) if examples is not None else tf.data.UNKNOWN_CARDINALITY
    if before <= 0 or (left >= 0 and left != int(batches.cardinality())):
        return None
    return before


def _last_batching(steps: list) -> tf.data.Dataset | None:
    """Returns the step that makes the batches, or None if a later step splits them."""
    for each in steps:
        if batching_of(each) is not None:
            return each
        if any(word in type(each).__name__.lower() for word in ("unbatch", "rebatch")):
            return None
    return None


def _shuffles(steps: list) -> bool | None:
    """Returns whether any step shuffles, or None if a generator or files may shuffle."""
    kinds = [type(each).__name__.lower() for each in steps]
    if any("shuffle" in each for each in kinds):
        return True
    unseen = ("generator", "interleave", "flatmap")  # from_generator uses a flat map
    return None if any(word in each for each in kinds for word in unseen) else False


def _read_py_dataset(dataset: keras.utils.PyDataset) -> tuple:
    """Reads only the first and the last batch: everything else would need all batches."""
    count = dataset.num_batches
    first = dataset[0]
    data, specs = _read_specs(tf.nest.map_structure(_spec, _as_tuple(first)))
    rows, examples = _rows(specs), None
    if count:
        last = _as_tuple(dataset[count - 1])
        examples = (count - 1) * rows + len(tf.nest.flatten(last)[0])
    found = Data(**data, num_examples=examples, global_batch_size=rows, last_batch="smaller")
    return _with_labels(found, [first], are_all=count == 1), specs


def _read_arrays(arrays, batch_size: int) -> tuple:
    arrays = _as_tuple(arrays)
    flat = tf.nest.flatten(arrays)
    other = next((each for each in flat if not _is_array(each)), None)
    if other is not None:
        kind = type(other).__name__
        raise UserError(f"dataset contains a {kind}; use arrays everywhere, np.asarray(...)")
    shapes, specs = _read_specs(tf.nest.map_structure(_spec, arrays))
    data = Data(
        **shapes,
        num_examples=len(flat[0]),
        global_batch_size=batch_size,
        shuffles=True,  # the default of `fit`
    )
    return _with_labels(data, [arrays], are_all=True), specs


# The contents of batches.


def _as_tuple(batch) -> tuple:
    """Returns (x,), (x, y) or (x, y, weight). A list is taken like a tuple, a dict as x."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _is_array(value) -> bool:
    return isinstance(value, np.ndarray) or tf.is_tensor(value)


def _spec(value) -> tf.TensorSpec:
    value = np.asarray(value)
    return tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))


def _read_specs(structure) -> tuple[dict, object]:
    """Returns the shapes of a batch as facts, and the inputs' specs; None for unknown shapes."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(_as_tuple(structure))
    inputs, targets = (tf.nest.flatten(each) if _are_known(each) else () for each in (x, y))
    named = zip(_names(y), targets, strict=True) if targets else ()
    return {
        "inputs": shapes_of(inputs),
        "targets": tuple(Target(_shape(each), name, each.dtype.is_integer) for name, each in named),
    }, x if inputs else None


def _are_known(specs) -> bool:
    return all(each is not None and each.shape.rank for each in tf.nest.flatten(specs))


def _shape(spec: tf.TensorSpec) -> Shape:
    return tuple(spec.shape[1:])


def shapes_of(specs) -> tuple[Shape, ...]:
    """Returns the shapes of the inputs of one example."""
    return tuple(map(_shape, tf.nest.flatten(specs)))


def _rows(specs) -> int:
    return tf.nest.flatten(specs)[0].shape[0]


def _names(y) -> Sequence[str | None]:
    """Returns the targets' names in the order of `tf.nest`; None for targets without names."""
    if isinstance(y, dict) and len(tf.nest.flatten(y)) == len(y):
        return sorted(y)
    return [None] * len(tf.nest.flatten(y))


def _with_labels(data: Data, batches: Sequence, *, are_all: bool) -> Data:
    """Returns the data with the number of classes in the labels of these batches."""
    drawn = (keras.utils.unpack_x_y_sample_weight(_as_tuple(each))[1] for each in batches)
    columns = zip(*map(tf.nest.flatten, drawn), strict=True)
    counted = (
        _counted(target, labels, are_all=are_all) if target.has_labels else target
        for target, labels in zip(data.targets, columns, strict=True)
    )
    return dataclasses.replace(data, targets=tuple(counted)) if data.targets else data


def _counted(target: Target, batches: Sequence, *, are_all: bool) -> Target:
    labels = np.concatenate([np.ravel(each) for each in batches])
    if not labels.size:
        return target
    num_labels = None if are_all else labels.size // (math.prod(x or 1 for x in target.shape) or 1)
    return dataclasses.replace(target, num_classes=int(labels.max()) + 1, num_labels=num_labels)


def _with_classes(data: Data, num_classes: int) -> Data:
    """Returns the data with num_classes for the first target of labels, or else of integers."""
    labels = [each for each in data.targets if each.has_labels]
    labels = labels or [each for each in data.targets if each.is_integer]
    targets = (
        dataclasses.replace(each, num_classes=num_classes, num_labels=None)
        if each in labels[:1]
        else each
        for each in data.targets
    )
    return dataclasses.replace(data, targets=tuple(targets))
