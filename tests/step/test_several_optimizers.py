"""A `compile` and a `train_step` of the model's own, with an optimizer for each of two networks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

import tfaccel
from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.training.callbacks.finite import NonFiniteError

X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
LOSS = {"loss_fn": keras.losses.BinaryCrossentropy(from_logits=True)}


class Gan(keras.Model):
    """As in Keras's tutorial: no `call`; its noise is made of the data, so as to be the same."""

    def __init__(self):
        super().__init__()
        ones = keras.initializers.Constant(0.3)
        self.disc = keras.Sequential([layers.Dense(1, kernel_initializer=ones)])
        self.gen = keras.Sequential([layers.Dense(4, kernel_initializer=ones)])
        self.times = 1

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def train_step(self, data):
        real, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        rows, noise = tf.shape(real)[0], real[:, :2]
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], 0)
        for _ in range(self.times):
            both = tf.concat([self.gen(noise), real], 0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.disc(both))
            self._apply(self.d_optimizer, tape, d_loss, self.disc)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((rows, 1)), self.disc(self.gen(noise)))
        self._apply(self.g_optimizer, tape, g_loss, self.gen)
        self.d_loss.update_state(d_loss, sample_weight=rows)
        self.g_loss.update_state(g_loss, sample_weight=rows)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def _apply(self, optimizer, tape, loss, network):
        weights = network.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class CriticFirst(Gan):
    """As in the tutorial of WGAN: the critic takes several steps, and its weights are cut."""

    def __init__(self):
        super().__init__()
        self.times = 2

    def _apply(self, optimizer, tape, loss, network):
        super()._apply(optimizer, tape, loss, network)
        if network is self.disc:
            for each in network.trainable_weights:
                each.assign(tf.clip_by_value(each, -0.25, 0.25))


def _optimizers():
    return keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.5)


def _weights(model):
    return [*model.disc.get_weights(), *model.gen.get_weights()]


# Of two replicas one has 3 rows and one 2.
SETTINGS = {"batch_size": 5, "shuffle": False, "verbose": 0}


def _stepped(model, x=X):
    """Its logs after each step of one epoch, which take less than `fit`."""
    return [model.train_on_batch(x[start : start + 5], return_dict=True) for start in (0, 5)]


def _stock(kind):
    """As Keras trains it, without XLA."""
    model = kind()
    model.compile(*_optimizers(), **LOSS)
    model.jit_compile = False
    return model


@pytest.mark.parametrize(
    ("num_replicas", "kind"),
    [
        pytest.param(1, Gan, marks=pytest.mark.slow),
        pytest.param(1, CriticFirst, marks=pytest.mark.slow),
        pytest.param(2, Gan, marks=pytest.mark.slow),
        (2, CriticFirst),
    ],
)
def test_two_optimizers_train_as_with_stock_keras(kind, num_replicas):
    stock = _stock(kind)
    wanted = _stepped(stock)
    discriminates, generates = _optimizers()
    model = compiled(
        kind,
        num_replicas,
        optimizer=None,  # which this `compile` does not know
        d_optimizer=discriminates,
        g_optimizer=generates,
        **LOSS,
        xla=False,
    )
    for logs, expected in zip(_stepped(model), wanted, strict=True):
        assert logs.keys() == expected.keys() == {"d_loss", "g_loss"}
        for name, value in expected.items():
            np.testing.assert_allclose(logs[name], value, rtol=1e-4)
    for own, each in zip(_weights(model), _weights(stock), strict=True):
        np.testing.assert_allclose(own, each, rtol=1e-3, atol=1e-5)
    assert int(discriminates.iterations) == (2 if kind is Gan else 4)


def test_a_step_is_not_traced_again_for_what_it_does_not_make():
    class Counted(Gan):
        num_traces = 0

        def train_step(self, data):
            Counted.num_traces += 1
            return super().train_step(data)

    one, other = _optimizers()
    settings = {"optimizer": None, "d_optimizer": one, "g_optimizer": other, "xla": False}
    model = compiled(Counted, 1, **settings, **LOSS)
    _stepped(model)
    assert not model.optimizer.built  # Keras's default one, which the step does not use
    before = Counted.num_traces
    _stepped(model)
    assert Counted.num_traces == before > 0


def test_two_optimizers_train_with_xla_by_position(setup):
    run = setup()
    with run.scope():
        model = Gan()
    run.compile(model, *_optimizers(), **LOSS)
    wanted = _stock(Gan).fit(X, **SETTINGS).history["g_loss"]
    np.testing.assert_allclose(model.fit(X, **SETTINGS).history["g_loss"], wanted, rtol=1e-4)


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_one_of_two_optimizers_finds_not_finite_is_not_applied(num_replicas):
    one, other = _optimizers()
    settings = {"optimizer": None, "d_optimizer": one, "g_optimizer": other, "xla": False}
    model = compiled(Gan, num_replicas, **settings, **LOSS)
    x = X.copy()
    x[5, 3] = np.nan  # which the discriminator alone sees
    with pytest.raises(NonFiniteError, match="step 2"):
        _stepped(model, x)
    assert all(np.isfinite(each).all() for each in _weights(model))


