"""Metrics whose states may not be added: on replicas they are as stock Keras's on one device.

Sums of float32 in another order differ by roundings: RTOL allows for some of them.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled
from keras import layers, ops
from keras.src.backend.common.masking import get_keras_mask

from tfaccel import UserError
from tfaccel.config import StepConfig
from tfaccel.keras_internals.variables import components
from tfaccel.training.checkpoint import state

RTOL = 1e-4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 4)).astype("float32")
Y = RNG.normal(size=(10, 2)).astype("float32")
WEIGHTS = np.exp(RNG.normal(size=10)).astype("float32")
# Of 4, 4 and 2 rows. Of the last batch, one of three replicas has none.
FIT = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}


def small():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), layers.Dense(2)])


def by_keras(make, **compile_args):
    """The model on stock Keras. Eagerly, as a trace takes longer than the few steps."""
    model = make()
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True, **compile_args)
    return model


def here(make, num_replicas, **settings):
    return compiled(make, num_replicas, optimizer=keras.optimizers.SGD(0.1), **settings)


def assert_same_logs(ours, wanted):
    assert set(wanted) <= set(ours)
    for name, values in wanted.items():
        np.testing.assert_allclose(ours[name], values, rtol=RTOL, err_msg=name)


class Own(keras.metrics.Metric):
    """A metric that starts below every value: zeros would be wrong."""

    def __init__(self, name, start=-np.inf):
        super().__init__(name=name)
        self.start = start
        self.best = self.add_weight(name="best", initializer=keras.initializers.Constant(start))

    def reset_state(self):
        self.best.assign(self.start)

    def result(self):
        return self.best + 0.0


def errors(y_true, y_pred, sample_weight):
    """Of each row, and below zero."""
    values = -1 - ops.mean(ops.square(y_true - y_pred), axis=-1)
    return values if sample_weight is None else values * sample_weight


class Largest(Own):
    """Gets the rows of all replicas."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        best = ops.max(errors(y_true, y_pred, sample_weight))
        self.best.assign(ops.maximum(self.best, best))


class LargestByMax(Largest):
    merge_state = "max"


class SmallestByMin(Own):
    merge_state = "min"

    def update_state(self, y_true, y_pred, sample_weight=None):
        best = ops.min(errors(y_true, y_pred, sample_weight))
        self.best.assign(ops.minimum(self.best, best))


class SumByRule(Own):
    merge_state = "sum"

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.best.assign_add(ops.sum(errors(y_true, y_pred, sample_weight)))


class Variance(keras.metrics.Metric):
    """Of the errors, by the formula of Chan et al., with its state in a dict and within."""

    def __init__(self, name="variance"):
        super().__init__(name=name)
        self.state = {"mean": self.add_weight(name="mean", initializer="zeros")}
        self.squares = [self.add_weight(name="squares", initializer="zeros")]
        self.rows = keras.metrics.Sum()

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = errors(y_true, y_pred, sample_weight)
        mean = ops.mean(values)
        squares = ops.sum(ops.square(values - mean))
        self._add(ops.cast(ops.size(values), "float32"), mean, squares)

    def _add(self, rows, mean, squares):
        before, own = self.rows.result(), self.state["mean"]
        both = ops.maximum(before + rows, 1)
        distance = mean - own
        self.squares[0].assign_add(squares + distance**2 * before * rows / both)
        own.assign_add(distance * rows / both)
        self.rows.update_state(rows)

    def merge_state(self, metrics):
        for each in metrics:
            assert type(each) is type(self)
            self._add(each.rows.result(), each.state["mean"] + 0, each.squares[0] + 0)

    def result(self):
        return ops.divide_no_nan(self.squares[0], self.rows.result())


