"""The compiled step against stock Keras without a strategy, on the same data."""

import contextlib
import functools
import pathlib
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers

import tfaccel
from tfaccel import UserError
from tfaccel.config import StepConfig
from tfaccel.keras_internals import traced
from tfaccel.step import functions, in_xla

RNG = np.random.default_rng(0)
X = RNG.random((40, 8, 8, 1), dtype=np.float32)
Y = (X.mean((1, 2, 3)) * 1000).astype(np.int32) % 3


def build(dropout=0.2):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            # A bias here would have a gradient of pure rounding, which Adam makes large.
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(3, dtype="float32"),
        ]
    )


def without_dropout():
    return build(dropout=0.0)


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches(num_rows=32):
    """Batches of 16 rows; of all 40 rows the last batch has 8."""
    return tf.data.Dataset.from_tensor_slices((X[:num_rows], Y[:num_rows])).batch(16)


# A partial last batch and a test are compiled for themselves, so most tests have neither.
UNEVEN = {"num_rows": 40, "tested": True}


def fitted(model, *, num_rows=32, tested=False, **fit):
    """The model, trained, and its history."""
    data = batches(num_rows)
    settings = {"validation_data": data if tested else None, "epochs": 2, "verbose": 0}
    return model, model.fit(data, **settings, **fit).history


@functools.cache
def trained_by_keras(optimizer, *, xla, make=build, precision="float32", **fit):
    """Stock Keras without a strategy. XLA draws other dropout masks: both use it, or neither."""
    keras.config.set_dtype_policy(precision)  # as `setup` has it
    model = make()
    # Without XLA it is not traced either: eagerly it gives the same, and sooner.
    own = {"jit_compile": True} if xla else {"run_eagerly": True}
    model.compile(OPTIMIZERS[optimizer](), loss(), metrics=["accuracy"], **own)
    return fitted(model, **fit)


def trained_here(run, optimizer, *, make=build, compile_args=None, **fit):
    with run.scope():
        model = make()
    optimizer = OPTIMIZERS[optimizer]()
    run.compile(model, optimizer, loss(), metrics=["accuracy"], **(compile_args or {}))
    return fitted(model, **fit)


def assert_same(ours, keras_own, *, rtol):
    (model, history), (reference, reference_history) = ours, keras_own
    assert list(history) == list(reference_history)
    for name in history:
        # One of the images may stand on the edge between two classes.
        atol = 1.5 / len(X) if "accuracy" in name else 0
        np.testing.assert_allclose(
            history[name], reference_history[name], rtol=rtol, atol=atol, err_msg=name
        )
    for weight, wanted in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(weight),
            keras.ops.convert_to_numpy(wanted),
            rtol=rtol,
            atol=rtol,
            err_msg=weight.path,
        )


def adamw():
    """All that AdamW has; what is set on it afterwards stays too."""
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=20)
    optimizer = keras.optimizers.AdamW(
        schedule, weight_decay=10.0, global_clipnorm=0.1, use_ema=True, ema_momentum=0.9
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "kernel"])
    return optimizer


CLIPPED_ADAMW = "adamw by a schedule, with clipping and EMA"
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    CLIPPED_ADAMW: adamw,
    "accumulation": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize(
    ("optimizer", "xla"),
    [
        pytest.param("sgd", False, marks=pytest.mark.slow),
        pytest.param("sgd", True, marks=pytest.mark.slow),
        pytest.param(CLIPPED_ADAMW, False, marks=pytest.mark.slow),
        (CLIPPED_ADAMW, True),
        ("accumulation", False),
        pytest.param("accumulation", True, marks=pytest.mark.slow),
    ],
)
def test_one_replica_trains_as_keras_does(setup, optimizer, xla):
    thorough = optimizer == "sgd"
    fit = UNEVEN if thorough else {"make": without_dropout}
    ours = trained_here(setup(xla=xla), optimizer, **fit)
    reference = trained_by_keras(optimizer, xla=xla and thorough, **fit)
    # 4 or 6 steps in float32: the order of sums is the same, up to how XLA fuses them.
    assert_same(ours, reference, rtol=1e-3)


@functools.cache
def stepped_in_parts(num_parts):
    """The weights after one step of ten rows, and how many of them the model saw at a time."""
    seen = set()

    class Dense(layers.Dense):
        def call(self, x):
            seen.add(x.shape[0])
            return super().call(x)

    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((64,)), Dense(3)])

    config = StepConfig(accumulation_steps=num_parts)
    model = compiled(make, 1, optimizer="sgd", xla=False, config=config, loss=loss())
    model.fit(X[:10].reshape(10, 64), Y[:10], batch_size=10, verbose=0)
    return model.get_weights(), seen - {None}