class Rows:
    """The rows, one by one."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return X[index]


def test_a_run_of_two_optimizers_is_resumed_with_the_state_of_both(setup, tmp_path):
    def train(folder, *epochs):
        for num_epochs in epochs:
            run = setup(xla=False)
            with run.scope():
                model = Gan()
            run.compile(model, *_optimizers(), **LOSS)
            saved = run.checkpoints(folder, monitor="g_loss")
            loader = run.examples(Rows(), global_batch_size=4)
            model.fit(loader, epochs=num_epochs, callbacks=[saved], verbose=0)
        return _weights(model)

    whole, resumed = train(tmp_path / "whole", 2), train(tmp_path / "resumed", 1, 2)
    for own, wanted in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_what_a_compile_does_not_take_is_refused_in_a_sentence(setup):
    run = setup(xla=False)
    with run.scope():
        model = Gan()
    with pytest.raises(tfaccel.UserError, match=r"'other'; compile of Gan takes \(d_optimizer"):
        run.compile(model, *_optimizers(), other=1, **LOSS)


class Forgets(Gan):
    """Whose `compile` does not reach Keras's."""

    def compile(self, d_optimizer):
        self.d_optimizer = d_optimizer


def test_a_compile_that_does_not_reach_keras_is_refused(setup):
    run = setup(xla=False)
    with run.scope():
        model = Forgets()
    with pytest.raises(tfaccel.UserError, match=r"does not call super\(\)\.compile"):
        run.compile(model, keras.optimizers.SGD())


class Autoencoder(keras.Model):
    """As the tutorial's VAE: no `call`, steps of its own, and layers that are built by them."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(2, kernel_initializer="ones")])
        self.decoder = keras.Sequential([layers.Dense(4, kernel_initializer="ones")])
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def _loss(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = tf.reduce_mean(tf.square(x - self.decoder(self.encoder(x))))
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return loss

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self._loss(data)
        return {"loss": self.tracker.result()}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.encoder(x)


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_model_without_call_trains_evaluates_and_predicts_in_any_order(num_replicas):
    stock = Autoencoder()
    stock.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    once = {"batch_size": SETTINGS["batch_size"], "verbose": 0}
    fit = {**SETTINGS, "validation_data": (X,)}
    wanted = [stock.predict(X, **once), stock.evaluate(X, **once), stock.fit(X, **fit)]
    model = compiled(Autoencoder, num_replicas, optimizer=keras.optimizers.SGD(0.01), xla=False)
    got = [model.predict(X, **once), model.evaluate(X, **once), model.fit(X, **fit)]
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-5)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(got[2].history[name], wanted[2].history[name], rtol=1e-4)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_each_optimizer_has_a_loss_scale_in_float16(policy):
    optimizers = dict(zip(("d_optimizer", "g_optimizer"), _optimizers(), strict=True))
    keras.config.set_dtype_policy(policy)
    try:
        model = compiled(Gan, 1, optimizer=None, xla=False, **optimizers, **LOSS)
    finally:
        keras.config.set_dtype_policy("float32")
    for name, each in optimizers.items():
        own = getattr(model, name)
        if policy == "mixed_float16":
            assert isinstance(own, keras.optimizers.LossScaleOptimizer)
            own = own.inner_optimizer
        assert own is each


class BuildsIt(keras.Sequential):
    """Its optimizer has variables for all weights before a step applies it to some of them."""

    def compile(self, optimizer, **kwargs):
        optimizer.build(self.trainable_variables)
        super().compile(optimizer=optimizer, **kwargs)


def test_the_models_own_compile_may_build_the_optimizer():
    # The optimizer is made outside the scope, and was moved into it only after `compile`.
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = compiled(
        lambda: BuildsIt([keras.Input((4,)), layers.Dense(1)]), 2, optimizer=optimizer, loss="mse"
    )
    assert model.optimizer is optimizer
    assert optimizer.built


# Updates outside of a step of one's own.


class Pulled(keras.Model):
    """Applies gradients of its own in its loss, before Keras's `train_step` applies the others."""

    def __init__(self, pulls=None):
        super().__init__()
        self.dense = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        self.pulls, self.built = pulls, True

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, *args, training=True, **kwargs):
        if training:
            pulls, weights = self.pulls or self.optimizer, self.trainable_variables
            pulls.apply_gradients([(0.1 * each, each) for each in weights])
        return super().compute_loss(*args, training=training, **kwargs)


class PulledInStep(Pulled):
    def train_step(self, data):
        return super().train_step(data)


OF_REPLICAS_AND_PARTS = [(2, 1), *(pytest.param(*n, marks=pytest.mark.slow) for n in [(1, 2)])]


def fitted(model):
    for index, each in enumerate(model.trainable_variables):
        each.assign(np.random.default_rng(index).normal(size=each.shape))
    model.fit(X, X[:, :1], **SETTINGS)
    return model.get_weights()


@pytest.mark.parametrize("kind", [Pulled, PulledInStep])
@pytest.mark.parametrize(("num_replicas", "parts"), OF_REPLICAS_AND_PARTS)
def test_a_step_may_apply_gradients_twice(kind, num_replicas, parts):
    stock = kind()
    stock.compile(keras.optimizers.SGD(0.1), loss="mse")
    settings = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "xla": False}
    config = StepConfig(accumulation_steps=parts)
    ours = compiled(kind, num_replicas, config=config, **settings)
    for own, expected in zip(fitted(ours), fitted(stock), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def test_a_second_optimizer_needs_a_step_of_ones_own():
    settings = {"optimizer": lambda: keras.optimizers.SGD(0.1), "loss": "mse", "xla": False}
    second = lambda: keras.optimizers.SGD(0.1, name="second")  # noqa: E731
    with pytest.raises(UserError, match=r"the optimizer second, .*; use it in a train_step of"):
        fitted(compiled(lambda: Pulled(second()), 2, **settings))
    stock = PulledInStep(second())
    stock.compile(keras.optimizers.SGD(0.1), loss="mse")
    ours = compiled(lambda: PulledInStep(second()), 2, **settings)
    for own, expected in zip(fitted(ours), fitted(stock), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
