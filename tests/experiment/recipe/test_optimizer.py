"""Optimizers by name: which settings they take, and which weights they let decay."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

from tfaccel import UserError
from tfaccel.config import TrainConfig
from tfaccel.experiment.recipe import make_optimizer, make_schedule


def optimizer_of(**settings):
    train = TrainConfig(**settings)
    return make_optimizer(train, make_schedule(train, global_batch_size=64, num_steps=10))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AdamW", keras.optimizers.AdamW),
        ("adamw", keras.optimizers.AdamW),
        ("LAMB", keras.optimizers.Lamb),
        ("sgd", keras.optimizers.SGD),
        ("Muon", keras.optimizers.Muon),
    ],
)
def test_optimizers_by_name(name, kind):
    assert type(optimizer_of(optimizer=name)) is kind


def test_what_the_recipe_says_is_passed_on_and_the_rest_is_keras_own():
    sgd = optimizer_of(optimizer="sgd", momentum=1, nesterov=True, weight_decay=5e-3)
    assert (sgd.momentum, sgd.nesterov, sgd.weight_decay, sgd.use_ema) == (1.0, True, 5e-3, False)
    assert optimizer_of(optimizer="sgd", global_clipnorm=0.5).global_clipnorm == 0.5
    averaged = optimizer_of(optimizer="lamb", ema_momentum=0.999)
    assert (averaged.use_ema, averaged.ema_momentum) == (True, 0.999)
    own = keras.optimizers.AdamW().get_config() | {"learning_rate": pytest.approx(1e-3)}
    assert optimizer_of(optimizer="adamw").get_config() | {"name": own["name"]} == own
    muon = optimizer_of(optimizer="muon", weight_decay=0.0)
    assert (muon.weight_decay, muon.adam_weight_decay, muon.momentum) == (0, 0, 0.95)


# Settings, and words of the one sentence that says what is wrong.
WRONG = [
    ({"optimizer": "admw"}, "there is no optimizer 'admw'; did you mean 'adam"),
    ({"optimizer": "multioptimizer"}, "there is no optimizer 'multioptimizer'"),
    (
        {"optimizer": "adamw", "momentum": 0.9},
        "momentum=0.9, but adamw has no momentum; remove it, or use an optimizer that has it: "
        "muon, rmsprop, sgd",
    ),
    ({"optimizer": "rmsprop", "momentum": 0.9, "nesterov": True}, "nesterov=True, but rmsprop has"),
    ({"optimizer": "sgd", "nesterov": True}, "nesterov=True with momentum=None; set momentum"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG, ids=[each[1][:30] for each in WRONG])
def test_each_mistake_is_one_sentence(settings, words):
    with pytest.raises(UserError) as error:
        optimizer_of(**settings)
    assert words in str(error.value)


def test_a_constant_rate_is_a_number_that_can_be_changed():
    optimizer = optimizer_of(learning_rate=0.5, base_batch_size=32)
    assert float(optimizer.learning_rate) == 1.0  # 0.5 x 64/32
    optimizer.learning_rate = 0.25  # as ReduceLROnPlateau does
    assert float(optimizer.learning_rate) == 0.25
    scheduled = optimizer_of(learning_rate=0.5, epochs=2, decay="linear")
    assert float(scheduled.learning_rate) == 0.5
    with pytest.raises(TypeError, match="not settable"):
        scheduled.learning_rate = 0.25


class LearnedBias(layers.Layer):
    """A kernel of another name, in which one of ours occurs."""

    def build(self, shape):
        self.table = self.add_weight(shape=(shape[-1],), name="relative_bias_table")

    def call(self, x):
        return x + self.table


def many_layers():
    """Of several kinds, some of them called like a variable that does not decay."""
    tokens = keras.Input((4,), dtype="int32", name="tokens")
    x = layers.Embedding(5, 8, name="beta")(tokens)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = layers.LayerNormalization()(x)
    x = layers.RMSNormalization()(x)
    x = layers.GRU(16, name="gamma")(x)
    x = layers.Reshape((4, 4, 1))(x)
    x = layers.Conv2D(4, 3, padding="same", name="bias_conv")(x)
    x = layers.BatchNormalization(name="bias")(x)
    x = layers.DepthwiseConv2D(3)(x)
    x = layers.SeparableConv2D(4, 2)(x)
    x = layers.GroupNormalization(2)(x)
    x = LearnedBias()(layers.Flatten()(x))
    return keras.Model(tokens, layers.Dense(1, name="scale")(x))


NOT_DECAYED = {"bias", "gamma", "beta", "scale"}
DECAYED = {"kernel", "recurrent_kernel", "depthwise_kernel", "pointwise_kernel", "embeddings"}


@pytest.mark.parametrize(
    "policy", [pytest.param("float32", marks=pytest.mark.slow), "mixed_float16"]
)
@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kernels_and_embeddings_decay_and_nothing_else(num_replicas, policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = compiled(
            many_layers,
            num_replicas,
            optimizer=optimizer_of(optimizer="sgd", learning_rate=0.5, weight_decay=0.2),
            xla=False,
            loss=lambda y_true, y_pred: 0.0 * y_pred[:, 0],  # decay alone moves anything
        )
    finally:
        keras.config.set_dtype_policy("float32")
    before = {each.path: each.numpy() + 1.0 for each in model.trainable_variables}
    for each in model.trainable_variables:
        each.assign(before[each.path])
    model.train_on_batch(np.zeros((4, 4), np.int32), np.zeros((4, 1), np.float32))
    wraps = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert wraps == (policy == "mixed_float16")
    seen = {True: set(), False: set()}
    for each in model.trainable_variables:
        decays = each.name not in NOT_DECAYED
        seen[decays].add(each.name)
        factor = 0.9 if decays else 1.0
        for replica in each._value.values:
            np.testing.assert_allclose(replica, before[each.path] * factor, rtol=1e-6)
    assert seen == {True: DECAYED | {"relative_bias_table"}, False: NOT_DECAYED}


def test_sgds_weight_decay_is_what_the_config_says_of_it():
    # A weight without gradient: each step takes the part away, times the rate.
    sgd = optimizer_of(optimizer="sgd", learning_rate=0.1, momentum=0.9, weight_decay=1e-3)
    weight = keras.Variable(2.0, name="kernel")
    sgd.build([weight])
    step = tf.function(lambda: sgd.apply([tf.constant(0.0)]), autograph=False)
    for _ in range(500):
        step()
    assert float(weight) == pytest.approx(2 * (1 - 1e-4) ** 500, rel=1e-5)
    # PyTorch's 1e-4: added to the gradient, so that momentum 0.9 makes ten of it.
    theirs, velocity = 2.0, 0.0
    for _ in range(500):
        velocity = 0.9 * velocity + 1e-4 * theirs
        theirs -= 0.1 * velocity
    assert 2 - theirs == pytest.approx(2 - float(weight), rel=0.03)  # it takes ten steps to start
