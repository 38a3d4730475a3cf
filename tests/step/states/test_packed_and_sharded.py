"""`state_dtype` with `shard_states`: states of fewer bytes, of which each replica keeps a part."""

import json

import keras
import numpy as np
import pytest
from conftest import in_workers
from test_states_of_models import FEWER, FIT, SLOW, X, Y, compile_again, on_one_replica, trained
from test_states_of_models import model_of as packed

from tfaccel.config import StepConfig
from tfaccel.keras_internals.optimizer_states import states_of
from tfaccel.keras_internals.sharded_states import is_sharded, num_bytes_held
from tfaccel.step import compile_model
from tfaccel.training.checkpoint import state as state_lib

SHARDED = {"shard_states": True}


def read(model):
    """The values of all states, in float32 and the weights' shapes."""
    return [
        (each.read() if each.codec else each.parts[0].value).numpy() for each in states_of(model)
    ]


def check_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one, other)


def test_8_bits_train_as_whole_states_and_take_a_third():
    # 4,096 and 5,120 values of three replicas: slices of 1,536 and 1,792 values, six and seven
    # blocks. So the blocks are those of whole states.
    (whole, wanted), (model, losses) = (
        trained("8bit", 3, epochs=3, step=step) for step in ({}, SHARDED)
    )
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert [each.codec and each.codec.name for each in states_of(model)] == 2 * (["8bit", None] * 2)
    parts = [part for each in states_of(model) for part in each.parts]
    assert all(map(is_sharded, parts))
    sizes = [part._value.values[0].shape.num_elements() for part in states_of(model)[0].parts]
    assert sizes == [1536, 6]
    share = num_bytes_held(parts) / num_bytes_held(
        [part for each in states_of(whole) for part in each.parts]
    )
    assert 0.33 < share < 0.4
    close = [
        np.isclose(*each, rtol=1e-3, atol=1e-6)
        for each in zip(read(model), read(whole), strict=True)
    ]
    # A rounding of a sum may move a value to the next code.
    assert np.mean(np.concatenate([each.ravel() for each in close])) > 0.98


def test_bfloat16_learns_as_float32():
    model, losses = trained("bfloat16", 2, epochs=10, step=SHARDED)
    _, wanted = on_one_replica("float32")
    np.testing.assert_allclose(losses, wanted, rtol=0.03)
    first = states_of(model)[0].parts[0]
    assert (str(first.dtype), tuple(first.shape)) == ("bfloat16", (16, 256))
    assert first._value.values[0].shape == [2048]


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=SLOW), "8bit"])
def test_a_checkpoint_is_that_of_whole_states(dtype):
    sharded, _ = trained(dtype, 3, step=SHARDED)
    arrays = state_lib.variables(sharded)
    for other in (
        packed(dtype, 2, step=SHARDED),
        packed(dtype),
        packed("float32", 2, step=SHARDED),
    ):
        with other.distribute_strategy.scope():
            other.optimizer.build(other.trainable_variables)
        state_lib.put_variables(other, arrays)
        check_equal(read(other), read(sharded))
    again = packed(dtype, 3, step=SHARDED)
    with again.distribute_strategy.scope():
        again.optimizer.build(again.trainable_variables)
    state_lib.put_variables(again, arrays)
    found = state_lib.variables(again)
    check_equal(found.values(), arrays.values())


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=SLOW), "8bit"])
def test_either_may_be_taken_away_and_come_back(dtype):
    model, _ = trained(dtype, 2, step=SHARDED)
    values, strategy = read(model), model.distribute_strategy

    def compile_with(state_dtype, *, shards):
        config = StepConfig(state_dtype=state_dtype, shard_states=shards)
        arguments = {"xla": False, "optimizer": model.optimizer, "loss": model.loss}
        compile_model(model, strategy, config, **arguments)
        names = {each.codec and each.codec.name for each in states_of(model)}
        assert names == ({None} if state_dtype == "float32" else {state_dtype, None})
        parts = [part for each in states_of(model) for part in each.parts]
        assert all(is_sharded(each) == shards for each in parts)
        check_equal(read(model), values)

    compile_with(dtype, shards=False)
    compile_with(dtype, shards=True)
    compile_with("float32", shards=True)
    compile_with("float32", shards=False)
    compile_with("float32", shards=True)
    compile_with(dtype, shards=True)
    compile_with("float32", shards=False)
    compile_with(dtype, shards=False)
    compile_again(model, dtype, model.loss)
    compile_with(dtype, shards=True)
    model.fit(X[:16], Y[:16], **FIT)
    assert any(np.any(now != then) for now, then in zip(read(model), values, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("8bit", marks=SLOW)])
def test_stock_keras_loads_the_file(dtype, tmp_path):
    model, _ = trained(dtype, 2, step=SHARDED)
    model.save(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    slots = [each.numpy() for each in plain.optimizer.variables[2:]]
    assert {str(each.dtype) for each in plain.optimizer.variables[2:]} == {"float32"}
    by_shape = lambda found: sorted((each.tolist() for each in found), key=str)  # noqa: E731
    assert by_shape(slots) == by_shape(read(model))


WORKER = """
import json, pathlib
import keras, numpy as np, tfaccel, tfaccel.run
from tfaccel.keras_internals.optimizer_states import states_of
tfaccel.run.warn_at_start = lambda *_: None  # a look at the export, which is not shown here
run = tfaccel.setup(gpu_ids=(), xla=False)
draw = np.random.default_rng(0)
x = draw.normal(size=(64, 16)).astype("float32")
y = (x @ draw.normal(size=(16, 4))).argmax(axis=1)

def train(folder, epochs, **config):
    keras.utils.set_random_seed(7)
    with run.scope():
        model = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(300, "relu"), keras.layers.Dense(20)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(
        model, keras.optimizers.AdamW(1e-2), loss, step=tfaccel.StepConfig(audit_steps=3, **config))
    checkpoints = run.checkpoints(pathlib.Path({root!r}) / folder, monitor="loss")
    data = [(x[i], np.int64(y[i])) for i in range(64)]
    loader = run.examples(data, global_batch_size=16, shuffle=False)
    history = model.fit(loader, epochs=epochs, callbacks=[checkpoints], verbose=0).history
    names = [each.codec and each.codec.name for each in states_of(model)]
    return history["loss"], names

both = {{"state_dtype": {dtype!r}, "shard_states": True}}
found = {{"plain": train("plain", 5), "both": train("both", 3, **both)}}
found["again"] = train("both", 5, **both)
found["neither"] = train("both", 6)
print(json.dumps(found))
"""


@pytest.mark.slow
@FEWER
def test_two_workers_train_and_resume_with_both_and_without(dtype, tmp_path):
    program = WORKER.format(root=str(tmp_path), dtype=dtype)
    first, second = map(json.loads, in_workers(program, 2))
    assert first == second
    plain, _ = first["plain"]
    losses, names = first["both"]
    assert names == [dtype, None, dtype, None] * 2
    np.testing.assert_allclose(losses + first["again"][0][-2:], plain, rtol=0.03)
    assert first["neither"][1] == [None] * 8
    assert first["neither"][0][-1] < plain[-1]