class Fading(keras.metrics.Metric):
    """An average in which earlier rows count less: the order of rows matters."""

    def __init__(self, name="fading"):
        super().__init__(name=name)
        self.average = self.add_weight(name="average", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = errors(y_true, y_pred, sample_weight)
        powers = ops.cast(ops.shape(values)[0] - 1 - ops.arange(ops.shape(values)[0]), "float32")
        share = 0.5 ** (powers + 1)
        left = 1 - ops.sum(share)
        self.average.assign(self.average * left + ops.sum(share * values))

    def result(self):
        return self.average + 0.0


class Signs(keras.metrics.MeanIoU):
    """Keras's, of what the outputs are made into, with whole numbers."""

    def __init__(self):
        super().__init__(num_classes=2, name="signs")

    def update_state(self, y_true, y_pred, sample_weight=None):
        truth, found = (ops.cast(each[:, 0] > 0, "int32") for each in (y_true, y_pred))
        super().update_state(truth, found, sample_weight)


def metrics():
    """One of each kind."""
    return [
        Largest("largest"),
        LargestByMax("largest_by_max"),
        SmallestByMin("smallest", np.inf),
        SumByRule("sum", 0.0),
        Variance(),
        Fading(),
        Signs(),
    ]


def fitted(model):
    """The logs of a fit with validation, and of a test. Of two replicas, one has no row at last."""
    fit = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
    logs = model.fit(X[:7], Y[:7], validation_data=(X[9:], Y[9:]), **fit).history
    return logs | model.evaluate(X[8:9], Y[8:9], verbose=0, return_dict=True)


def fitted_with_weights(model):
    """The same with weights of rows, and with other numbers of rows."""
    fit = {**FIT, "sample_weight": WEIGHTS, "validation_data": (X[:5], Y[:5])}
    logs = model.fit(X, Y, **fit).history
    return logs | model.evaluate(X, Y, sample_weight=WEIGHTS, verbose=0, return_dict=True)


@functools.cache
def wanted():
    return fitted(by_keras(small, loss="mse", metrics=metrics()))


@functools.cache
def wanted_with_weights():
    args = {"metrics": metrics(), "weighted_metrics": metrics()}
    return fitted_with_weights(by_keras(small, loss="mse", **args))


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [(2, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, True), (3, True)])],
)
def test_metrics_are_those_of_one_device(num_replicas, xla, caplog):
    model = here(small, num_replicas, xla=xla, loss="mse", metrics=metrics())
    assert_same_logs(fitted(model), wanted())
    assert model.train_function.xla == xla
    assert "metric" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "xla"), [(2, True), (3, False), (3, True)])
def test_metrics_with_weights_are_those_of_one_device(num_replicas, xla):
    args = {"metrics": metrics(), "weighted_metrics": metrics()}
    model = here(small, num_replicas, xla=xla, loss="mse", **args)
    assert_same_logs(fitted_with_weights(model), wanted_with_weights())


class LargestAsItIs(Largest):
    """Whose result is its variable."""

    def result(self):
        return self.best


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_result_that_is_a_variable_is_logged_without_a_warning(num_replicas, caplog):
    settings = {"loss": "mse", "metrics": [LargestAsItIs("largest")]}
    model, theirs = here(small, num_replicas, xla=False, **settings), by_keras(small, **settings)
    assert_same_logs(fitted(model), fitted(theirs))
    assert "metric" not in caplog.text


def test_the_state_lies_on_the_first_replica():
    """So that the sum over replicas is the state, which a checkpoint holds."""
    model = here(small, 2, xla=False, loss="mse", metrics=[Largest("a"), LargestByMax("b")])
    logs = model.test_on_batch(X, Y, return_dict=True)
    for variable, name in zip(model.metrics_variables[-2:], "ab", strict=True):
        assert [each.numpy() for each in components(variable)] == [logs[name], 0]


def test_a_checkpoint_holds_the_state():
    """Of a metric that has no row yet, the state is infinite: other processes hold zeros of it."""
    model = here(small, 2, xla=False, loss="mse", metrics=[Largest("a"), LargestByMax("b")])
    model.test_on_batch(X, Y)
    model.reset_metrics()
    arrays = state.metrics(model)
    for is_chief in (True, False):
        state.put_metrics(model, arrays, is_chief=is_chief)
        for variable in model.metrics_variables[-2:]:
            held = [each.numpy() for each in components(variable)]
            assert held == [-np.inf if is_chief else 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("xla", [False, True])
def test_accumulation(xla):
    settings = {"loss": "mse", "metrics": [Largest("largest"), Variance()]}
    model = here(small, 2, xla=xla, config=StepConfig(accumulation_steps=2), **settings)
    theirs = by_keras(small, loss="mse", metrics=[Largest("largest"), Variance()])
    assert_same_logs(model.fit(X, Y, **FIT).history, theirs.fit(X, Y, **FIT).history)


@pytest.mark.parametrize(
    ("num_replicas", "xla"),
    [(3, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, True), (3, True)])],
)
def test_padding_is_left_out(num_replicas, xla):
    """Of the second batch, with 2 replicas one has padding alone, with 3 the first one has rows."""

    x, y = (np.concatenate([each[:6], np.full_like(each[:2], 7)]) for each in (X, Y))
    weights = np.array([1.0] * 6 + [0.0] * 2, "float32")
    config = StepConfig(zero_weight_is_padding=True)
    settings = {"loss": "mse", "weighted_metrics": [Weighed(), WeighedByMax()]}
    model = here(small, num_replicas, xla=xla, config=config, **settings)
    settings = {"loss": "mse", "weighted_metrics": [Weighed(), WeighedByMax()]}
    theirs = by_keras(small, **settings)
    ours = model.fit(x, y, sample_weight=weights, **FIT).history
    assert_same_logs(ours, theirs.fit(X[:6], Y[:6], **FIT).history)