@pytest.mark.parametrize(("num_parts", "rows"), [(2, {5}), (4, {2, 3})])
def test_p14_a_step_in_parts_is_the_step_of_the_whole_batch(num_parts, rows):
    whole, _ = stepped_in_parts(1)
    ours, seen = stepped_in_parts(num_parts)
    # A layer of the user's is called, so a plan of the step may look at 10 and 20 rows.
    assert seen - {10, 20} == rows
    for weight, wanted in zip(ours, whole, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("precision", "xla"),
    [
        ("mixed_float16", False),
        pytest.param("mixed_float16", True, marks=pytest.mark.slow),
        pytest.param("mixed_bfloat16", False, marks=pytest.mark.slow),
        pytest.param("mixed_bfloat16", True, marks=pytest.mark.slow),
    ],
)
def test_mixed_precision_trains_as_keras_does(setup, precision, xla):
    fit = {"make": without_dropout, "tested": True}
    ours = trained_here(setup(precision=precision, xla=xla), "sgd", **fit)
    # One rounding of float16 is 1e-3 and of bfloat16 8e-3; 4 steps of them add up.
    rtol = {"mixed_float16": 2e-2, "mixed_bfloat16": 1e-1}[precision]
    reference = trained_by_keras("sgd", xla=False, precision=precision, **fit)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(ours[1][name], reference[1][name], rtol=rtol)


def small():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(3)])


def test_float16_overflow_skips_the_step_and_halves_the_scale(setup):
    run = setup(precision="mixed_float16")
    with run.scope():
        model = small()
    run.compile(model, keras.optimizers.SGD(0.1), loss())
    weights = [weight.numpy() for weight in model.trainable_weights]
    model.fit(X[:16] * np.float32(3e38), Y[:16], epochs=1, verbose=0)
    for weight, before in zip(model.trainable_weights, weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), before)
    assert keras.ops.convert_to_numpy(model.optimizer.dynamic_scale) == 2.0**14


@pytest.mark.parametrize("use", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("xla", [False, True])
def test_xla_compiles_each_step_when_asked(setup, xla, use, caplog):
    # XLA alone cannot compile operations on strings: one shows whether it was there.
    class Text(keras.layers.Layer):
        def call(self, x):
            return x + 0 * tf.strings.to_number(tf.strings.as_string(tf.reduce_sum(x)))

    run = setup(xla=xla)
    with run.scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), Text(), *small().layers])
    run.compile(model, "sgd", loss())
    data = (X[:16],) if use == "predict" else (X[:16], Y[:16])
    with caplog.at_level("INFO", logger="tfaccel"):
        getattr(model, use)(*data, batch_size=8, verbose=0)
    said = re.findall(
        r"does not support an operation of the step \((AsString|StringToNumber)", caplog.text
    )
    assert len(said) == (1 if xla else 0)


