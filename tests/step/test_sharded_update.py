"""Sharded optimizer states give the weights of whole ones, on two and three CPU replicas.

The limit is that of `tfaccel selftest` for float32, relative to the largest change of a weight.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of
from keras import layers, optimizers

from tfaccel import UserError
from tfaccel.config import StepConfig
from tfaccel.diagnostics.selftest import SMALL
from tfaccel.keras_internals.one_replica import as_replica
from tfaccel.keras_internals.optimizers import scale_rate
from tfaccel.keras_internals.replica import local_replicas
from tfaccel.keras_internals.sharded_states import is_sharded, num_bytes_held
from tfaccel.keras_internals.variables import components
from tfaccel.step import compile_model
from tfaccel.step.sharded_update import ShardedWatch

LIMIT = SMALL["float32"]
NUM_STEPS = 20
RNG = np.random.default_rng(0)
SHAPES = [(5, 7), (7,), (7, 3), (3,)]  # of the weights of `small`
GRADIENTS = [[RNG.normal(size=each).astype("float32") for each in SHAPES] for _ in range(NUM_STEPS)]
SHARDED = StepConfig(shard_states=True, audit_steps=0)


def small():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(7, activation="tanh", name="first"),  # 35 values, for 2 and 3 replicas
            layers.Dense(3, dtype="float32", name="last"),
        ],
        name="small",
    )


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def values(variables):
    return [each.numpy() for each in variables]


def largest(ones, others):
    return max(np.abs(one - other).max() for one, other in zip(ones, others, strict=True))


def check_alike(model, ends, start):
    change = largest(ends, start)
    assert change > 0.01
    assert largest(values(model.trainable_variables), ends) < LIMIT * change
    for each in model.trainable_variables:  # the same on all replicas, bit for bit
        first, *others = [own.numpy() for own in components(each)]
        assert all(np.array_equal(first, other) for other in others)


# Updates by given gradients, against stock Keras without a strategy.

MAIN = {
    "momentum, clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
    "loss scale, decay": lambda: optimizers.LossScaleOptimizer(
        optimizers.AdamW(0.02, weight_decay=0.1, global_clipnorm=1e-4),
        dynamic_growth_steps=7,
    ),
}
OTHERS = {
    "accumulation": lambda: optimizers.Adamax(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.7
    ),
    "Adam": lambda: optimizers.Adam(0.02, amsgrad=True, global_clipnorm=1.0),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True, clipvalue=0.5),
    "averages": lambda: optimizers.Adagrad(0.1, use_ema=True, ema_overwrite_frequency=3),
    "Adadelta": lambda: optimizers.Adadelta(3.0),
    "fixed scale": lambda: optimizers.Nadam(0.01, loss_scale_factor=64.0, clipnorm=0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lion": lambda: optimizers.Lion(0.01),
}


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in MAIN.items()),
        *(pytest.param(make, id=name, marks=pytest.mark.slow) for name, make in OTHERS.items()),
    ],
)
def test_an_update_is_that_of_stock_keras(make):
    model = compiled(small, 3, optimizer=make, xla=False, loss=loss(), config=SHARDED)
    theirs, own = small(), make()
    start = values(theirs.trainable_variables)
    exclude(own)
    exclude(model.optimizer)
    with strategy_of(3).scope():
        model.optimizer.build(model.trainable_variables)
    update = updating(model)
    for each in GRADIENTS:
        update([tf.constant(one) for one in each])
        own.apply([tf.constant(one) for one in each], theirs.trainable_variables)
    check_alike(model, values(theirs.trainable_variables), start)
    for one, other in zip(model.optimizer.variables, own.variables, strict=True):
        assert one.path.rpartition("/")[2] == other.path.rpartition("/")[2] or not one.shape.rank
        assert one.shape == other.shape
        assert is_sharded(one) == (one.shape.rank > 0)
        size = max(1e-6, np.abs(other.numpy()).max())
        assert np.abs(one.numpy() - other.numpy()).max() <= LIMIT * size, one.path


def exclude(optimizer):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner.exclude_from_weight_decay(var_names=["bias"])


def updating(model):
    """A function of gradients that all replicas have in common."""
    replicas = local_replicas(model.distribute_strategy)

    def update(gradients):
        for replica in replicas:
            with tf.device(replica.device), as_replica(model, replica):
                watch = ShardedWatch(model, replica, replica, xla=False)
                watch.apply(model.optimizer, gradients, model.trainable_variables)

    return tf.function(update, autograph=False)


def test_an_update_in_a_branch_is_refused():
    model = compiled(small, 2, optimizer="sgd", xla=False, loss=loss(), config=SHARDED)
    replica = local_replicas(model.distribute_strategy)[0]

    @tf.function(autograph=False)
    def update(gradients):
        with as_replica(model, replica):
            watch = ShardedWatch(model, replica, replica, xla=False)
            apply = lambda: watch.apply(model.optimizer, gradients, model.trainable_variables)  # noqa: E731
            tf.cond(gradients[0][0, 0] > 0, apply, lambda: None)

    with pytest.raises(UserError, match=r"applies gradients within a tf\.cond, .*; apply them out"):
        update([tf.constant(one) for one in GRADIENTS[0]])


# Whole training, against the same step with whole states.

X = RNG.normal(size=(60, 5)).astype("float32")
Y = (X.sum(1) * 10).astype(int) % 3
FIT = {"batch_size": 12, "shuffle": False, "verbose": 0}


def of_many_kinds():
    """Layers with moving statistics, without training, and with a constraint."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, trainable=False),
            layers.BatchNormalization(momentum=0.8),
            layers.Dense(7, activation="tanh", kernel_constraint=keras.constraints.UnitNorm()),
            layers.Dense(3, dtype="float32"),
        ]
    )