class Weighed(Own):
    """Leaves out rows of weight 0."""

    def __init__(self, name="weighed"):
        super().__init__(name)

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = errors(y_true, y_pred, None)
        if sample_weight is not None:
            values = ops.where(sample_weight > 0, values, -np.inf)
        self.best.assign(ops.maximum(self.best, ops.max(values)))


class WeighedByMax(Weighed):
    merge_state = "max"

    def __init__(self):
        super().__init__("weighed_by_max")


class OwnStep(keras.Model):
    """Updates metrics with rows, with a single number and with a count; logs other names."""

    def __init__(self):
        super().__init__()
        self.network = small()
        self.built = True
        self.largest = LargestByMax("any")
        self.fading = Fading("other")
        self.tracker = keras.metrics.Mean(name="loss")
        self.by_number = Numbers()

    @property
    def metrics(self):
        return [self.largest, self.fading, self.tracker, self.by_number]

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean((y - y_pred) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for each in (self.largest, self.fading):
            each.update_state(y, y_pred)
        self.tracker.update_state(loss)
        self.by_number.update_state(loss, tf.reduce_sum(tf.cast(y[:, 0] > 0, tf.int32)))
        return {
            "the_largest": self.largest.result(),
            "within": {"fades": self.fading.result()},
            **self.by_number.result(),
            "tracked": self.tracker.result(),
        }


class Numbers(keras.metrics.Metric):
    """The largest loss of a batch, and a count; its result is a dict."""

    def __init__(self):
        super().__init__(name="numbers")
        self.largest = self.add_weight(name="largest", initializer="zeros")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, loss, count):
        self.largest.assign(ops.maximum(self.largest, loss))
        self.count.assign_add(count)

    def result(self):
        return {"largest_loss": self.largest + 0, "count": self.count + 0}


@functools.cache
def wanted_of_own_step():
    theirs = OwnStep()
    theirs.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    history = theirs.fit(X, Y, **FIT).history
    # tfaccel's logs are not nested.
    within = history.pop("within", None)
    return history if within is None else history | {"fades": [each["fades"] for each in within]}


@pytest.mark.slow
@pytest.mark.parametrize("xla", [False, True])
def test_a_train_step_of_ones_own(xla, caplog):
    """Of the last batch, of 2 rows, one of 3 replicas has none. Others have 2, 1 and 1."""
    model = here(OwnStep, 3, xla=xla)
    assert_same_logs(model.fit(X, Y, **FIT).history, wanted_of_own_step())
    assert "numbers gets one number for all rows. It is taken as a mean over rows" in caplog.text
    assert "numbers gets one number for all rows. It is taken as a count" in caplog.text


@pytest.mark.parametrize("make", [pytest.param(small, marks=pytest.mark.slow), OwnStep])
def test_in_one_function(in_one_function, make):
    """As on the GPUs of one process, where batches of other sizes differ in what they send."""
    args = {"loss": "mse", "metrics": metrics()} if make is small else {}
    model = here(make, 2, xla=True, **args)
    wanted = wanted_of_own_step()
    if make is small:
        wanted = by_keras(small, loss="mse", metrics=metrics()).fit(X, Y, **FIT).history
    assert_same_logs(model.fit(X, Y, **FIT).history, wanted)


class Branching(OwnStep):
    def train_step(self, data):
        logs = super().train_step(data)
        tf.cond(
            logs["tracked"] > 0,
            lambda: self.by_number.update_state(logs["tracked"], 1),
            lambda: None,
        )
        return logs


class NotRows(Largest):
    """Gets a tensor that has no rows."""

    def update_state(self, values):
        self.best.assign(ops.max(values))


