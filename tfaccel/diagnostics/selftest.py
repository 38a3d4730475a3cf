"""Tests whether this machine's replicas train as one device does, for `tfaccel selftest`.

Takes a strategy; yields one row for each check, in each precision, with and without XLA. The
reference is plain Keras on one device without a strategy, on the same rows in the same order. With
several workers each has its own reference, and a row has the largest figure of all workers.

    rows = run(tf.distribute.MirroredStrategy(), precisions=("mixed_float16",), xla=(True,))
    all(row.passed for row in rows)

The figures and their limits:
  "loss": the largest difference of a step's loss, relative to the reference's loss.
  "weights": the largest difference of a weight at the end, relative to the largest change of a
    weight in the reference. So a wrong update shows even if the weights are large.
  Sums in another order differ by rounding. SMALL is the limit for the steps below, by the mantissa
  of the precision. Optimizer states of fewer bytes are rounded, too: STATES has their limits. The
  limit is 0 for values that must be equal, such as those of the replicas.
"""

import contextlib
import dataclasses
import datetime
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfaccel.common import temporary
from tfaccel.common.tables import show
from tfaccel.config import RuntimeConfig, StepConfig
from tfaccel.keras_internals.replica import of_workers
from tfaccel.keras_internals.variables import components
from tfaccel.run import Run
from tfaccel.runtime.cluster import Cluster, find
from tfaccel.runtime.devices import configure, describe_environment, load_cuda_libraries
from tfaccel.runtime.strategy import make_strategy
from tfaccel.step import compile_model
from tfaccel.training.methods import extend
from tfaccel.training.replica_checksums import Audit, ReplicasDifferError
from tfaccel.training.workdir import write_json

log = logging.getLogger("tfaccel")

