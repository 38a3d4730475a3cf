"""The plan of a full memory: its numbers, the ways it proposes, and the error that carries it."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled

from tfaccel.common.errors import RunError, UserError
from tfaccel.config import StepConfig
from tfaccel.process.out_of_memory import is_out_of_memory
from tfaccel.training import memory_errors
from tfaccel.training.memory_errors import OutOfMemoryError, explain, explained, situation_of
from tfaccel.training.memory_plan import Plan, read_plan, saved_by_slices
from tfaccel.training.memory_ways import Situation

GIB = 2**30
# 10 GiB of 80 are fixed: the room of 70 GiB, less 5%, is 66.5.
PLAN = Plan(2 * GIB, 4 * GIB, 2 * GIB, activations=133 * GIB, others=2 * GIB, limit=80 * GIB)


def say(plan, batch, *, num_replicas=1, parts=1, half_precision=True, trains=True, remat=None):
    return explain(
        Situation(
            plan,
            batch,
            num_replicas=num_replicas,
            step=StepConfig(accumulation_steps=parts, remat=remat),
            trains=trains,
            half_precision=half_precision,
        )
    )


@pytest.mark.parametrize(
    ("batch", "num_replicas", "parts", "fitting", "accumulation"),
    [
        # Half of the activations fit: half of the batch. In parts, the sum of their gradients,
        # 2 GiB, is there as well: 0.4857 of the rows fit, and two parts of half of them do not.
        (1024, 1, 1, 512, 3),
        (1024, 2, 1, 512, 3),
        (1000, 1, 1, 496, 3),  # the multiple of 8 below 500
        (1024, 3, 1, 504, 3),  # of 8 and of 3
        (1024, 1, 2, 496, 5),  # 0.4857 * 512 = 248 rows at a time, 2 times
        (16, 1, 1, 8, 3),
    ],
)
def test_the_batch_that_would_fit(batch, num_replicas, parts, fitting, accumulation):
    said = say(PLAN, batch, num_replicas=num_replicas, parts=parts)
    assert f"out of memory with global_batch_size={batch}; use " in said
    assert f", or global_batch_size={fitting} or less (more updates of fewer rows; " in said
    assert (
        f"use accumulation_steps={accumulation} or more (the same result, except for batch norm; "
        "a step takes about 1.0" in said
    )
    assert "mixed_float16" not in said


def test_what_the_proposal_says_would_fit():
    rows = PLAN.fitting_rows(1024)
    fixed, activations = 10 * GIB, PLAN.activations * rows / 1024
    assert fixed + activations <= PLAN.limit - 0.05 * 70 * GIB
    assert PLAN.fitting_rows(1024, kept_gradients=True) < rows


def test_the_plan_reads_as_one_line():
    said = " ".join(say(PLAN, 1024, half_precision=False).split())
    assert said == (
        "out of memory with global_batch_size=1024; use accumulation_steps=3 or more (the same "
        "result, except for batch norm; a step takes about 1.02 times as long), or remat=68096 "
        "(the same result; a step takes about 1.25 times as long), or precision='mixed_float16' "
        "(activations of 16 bits; a step takes down to 0.50 of the time), or "
        "global_batch_size=512 or less (more updates of fewer rows; the same time for each row); "
        "`tfaccel autobatch` finds the largest batch that fits, or, with --keep-batch, the "
        "cheapest way to keep this batch, and its price. Estimated: parameters 2,048, optimizer "
        "4,096, gradients 2,048, activations 136,192, DALI, CUDA and others 2,048 of 81,920 MiB "
        "on each replica"
    )


def test_what_is_not_known_is_not_said():
    said = say(Plan(GIB, 0, 0), 64, trains=False)
    assert "use a smaller batch; " in said
    assert said.endswith(
        "Estimated: parameters 1,024, optimizer 0, gradients 0 MiB on each replica"
    )
    said = say(Plan(GIB, 0, GIB), None)
    assert said.startswith("out of memory; use accumulation_steps=2 or more (the same")


def test_what_failed_is_never_proposed():
    roomy = Plan(0, 0, 0, activations=GIB, limit=80 * GIB)
    said = say(roomy, 64)
    assert "use accumulation_steps=2 or more" in said
    assert "or global_batch_size=56 or less" in said


def test_a_model_that_fits_with_no_batch():
    said = say(Plan(79 * GIB, 0, 0, activations=GIB * 8000, limit=80 * GIB), 64)
    assert "use a smaller model or smaller images (even a batch of 8 may not fit); " in said


def test_what_is_computed_again_already_is_not_proposed():
    plan = Plan(0, 0, 0, activations=100 * GIB, limit=80 * GIB)
    assert "remat=77824 (the same result; a step takes about 1.12 times" in say(plan, 1024)
    assert "remat" not in say(plan, 1024, remat="blocks")
    assert "remat" not in say(plan, 1024, trains=False)  # `evaluate` keeps no activations


def make():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1000)])


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_variables_are_counted_in_bytes_on_one_replica(num_replicas):
    model = compiled(make, num_replicas, optimizer="adam", loss="mse")
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    plan = read_plan(model, "", trains=True)
    weights = 4 * 9000
    assert plan.gradients == weights
    assert 0 <= plan.parameters - weights < 100  # metrics have a few
    assert 0 <= plan.optimizer - 2 * weights < 100  # Adam's two moments
    assert (plan.activations, plan.others, plan.limit) == (None, None, None)  # the CPU tells none
    assert read_plan(model, "", trains=False).gradients == 0


@pytest.mark.parametrize(
    ("optimizer", "shards", "held", "saved"),
    [
        ("adam", False, 72_000, 36_000),  # two thirds of the moments, less a third of the weights
        # Of two moments and the weights: slices of 8,000 and 1,000 values.
        ("adam", True, 3 * 4 * (11 * 256 + 334), 0),
        (keras.optimizers.Lamb, False, 72_000, 0),  # it needs whole weights
        ("sgd", False, 0, 0),
    ],
)
def test_sharded_states_are_counted(optimizer, shards, held, saved):
    config = StepConfig(shard_states=shards)
    model = compiled(make, 3, optimizer=optimizer, loss="mse", config=config)
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    plan = read_plan(model, "", trains=True)
    assert 0 <= plan.optimizer - held < 100
    assert 0 <= saved_by_slices(model, plan) - saved < 100
    situation = situation_of(model, config, plan, global_batch_size=24)
    assert situation.packs_states == (optimizer != "sgd")
    assert 0 <= situation.saved_by_slices - saved < 100


class Greedy(keras.layers.Layer):
    """Asks TensorFlow for 16 TiB."""

    def call(self, inputs):
        seed = tf.cast(inputs[0, :2], tf.int32)
        return inputs + tf.sort(tf.random.stateless_uniform((2**36, 2**6), seed))[0, :8]


def make_greedy():
    return keras.Sequential([keras.Input((8,)), Greedy()])


@pytest.mark.slow  # TensorFlow waits for 10 s before it gives up
def test_tensorflows_own_error_is_explained():
    model = compiled(make_greedy, 1, optimizer="sgd", loss="mse")
    x = np.ones((64, 8), np.float32)
    with pytest.raises(OutOfMemoryError, match="with global_batch_size=16; use a ") as caught:
        explained(model.evaluate, model, StepConfig())(x, x, batch_size=16, verbose=0)
    assert isinstance(caught.value, RunError)
    assert isinstance(caught.value.__cause__, tf.errors.ResourceExhaustedError)


FULL = "{{node step}} Out of memory while trying to allocate 64.00TiB. [Op:__inference_step_70]"
PIPELINE = "pipeline failed: operator decoder: Can't allocate 4096 bytes on device 0."


@pytest.mark.parametrize(
    "error", [tf.errors.ResourceExhaustedError(None, None, FULL), UserError(PIPELINE)]
)
@pytest.mark.parametrize("trains", [True, False])
def test_every_method_and_error_is_explained(trains, error):
    def fit(x=None, y=None, batch_size=None, epochs=1):
        raise error

    def predict(x, batch_size=None):
        raise error

    class Loader:
        global_batch_size = 24

    model = compiled(make, 1, optimizer="sgd", loss="mse")
    call = explained(fit if trains else predict, model, StepConfig(accumulation_steps=2))
    for arguments, size in (
        ({"x": Loader()}, " with global_batch_size=24; "),
        ({"x": np.ones((64, 8)), "batch_size": 16}, " with global_batch_size=16; "),
        ({"x": {"a": np.ones((64, 8))}}, " with global_batch_size=32; "),  # Keras's own
        ({"x": np.ones((7, 8))}, " with global_batch_size=7; "),
        ({"x": iter(())}, "out of memory; "),
    ):
        with pytest.raises(OutOfMemoryError, match=size) as caught:
            call(**arguments)
        assert ("accumulation_steps=4" in str(caught.value)) == trains
        assert "mixed_float16" in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "is_explained"),
    [
        (Plan(GIB, GIB, GIB, activations=73 * GIB, others=GIB, limit=80 * GIB), True),
        (Plan(GIB, GIB, GIB, activations=60 * GIB, others=GIB, limit=80 * GIB), False),
        (Plan(GIB, GIB, GIB), False),  # of the CPU
    ],
)
@pytest.mark.parametrize(
    "text",
    ["cuDNN launch failure : input shape ([64,8])", "aborted by: NCCL: unhandled cuda error"],
)
def test_an_error_that_names_no_cause_is_explained_if_memory_was_full(
    text, plan, is_explained, monkeypatch
):
    def fit(x):
        raise tf.errors.InternalError(None, None, text)

    monkeypatch.setattr(memory_errors, "read_plan", lambda model, text, trains: plan)
    model = compiled(make, 1, optimizer="sgd", loss="mse")
    expected = OutOfMemoryError if is_explained else tf.errors.InternalError
    with pytest.raises(expected) as caught:
        explained(fit, model, StepConfig())(np.ones((64, 8)))
    # So that another process, which knows the text alone, takes it for what it is.
    assert is_out_of_memory(str(caught.value)) == is_explained


def test_what_a_method_within_it_explained_stays():
    own = OutOfMemoryError("out of memory with global_batch_size=8; use a smaller batch")

    def fit(x):
        raise own

    model = compiled(make, 1, optimizer="sgd", loss="mse")
    with pytest.raises(OutOfMemoryError) as caught:
        explained(fit, model, StepConfig())(np.ones((64, 8)))
    assert caught.value is own


def test_a_batch_that_is_given_whole_is_known():
    def train_on_batch(x, y=None):
        raise tf.errors.ResourceExhaustedError(None, None, FULL)

    model = compiled(make, 1, optimizer="sgd", loss="mse")
    with pytest.raises(OutOfMemoryError, match=r"global_batch_size=48; use .*accumulation_steps=2"):
        explained(train_on_batch, model, StepConfig())(np.ones((48, 8)))


def test_other_errors_pass_as_they_are():
    class Wrong(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise ZeroDivisionError("mine")

    model = compiled(make, 1, optimizer="sgd", loss="mse")
    with pytest.raises(ZeroDivisionError, match=re.escape("mine")):
        explained(model.fit, model, StepConfig())(
            np.ones((8, 8)), np.ones((8, 1000)), callbacks=[Wrong()], verbose=0
        )
