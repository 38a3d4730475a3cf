"""What a user sees of sharded states: whole values, files of Keras, and what is refused."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of
from keras import layers, optimizers

from tfaccel import UserError
from tfaccel.config import Config, StepConfig, deciding
from tfaccel.keras_internals.sharded_states import (
    ShardedState,
    is_sharded,
    num_bytes_held,
    shard,
)
from tfaccel.keras_internals.slices import in_slices, own_slice, slice_size, whole_of
from tfaccel.keras_internals.variables import components
from tfaccel.step import compile_model
from tfaccel.training.callbacks.ema import EMA, averages_of
from tfaccel.training.checkpoint import state
from tfaccel.training.replica_checksums import Audit, ReplicasDifferError

SHARDED = StepConfig(shard_states=True)


def small(optimizer, num_replicas=3, config=SHARDED):
    """A model of 10 and 2 weights whose optimizer is built, with another value everywhere."""
    make = lambda: keras.Sequential([keras.Input((5,)), layers.Dense(2)])  # noqa: E731
    model = compiled(make, num_replicas, optimizer=optimizer, xla=False, loss="mse", config=config)
    if not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    for number, each in enumerate(model.optimizer.variables[2:]):
        each.assign(number + np.arange(np.prod(each.shape), dtype="float32").reshape(each.shape))
    return model


def again(model, config=SHARDED):
    strategy = model.distribute_strategy
    compile_model(model, strategy, config, xla=False, optimizer=model.optimizer, loss="mse")


def states(model):
    return [each.numpy() for each in model.optimizer.variables]


def check_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(), (1,), (2, 5), (9,), (3, 1, 4)])
def test_slices_are_put_together_again(shape):
    whole = tf.random.normal(shape)
    slices = in_slices(whole, num_replicas=3)
    assert slices.shape == (3, slice_size(shape, 3))
    for index in range(3):
        own = own_slice(whole, index=index, num_replicas=3)
        np.testing.assert_array_equal(own, slices[index])
    np.testing.assert_array_equal(whole_of(slices, shape), whole)


def test_a_state_reads_as_whole_and_takes_a_third():
    kernel, bias = small("adam").optimizer.variables[2::2]
    assert [(each.shape, each.ndim) for each in (kernel, bias)] == [((5, 2), 2), ((2,), 1)]
    held = [each.numpy().tolist() for each in components(kernel)]
    assert held == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert kernel.numpy().tolist() == np.arange(10).reshape(5, 2).tolist()
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(kernel), kernel.numpy())
    kernel.assign(kernel + 1)
    assert components(kernel)[1].numpy().tolist() == [5, 6, 7, 8]
    assert "(5, 2)" in repr(kernel)
    assert num_bytes_held([kernel, kernel, bias]) == 4 * (4 + 1)


def test_a_saved_model_has_whole_states(tmp_path):
    model = small(optimizers.SGD(momentum=0.9, nesterov=True))
    model.save(tmp_path / "model.keras")
    with strategy_of(3).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    check_equal(states(loaded), states(model))
    again(loaded)
    assert all(map(is_sharded, loaded.optimizer.variables[2:]))
    check_equal(states(loaded), states(model))


def test_files_of_weights_have_whole_states(tmp_path):
    model = small("adam")
    before = states(model)
    model.save_weights(tmp_path / "all.weights.h5")
    for each in model.optimizer.variables[2:]:
        each.assign(tf.zeros(each.shape))
    model.load_weights(tmp_path / "all.weights.h5")
    check_equal(states(model), before)


def test_an_export_works_and_what_would_save_slices_is_refused(tmp_path):
    model = small("adam")
    model.export(tmp_path / "served", verbose=False)
    assert tf.saved_model.load(tmp_path / "served").serve(tf.ones([1, 5])).shape == (1, 2)
    with pytest.raises(UserError, match=r"use model\.export or model\.save"):
        tf.saved_model.save(model, tmp_path / "all")
    with pytest.raises(UserError, match=r"use model\.save or run\.checkpoints"):
        tf.train.Checkpoint(optimizer=model.optimizer).save(tmp_path / "tf")


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optimizers.Nadam(use_ema=True, gradient_accumulation_steps=2),
        lambda: optimizers.LossScaleOptimizer(optimizers.AdamW()),
    ],
)
def test_states_keep_their_values_if_the_model_is_compiled_again(optimizer):
    model = small(optimizer(), 2)
    before = states(model)
    num_variables = len(before)
    again(model, StepConfig())
    assert not any(map(is_sharded, model.optimizer.variables))
    check_equal(states(model), before)
    again(model)
    assert len(model.optimizer.variables) == num_variables
    assert any(map(is_sharded, model.optimizer.variables))
    check_equal(states(model), before)


class OfItsOwn(optimizers.SGD):
    pass


@pytest.mark.parametrize(
    "optimizer", [optimizers.Lamb, optimizers.Adafactor, optimizers.Muon, OfItsOwn]
)
def test_an_optimizer_that_may_need_whole_weights_is_refused(optimizer):
    made = optimizer()
    with pytest.raises(UserError, match=f"{optimizer.__name__}, which may need whole weights"):
        small(made)


def test_a_weight_that_its_gradient_overwrites_is_refused():
    optimizer = optimizers.SGD(momentum=0.9)
    model = small("adam")
    model.trainable_variables[0].overwrite_with_gradient = True  # as those of float8
    shard(optimizer, model.distribute_strategy)
    with pytest.raises(UserError, match="kernel is overwritten with its gradient"):
        optimizer.build(model.trainable_variables)


def test_an_optimizer_of_ones_own_may_say_that_it_is_elementwise(monkeypatch):
    monkeypatch.setattr(OfItsOwn, "is_elementwise", True, raising=False)
    assert is_sharded(small(OfItsOwn(momentum=0.9)).optimizer.variables[-1])


def test_one_replica_says_that_nothing_changes(caplog):
    with caplog.at_level("INFO", "tfaccel"):
        model = small("adam", 1)
    assert "shard_states changes nothing, because there is one replica" in caplog.text
    assert not any(map(is_sharded, model.optimizer.variables))


def test_a_worker_alone_cannot_read_a_state():
    kernel = small("adam").optimizer.variables[2]
    kernel.num_replicas = 6  # as if another worker had three
    with pytest.raises(UserError, match="one worker cannot read it alone; use"):
        kernel.numpy()


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_checkpoint_is_whole_and_fits_any_number_of_replicas(num_replicas):
    saved, plain = small("adam"), small("adam", 2, StepConfig())
    arrays = state.variables(saved)
    other = small("adam", num_replicas)
    for each in other.optimizer.variables[2:]:
        each.assign(tf.zeros(each.shape))
    state.put_variables(other, arrays)
    check_equal(states(other), states(saved))
    state.put_variables(plain, state.variables(other))
    check_equal(states(plain), states(saved))
    in_order = [[each[name] for name in sorted(each)] for each in (arrays, state.variables(plain))]
    check_equal(*in_order)


def test_a_checkpoint_of_another_model_is_refused():
    arrays = state.variables(small("adam"))
    name = next(each for each in arrays if "momentum" in each)
    with pytest.raises(
        UserError, match=r"is float32 \[4\], but .* of this model is float32 \[5, 2\]"
    ):
        state.put_variables(small("adam"), arrays | {name: np.zeros(4, np.float32)})


def test_a_run_may_resume_with_the_option_changed():
    config = Config()
    assert deciding(dataclasses.replace(config, step=SHARDED)) == deciding(config)


def test_validation_is_by_the_average_and_puts_the_weights_back(monkeypatch):
    model = small(optimizers.SGD(use_ema=True))
    kernel, average = model.trainable_variables[0], model.optimizer.variables[2]
    model.optimizer.iterations.assign(1)
    weights, averages = kernel.numpy(), average.numpy()
    callback = EMA()
    callback.set_model(model)
    callback.on_test_begin()
    np.testing.assert_array_equal(kernel.numpy(), averages)
    np.testing.assert_array_equal(average.numpy(), weights)
    callback.on_test_end()
    for each in components(kernel):
        np.testing.assert_array_equal(each.numpy(), weights)
    np.testing.assert_array_equal(average.numpy(), averages)
    model.optimizer.finalize_variable_values(model.trainable_variables)  # as `fit` does at its end
    np.testing.assert_array_equal(kernel.numpy(), averages)
    monkeypatch.setattr(ShardedState, "is_here", False)  # as if another worker had some, too
    with averages_of(model):
        np.testing.assert_array_equal(kernel.numpy(), averages)
    kernel.assign(kernel + 1)
    with pytest.raises(UserError, match="one worker cannot read it alone"), averages_of(model):
        pass


def test_the_audit_compares_weights_and_no_slices():
    model = small("adam")
    Audit(model).check(when="now")
    components(model.trainable_variables[0])[1].assign(tf.zeros([5, 2]))
    with pytest.raises(ReplicasDifferError, match="kernel now"):
        Audit(model).check(when="now")