SMALL = {"float32": 1e-3, "mixed_float16": 3e-2, "mixed_bfloat16": 1e-1}
STATES = {"bfloat16": 5e-3, "8bit": 2e-2}
ALONE = Cluster()  # of one worker
ROWS_PER_REPLICA = 16
SHORT, LONG = 10, 200  # steps


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one check: `figure` was measured, and `limit` is the largest that passes."""

    check: str
    precision: str
    xla: bool
    figure: float
    limit: float
    passed: bool


def report(
    config: RuntimeConfig,
    *,
    precisions: tuple[str, ...],
    xla: tuple[bool, ...],
    output: pathlib.Path | None,
) -> int:
    """Tests the devices that `config` chooses, prints a row for each check, and writes `output`.

    In a job of several workers, all of them test its replicas, and the chief prints and writes.

    Returns:
      0, or 1 if any check failed.
    """
    load_cuda_libraries()
    cluster, guard = find(os.environ), contextlib.nullcontext
    if cluster.num_workers > 1:
        # Workers whose steps all run without XLA do not sum in XLA.
        config = dataclasses.replace(config, xla=None if True in xla else False)
        this_run = Run(config, cluster)
        guard = this_run.watchdog.guard
        devices = tuple(each.name for each in this_run.runtime.devices)
    # Without a GPU, the CPU stands in for two: the checks are about two replicas.
    elif config.gpu_ids == () or not tf.config.list_physical_devices("GPU"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        configure(config)
        devices = ("/cpu:0", "/cpu:1")
    else:
        devices = tuple(each.name for each in configure(config).devices)
    rows = []
    strategy = make_strategy(cluster, devices)
    tell = show if cluster.is_chief else log.debug
    tell(f"{'check':35} {'precision':14} XLA {'figure':>9} {'limit':>6}")
    for row in run(strategy, precisions=precisions, xla=xla, cluster=cluster, guard=guard):
        rows.append(row)
        tell(
            f"{row.check:35} {row.precision:14} {'on' if row.xla else 'off':3} {row.figure:9.2g} "
            f"{row.limit:6.2g}{'' if row.passed else '  FAILED'}"
        )
    failed = sum(not each.passed for each in rows)
    where = f"{strategy.num_replicas_in_sync} replica(s)"
    if cluster.num_workers > 1:
        where += f" of {cluster.num_workers} workers"
    tell(f"{len(rows) - failed} of {len(rows)} checks passed on {where}")
    if output and cluster.is_chief:
        write_json(
            output,
            {
                "command": "tfaccel " + " ".join(sys.argv[1:]),
                "date": datetime.date.today().isoformat(),
                "environment": describe_environment(),
                "devices": devices,
                "workers": cluster.num_workers,
                "rows": [dataclasses.asdict(each) for each in rows],
            },
        )
    return 1 if failed else 0


def run(
    strategy: tf.distribute.Strategy,
    *,
    precisions: tuple[str, ...],
    xla: tuple[bool, ...],
    cluster: Cluster = ALONE,
    guard: Callable = contextlib.nullcontext,
) -> Iterator[Row]:
    """Runs every check and yields its row at once.

    TensorFloat-32 is off during the checks, so that float32 is compared as float32.

    Args:
      strategy: over the replicas to test.
      precisions: Keras dtype policies that have a limit in SMALL.
      xla: True, False, or both.
      cluster: the workers of the strategy.
      guard: makes a context for every call that involves other workers.
    """
    levels = [(each, each.level) for each in (log, tf.get_logger())]
    log.setLevel(logging.WARNING)  # hides a line for each compiled model,
    tf.get_logger().setLevel(logging.ERROR)  # and warnings about retracing
    policy = keras.config.dtype_policy()
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        for precision in precisions:
            keras.config.set_dtype_policy(precision)
            references = {}
            for each in xla:
                trainer = _Trainer(
                    strategy, precision, references, xla=each, cluster=cluster, guard=guard
                )
                for name, figure, limit in _checks(trainer):
                    if cluster.num_workers > 1:
                        with guard():
                            figure = of_workers(np.array([float(figure)]), strategy).max()
                    passed = bool(figure <= limit)  # NaN does not pass
                    yield Row(name, precision, each, float(figure), limit, passed)
    finally:
        for logger, level in levels:
            logger.setLevel(level)
        keras.config.set_dtype_policy(policy)
        tf.config.experimental.enable_tensor_float_32_execution(tf32)


def _checks(trainer: "_Trainer") -> Iterator[tuple[str, float, float]]:
    """Yields (name, figure, limit) of each check."""
    small = SMALL[trainer.precision]

    one, several = trainer.both("long", num_steps=LONG)
    yield f"loss over {LONG} steps", _relative(several.losses, one.losses), small
    yield f"replicas differ after {LONG} steps", _num_different(several.model), 0

    for clip in ({"global_clipnorm": 0.05}, {"clipnorm": 0.02}, {"clipvalue": 0.1}):
        name = next(iter(clip))
        one, several = trainer.both(name, optimizer=_sgd(**clip))
        yield f"weights, {name}", _difference(several, one), small

    optimizer = _sgd(gradient_accumulation_steps=2)
    one, several = trainer.both("accumulation", optimizer=optimizer)
    yield "weights, accumulation over steps", _difference(several, one), small
    config = StepConfig(accumulation_steps=4)
    one, several = trainer.both("plain", config=config)
    yield "weights, accumulation in a step", _difference(several, one), small

    for dtype, rounding in STATES.items():
        one, several = trainer.both("plain", config=StepConfig(state_dtype=dtype))
        yield f"weights, states in {dtype}", _difference(several, one), max(small, rounding)
        yield f"replicas differ, states in {dtype}", _num_different(several.model), 0

    config, lacking = StepConfig(sync_batchnorm=True), ROWS_PER_REPLICA - 1
    one, several = trainer.both("norm", make=_with_batch_norm, config=config, rows_less=lacking)
    yield "weights, synchronized batch norm", _difference(several, one), small
    yield "statistics, synchronized batch norm", _statistics(several, one), small
    several = trainer.replicas(make=_with_batch_norm)
    yield "replicas differ, local batch norm", _num_different(several.model), 0

    one, several = trainer.both("partial", rows_less=lacking)
    yield "weights, partial last batch", _difference(several, one), small
    tested, wanted = trainer.tested(several), trainer.tested(one)
    yield "metrics, partial last batch", _relative(tested, wanted), small

    one, several = trainer.both("gan", make=_Gan)
    yield "weights, GAN of two optimizers", _difference(several, one), small
    one, several = trainer.both("copy", make=_MeanTeacher)
    yield "weights, averaged copy", _of_copy(several, one), small
    one, several = trainer.both("masked", loss=_ignoring, some_ignored=True)
    yield "weights, masked loss", _difference(several, one), small

    one, several = trainer.both("attention", make=_attention)
    yield "weights, attention", _difference(several, one), small
    config = StepConfig(remat=("attend", "wide"))
    one, several = trainer.both("attention", make=_attention, config=config)
    yield "weights, activations computed again", _difference(several, one), small

    settings = {"optimizer": _adam, "num_steps": 2 * SHORT}
    one, several = trainer.both("adam", config=StepConfig(shard_states=True), **settings)
    yield "weights, sharded optimizer states", _difference(several, one), small

    half, whole = trainer.replicas(), trainer.replicas(num_steps=2 * SHORT)
    yield "weights, saved and loaded half way", _difference(trainer.resumed(half), whole), small

    if trainer.precision == "mixed_float16":
        for index in range(trainer.num_replicas):
            wrong = trainer.num_wrong_after(half, overflow_on=index)
            yield f"errors after overflow on replica {index}", wrong, 0


# The models and their training.


def _plain() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(32, activation="relu", kernel_regularizer="l2"),
            layers.Dense(8, dtype="float32"),
        ]
    )


def _with_batch_norm() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(16, 3, use_bias=False),  # a bias would have a gradient of rounding errors
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(8, dtype="float32"),
        ]
    )


def _attention() -> keras.Model:
    """A transformer block over patches, which cuDNN computes where it can."""
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Reshape((16, 16))(layers.Conv2D(16, 2, strides=2)(x))
    x = x + layers.MultiHeadAttention(2, 8, name="attend")(x, x, use_causal_mask=True)
    wide = layers.Dense(32, "gelu", name="wide")
    x = x + layers.Dense(16)(wide(layers.LayerNormalization()(x)))
    return keras.Model(inputs, layers.Dense(8, dtype="float32")(layers.Flatten()(x)))


def _update(optimizer, tape, loss, weights) -> None:
    """Applies the gradients of a loss that the optimizer has scaled."""
    gradients = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(gradients, weights, strict=True))


class _Gan(keras.Model):
    """Trains a discriminator, then a generator against the new discriminator.

    The noise is a part of each image, so that a row has the same on any number of replicas.
    """

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(8, 3, strides=2, activation="tanh"),
                layers.Flatten(),
                layers.Dense(1, dtype="float32"),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(32, "tanh"),
                layers.Dense(192, dtype="float32"),
                layers.Reshape((8, 8, 3), dtype="float32"),
            ]
        )
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True, dtype="float32")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def compile(self, optimizer, loss, metrics, **others):
        """Gives each network an optimizer, with its own loss scale in float16."""
        super().compile(optimizer=optimizer, **others)
        # At this rate, a generator trained against the old discriminator differs by 0.0085.
        self.d_optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
        if keras.config.dtype_policy().name == "mixed_float16":
            self.d_optimizer = keras.optimizers.LossScaleOptimizer(self.d_optimizer)

    def train_step(self, data):
        images, _ = data
        noise = images[:, 0, :, 0]
        rows = tf.shape(noise)[0]
        real, made = tf.ones((rows, 1)), tf.zeros((rows, 1))
        both = tf.concat([images, self.generator(noise, training=True)], axis=0)
        with tf.GradientTape() as tape:
            answers = self.discriminator(both, training=True)
            loss = self.entropy(tf.concat([real, made], axis=0), answers)
            scaled = self.d_optimizer.scale_loss(loss)
        _update(self.d_optimizer, tape, scaled, self.discriminator.trainable_variables)
        with tf.GradientTape() as tape:
            answers = self.discriminator(self.generator(noise, training=True), training=True)
            loss = self.entropy(real, answers)
            scaled = self.optimizer.scale_loss(loss)
        _update(self.optimizer, tape, scaled, self.generator.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class _MeanTeacher(keras.Model):
    """A network, and a teacher that is its average after each update, and that it follows."""

    def __init__(self):
        super().__init__()
        self.network, self.teacher = _plain(), _plain()
        self.teacher.set_weights(self.network.get_weights())
        self.teacher.trainable = False
        self.built = True

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            answers = self.network(images, training=True)
            loss = self.compute_loss(images, labels, answers)
            loss += 0.1 * tf.reduce_mean(tf.square(answers - self.teacher(images)))
            scaled = self.optimizer.scale_loss(loss)
        _update(self.optimizer, tape, scaled, self.network.trainable_variables)
        for slow, new in zip(self.teacher.weights, self.network.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * new)
        return self.compute_metrics(images, labels, answers)


def _crossentropy(**settings) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def _ignoring() -> keras.losses.Loss:
    return _crossentropy(ignore_class=-1)


def _sgd(**settings) -> Callable[[], keras.optimizers.Optimizer]:
    # At four times this rate, training is chaotic: 1e-7 becomes 1e-2 after 200 steps.
    return lambda: keras.optimizers.SGD(0.005, momentum=0.9, **settings)


def _adam() -> keras.optimizers.Optimizer:
    # The epsilon is large, because a gradient of rounding errors has an update as large as others.
    return keras.optimizers.Adam(0.002, epsilon=1e-3, global_clipnorm=0.5)


@dataclasses.dataclass(frozen=True)
class _Trained:
    """A model, its trainable weights at the start, and the loss of each step."""

    model: keras.Model
    start: list[np.ndarray]
    losses: list[float]


class _Trainer:
    """Trains small models on fixed rows: on one device by plain Keras, and on the replicas."""

    def __init__(
        self, strategy, precision: str, references: dict, *, xla: bool, cluster: Cluster, guard
    ):
        """Takes the settings, and the dictionary that keeps the results of the one device."""
        self._cluster, self._guard = cluster, guard
        self.strategy, self.precision, self.xla = strategy, precision, xla
        self.references = references
        self.num_replicas = strategy.num_replicas_in_sync
        self.batch_size = ROWS_PER_REPLICA * self.num_replicas

    def both(self, name: str, *, config=None, **settings) -> tuple[_Trained, _Trained]:
        """Returns the results of one device and of the replicas; `config` is for the replicas."""
        if name not in self.references:
            self.references[name] = self.one_device(**settings)
        return self.references[name], self.replicas(config=config, **settings)

    def one_device(self, *, make=_plain, optimizer=None, loss=_crossentropy, **data) -> _Trained:
        """Trains with plain Keras without XLA, the slowest way."""
        model = _seeded(make)
        model.compile(**self._compile_args(optimizer, loss), jit_compile=False)
        return self._fit(model, **data)

    def replicas(
        self, *, make=_plain, optimizer=None, loss=_crossentropy, config=None, **data
    ) -> _Trained:
        """Trains on the replicas."""
        with self.strategy.scope():
            model = _seeded(make)
        self._compile(model, config or StepConfig(), optimizer, loss)
        return self._fit(model, **data)

    def resumed(self, half: _Trained) -> _Trained:
        """Saves and loads the model, and continues where `half` stopped."""
        with temporary.folder("selftest") as folder:
            path = folder / "model.keras"
            half.model.save(path)
            with self.strategy.scope():
                model = keras.models.load_model(path)
        self._compile(model, StepConfig(), lambda: model.optimizer)
        return self._fit(model, skip=SHORT)

    def num_wrong_after(self, trained: _Trained, *, overflow_on: int) -> int:
        """Makes one replica's rows overflow; returns the number of wrong weights and loss scales.

        No replica may change a weight, and each replica must halve its loss scale.
        """
        x, y = self.rows(1)
        variables = trained.model.trainable_variables
        before = [each.numpy() for each in variables]
        scale = trained.model.optimizer.initial_scale
        trained.model.optimizer.dynamic_scale.assign(scale)
        row = overflow_on * ROWS_PER_REPLICA
        x[row] = 6e4
        # The least likely class, because the most likely one would have no gradient at all.
        y[row] = trained.model(x[row : row + 1]).numpy().argmin()
        trained.model.fit(x, y, batch_size=self.batch_size, shuffle=False, verbose=0)
        wrong = 0
        for variable, value in zip(variables, before, strict=True):
            wrong += sum((each.numpy() != value).any() for each in components(variable))
        scales = components(trained.model.optimizer.dynamic_scale)
        return wrong + sum(float(each.numpy()) != scale / 2 for each in scales)

    def tested(self, trained: _Trained) -> list[float]:
        """Returns loss and accuracy over rows with a partial last batch."""
        x, y = self.rows(2, less=ROWS_PER_REPLICA - 1)
        return trained.model.evaluate(x, y, batch_size=self.batch_size, verbose=0)

    def rows(self, num_steps: int, *, skip: int = 0, less: int = 0, some_ignored: bool = False):
        """Returns x, [rows, 8, 8, 3] float32, and y, [rows] int64, without the last `less` rows.

        With `some_ignored`, some labels are -1; the next replica has more of them.
        """
        random = np.random.default_rng(0)
        x = random.normal(size=((skip + num_steps) * self.batch_size, 8, 8, 3)).astype("float32")
        y = x.mean((1, 2)).argmax(1)  # labels that can be learned
        if some_ignored:
            replica, row = np.divmod(np.arange(len(y)) % self.batch_size, ROWS_PER_REPLICA)
            y[row < ROWS_PER_REPLICA * (replica + 1) // (self.num_replicas + 1)] = -1
        chosen = slice(skip * self.batch_size, len(x) - less)
        return x[chosen], y[chosen]

    def _compile(self, model, config: StepConfig, optimizer, loss=_crossentropy) -> None:
        # No audit: replicas that differ are a row here, and must not end the training.
        config = dataclasses.replace(config, audit_steps=0)
        compile_args = self._compile_args(optimizer, loss)
        compile_model(model, self.strategy, config, xla=self.xla, **compile_args)
        extend(model, config, guard=self._guard, cluster=self._cluster)

    def _compile_args(self, optimizer, loss) -> dict:
        return {
            "optimizer": (optimizer or _sgd())(),
            "loss": loss(),
            "metrics": ["accuracy"],
        }

    def _fit(
        self, model, *, num_steps: int = SHORT, skip: int = 0, rows_less: int = 0, **labels
    ) -> _Trained:
        start, losses = _values(model.trainable_variables), []
        each_step = keras.callbacks.LambdaCallback(
            # Keras logs the mean since the start of the epoch, but we need each step's loss.
            on_train_batch_begin=lambda batch, logs: model.reset_metrics(),
            on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]),
        )
        x, y = self.rows(num_steps, skip=skip, less=rows_less, **labels)
        settings = {"batch_size": self.batch_size, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=[each_step], **settings)
        return _Trained(model, start, losses)


def _seeded(make: Callable[[], keras.Model]) -> keras.Model:
    keras.utils.set_random_seed(0)
    return make()


# The comparisons.


def _relative(got, wanted) -> float:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.max(np.abs(got - wanted) / np.maximum(np.abs(wanted), 1e-3)))


def _difference(got: _Trained, wanted: _Trained) -> float:
    """Returns the largest difference of a weight, relative to the largest change of a weight."""
    end = _values(wanted.model.trainable_variables)
    change = _largest(end, wanted.start)
    return _largest(_values(got.model.trainable_variables), end) / change


def _of_copy(got: _Trained, wanted: _Trained) -> float:
    """Returns the same of the copy that the model has of its weights."""
    ends = [_values(each.model.teacher.weights) for each in (got, wanted)]
    return _largest(*ends) / _largest(ends[1], wanted.start)


def _statistics(got: _Trained, wanted: _Trained) -> float:
    """Returns the largest difference of a moving statistic, relative to the largest statistic."""
    statistics = [_values(each.model.layers[1].non_trainable_variables) for each in (got, wanted)]
    return _largest(*statistics) / max(np.abs(each).max() for each in statistics[1])


def _values(variables) -> list[np.ndarray]:
    return [each.numpy().astype(np.float64) for each in variables]


def _largest(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    return max(np.abs(one - other).max() for one, other in zip(got, wanted, strict=True))


def _num_different(model) -> int:
    """Returns 1 if any bit of a replica's variables differs from replica 0, else 0."""
    try:
        Audit(model).check(when="in the self-test")
    except ReplicasDifferError as error:
        log.error("%s", error)
        return 1
    return 0