def test_the_kernels_of_an_operation_are_listed_once(monkeypatch):
    # TensorFlow takes 1.6 ms for each list: 5 s for the 6,326 nodes of a ResNet-50 step.
    listed, list_kernels = [], traced.kernels.get_registered_kernels_for_op

    def listing(operation):
        listed.append(operation)
        return list_kernels(operation)

    monkeypatch.setattr(traced.kernels, "get_registered_kernels_for_op", listing)
    in_xla._kernels_of.cache_clear()
    sums = in_xla.checked(lambda x: functools.reduce(tf.add, [x, x, x, x]), on_gpu=False)
    tf.function(sums, autograph=False).get_concrete_function(tf.constant(1.0))
    assert "AddV2" in listed
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_layer_that_says_so_trains_without_xla_and_that_is_said_once(num_replicas, caplog):
    """RandomRotation has supports_jit=False, wherever it is; so has an LSTM that cuDNN computes."""

    class Inside(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [layers.TimeDistributed(layers.RandomRotation(0.1))]

        def call(self, x):
            return self.parts[0](x[:, None])[:, 0]

    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((8, 8, 1)), Inside(), layers.Flatten(), layers.Dense(3)]
        )

    with caplog.at_level("INFO", logger="tfaccel"):
        model = compiled(make, num_replicas, optimizer="sgd", loss=loss(), xla=True)
        model.fit(X[:8], Y[:8], batch_size=4, validation_data=(X[:4], Y[:4]), verbose=0)
        model.predict(X[:4], verbose=0)
    assert caplog.text.count("(RandomRotation): supports_jit=False") == 1
    assert not model.train_function.xla
    assert not model.test_function.xla


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_text_in_the_model_trains_without_xla_as_stock_keras_does(num_replicas, caplog):
    texts, labels = tf.constant(["a b c", "b c d", "c d e", "a a b"]), np.array([0, 1, 0, 1])

    def make():
        keras.utils.set_random_seed(0)
        words = layers.TextVectorization(output_sequence_length=3, vocabulary=list("abcde"))
        first = [keras.Input((), dtype="string"), words, layers.Embedding(7, 4)]
        return keras.Sequential([*first, layers.Flatten(), layers.Dense(2)])

    cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    theirs = make()
    theirs.compile("sgd", cross)
    wanted = theirs.fit(texts, labels, shuffle=False, batch_size=4, epochs=2, verbose=0).history
    with caplog.at_level("INFO", logger="tfaccel"):
        ours = compiled(make, num_replicas, optimizer="sgd", loss=cross, xla=True)
        found = ours.fit(texts, labels, shuffle=False, batch_size=4, epochs=2, verbose=0).history
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        ours.predict(texts, verbose=0), theirs.predict(texts, verbose=0), rtol=1e-4
    )
    assert caplog.text.count("step: without XLA, because") == 1


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_layer_whose_shape_is_not_as_it_says_trains_as_in_keras(num_replicas):
    """TextVectorization says [rows, 1, words] here and gives [rows, words]; a Lambda may, too."""
    texts, labels = tf.constant([["a b"], ["b"], ["c"], ["a c"]]), np.array([0, 1, 1, 0])

    def make():
        keras.utils.set_random_seed(0)
        words = layers.TextVectorization(output_mode="multi_hot", vocabulary=list("abc"))
        return keras.Sequential([keras.Input((1,), dtype="string"), words, layers.Dense(2)])

    how = {"metrics": ["accuracy"], "optimizer": "sgd", "loss": loss()}
    theirs, ours = make(), compiled(make, num_replicas, **how)
    theirs.compile(**how)
    fit = {"x": texts, "y": labels, "shuffle": False, "batch_size": 4, "verbose": 0}
    wanted, found = theirs.fit(**fit).history, ours.fit(**fit).history
    for name, each in wanted.items():
        np.testing.assert_allclose(found[name], each, rtol=1e-5)


class OfRagged(keras.Model):
    """A mean of embeddings, of rows of any length."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(6, 3), layers.Dense(2)

    def call(self, x):
        each = tf.ragged.map_flat_values(self.embedding, x)
        return self.dense(tf.reduce_sum(each, 1))


class OfSparse(keras.Model):
    """A dense layer over sparse rows."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)


