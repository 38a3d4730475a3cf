"""Tensors of another device come to the host as they are."""

import numpy as np
import pytest
import tensorflow as tf

from tfaccel.process.to_host import make_to_host


@pytest.mark.parametrize(
    "device", ["/cpu:0", "/cpu:1", pytest.param("/gpu:0", marks=pytest.mark.gpu)]
)
def test_a_nest_of_tensors_is_copied_to_the_host(device):
    with tf.device(device):
        tensors = {"codes": [tf.constant([1, 2], tf.int64)], "logs": {"loss": tf.constant(0.5)}}
        host = make_to_host(tensors["codes"][0].device)(tensors)
    # Where the values are: `device` is that of the function, the first GPU where there is one.
    assert {each.backing_device[-5:] for each in tf.nest.flatten(host)} == {"CPU:0"}
    tf.nest.map_structure(np.testing.assert_array_equal, host, tensors)


def test_none_stays_none():
    assert make_to_host(tf.zeros(()).device)({"nothing": None}) == {"nothing": None}


def test_it_is_traced_once_for_all_devices():
    # Of what is traced anew for each, or by every `fit`, TensorFlow warns.
    for index in range(3):
        with tf.device(f"/cpu:{index}"):
            tensor = tf.fill((2,), index)
        to_host = make_to_host(tensor.device)
        before = to_host.experimental_get_tracing_count()
        np.testing.assert_array_equal(to_host(tensor), [index, index])
    assert to_host.experimental_get_tracing_count() == before
