import keras
import pytest
import tensorflow as tf
from conftest import strategy_of

from tfaccel.keras_internals.one_replica import as_replica
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.keras_internals.variables import components


def test_each_replica_is_alone_within_as_replica():
    with strategy_of(2).scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile("sgd", "mse", jit_compile=False)
    kernel, value = dense.kernel, dense.kernel._value
    components(kernel)[1].assign([[5.0]])
    for replica, wanted in zip(local_replicas(strategy_of(2)), (1, 5), strict=True):
        with strategy_of(2).scope(), as_replica(model, replica):
            assert kernel.numpy() == wanted
            assert tf.distribute.get_strategy() is not strategy_of(2)
        with pytest.raises(ZeroDivisionError), as_replica(model, replica):
            raise ZeroDivisionError
        assert kernel._value is value
        assert model.optimizer._distribution_strategy is strategy_of(2)
        assert not tf.distribute.has_strategy()