class WithoutRows(OwnStep):
    def train_step(self, data):
        logs = super().train_step(data)
        self.largest.update_state(data[1], data[1])
        self.not_rows.update_state(tf.tile(data[0][0], [4])[:11])
        return logs

    def __init__(self):
        super().__init__()
        self.not_rows = NotRows("not_rows")

    @property
    def metrics(self):
        return [*super().metrics, self.not_rows]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Branching, "update_state of the metric numbers is called in a branch"),
        (WithoutRows, r"not_rows gets a tensor of shape \(11,\) for 2 rows"),
    ],
)
def test_what_cannot_be_gathered_is_refused(make, why):
    model = here(make, 2, xla=False)
    with pytest.raises(UserError, match=why):
        model.train_on_batch(X[:4], Y[:4])


def test_an_unknown_rule_is_refused():
    metric = Largest("largest")
    metric.merge_state = "mean"
    with pytest.raises(UserError, match="the metric largest has merge_state='mean'; expected 'sum"):
        here(small, 2, xla=False, loss="mse", metrics=[metric])


# Keras's own metrics, whose variables are sums over rows.


def named(kinds, **settings):
    """Functions that make metrics of Keras, by their names."""
    return {
        each: functools.partial(getattr(keras.metrics, each), **settings) for each in kinds.split()
    }


OF_NUMBERS = named(
    """MeanSquaredError RootMeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError
    MeanSquaredLogarithmicError CosineSimilarity LogCoshError R2Score KLDivergence Poisson
    BinaryCrossentropy Hinge SquaredHinge PearsonCorrelation ConcordanceCorrelation"""
)
OF_BITS = named(
    """Accuracy BinaryAccuracy FalsePositives FalseNegatives TrueNegatives TruePositives Precision
    Recall AUC F1Score"""
)
OF_BITS |= named("Precision Recall", thresholds=[0.3, 0.6])
OF_BITS = {
    **OF_BITS,
    **named("BinaryIoU", threshold=0.5),
    **named("FBetaScore", beta=0.5, threshold=0.4),
    "SensitivityAtSpecificity": lambda: keras.metrics.SensitivityAtSpecificity(0.5),
    "SpecificityAtSensitivity": lambda: keras.metrics.SpecificityAtSensitivity(0.5),
    "PrecisionAtRecall": lambda: keras.metrics.PrecisionAtRecall(0.5),
    "RecallAtPrecision": lambda: keras.metrics.RecallAtPrecision(0.5),
}
OF_ONE_HOT = named(
    "CategoricalAccuracy CategoricalCrossentropy CategoricalHinge TopKCategoricalAccuracy"
)
OF_ONE_HOT |= named("OneHotMeanIoU", num_classes=3)
OF_ONE_HOT |= named("OneHotIoU", num_classes=3, target_class_ids=[0, 2])
OF_LABELS = named("SparseCategoricalAccuracy SparseCategoricalCrossentropy")
OF_LABELS |= named("SparseTopKCategoricalAccuracy", k=2)
OF_LABELS |= named("MeanIoU", num_classes=3, sparse_y_pred=False)
OF_LABELS |= named("IoU", num_classes=3, target_class_ids=[1], sparse_y_pred=False)
KINDS = {"numbers": OF_NUMBERS, "bits": OF_BITS, "one_hot": OF_ONE_HOT, "labels": OF_LABELS}
# They have no y_true and y_pred, or are for others to subclass.
BASES = {"Mean", "Sum", "Metric", "MeanMetricWrapper"}


def test_every_metric_of_keras_is_tried():
    metrics = {name for name, each in vars(keras.metrics).items() if isinstance(each, type)}
    assert metrics - BASES == {name for kind in KINDS.values() for name in kind}


