"""Writes and reads named arrays in TensorFlow's checkpoint files, each with a checksum.

Takes a path and arrays by name; gives two files, and from them the same arrays, bit for bit.

    write_arrays(folder / "arrays", {"model/0": kernel})   # arrays.index, arrays.data-*
    read_arrays(folder / "arrays")["model/0"]

The files hold values only. Reading them runs no code: there is no object graph, and no pickle.
"""

import pathlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfaccel.common.disk_errors import from_tensorflow
from tfaccel.common.literal_path import literal
from tfaccel.training.checkpoint.manifest import CheckpointError


def write_arrays(prefix: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes all arrays without the use of a GPU. Any thread may call it.

    An array may have any shape, and any dtype of TensorFlow: for bfloat16, that of `ml_dtypes`.

    Raises:
      OSError: the files cannot be written. TensorFlow's own errors are converted to it.
    """
    names = sorted(arrays)
    try:
        with tf.device("/cpu:0"):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=names,
                shape_and_slices=[""] * len(names),  # each array as a whole
                tensors=[tf.constant(arrays[name]) for name in names],
            )
    except tf.errors.OpError as error:
        raise from_tensorflow(error, prefix) from error


def read_arrays(prefix: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `write_arrays` wrote.

    Raises:
      CheckpointError: the files are missing, or an array differs from what was written.
    """
    name = None
    try:
        with literal(prefix.parent) as folder:
            reader = tf.train.load_checkpoint(f"{folder}/{prefix.name}")
            arrays = {}
            for name in sorted(reader.get_variable_to_shape_map()):
                # For an array without dimensions the reader returns a scalar.
                arrays[name] = np.asarray(reader.get_tensor(name))
    # The reader turns some of TensorFlow's errors into Python's.
    except (tf.errors.OpError, OSError, RuntimeError, ValueError) as error:
        what = f"array '{name}' in {prefix}" if name else f"{prefix}.index"
        raise CheckpointError(f"{what} cannot be read ({error})") from error
    return arrays