RAGGED = tf.ragged.constant([[1], [2, 3], [1, 2, 3], [4], []])
SPARSE = tf.sparse.from_dense([[1.0, 0, 2], [0, 0, 3], [1, 1, 0], [0, 5, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("kind", "x", "num_replicas"),
    [
        (OfRagged, RAGGED, 2),
        (OfSparse, SPARSE, 2),
        pytest.param(OfRagged, RAGGED, 1, marks=pytest.mark.slow),
        pytest.param(OfSparse, SPARSE, 1, marks=pytest.mark.slow),
    ],
)
def test_ragged_and_sparse_rows_train_as_in_keras(kind, x, num_replicas):
    """Of 5 rows the last batch has 1 (ragged), which leaves none for the second replica, or 2."""

    def make():
        keras.utils.set_random_seed(0)
        return kind()

    size = 4 if kind is OfRagged else 3
    data = tf.data.Dataset.from_tensor_slices((x, [0, 1, 1, 0, 1])).batch(size)
    how = {"optimizer": "sgd", "loss": loss()}
    theirs, ours = make(), compiled(make, num_replicas, xla=False, **how)
    theirs.compile(**how)
    wanted, found = (each.fit(data, verbose=0).history for each in (theirs, ours))
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    answers = [each.predict(data, verbose=0) for each in (theirs, ours)]
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-4, atol=1e-6)


def test_a_vocabulary_need_not_know_the_empty_string_that_could_stand_in():
    """Of 3 rows on two replicas the last batch has 1: the second replica has none."""
    words, labels = tf.constant([["a"], ["b"], ["a"]]), np.array([0, 1, 1])

    def make():
        keras.utils.set_random_seed(0)
        known = layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0, output_mode="one_hot")
        return keras.Sequential([keras.Input((1,), dtype="string"), known, layers.Dense(2)])

    how = {"optimizer": "sgd", "loss": loss()}
    theirs, ours = make(), compiled(make, 2, xla=False, **how)
    theirs.compile(**how)
    rows = {"batch_size": 2, "verbose": 0}
    found, wanted = (
        each.fit(words, labels, shuffle=False, **rows).history["loss"] for each in (ours, theirs)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    answers = [each.predict(words, **rows) for each in (ours, theirs)]
    np.testing.assert_allclose(*answers, rtol=1e-4, atol=1e-6)


def test_sparse_rows_that_cannot_be_cut_are_refused_in_a_sentence():
    data = tf.data.Dataset.from_tensor_slices((SPARSE, [0, 1, 1, 0, 1])).batch(4)
    ours = compiled(OfSparse, 2, optimizer="sgd", loss=loss(), xla=False)
    with pytest.raises(UserError, match="sparse tensors has fewer rows than there are replicas"):
        ours.fit(data, verbose=0)


def test_strings_beside_the_inputs_train_without_xla(caplog):
    """A batch with names that no layer takes, which ended the process."""
    data = tf.data.Dataset.from_tensor_slices(
        {"x": np.ones((4, 2), np.float32), "name": ["a", "b", "c", "d"]}
    ).map(lambda each: (each, each["x"]))

    class Takes(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, given):
            return self.dense(given["x"])

    with caplog.at_level("INFO", logger="tfaccel"):
        model = compiled(Takes, 1, optimizer="sgd", loss="mse", xla=True)
        model.fit(data.batch(2), verbose=0)
    assert caplog.text.count("a batch has strings, which XLA does not support") == 1


@pytest.mark.parametrize(
    ("num_replicas", "precision"),
    [
        pytest.param(1, "float32", marks=pytest.mark.slow),
        pytest.param(1, "mixed_float16", marks=pytest.mark.slow),
        pytest.param(2, "float32", marks=pytest.mark.slow),
        (2, "mixed_float16"),
    ],
)
def test_an_update_of_its_own_in_xla_is_the_same(num_replicas, precision, monkeypatch):
    """As on a GPU where the layers are not for XLA: the update alone is, embedding's slices too."""

    def make():
        keras.utils.set_random_seed(0)
        first = [keras.Input((3,), dtype="int32"), layers.Embedding(5, 4)]
        return keras.Sequential([*first, layers.Flatten(), layers.Dense(3, dtype="float32")])

    x, y = np.arange(24).reshape(8, 3) % 5, np.arange(8) % 3
    trained = []
    before = keras.config.dtype_policy()
    monkeypatch.setattr(in_xla, "of_layers", lambda _: "this test says so")
    for on_gpu in (False, True):
        monkeypatch.setattr(functions._Step, "updates_on_gpu", on_gpu)
        keras.config.set_dtype_policy(precision)
        try:
            model = compiled(make, num_replicas, optimizer="adamw", loss=loss(), xla=True)
        finally:
            keras.config.set_dtype_policy(before)
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        trained.append([each.numpy() for each in model.trainable_variables])
    for found, wanted in zip(*reversed(trained), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("read_on_devices")
def test_each_shape_is_traced_once(setup):
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, x):
            traces.append(x.shape)
            return x

    def make():
        return keras.Sequential([keras.Input((8, 8, 1)), Counting(), *small().layers])

    trained_here(setup(xla=False), "sgd", make=make, **UNEVEN)
    concrete = [shape for shape in traces if shape[0] is not None]
    # The full and the partial batch, each in training and in evaluation, and Keras's one look.
    assert sorted(shape[0] for shape in concrete) in ([8, 8, 16, 16], [8, 8, 16, 16, 16])


@pytest.mark.parametrize(
    ("steps_per_execution", "xla"),
    [
        (3, False),
        *(pytest.param(each, True, marks=pytest.mark.slow) for each in (2, 100)),
    ],
)
def test_any_steps_per_execution_trains_alike(setup, steps_per_execution, xla):
    args, fit = {"steps_per_execution": steps_per_execution}, {"make": without_dropout, **UNEVEN}
    ours = trained_here(setup(xla=xla), "sgd", compile_args=args, **fit)
    assert_same(ours, trained_by_keras("sgd", xla=False, **fit), rtol=1e-3)


def test_predict_returns_rows_in_order(setup):
    run = setup()
    with run.scope():
        model = build()
    run.compile(model, "sgd", loss())
    predicted = model.predict(batches(40), verbose=0)
    assert predicted.shape == (40, 3)
    np.testing.assert_allclose(predicted, model(X, training=False), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.predict(X[:8], verbose=0), predicted[:8], rtol=1e-4, atol=1e-5)


def test_single_batches_by_hand_are_keras_own(setup):
    run = setup(xla=False)
    with run.scope():
        model = build()
    run.compile(model, "sgd", loss(), metrics=["accuracy"])
    reference = build()
    reference.compile("sgd", loss(), metrics=["accuracy"], run_eagerly=True)
    for _ in range(2):
        ours, theirs = (each.train_on_batch(X[:16], Y[:16]) for each in (model, reference))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    ours, theirs = (each.test_on_batch(X[:9], Y[:9]) for each in (model, reference))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    ours, theirs = (each.predict_on_batch(X[:9]) for each in (model, reference))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_subclassed_model_builds_at_its_first_batch(setup):
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.flat, self.dense = layers.Flatten(), layers.Dense(3)

        def call(self, x):
            return self.dense(self.flat(x))

    run = setup(xla=False)
    with run.scope():
        model = Subclassed()
    run.compile(model, "adam", loss(), metrics=["accuracy"])
    assert model.predict(X[:32], batch_size=16, verbose=0).shape == (32, 3)
    assert np.isfinite(
        model.fit(X[:32], Y[:32], batch_size=16, epochs=2, verbose=0).history["loss"]
    ).all()


def test_several_inputs_and_outputs_in_dicts(setup):
    def make():
        keras.utils.set_random_seed(0)
        inputs = {"left": keras.Input((8, 8, 1), name="left")}
        inputs["right"] = keras.Input((2,), name="right")
        joined = layers.Concatenate()([layers.Flatten()(inputs["left"]), inputs["right"]])
        return keras.Model(inputs, {"a": layers.Dense(3)(joined), "b": layers.Dense(1)(joined)})

    # Whole batches: stock Keras weighs a partial one as a whole in `a_loss` and `b_loss`.
    x = {"left": X[:96], "right": X[:96, 0, :2, 0]}
    y = {"a": Y[:96], "b": X[:96, 1, :1, 0]}
    arguments = {"loss": {"a": loss(), "b": "mse"}, "metrics": {"a": ["accuracy"], "b": ["mae"]}}
    run = setup(xla=False)
    with run.scope():
        model = make()
    run.compile(model, "sgd", **arguments)
    reference = make()
    reference.compile("sgd", **arguments, run_eagerly=True)
    fit = {"batch_size": 16, "shuffle": False, "epochs": 2, "verbose": 0}
    ours, theirs = (each.fit(x, y, **fit).history for each in (model, reference))
    assert list(ours) == list(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, err_msg=name)
    ours, theirs = (each.predict(x, verbose=0) for each in (model, reference))
    np.testing.assert_allclose(ours["b"], theirs["b"], rtol=1e-3, atol=1e-5)


WEIGHTS_OF_SAMPLES = {"sample_weight": np.linspace(0, 2, 40, dtype=np.float32)}


@pytest.mark.parametrize(
    ("weights", "xla"),
    [
        (WEIGHTS_OF_SAMPLES, False),
        pytest.param(WEIGHTS_OF_SAMPLES, True, marks=pytest.mark.slow),
        ({"class_weight": {0: 2.0, 1: 0.5, 2: 1.0}}, False),
    ],
)
def test_weights_of_samples_and_classes_count(setup, weights, xla):
    def losses(model):
        fitted = model.fit(X, Y, batch_size=16, shuffle=False, epochs=2, verbose=0, **weights)
        return fitted.history["loss"]

    run = setup(xla=xla)
    with run.scope():
        model = without_dropout()
    run.compile(model, "sgd", loss())
    reference = without_dropout()
    reference.compile("sgd", loss(), run_eagerly=True)
    np.testing.assert_allclose(losses(model), losses(reference), rtol=1e-3)


def test_class_weights_count_for_a_loader_as_for_arrays(setup, folder, in_file_order):
    images, labels = in_file_order
    x, weights = images[..., None] / np.float32(255), {0: 5.0, 2: 0.1}

    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((12, 10, 1)), layers.Flatten(), layers.Dense(3)])

    run = setup(xla=False)
    with run.scope():
        model = make()
    run.compile(model, "sgd", loss())
    loader = run.image_folder(folder, image_size=(12, 10), channels=1, global_batch_size=8)
    ours = model.fit(loader, epochs=2, class_weight=weights, verbose=0).history["loss"]

    reference = make()
    reference.compile("sgd", loss(), run_eagerly=True)
    given = {0: 5.0, 1: 1.0, 2: 0.1}
    theirs = reference.fit(
        x, labels, batch_size=8, shuffle=False, epochs=2, class_weight=given, verbose=0
    ).history["loss"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    # A test on the same loader, without weights, does not end them.
    model.optimizer.learning_rate = 0.0
    fitted = model.fit(loader, epochs=2, class_weight=weights, validation_data=loader, verbose=0)
    first, second = fitted.history["loss"]
    np.testing.assert_allclose(first, second, rtol=1e-5)
    assert abs(first / fitted.history["val_loss"][0] - 1) > 0.1
    # The weights were for that fit alone.
    assert next(iter(loader))[2].numpy().tolist() == [1.0] * 8


def test_the_optimizer_stays_the_one_the_caller_holds(setup):
    run = setup(xla=False)
    with run.scope():
        model = build()
    optimizer = keras.optimizers.SGD(0.5)
    run.compile(model, optimizer, loss())
    optimizer.learning_rate = 0.0
    before = [weight.numpy() for weight in model.trainable_weights]
    model.fit(batches(), epochs=1, verbose=0)
    for weight, same in zip(model.trainable_weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), same)
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 2


