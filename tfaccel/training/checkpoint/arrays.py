"""Named arrays in TensorFlow's checkpoint files: values alone, no objects, each with a checksum.

Takes a path and arrays by name; gives two files, and from them the same arrays, bit for bit.

    write_arrays(folder / "arrays", {"model/0": kernel})   # arrays.index, arrays.data-*
    read_arrays(folder / "arrays")["model/0"]

Nothing that is read is run: there is no object graph, and no pickle.
"""

import pathlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfaccel.common.disk_errors import from_tensorflow
from tfaccel.common.literal_path import literal
from tfaccel.training.checkpoint.manifest import CheckpointError


def write_arrays(prefix: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes all arrays, from whichever thread calls; GPUs are left alone.

    Args:
      prefix: of the files; its folder exists.
      arrays: by name, any shape, of every dtype TensorFlow has: bfloat16 as `ml_dtypes` has it.

    Raises:
      OSError: as of other files, also where TensorFlow has a name of its own for it.
    """
    names = sorted(arrays)
    try:
        with tf.device("/cpu:0"):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=names,
                shape_and_slices=[""] * len(names),  # whole, each
                tensors=[tf.constant(arrays[name]) for name in names],
            )
    except tf.errors.OpError as error:
        raise from_tensorflow(error, prefix) from error


def read_arrays(prefix: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `write_arrays` wrote.

    Raises:
      CheckpointError: the files are missing, or one of the arrays is not what was written.
    """
    name = None
    try:
        with literal(prefix.parent) as folder:
            reader = tf.train.load_checkpoint(f"{folder}/{prefix.name}")
            arrays = {}
            for name in sorted(reader.get_variable_to_shape_map()):
                # An array also where it has no dimension: the reader gives a scalar then.
                arrays[name] = np.asarray(reader.get_tensor(name))
    # The reader has Python's errors for some of TensorFlow's.
    except (tf.errors.OpError, OSError, RuntimeError, ValueError) as error:
        what = f"array '{name}' in {prefix}" if name else f"{prefix}.index"
        raise CheckpointError(f"{what} cannot be read ({error})") from error
    return arrays
