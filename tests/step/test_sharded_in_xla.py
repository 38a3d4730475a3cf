"""The program that XLA makes of a step with sharded states, in which XLA sums and gathers.

XLA of TensorFlow 2.21 runs no collective on the CPU, but it makes and optimizes the program of one
replica.
"""

import functools
import re

import keras
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers, optimizers

from tfaccel.config import StepConfig
from tfaccel.keras_internals import replica as replica_lib
from tfaccel.keras_internals import xla_scatter
from tfaccel.step import replica_steps, totals
from tfaccel.step.remat.choose import Remat


def program(stage, num_replicas, *, clipnorm):
    """XLA's text of the step of the last replica, with weights of 35, 7 and 21 values."""
    make = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((5,)), layers.Dense(7, "tanh"), layers.Dense(3, use_bias=False)]
    )
    adamw = optimizers.AdamW(0.01, global_clipnorm=clipnorm)
    settings = {"config": StepConfig(shard_states=True), "loss": "mse", "optimizer": adamw}
    model = compiled(make, num_replicas, **settings)
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    replica = replica_lib.local_replicas(model.distribute_strategy)[-1].like(reduces_in_xla=True)
    weigh = functools.partial(totals.weight_of, padding=False)
    how = {"parts": 1, "xla": True, "remat": Remat(model, None)}
    pass_ = functools.partial(totals.make_totals, model, model.train_step, weigh=weigh, **how)
    settings = {"gradients_as": None, "make_batch": None, "xla": True, "updates_in_xla": True}
    settings |= {"trains": True, "within": False, "shards": True}
    step = replica_steps.replica_step(model, pass_, replica, **settings)
    with tf.device(replica.device):
        batch = tf.zeros([4, 5]), tf.zeros([4, 3])
        model.compute_loss(batch[0], batch[1], batch[1])  # makes its metrics
        return step.experimental_get_compiler_ir(batch, None)(stage=stage)


def collectives(text):
    """The kind and the size of each collective, in order: ("all-reduce", 24)."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* (all-reduce|reduce-scatter|all-gather)\(", text)
    sizes = ([int(each) for each in shape.split(",") if each] for shape, _ in found)
    return [
        (kind, functools.reduce(int.__mul__, size, 1))
        for (_, kind), size in zip(found, sizes, strict=True)
    ]


@pytest.mark.parametrize("clipnorm", [pytest.param(None, marks=pytest.mark.slow), 0.1])
def test_sums_and_slices_stand_in_for_what_is_not_measured(clipnorm):
    found = collectives(program("hlo", 2, clipnorm=clipnorm))
    # 18 + 4 + 11 values for each of two replicas, sent as 66 values and a number that keeps the
    # order; what the metrics add, and in which step all skip; the new weights.
    assert [kind for kind, _ in found] == ["all-reduce"] * len(found)
    sizes = sorted(size for _, size in found)
    assert sizes[-2:] == [66, 67]
    assert (3 if clipnorm is None else 4) in sizes


@pytest.mark.parametrize("stage", ["hlo", pytest.param("optimized_hlo", marks=pytest.mark.slow)])
def test_xla_scatters_and_gathers(monkeypatch, stage):
    monkeypatch.setattr(replica_lib, "SCATTERS_IN_XLA", True)
    for name in ("reduce_scatter", "all_gather"):
        on_cpu = functools.partial(getattr(xla_scatter, name), platform="CPU")
        monkeypatch.setattr(xla_scatter, name, on_cpu)
    text = program(stage, 2, clipnorm=None)
    found = collectives(text)
    assert ("reduce-scatter", 33) in found or ("reduce-scatter", 34) in found
    assert ("all-gather", 2 * 34) in found
    assert all(size < 33 for kind, size in found if kind == "all-reduce")
    assert text.count("replica_groups={{0,1}}") == len(found)