def test_a_train_step_of_the_users_own_runs(setup):
    class Doubled(keras.Model):
        """Trains on twice the loss and reports a metric of its own."""

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3, kernel_initializer="zeros")
            self.own = keras.metrics.Mean(name="own")

        def call(self, x):
            return self.dense(keras.ops.reshape(x, (-1, 64)))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = 2 * self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(value, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            self.own.update_state(value)
            return {"own": self.own.result()}

    run = setup()
    with run.scope():
        model = Doubled()
    run.compile(model, "sgd", loss())
    history = model.fit(X, Y, batch_size=40, epochs=2, verbose=0).history
    # The first loss is of equal logits: 2 ln 3.
    np.testing.assert_allclose(history["own"][0], 2 * np.log(3), rtol=1e-5)
    assert history["own"][1] < history["own"][0]


def test_an_epochs_metrics_are_not_worked_out_twice(setup, monkeypatch):
    model, first = trained_here(setup(), "sgd", make=small, tested=True)
    for kind in (keras.metrics.Mean, keras.metrics.SparseCategoricalAccuracy):
        monkeypatch.setattr(kind, "result", lambda _: pytest.fail("the metric was asked"))
    model, again = fitted(model, tested=True)
    assert list(again) == list(first)


class SaysTwice(keras.Sequential):
    """By a step of its own, whose loss is not the metric of that name."""

    def train_step(self, data):
        return {"loss": 2 * super().train_step(data)["loss"]}


def test_an_epochs_log_is_the_metric_of_that_name(setup):
    def made():
        keras.utils.set_random_seed(0)
        return SaysTwice([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(3)])

    run, keras_own = setup(), made()
    keras_own.compile("sgd", loss(), run_eagerly=True)
    with run.scope():
        model = made()
    run.compile(model, "sgd", loss())
    assert_same(fitted(model), fitted(keras_own), rtol=1e-5)


def test_keras_callbacks_change_the_learning_rate(setup):
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    model, history = trained_here(setup(), "sgd", make=small, callbacks=[schedule])
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.05], rtol=1e-6)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model.optimizer.learning_rate), 0.05)