def four_outputs():
    """A network with an output for each kind of labels, of 3 probabilities."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    kinds = {"numbers": "sigmoid", "bits": "sigmoid", "one_hot": "softmax", "labels": "softmax"}
    return keras.Model(
        inputs,
        {name: layers.Dense(3, kind, name=name)(inputs) for name, kind in kinds.items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("xla", [False, True])
def test_metrics_of_keras_are_sums_over_rows(xla):
    """Of 10 rows in batches of 5, where one of two replicas has 3 rows and the other 2."""
    labels = RNG.integers(0, 3, 10)
    y = {
        "numbers": RNG.random((10, 3), dtype="float32"),
        "bits": RNG.integers(0, 2, (10, 3)).astype("float32"),
        "one_hot": np.eye(3, dtype="float32")[labels],
        "labels": labels[:, None],
    }

    def args():
        kinds = {
            kind: {name: each() for name, each in made.items()} for kind, made in KINDS.items()
        }
        for made in kinds.values():
            for name, each in made.items():
                each.name = name  # else Keras numbers them
        metrics = {kind: list(made.values()) for kind, made in kinds.items()}
        return {"loss": dict.fromkeys(KINDS, "mse") | {"labels": None}, "metrics": metrics}

    model = here(four_outputs, 2, xla=xla, **args())
    theirs = by_keras(four_outputs, **args())
    logs = [
        each.evaluate(X, y, batch_size=5, verbose=0, return_dict=True) for each in (model, theirs)
    ]
    assert_same_logs(*logs)
    assert len(logs[1]) > 40


def median(y_true, y_pred):
    """One number for all rows."""
    return tf.sort(tf.reshape(tf.abs(y_true - y_pred), [-1]))[tf.size(y_true) // 2]


def by_column(y_true, y_pred):
    """A value for each column."""
    return tf.reduce_max(tf.abs(y_true - y_pred), axis=0)


@pytest.mark.parametrize(
    ("num_replicas", "xla"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_functions_of_all_rows(num_replicas, xla, caplog):
    """These are not sums over rows: of each batch they have a number, or one for each column."""

    def metrics():
        return [
            median,
            by_column,
            keras.metrics.CosineSimilarity(axis=0),
            keras.metrics.PearsonCorrelation(axis=0),
            keras.metrics.ConcordanceCorrelation(axis=(0, 1)),
        ]

    args = [{"loss": "mse", "metrics": metrics()} for _ in range(2)]
    models = here(small, num_replicas, xla=xla, **args[0]), by_keras(small, **args[1])
    logs = [
        each.evaluate(X[:8], Y[:8], batch_size=5, verbose=0, return_dict=True) for each in models
    ]
    assert_same_logs(*logs)
    assert "returns one number" not in caplog.text


class LongestRow(Own):
    """Of ragged rows, the largest sum; their number of values differs."""

    def __init__(self):
        super().__init__("longest", 0.0)

    def update_state(self, values):
        assert isinstance(values, tf.RaggedTensor)
        self.best.assign(tf.maximum(self.best, tf.reduce_max(tf.reduce_sum(values, axis=1))))


class Unmasked(Own):
    """How many steps of a batch are not masked, at most."""

    def __init__(self):
        super().__init__("unmasked", 0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        mask = get_keras_mask(y_pred)
        if mask is not None:  # while the metric is built there is none
            count = ops.sum(ops.cast(mask, "float32"))
            self.best.assign(ops.maximum(self.best, count))


class OfRaggedAndMasked(OwnStep):
    def __init__(self):
        super().__init__()
        self.longest, self.unmasked, self.masking = LongestRow(), Unmasked(), layers.Masking()

    @property
    def metrics(self):
        return [*super().metrics, self.longest, self.unmasked]

    def train_step(self, data):
        x, y = data[:2]
        self.longest.update_state(tf.ragged.boolean_mask(x, x > 0))
        self.unmasked.update_state(y, self.masking(tf.maximum(x, 0)[..., None]))
        logs = {"long": self.longest.result(), "unmasked": self.unmasked.result()}
        return super().train_step(data) | logs


@pytest.mark.slow
def test_ragged_and_masked_rows():
    model, theirs = here(OfRaggedAndMasked, 3, xla=False), OfRaggedAndMasked()
    theirs.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    histories = [each.fit(X, Y, **FIT).history for each in (model, theirs)]
    for name in ("long", "unmasked"):
        ours, wanted = (each[name] for each in histories)
        np.testing.assert_allclose(ours, wanted, rtol=RTOL)
    assert wanted[0] > 5  # more than a replica's rows have


class Norm(keras.metrics.Metric):
    """Adds up the norm of the errors of each batch: the norms of its parts are larger."""

    def __init__(self):
        super().__init__(name="norm")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.norm(y_true - y_pred))

    def result(self):
        return self.total + 0.0


def test_an_eager_step_gives_a_metric_the_rows_of_all_replicas():
    stock = by_keras(small, loss="mse", metrics=[Norm()]).fit(X, Y, **FIT).history
    ours = here(small, 2, loss="mse", metrics=[Norm()], xla=False, run_eagerly=True)
    assert_same_logs(ours.fit(X, Y, **FIT).history, stock)