def own_step():
    """A step of the user's own that reads the new weights behind its update."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x))
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    keras.utils.set_random_seed(0)
    return Model([keras.Input((5,)), layers.Dense(7, "tanh"), layers.Dense(3)])


def adamw(**settings):
    return optimizers.AdamW(0.01, weight_decay=0.1, **settings)


def trained(
    make, num_replicas, optimizer, *, rows=60, xla=False, eagerly=False, epochs=4, **config
):
    settings = {"xla": xla, "config": StepConfig(audit_steps=3, **config), "loss": loss()}
    model = compiled(make, num_replicas, optimizer=optimizer, run_eagerly=eagerly, **settings)
    start = values(model.trainable_variables)
    history = model.fit(X[:rows], Y[:rows], epochs=epochs, **FIT).history
    return model, start, history


def both(make, num_replicas, optimizer, **settings):
    plain, start, history = trained(make, num_replicas, optimizer, **settings)
    model, _, own = trained(make, num_replicas, optimizer, shard_states=True, **settings)
    check_alike(model, values(plain.trainable_variables), start)
    np.testing.assert_allclose(own["loss"], history["loss"], rtol=LIMIT)
    wanted = [each.numpy() for each in plain.non_trainable_variables]
    assert not wanted or largest(values(model.non_trainable_variables), wanted) < LIMIT
    return model, plain


def test_a_fit():
    clipped = functools.partial(adamw, global_clipnorm=0.3)
    model, plain = both(of_many_kinds, 2, clipped)
    slots = [each for each in model.optimizer.variables if each.shape.rank]
    held = [components(each)[0].shape.num_elements() for each in slots]
    whole = [components(each)[0].shape.num_elements() for each in plain.optimizer.variables]
    assert held == [-(-each // 2) for each in whole if each > 1]
    assert num_bytes_held(model.optimizer.variables) < sum(whole) * 4 / 2 + 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "num_replicas", "settings"),
    [
        (of_many_kinds, 2, {"xla": True, "remat": "blocks"}),
        (of_many_kinds, 2, {"eagerly": True, "epochs": 2}),
        (of_many_kinds, 2, {"sync_batchnorm": True}),
        (of_many_kinds, 3, {"accumulation_steps": 2, "rows": 56, "allreduce_dtype": "float16"}),
        (own_step, 2, {}),
        (own_step, 2, {"eagerly": True, "epochs": 2}),
        (own_step, 2, {"accumulation_steps": 2}),
    ],
)
def test_other_fits(make, num_replicas, settings):
    both(make, num_replicas, functools.partial(adamw, clipnorm=0.3), **settings)


@pytest.mark.slow
def test_all_replicas_skip_a_bad_gradient_that_one_of_them_finds_and_name_the_same_layer():
    x = X.copy()
    x[12 + 6 : 24, :] = np.inf  # rows of the second replica in the second step
    codes, ends = [], []
    for config in (StepConfig(nonfinite="skip"), StepConfig(nonfinite="skip", shard_states=True)):
        model = compiled(small, 2, optimizer=adamw(), xla=False, loss=loss(), config=config)
        model.train_function.kept = found = []
        model.fit(x, Y, epochs=2, **FIT)
        codes.append(np.concatenate([np.ravel(each) for each in found]).tolist())
        ends.append(values(model.trainable_variables))
        assert int(model.optimizer.iterations.numpy()) == 8
        assert all(np.isfinite(each.numpy()).all() for each in model.optimizer.variables)
    assert codes[0] == codes[1]
    assert [index for index, each in enumerate(codes[0]) if each] == [1, 6]
    assert largest(*ends) < LIMIT * 0.1


@pytest.mark.slow
@pytest.mark.parametrize("xla", [False, True])
def test_float16_skips_together_and_two_rates_stay_two(xla):
    def two_rates(model):
        optimizer = optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3)
        scale_rate(optimizer, model.layers[0].trainable_variables, 0.1)
        return optimizer

    keras.config.set_dtype_policy("mixed_float16")
    found = []
    try:
        for shards in (False, True):
            config = StepConfig(shard_states=shards, loss_scale_initial=2.0**22)
            strategy = strategy_of(2)
            with strategy.scope():
                model = small()
            start = values(model.trainable_variables)
            settings = {"optimizer": two_rates(model), "loss": loss()}
            compile_model(model, strategy, config, xla=xla, **settings)
            history = model.fit(X, Y, epochs=4, **FIT).history
            found.append((values(model.trainable_variables), history["skipped_steps"][0]))
            scales = [each.numpy() for each in components(model.optimizer.dynamic_scale)]
            assert scales[0] == scales[1] < 2.0**22
    finally:
        keras.config.set_dtype_policy("float32")
    (plain, skipped), (ours, also_skipped) = found
    assert skipped == also_skipped > 0
    assert largest(ours, plain) < SMALL["mixed_float16"] * largest(plain, start)
    first, last = (np.abs(plain[index] - start[index]).max() for index in (0, 2))
    assert first < 0.5 * last