def test_saved_model_and_optimizer_go_on_alike(setup, tmp_path):
    run = setup(precision="mixed_float16", xla=False)
    model, _ = trained_here(run, CLIPPED_ADAMW, make=small)
    model.save(tmp_path / "model.keras")
    with run.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for mine, theirs in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(theirs), mine.path
        )


def test_fit_inside_the_scope_works_too(setup):
    run = setup(xla=False)
    with run.scope():
        _, history = trained_here(run, "sgd", make=small)
    _, reference = trained_by_keras("sgd", xla=False, make=small)
    np.testing.assert_allclose(history["loss"], reference["loss"], rtol=1e-3)


def test_run_eagerly_runs_the_python_of_a_step(setup):
    seen = []

    class Looking(keras.layers.Layer):
        def call(self, x):
            seen.append(isinstance(x, tf.__internal__.EagerTensor))
            return x

    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), Looking(), *small().layers])
    run.compile(model, "sgd", loss(), run_eagerly=True)
    model.fit(X[:16], Y[:16], verbose=0)
    assert any(seen)


class Counting(layers.Identity):
    """Says how often Keras has called it; its shape is one that Keras's own layer tells."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


def as_a_graph(counting):
    return keras.Sequential([keras.Input((8, 8, 1)), counting, *small().layers])


def in_lists(counting):
    x = keras.Input((8, 8, 1))
    return keras.Model([x], [small()(counting(x))])


def unbuilt(counting):
    return keras.Sequential([counting, layers.Flatten(), layers.Dense(3)])


def of_any_size(counting):
    x = keras.Input((None, None, 1))
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling2D()(counting(x))))


def with_a_call_of_its_own(counting):
    class Twice(keras.Model):
        def call(self, x, training=None, mask=None):
            return 2 * super().call(x, training=training, mask=mask)

    x = keras.Input((8, 8, 1))
    return Twice(x, small()(counting(x)))


def of_other_rows(counting):
    """Each row twice, and then those of the first half."""

    class Half(layers.Layer):
        def call(self, x):
            return x[: tf.shape(x)[0] // 2]

        def compute_output_shape(self, shape):
            return (shape[0] and shape[0] // 2, *shape[1:])

    x = keras.Input((8, 8, 1))
    return keras.Model(x, Half()(small()(layers.Concatenate(axis=0)([counting(x), x]))))


def with_an_optional_input(counting):
    x, other = keras.Input((8, 8, 1), name="x"), keras.Input((8, 8, 1), name="y", optional=True)

    class First(layers.Layer):
        def call(self, x, other):
            return x

        def compute_output_shape(self, x_shape, other_shape):
            return x_shape

    return keras.Model({"x": x, "y": other}, small()(counting(First()(x, other))))


def in_dicts(counting):
    x = {"b": keras.Input((8, 8, 1)), "a": keras.Input((3,))}
    return keras.Model(x, {"all": small()(counting(x["b"])), "a": layers.Dense(1)(x["a"])})


def given_to(make):
    """What a model is compiled with, and trained on, in batches of static rows."""
    losses, x, y, metrics = loss(), X[:16], Y[:16], ["accuracy"]
    if make is in_dicts:
        x = {"a": np.ones((16, 3), np.float32), "b": x}
        y, losses = {"all": y, "a": y}, {"all": losses, "a": "mse"}
        metrics = {"all": metrics}
    if make is with_an_optional_input:
        x = {"x": x, "y": None}
    return {"loss": losses, "metrics": metrics}, (x, y)


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        pytest.param(as_a_graph, 1, marks=pytest.mark.slow),
        pytest.param(in_lists, 1, marks=pytest.mark.slow),
        (in_dicts, 1),
        pytest.param(of_other_rows, 2, marks=pytest.mark.slow),
        pytest.param(unbuilt, 2, marks=pytest.mark.slow),
        (of_any_size, 2),
        pytest.param(with_a_call_of_its_own, 2, marks=pytest.mark.slow),
        (with_an_optional_input, 2),
    ],
)
def test_shapes_that_a_model_knows_are_not_asked_of_its_layers(setup, make, calls):
    compile_args, data = given_to(make)
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(0)
    reference = make(Counting())
    reference.compile("sgd", **compile_args, run_eagerly=True)
    expected = reference.fit(*data, **fit).history

    counting, run = Counting(), setup(xla=False)
    keras.utils.set_random_seed(0)
    with run.scope():
        model = make(counting)
    run.compile(model, "sgd", **compile_args)
    counting.calls = 0
    history = model.fit(*data, **fit).history
    assert counting.calls == calls  # to trace the step, and before that where the shapes are asked
    assert history.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(history[name], wanted, rtol=1e-5, err_msg=name)


def test_a_batch_of_another_shape_is_said(setup, caplog):
    run = setup(xla=False)
    with run.scope():
        model = small()
    run.compile(model, "sgd", loss())
    model.fit(batches(16), epochs=2, verbose=0)
    assert "built again" not in caplog.text
    model.fit(batches(24), epochs=2, verbose=0)
    (said,) = [each.message for each in caplog.records if "built again" in each.message]
    assert "for a batch of shapes (8, 8, 8, 1), (8,); 2 shapes so far, each built once" in said


def test_layers_of_a_float32_region_compute_in_float32(setup):
    run = setup(precision="mixed_float16", xla=False)
    with run.scope():
        x = keras.Input((8, 8, 1))
        y = layers.Flatten()(x)
        with tfaccel.float32_region():
            y = layers.Dense(4, name="in_float32")(y)
            with tfaccel.float32_region():
                y = layers.Dense(4, dtype="mixed_bfloat16", name="in_bfloat16")(y)
        model = keras.Model(x, layers.Dense(3, name="in_float16")(y))
    computed = {each.name: each.compute_dtype for each in model.layers}
    for name in ("float16", "float32", "bfloat16"):
        assert computed[f"in_{name}"] == name
    with pytest.raises(ZeroDivisionError), tfaccel.float32_region():
        1 / 0  # noqa: B018
    assert keras.config.dtype_policy().name == "mixed_float16"
    run.compile(model, "sgd", loss())
    assert np.isfinite(model.fit(X[:16], Y[:16], verbose=0).history["loss"]).all()


# What is refused, in one sentence.


def test_channels_first_on_a_cpu_is_refused_where_it_has_no_gradient(setup):
    def model_of(run):
        with run.scope():
            first = layers.Conv2D(2, 3, data_format="channels_first", name="first")
            return keras.Sequential([keras.Input((1, 8, 8)), first, layers.Flatten()])

    run = setup(xla=False)
    with pytest.raises(UserError, match="layer first has data_format='channels_first', but"):
        run.compile(model_of(run), "sgd", loss())
    run = setup(xla=True)
    run.compile(model := model_of(run), "sgd", loss())
    model.fit(X[:16].transpose(0, 3, 1, 2), Y[:16], verbose=0)


def test_a_model_built_outside_the_scope_is_refused(setup):
    run, model = setup(), build()
    for where in (contextlib.nullcontext(), run.scope()):
        with (
            where,
            pytest.raises(UserError, match=r"built in no scope or in another run's.*run\.scope"),
        ):
            run.compile(model, "sgd", loss())


def test_jit_compile_is_ours_to_set(setup):
    run = setup()
    with run.scope():
        model = build()
    with pytest.raises(UserError, match="jit_compile is set by tfaccel"):
        run.compile(model, "sgd", loss(), jit_compile=True)


def test_an_optimizer_of_another_model_is_refused(setup):
    optimizer = keras.optimizers.Adam()
    optimizer.build(build().trainable_variables)
    run = setup()
    with run.scope():
        model = build()
    with pytest.raises(UserError, match="already has the state of another model"):
        run.compile(model, optimizer, loss())


def test_what_a_loader_brings_is_not_given_twice(setup, folder):
    run = setup()
    loader = run.image_folder(folder, image_size=(12, 10), channels=1, global_batch_size=8)
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 1)), layers.Flatten(), layers.Dense(3)])
    run.compile(model, "sgd", loss())
    zeros = np.zeros(37)
    for call in (
        lambda: model.fit(loader, zeros),
        lambda: model.fit(loader, sample_weight=zeros),
        lambda: model.fit(loader, batch_size=8),
        lambda: model.evaluate(loader, y=zeros),
        lambda: model.evaluate(loader, sample_weight=zeros),
    ):
        with pytest.raises(UserError, match="together with a loader, which has its own"):
            call()


def test_loaders_of_other_classes_do_not_validate(setup, folder, tmp_path):
    other = pathlib.Path(shutil.copytree(folder, tmp_path / "other"))
    shutil.rmtree(other / "a")
    run = setup()
    settings = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8}
    train, test = (run.image_folder(root, **settings) for root in (folder, other))
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 1)), layers.Flatten(), layers.Dense(3)])
    run.compile(model, "sgd", loss())
    with pytest.raises(UserError, match="the test images have no class 'a'"):
        model.fit(train, validation_data=test, verbose=0)


def test_what_cannot_be_deterministic_is_said_in_a_sentence(monkeypatch):
    model = compiled(
        lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        1,
        optimizer="sgd",
        loss="mse",
    )

    def fail(*_):
        raise tf.errors.UnimplementedError(
            None, None, "GPU MaxPool gradient ops do not yet have a deterministic XLA\nmore"
        )

    model.train_function = fail
    with pytest.raises(UserError, match=r"no deterministic form here .GPU MaxPool gradient"):
        model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)
