"""Batches come to a device as they are, by themselves or stacked."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.process import to_device
from tfaccel.process.to_device import carried, copy_to, stack_to

DEVICES = ["/cpu:0", "/cpu:1", pytest.param("/gpu:0", marks=pytest.mark.gpu)]
DTYPES = ["int32", "int64", "uint8", "float16", "float32", "bool"]


def on_host(*values):
    with tf.device("/cpu:0"):
        return [
            tf.cast(tf.constant(each), dtype) for each, dtype in zip(values, DTYPES, strict=False)
        ]


@pytest.mark.parametrize("device", DEVICES)
def test_batches_are_stacked_and_keep_their_bits(device):
    batches = [on_host(*[[number, 200 + number]] * len(DTYPES)) for number in range(3)]
    stacks = stack_to(device, batches)
    assert [each.shape for each in stacks] == [(3, 2)] * len(DTYPES)
    for index, stack in enumerate(stacks):
        dtype = batches[0][index].dtype
        assert stack.dtype == carried(dtype)
        assert {stack.device[-5:], stack.backing_device[-5:]} == {device[1:].upper()}
        found = tf.bitcast(stack, dtype) if stack.dtype != dtype else stack
        for number in range(3):
            np.testing.assert_array_equal(found[number], batches[number][index])


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_copied_as_it_is(device):
    tensors = on_host([[-7, 2]], [3])
    for found, wanted in zip(copy_to(device, tensors), tensors, strict=True):
        assert found.dtype == wanted.dtype
        assert found.device[-5:] == device[1:].upper()
        np.testing.assert_array_equal(found, wanted)
    assert copy_to(device, []) == []


def test_one_function_takes_all_shapes_and_threads():
    def use(length):
        stack_to("/cpu:1", [on_host(np.zeros((2, length)))] * 2)

    threads = [threading.Thread(target=use, args=(length,)) for length in range(1, 9)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    stack = to_device._stacker("/cpu:1", 2, (tf.int32,))
    assert stack.experimental_get_tracing_count() == 1
