"""Copies batches from the host to a device, in threads that do not hold up the program.

    copied = copy_to("/gpu:0", [x, y])                      # as they are
    stacks = stack_to("/gpu:0", [[x, y], [next_x, next_y]]) # [2, ...] each

A copy to a GPU begins when the GPU has finished the work that is queued at that moment. Whoever
asks for it waits as long. So ask in a thread of its own, before the next work is queued: then the
copy runs beside that work.

Eager TensorFlow would stack on the device, and copy each batch by itself. Here the host stacks, in
a function. TensorFlow then gives the stack memory from which a GPU copies without the processor.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

# TensorFlow keeps int32 tensors of a GPU in the host's memory, and would copy them only as the next
# step begins, after all work that is queued. These have as many bits, and it keeps them on the GPU.
CARRIES_INT32 = tf.uint32


def copy_to(device: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors on a device, each as it is. (int32 stays in the host's memory.)"""
    if not tensors:
        return []
    copy = _copier(device, tuple(each.dtype for each in tensors))
    with tf.device(device):  # or they would name the device of the function as theirs
        return copy(list(tensors))


def stack_to(device: str, batches: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns the first tensors of all batches as one, [batches, ...], on a device; and so on.

    Args:
      device: the device, such as "/gpu:0".
      batches: the tensors of each batch, on the host; in all batches of the same shapes and dtypes.

    Returns:
      As many tensors as a batch has. For int32 they are uint32 of the same bits: see `carried`.
    """
    dtypes = tuple(each.dtype for each in batches[0])
    stack = _stacker(device, len(batches), dtypes)
    with tf.device(device):
        return stack([list(each) for each in batches])


def carried(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which `stack_to` gives tensors of a dtype."""
    return CARRIES_INT32 if dtype == tf.int32 else dtype


# Of each kind there is one function, for tensors of all shapes. If one function were traced again
# for each kind, TensorFlow would warn.


def _specs(dtypes: Sequence[tf.DType]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(None, each) for each in dtypes]


@functools.cache
def _copier(device: str, dtypes: tuple[tf.DType, ...]) -> Callable:
    @tf.function(autograph=False, input_signature=[_specs(dtypes)])
    def copy(tensors):
        with tf.device(device):
            return [tf.identity(each) for each in tensors]

    return copy


@functools.cache
def _stacker(device: str, number: int, dtypes: tuple[tf.DType, ...]) -> Callable:
    @tf.function(autograph=False, input_signature=[[_specs(dtypes)] * number])
    def stack(batches):
        with tf.device(_host_of(device)):
            stacks = [tf.stack(each) for each in zip(*batches, strict=True)]
            stacks = [
                each if carried(each.dtype) == each.dtype else tf.bitcast(each, carried(each.dtype))
                for each in stacks
            ]
        with tf.device(device):
            return [tf.identity(each) for each in stacks]

    return stack


def _host_of(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()
