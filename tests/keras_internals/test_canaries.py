"""The canaries: each private name of Keras and TensorFlow is there and does what tfaccel needs.

A new version of Keras or TensorFlow fails here first, with a sentence that names what changed.
"""

import functools
import inspect
import re
import sys
import tempfile
import threading
import time
import types

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import strategy_of
from keras import layers
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as keras_loss
from keras.src.models.functional import Functional, unpack_singleton
from keras.src.ops.operation import Operation
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers import compile_utils, data_adapters
from keras.src.trainers import epoch_iterator as epoch_iterator_lib
from keras.src.trainers.compile_utils import MetricsList
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.utils import is_default
from keras.src.utils.naming import to_snake_case
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.rng_utils import get_random_seed
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
    CollectiveAllReduceStrategy,
)
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import concrete_function, function_context
from tensorflow.python.framework import config as tf_config
from tensorflow.python.framework import kernels, op_def_registry, ops
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
from tensorflow.python.ops import cond as cond_ops
from tensorflow.python.ops import (
    control_flow_util_v2,
    custom_gradient,
    gen_linalg_ops,
    gen_math_ops,
    gen_nn_ops,
    summary_ops_v2,
    while_loop,
)
from tensorflow.python.ops.handle_data_util import get_resource_handle_data
from tensorflow.python.ops.parallel_for import control_flow_ops as pfor_ops

from tfaccel.keras_internals import device_iterators, epoch_order  # noqa: F401
from tfaccel.keras_internals.moved import Variable as TensorFlowVariable
from tfaccel.keras_internals.moved import nn, numpy, ordered_by, place_of_remat
from tfaccel.keras_internals.seeds import draws_kept

CANARIES = {}  # (name, what it does) -> a function that returns whether it does


def canary(name, does):
    def register(function):
        CANARIES[name, does] = function
        return function

    return register


def dense(**settings):
    return layers.Dense(1, use_bias=False, kernel_initializer="ones", **settings)


def in_scope(make):
    with strategy_of(2).scope():
        return make()


def model_of(*parts, **compile_args):
    """A model made in the scope of two replicas; with arguments, compiled."""
    model = in_scope(lambda: keras.Sequential([keras.Input((1,)), *[part() for part in parts]]))
    if compile_args:
        in_scope(lambda: model.compile(**compile_args, jit_compile=False))
    return model


@canary("Variable._value", "is what a variable reads as")
def _():
    variable = keras.Variable([1.0])
    variable._value = tf.constant([2.0])
    return keras.ops.convert_to_numpy(variable + 0) == 2 and variable.numpy() == 2


@canary("Variable._value", "holds one tf.Variable for each replica, where made in a scope")
def _():
    value = in_scope(lambda: keras.Variable([1.0]))._value
    each = [isinstance(each, tf.Variable) for each in value.values]
    return isinstance(value, tf.distribute.DistributedValues) and each == [True, True]


@canary("Variable._initialize", "makes a variable again, in the scope, with the value given")
def _():
    variable = keras.Variable([1.0])
    in_scope(lambda: variable._initialize(np.float32([3.0])))
    return [each.numpy() for each in variable._value.values] == [3, 3]


@canary("Variable._direct_assign", "is what assign, assign_add and assign_sub end in")
def _(monkeypatch):
    seen, own = [], TensorFlowVariable.__dict__["_direct_assign"]

    def note(variable, value):
        seen.append(variable)
        return own(variable, value)

    monkeypatch.setattr(TensorFlowVariable, "_direct_assign", note)
    variable = keras.Variable([1.0])
    variable.assign([2.0])
    variable.assign_add([2.0])
    variable.assign_sub([1.0])
    return seen == [variable] * 3 and variable.numpy() == 3


@canary("Optimizer.apply", "is an instance's attribute that apply_gradients calls")
def _():
    own = keras.optimizers.SGD()
    optimizers, seen = (own, keras.optimizers.LossScaleOptimizer(own)), []
    variable = keras.Variable([1.0])
    for optimizer in optimizers:
        optimizer.__dict__["apply"] = lambda grads, variables: seen.append((grads, variables))
        optimizer.apply_gradients([(2.0, variable)])
    return seen == [((2.0,), (variable,)), ((2.0,), (variable,))]


@canary("Optimizer.apply", "is defined in BaseOptimizer, and again in those that wrap others alone")
def _():
    kinds = {each for each in vars(keras.optimizers).values() if isinstance(each, type)}
    bases = {base for kind in kinds for base in kind.__mro__}
    wrapping = {keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer}
    return {each for each in bases if "apply" in vars(each)} == {BaseOptimizer, *wrapping}


@canary("Optimizer._iterations", "counts the updates that were made, not the skipped ones")
def _():
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    counts = []
    for gradient in (1.0, float("inf"), 1.0):
        optimizer.apply([tf.constant([gradient])], [variable])
        counts.append(int(optimizer.inner_optimizer._iterations.numpy()))
    return counts == [1, 1, 2]


@canary("Optimizer._distribution_strategy", "is the strategy that updates go through")
def _():
    optimizer = in_scope(keras.optimizers.SGD)
    own = optimizer._distribution_strategy
    optimizer._distribution_strategy = types.SimpleNamespace(extended=None)
    variable = keras.Variable([1.0])
    try:
        optimizer.apply([tf.constant([1.0])], [variable])
    except AttributeError:
        return own is strategy_of(2)  # the one that was set is used, and is none
    return False


@canary("TFOptimizer._all_reduce_sum_gradients", "gives the gradients that an update applies")
def _(monkeypatch):
    def doubled(_optimizer, pairs):
        return [(2 * gradient, variable) for gradient, variable in pairs]

    monkeypatch.setattr(TFOptimizer, "_all_reduce_sum_gradients", doubled)
    variable = keras.Variable([1.0])
    keras.optimizers.SGD(1.0).apply([tf.constant([1.0])], [variable])
    return variable.numpy() == -1


@canary("Adam._momentums, ._velocities and ._velocity_hats", "are what an update reads and assigns")
def _():
    class Moment:  # as tfaccel/keras_internals/optimizer_states.py puts one into a list
        dtype = "float32"

        def __init__(self):
            self.value = tf.zeros(1)

        def __tf_tensor__(self, dtype=None, name=None):
            return self.value

        def assign(self, value):
            self.value = value

        def assign_add(self, value):
            self.value += value

    optimizer, variable = keras.optimizers.Adam(0.5, amsgrad=True), keras.Variable([1.0])
    optimizer.build([variable])
    kept = [optimizer._momentums, optimizer._velocities, optimizer._velocity_hats]
    for states in kept:
        states[0] = Moment()
    optimizer.apply([tf.constant([4.0])], [variable])
    found = [float(states[0].value[0]) for states in kept]
    np.testing.assert_allclose(found, [0.4, 0.016, 0.016], rtol=1e-5)
    return abs(float(variable.numpy()[0]) - 0.5) < 1e-3


@canary("Optimizer._variables and ._tracker", "are the variables in order, and what forgets one")
def _():
    optimizer = keras.optimizers.Adam()
    optimizer.build([keras.Variable([1.0])])
    first, *others = optimizer.variables
    optimizer._tracker.untrack(first)
    forgotten = [each is other for each, other in zip(optimizer.variables, others, strict=True)]
    optimizer._variables.insert(0, first)
    return all(forgotten) and optimizer.variables[0] is first


@canary(
    "CollectiveAllReduceExtended._get_variable_creator_initial_value",
    "is what a scope calls, and may be that of MirroredExtended",
)
def _(monkeypatch):
    strategy, name = CollectiveAllReduceStrategy(), "_get_variable_creator_initial_value"
    own, seen = getattr(MirroredExtended, name), []

    def note(extended, replica_id, device, primary_var, **kwargs):
        seen.append(replica_id)
        return own(extended, replica_id, device, primary_var, **kwargs)

    monkeypatch.setattr(CollectiveAllReduceExtended, name, note)
    with strategy.scope():
        variable = keras.Variable(np.uint8([3]), dtype="uint8")
    return seen == [0] and variable.numpy() == 3


@canary("Optimizer.add_variable_from_reference", "is an instance's attribute that makes each state")
def _():
    optimizer, names = keras.optimizers.Adam(use_ema=True), []
    own = optimizer.add_variable_from_reference

    def note(reference_variable, name=None, initializer="zeros"):
        names.append(
            (name, optimizer._get_variable_index(reference_variable) if name[0] != "a" else 0)
        )
        return own(reference_variable, name=name, initializer=initializer)

    optimizer.add_variable_from_reference = note
    optimizer.build([keras.Variable([1.0]), keras.Variable([2.0])])
    moments = [(name, index) for index in range(2) for name in ("momentum", "velocity")]
    return names == [("average", 0), ("average", 0), *moments]


@canary("LossScaleOptimizer.dynamic_scale", "is the variable that an overflow halves")
def _():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    optimizer.apply([tf.constant([float("inf")])], [keras.Variable([1.0])])
    return isinstance(optimizer.dynamic_scale, keras.Variable) and optimizer.dynamic_scale == 4


@canary("LossScaleOptimizer.check_finite", "is an instance's attribute that says whether to update")
def _():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    variable = keras.Variable([1.0])
    optimizer.__dict__["check_finite"] = lambda _: tf.constant(False)
    optimizer.apply([tf.constant([1.0])], [variable])
    return variable.numpy() == 1 and optimizer.dynamic_scale == 4


@canary("SeedGenerator.next", "gives Dropout its seeds: [2], of which the first may be moved")
def _(monkeypatch):
    seen, own = [], keras.random.SeedGenerator.__dict__["next"]

    def note(generator, ordered=True):
        seen.append(own(generator, ordered))
        return seen[-1]

    monkeypatch.setattr(keras.random.SeedGenerator, "next", note)
    layers.Dropout(0.5)(tf.ones((1, 4)), training=True)
    (seed,) = seen
    return seed.shape == (2,) and seed.dtype.is_integer


@canary("BatchNormalization.call", "is the class's own")
def _():
    return "call" in vars(layers.BatchNormalization)


@canary("BatchNormalization._moments", "is the class's own, and what call takes statistics from")
def _(monkeypatch):
    seen, own = [], vars(layers.BatchNormalization)["_moments"]

    def note(layer, inputs, mask):
        seen.append(layer)
        return own(layer, inputs, mask)

    monkeypatch.setattr(layers.BatchNormalization, "_moments", note)
    layer = layers.BatchNormalization()
    layer(tf.ones((2, 3)), training=True)
    layer(tf.ones((2, 3)), training=False)
    return seen == [layer]


@canary("BatchNormalization._reduction_axes", "are all axes but that of the channels")
def _():
    layer = layers.BatchNormalization(axis=1)
    layer.build((2, 3, 4, 5))
    return list(layer._reduction_axes) == [0, 2, 3]


@canary("Conv2D.call and .convolution_op", "are what a layer runs, bias last, and can be replaced")
def _(monkeypatch):
    seen = []

    def note(layer, inputs, kernel):
        seen.append((layer.kernel_size, layer.strides, layer.groups, kernel.shape))
        return inputs

    monkeypatch.setattr(layers.Conv2D, "convolution_op", note, raising=False)
    conv = layers.Conv2D(1, 3, bias_initializer="ones")
    outputs = conv(tf.ones((1, 4, 4, 1)))
    is_linear = conv.activation is keras.activations.linear
    return seen == [((3, 3), (1, 1), 1, (3, 3, 1, 1))] and is_linear and np.all(outputs == 2)


@canary("Conv2DTranspose.call", "is what a layer runs, and reads its settings of the layer")
def _(monkeypatch):
    seen = []

    def note(layer, inputs):
        seen.append((layer.kernel_size, layer.strides, layer.dilation_rate, layer.output_padding))
        seen.append((layer.data_format, layer.use_bias, layer.kernel.shape))
        return inputs

    monkeypatch.setattr(layers.Conv2DTranspose, "call", note, raising=False)
    layers.Conv2DTranspose(5, 2, strides=2)(tf.ones((1, 4, 4, 3)))
    sizes, rest = seen[-2:]
    return sizes == ((2, 2), (2, 2), (1, 1), None) and rest == ("channels_last", True, (2, 2, 5, 3))


@canary("MaxPooling2D.call", "is what a layer runs, and reads its sizes of the layer")
def _(monkeypatch):
    seen = []

    def note(layer, inputs):
        seen.append((layer.pool_size, layer.strides, layer.padding, layer.data_format))
        return inputs

    monkeypatch.setattr(layers.MaxPooling2D, "call", note, raising=False)
    layers.MaxPooling2D(3, strides=2)(tf.ones((1, 4, 4, 1)))
    return seen == [((3, 3), (2, 2), "valid", "channels_last")]


@canary("Model._flatten_layers", "gives nested layers too")
def _():
    inner = dense()
    model = keras.Sequential([keras.Input((1,)), keras.Sequential([inner])])
    return any(each is inner for each in model._flatten_layers())


@canary("RNN._expected_batch_size", "is the number of rows of a stateful layer")
def _():
    layer = keras.layers.GRU(1, stateful=True)
    layer.build((2, 3, 1))
    return layer._expected_batch_size == 2 and [each.shape for each in layer.states] == [(2, 1)]


@canary("Variable._aggregation", "is what the variable's aggregation reads")
def _():
    variable = keras.Variable(1.0)
    variable._aggregation = "sum"
    return variable.aggregation == "sum"


@functools.cache
def seen_in_fit():
    """What is built by a fit with a validation and by a train_on_batch, and when logs are made."""
    model, built, made = model_of(dense, optimizer="sgd", loss="mse"), [], []
    build, results = model._maybe_symbolic_build, model._get_metrics_result_or_logs

    def note(iterator=None, data_batch=None):
        built.append(type(iterator).__name__ if iterator else len(data_batch))
        build(iterator=iterator, data_batch=data_batch)

    model._maybe_symbolic_build = note
    model._get_metrics_result_or_logs = lambda logs: (made.append("results"), results(logs))[1]
    validates = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: made.append("test"))
    x = np.ones((4, 1), "float32")
    model.fit(x, x, batch_size=2, validation_data=(x, x), callbacks=[validates], verbose=0)
    model.train_on_batch(x[:2], x[:2])
    return built, made


@canary("Model._maybe_symbolic_build", "is an instance's attribute that fit and evaluate call")
def _():
    return seen_in_fit()[0] == ["TFEpochIterator", "TFEpochIterator", 3]


@canary("Model._symbolic_build", "makes weights and metrics from the specs of a batch")
def _():
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = dense()

        def call(self, x):
            return self.dense(x)

    def make():
        model = Unbuilt()
        model.compile("adam", "mse", metrics=["mae"])
        spec = tf.TensorSpec((2, 1), tf.float32)
        model._symbolic_build(data_batch=(spec, spec, None))
        return model

    model = in_scope(make)
    return model.dense.built and len(model.metrics_variables) == 4 and model.optimizer.built


@canary("backend.compute_output_spec", "is asked for a model's outputs, once, before it is trained")
def _(monkeypatch):
    seen, own = [], backend.compute_output_spec

    def note(fn, *args, **kwargs):
        seen.append((fn, len(args)))
        return own(fn, *args, **kwargs)

    monkeypatch.setattr(backend, "compute_output_spec", note)
    model, spec = model_of(dense, optimizer="sgd", loss="mse"), tf.TensorSpec((2, 1), tf.float32)
    in_scope(lambda: model._symbolic_build(data_batch=(spec, spec, None)))
    return seen.count((model, 1)) == 1


@canary("backend.compute_output_spec", "traces a model, so its dtypes are the computed ones")
def _():
    ids = keras.Input((1,), dtype="int32")
    tokens = layers.ReversibleEmbedding(3, 2, dtype="mixed_bfloat16")
    model = keras.Model({"ids": ids}, {"next": tokens(tokens(ids), reverse=True)})
    model.dtype_policy = "mixed_bfloat16"
    traced = backend.compute_output_spec(model, model.input, training=False)["next"]
    return (model.outputs[0].dtype, traced.dtype) == ("bfloat16", "float32")


@canary("Functional.call", "is that of models of keras.Model(inputs, outputs)")
def _():
    x = keras.Input((1,))
    return type(keras.Model(x, x)).call is Functional.call


@canary("Sequential._functional", "is the graph of its layers, None before it is built")
def _():
    built = keras.Sequential([keras.Input((1,)), dense()])._functional
    return isinstance(built, Functional) and keras.Sequential([dense()])._functional is None


@canary("models.functional.unpack_singleton", "is what call does to its outputs")
def _():
    x = keras.Input((1,))
    model = keras.Model([x], [dense()(x)])
    given = tf.ones((2, 1))
    return tf.is_tensor(model(given)) and unpack_singleton([given]) is given


@canary("Model._compile_loss._user_loss", "is the loss that compile was given")
def _():
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model = model_of(dense, optimizer="sgd", loss=loss)
    return model._compile_loss._user_loss is loss


@canary("Model._compile_loss._user_loss_weights", "are the weights that compile was given")
def _():
    model, *_ = of_metrics()
    return model._compile_loss._user_loss_weights == {"a": 0.5, "b": 2.0}


@canary("Model._flatten_metrics_in_order", "puts the loss first, and what is no metric last")
def _():
    model = model_of(dense, optimizer="sgd", loss="mse")
    return model._flatten_metrics_in_order({"z": 3, "loss": 1}) == [1, 3]


@canary("common.global_state.get_global_attribute", "gives the thread's names, and its draws")
def _():
    keras.random.normal((1,))  # makes them
    found = global_state.get_global_attribute("global_seed_generator")
    return keras.random.SeedGenerator is type(found) and isinstance(
        global_state.get_global_attribute("object_name_uids"), dict
    )


@canary("set_global_attribute", "replaces them: of None, a later draw makes a new one")
def _():
    keras.random.normal((1,))
    before = global_state.get_global_attribute("global_seed_generator")
    with draws_kept():
        keras.random.normal((1,))
        meanwhile = global_state.get_global_attribute("global_seed_generator")
    after = global_state.get_global_attribute("global_seed_generator")
    return after is before and meanwhile is not before


def with_metrics():
    """A compiled model with a metric, a weighted one, and a loss for each of two outputs."""
    x = keras.Input((1,))
    model = keras.Model(x, {"a": dense()(x), "b": dense()(x)})
    own, weighted = keras.metrics.MeanAbsoluteError(), keras.metrics.MeanSquaredError()
    losses = {"a": "mse", "b": "mse"}
    settings = {"metrics": {"a": [own]}, "weighted_metrics": {"b": [weighted]}}
    weights = {"a": 0.5, "b": 2.0}
    model.compile("sgd", losses, weights, **settings, jit_compile=False)
    model.train_on_batch(np.ones((2, 1)), {"a": np.ones((2, 1)), "b": np.ones((2, 1))})
    return model, own, weighted


of_metrics = functools.cache(with_metrics)  # for who only looks at it


@canary("Model._compile_metrics._user_metrics", "are the metrics that compile was given")
def _():
    model, own, _ = of_metrics()
    return tf.nest.flatten(model._compile_metrics._user_metrics) == [own]


@canary("Model._compile_metrics._user_weighted_metrics", "are the weighted ones it was given")
def _():
    model, _, weighted = of_metrics()
    return tf.nest.flatten(model._compile_metrics._user_weighted_metrics) == [weighted]


@canary("Model._loss_tracker", "is the metric that averages the loss")
def _():
    model, *_ = of_metrics()
    return type(model._loss_tracker) is keras.metrics.Mean and model._loss_tracker.name == "loss"


@canary("CompileLoss.metrics", "are the means of the outputs' losses")
def _():
    model, *_ = of_metrics()
    found = model._compile_loss.metrics
    return len(found) == 2 and {type(each) for each in found} == {keras.metrics.Mean}


@canary("custom_gradient._graph_mode_decorator", "gets the function that has a gradient of its own")
def _(monkeypatch):
    seen, own = [], custom_gradient._graph_mode_decorator

    def note(function, *args, **kwargs):
        seen.append(function.__name__)
        return own(function, *args, **kwargs)

    @tf.custom_gradient
    def doubled(x):
        return 2.0 * x, lambda upstream: 2.0 * upstream

    monkeypatch.setattr(custom_gradient, "_graph_mode_decorator", note)
    tf.function(doubled, autograph=False)(tf.constant(1.0))
    return "doubled" in seen


@canary("compile_utils.CompileMetrics", "and compile_utils.MetricsList update metrics within them")
def _():
    kinds = compile_utils.CompileMetrics, compile_utils.MetricsList
    return all("update_state" in vars(each) for each in kinds)


@canary("MetricsList.update_state", "and .metrics: what each output's metrics are updated by")
def _(monkeypatch):
    seen, own = [], MetricsList.__dict__["update_state"]

    def note(metrics, y_true, y_pred, sample_weight=None):
        seen.append([each.name for each in metrics.metrics])
        own(metrics, y_true, y_pred, sample_weight)

    monkeypatch.setattr(MetricsList, "update_state", note)
    with_metrics()
    return ["mean_absolute_error"] in seen and ["mean_squared_error"] in seen


@canary("losses.loss.reduce_weighted_values", "reduces the values of every loss, by five arguments")
def _(monkeypatch):
    seen, own = [], keras_loss.reduce_weighted_values

    def note(values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None):
        seen.append(tuple(values.shape))
        return own(values, sample_weight, mask, reduction, dtype)

    monkeypatch.setattr(keras_loss, "reduce_weighted_values", note)
    keras.losses.MeanSquaredError()(np.ones((2, 1)), np.zeros((2, 1)))
    return seen == [(2,)]


@canary("backend.get_keras_mask", "gives the mask that a layer computed")
def _():
    masked = layers.Masking()(tf.constant([[[1.0], [0.0]]]))
    return get_keras_mask(masked).numpy().tolist() == [[True, False]]


@canary("backend.set_keras_mask", "lets a tensor have a mask")
def _():
    value = tf.constant([1.0])
    set_keras_mask(value, tf.constant([False]))
    return get_keras_mask(value).numpy().tolist() == [False]


@canary("Metric._metrics", "are the metrics within a metric")
def _():
    metric = keras.metrics.Metric()
    metric.within = keras.metrics.Sum()
    return metric._metrics == [metric.within]


@canary("MeanMetricWrapper._fn", "is its function, and ._fn_kwargs what that gets besides")
def _():
    metric = keras.metrics.CosineSimilarity(axis=0)
    names = metric._fn.__module__.partition(".")[0], metric._fn.__name__
    return names == ("keras", "cosine_similarity") and metric._fn_kwargs["axis"] == 0


@canary("utils.rng_utils.get_random_seed", "gives what set_random_seed was given")
def _():
    keras.utils.set_random_seed(5)
    given = get_random_seed()
    keras.utils.set_random_seed(0)
    return given == 5


@canary("Optimizer._apply_weight_decay", "and .update_step are looked up on the optimizer itself")
def _():
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.1)
    optimizer.build([variable])
    seen = []
    optimizer._apply_weight_decay = lambda variables: seen.append(len(variables))
    optimizer.update_step = lambda gradient, variable, rate: seen.append(float(rate))
    optimizer.apply([tf.constant([1.0])])
    return seen == [1, 1.0]


@canary("Optimizer._get_variable_index", "takes Keras's variable and each replica's own")
def _():
    with strategy_of(2).scope():
        variables = [keras.Variable([1.0]), keras.Variable([1.0])]
        optimizer = keras.optimizers.SGD()
        optimizer.build(variables)
    seen = [optimizer._get_variable_index(each) for each in variables]
    seen += [optimizer._get_variable_index(each) for each in variables[1].value.values]
    return seen == [0, 1, 1, 1]


@canary("Optimizer._trainable_variables", "and ._model_variables_moving_average go in pairs")
def _():
    weights = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer = keras.optimizers.SGD(use_ema=True)
    optimizer.apply([tf.constant([0.0])] * 2, weights)
    averages = [each.numpy() for each in optimizer._model_variables_moving_average]
    own = [id(each) for each in optimizer._trainable_variables]
    return own == [id(each) for each in weights] and averages == [1, 2]


@canary(
    "Optimizer.add_variable",
    "is looked up on the optimizer itself, and so are build, add_variable_from_reference, _var_key,"
    " _use_weight_decay, _clip_gradients and _update_model_variables_moving_average",
)
def _():
    seen = []
    optimizer = keras.optimizers.SGD(momentum=0.9, weight_decay=0.1, clipnorm=1.0, use_ema=True)
    names = ["add_variable", "add_variable_from_reference", "build", "_var_key"]
    names += ["_use_weight_decay", "_clip_gradients", "_update_model_variables_moving_average"]

    def noting(name, own):
        def call(*args, **kwargs):
            seen.append(name)
            return own(*args, **kwargs)

        return call

    for name in names:
        optimizer.__dict__[name] = noting(name, getattr(optimizer, name))
    optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0])])
    return set(seen) == set(names)


@canary("Optimizer._overwrite_model_variables_with_average_value", "ends fit, looked up so, too")
def _():
    optimizer, seen = keras.optimizers.SGD(use_ema=True), []
    optimizer.__dict__["_overwrite_model_variables_with_average_value"] = seen.append
    optimizer.finalize_variable_values([1])
    return seen == [[1]]


@canary("Optimizer._accumulated_gradients", "has the sum for each weight, in their order")
def _():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.apply([tf.constant([3.0])], [keras.Variable([1.0])])
    return optimizer._accumulated_gradients[0].numpy() == 3


@canary("Optimizer._untrack_variable", "and ._trainable_variables_indices let it be built anew")
def _():
    weights, optimizer = [keras.Variable([1.0])], keras.optimizers.SGD(momentum=0.9)
    optimizer.build(weights)
    optimizer._untrack_variable(optimizer.variables[-1])
    optimizer._trainable_variables_indices.clear()
    optimizer.built = False
    optimizer.build(weights)
    names = [each.name.rpartition("_")[2] for each in optimizer.variables]
    return names == ["iteration", "rate", "momentum"]


@canary("Variable._shape", "is what .shape gives, and a subclass may give another one")
def _():
    class Other(TensorFlowVariable):
        @property
        def shape(self):
            return tf.TensorShape([2, *self._shape])

    variable = keras.Variable([1.0])
    variable.__class__ = Other
    return tuple(variable.shape) == (2, 1) and variable.numpy() == 1


def epoch_iterator():
    x = np.ones((4, 1), "float32")
    strategy = strategy_of(2)
    return TFEpochIterator(x=x, y=x, batch_size=2, distribute_strategy=strategy)


@canary("TFEpochIterator._distributed_dataset", "has the specs of the batches that are drawn")
def _():
    specs = epoch_iterator()._distributed_dataset.element_spec
    return len(tf.nest.flatten(specs)) == 2


@canary("data_adapters.get_data_adapter", "is what opens every input, and ends in epoch_order's")
def _():
    return (
        data_adapters.get_data_adapter
        is epoch_order._get_data_adapter
        is (epoch_iterator_lib.data_adapters.get_data_adapter)
    )


@canary("ordered_by", "orders rows (DataAdapter.get_tf_dataset, _tf_shuffle, tf.random.shuffle)")
def _():
    asked = []

    def backwards(rows):
        asked.append(tuple(rows.shape))
        return rows[::-1]

    adapter = ArrayDataAdapter(np.arange(5.0), batch_size=2, shuffle=True)
    with ordered_by(backwards, adapter):
        dataset = adapter.get_tf_dataset()
    rows = [np.ravel(batch).tolist() for batch in dataset]
    return rows == [[4, 3], [2, 1], [0]] and asked == [(5,)]


@canary("ArrayDataAdapter._shuffle", "is whether rows are shuffled, or 'batch'")
def _():
    made = [ArrayDataAdapter(np.ones(5), shuffle=each) for each in (False, True, "batch")]
    return [each._shuffle for each in made] == [False, True, "batch"]


@canary("ArrayDataAdapter._num_samples", "is the number of rows")
def _():
    return ArrayDataAdapter(np.ones(5))._num_samples == 5


class Five(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return (np.float32([[index]]),)


@canary("PyDatasetAdapter.shuffle", "may be set, and is whether batches are shuffled")
def _():
    adapter = PyDatasetAdapter(Five(), shuffle=True)
    before, adapter.shuffle = adapter.shuffle, False
    return before is True and np.ravel([*adapter.get_tf_dataset()]).tolist() == [*range(5)]


@canary("PyDatasetAdapter.py_dataset", "may be set, and is what batches are read from")
def _():
    class Two(Five):
        def __len__(self):
            return 2

    adapter = PyDatasetAdapter(Five())
    adapter.py_dataset = Two()
    return adapter.num_batches == 2 and len(list(adapter.get_tf_dataset())) == 2


@canary(
    "PyDatasetAdapter.enqueuer", "has the data set and whether it is shuffled; None of 1 worker"
)
def _():
    adapter = PyDatasetAdapter(Five(workers=2), shuffle=True)
    has = adapter.enqueuer.shuffle is True and adapter.enqueuer.py_dataset is adapter.py_dataset
    return has and PyDatasetAdapter(Five()).enqueuer is None


@canary("Dataset._inputs", "and ._functions tell what a data set is made of")
def _():
    rows = tf.data.Dataset.range(3)
    mapped = rows.map(lambda x: x + 1)
    (function,) = mapped._functions()
    ops = {node.op for node in function.function.graph.as_graph_def().node}
    return mapped._inputs() == [rows] and rows._functions() == [] and "AddV2" in ops


@canary("MonitorCallback._is_improvement", "is an instance's attribute that three callbacks ask")
def _(monkeypatch):
    monkeypatch.chdir(tempfile.gettempdir())  # where nothing is written
    seen, model = [], model_of(dense, optimizer="sgd", loss="mse")
    settings = {"monitor": "loss", "mode": "min"}
    for each in (
        keras.callbacks.EarlyStopping(**settings),
        keras.callbacks.ReduceLROnPlateau(**settings),
        keras.callbacks.ModelCheckpoint("a.keras", save_best_only=True, **settings),
    ):
        each.set_model(model)
        each._is_improvement = lambda value, best: bool(seen.append((value, best)))
        each.on_train_begin()
        each.on_epoch_end(0, {"loss": 2.0})
    return seen == [(2.0, None)] * 3


@canary("PerReplicaSpec._value_specs", "has one spec, of a tensor, for each replica")
def _():
    specs = tf.nest.flatten(epoch_iterator()._distributed_dataset.element_spec)[0]._value_specs
    return [isinstance(each, tf.TensorSpec) for each in specs] == [True, True]


@canary("distribute_lib._push_per_thread_mode", "with _get_default_replica_mode hides the scope")
def _():
    default = distribute_lib._get_default_replica_mode()
    with strategy_of(2).scope():
        distribute_lib._push_per_thread_mode(default)
        try:
            inside = tf.distribute.get_strategy()
            return inside is default.strategy and not tf.distribute.in_cross_replica_context()
        finally:
            distribute_lib._pop_per_thread_mode()


@canary("distribute_lib._pop_per_thread_mode", "brings the scope back")
def _():
    with strategy_of(2).scope():
        distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
        distribute_lib._pop_per_thread_mode()
        return tf.distribute.get_strategy() is strategy_of(2)


@canary("utils.is_default", "tells a callback's hook from Keras's own")
def _():
    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    hooks = Sees().on_train_batch_end, Sees().on_batch_end
    return [is_default(each) for each in hooks] == [False, True]


@canary("utils.python_utils.pythonify_logs", "makes the logs that callbacks get")
def _():
    logs = {"loss": tf.constant(0.5), "inner": {"deep": tf.constant(2)}, "none": None}
    return pythonify_logs(logs) == {"loss": 0.5, "deep": 2.0, "none": None}


@canary("Model._get_metrics_result_or_logs", "makes an epoch's logs, before its validation")
def _():
    return seen_in_fit()[1] == ["results", "test", "results"]


@canary("distribute_lib._get_default_replica_mode", "is what there is outside any scope")
def _():
    return distribute_lib._get_default_replica_mode().strategy is tf.distribute.get_strategy()


@canary("StrategyExtended._collective_ops", "are a MirroredStrategy's: a launcher per replica")
def _():
    return len(strategy_of(2).extended._collective_ops._launchers) == 2


def workers_extended():
    """Of a MultiWorkerMirroredStrategy whose only worker this is."""
    return CollectiveAllReduceStrategy._from_local_devices(["/cpu:0", "/cpu:1"]).extended


@canary("StrategyExtended._cross_device_ops", "are several workers': a launcher per replica")
def _():
    return len(workers_extended()._cross_device_ops._launchers) == 2


@canary("StrategyExtended._id_in_cluster", "is which of several workers this one is")
def _():
    return workers_extended()._id_in_cluster == 0


@canary("CollectiveReplicaLauncher._group_key and ._group_size", "are those of all replicas")
def _():
    launchers = strategy_of(2).extended._collective_ops._launchers
    (key,) = {each._group_key for each in launchers}
    return isinstance(key, int) and [each._group_size for each in launchers] == [2, 2]


@canary(
    "CollectiveReplicaLauncher._get_ordering_token and ._ordering_token",
    "the one returns the handle of the other for each sum",
)
def _():
    launcher = strategy_of(2).extended._collective_ops._launchers[0]
    return launcher._get_ordering_token() is launcher._ordering_token.handle


@canary("CollectiveAllReduce._launchers", "sum, and gather rows, in order of the replicas")
def _():
    launchers = strategy_of(2).extended._collective_ops._launchers

    @tf.function
    def run():
        summed, gathered = [], []
        for index, launcher in enumerate(launchers):
            with tf.device(f"/cpu:{index}"):
                summed.append(launcher.all_reduce(tf.constant([index + 1.0])))
                gathered.append(launcher.all_gather(tf.fill((index + 1, 1), index), axis=0))
        return summed, gathered

    summed, gathered = run()
    rows = [each.numpy().ravel().tolist() for each in gathered]
    return [each.numpy() for each in summed] == [3, 3] and rows == [[0, 1, 1]] * 2


@canary("values.DistributedVariable", "is the base of what a scope makes, and has numpy()")
def _():
    value = in_scope(lambda: tf.Variable(2.5))
    return isinstance(value, DistributedVariable) and value.numpy() == 2.5


@canary("xla.optimization_barrier", "returns what it is given, in a compiled function")
def _():
    same = tf.function(lambda x: xla.optimization_barrier(x, x + 1), jit_compile=True)
    return [each.numpy() for each in same(tf.constant(1))] == [1, 2]


@canary("tf.__internal__.FuncGraph", "is a graph that variables are lifted out of")
def _():
    with tf.__internal__.FuncGraph("made_by_step").as_default():
        is_traced = not tf.executing_eagerly()
        with tf.init_scope():
            return is_traced and tf.executing_eagerly()


@canary("Layer._trainable_variables", "are the layer's own, without those of layers in it")
def _():
    layer = dense()
    model = keras.Sequential([keras.Input((1,)), layer])
    return layer._trainable_variables == [layer.kernel] and model._trainable_variables == []


@canary("Dense._kernel", "is the kernel without the product of LoRA's matrices")
def _():
    layer = dense()
    layer.build((None, 1))
    layer.enable_lora(1)
    layer.lora_kernel_b.assign([[1.0]])
    layer.lora_kernel_a.assign([[1.0]])
    return layer._kernel.numpy() == 1 and keras.ops.convert_to_numpy(layer.kernel) != 1


@canary("Layer._build_shapes_dict", "has the shapes that build was called with")
def _():
    layer = dense()
    layer.build((2, 3))
    return [*layer._build_shapes_dict.values()] == [(2, 3)]


@canary("Layer._clear_losses", "drops what calls have added")
def _():
    model = keras.Sequential([keras.Input((1,)), dense(activity_regularizer="l2")])
    model(tf.ones((2, 1)))
    before = len(model.losses)
    model._clear_losses()
    return before == 1 and model.losses == []


@canary("Optimizer._learning_rate", "is the schedule or the variable that was given")
def _():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    scheduled, fixed = keras.optimizers.SGD(schedule), keras.optimizers.SGD(0.5)
    return scheduled._learning_rate is schedule and fixed._learning_rate.numpy() == 0.5


@canary("Model._eval_epoch_iterator", "is what fit validates by, with _use_cached_eval_dataset")
def _():
    model, seen = model_of(dense, optimizer="sgd", loss="mse"), []

    def note(**settings):
        seen.append((settings["_use_cached_eval_dataset"], type(model._eval_epoch_iterator)))
        return {}

    vars(model)["evaluate"] = note
    x = np.ones((4, 1), "float32")
    model.fit(x, x, validation_data=(x, x), verbose=0)
    return seen == [(True, TFEpochIterator)]


@canary("TFDatasetAdapter", "is the adapter of a tf.data.Dataset, which it gives as it is")
def _():
    dataset = tf.data.Dataset.range(4).batch(2)
    adapter = data_adapters.get_data_adapter(dataset)
    return type(adapter) is TFDatasetAdapter and adapter.get_tf_dataset() is dataset


@canary("Dataset._batch_size", "and ._drop_remainder are what batch was given")
def _():
    batches = tf.data.Dataset.range(5).batch(2, drop_remainder=True)
    known = [tf.get_static_value(each) for each in (batches._batch_size, batches._drop_remainder)]
    return known == [2, True] and not hasattr(tf.data.Dataset.range(5), "_batch_size")


@canary("naming.to_snake_case", "makes the name of a layer that has none")
def _():
    layer = layers.SeparableConv2D(1, 1)
    return layer.name.startswith("separable_conv2d") and to_snake_case("SeparableConv2D") == (
        "separable_conv2d"
    )


@canary("legacy_h5_format.load_attributes_from_hdf5_group", "reads names, also those cut in pieces")
def _():
    with h5py.File("names", "w", driver="core", backing_store=False) as file:
        file.attrs["layer_names"] = [b"dense", b"dense_1"]
        file.attrs["weight_names0"], file.attrs["weight_names1"] = [b"a"], [b"b"]
        read = legacy_h5_format.load_attributes_from_hdf5_group
        return read(file, "layer_names") == ["dense", "dense_1"] and (
            read(file, "weight_names") == ["a", "b"]
        )


@canary("H5IOStore._h5_entry_path", "is a layer's place in the file that it is loaded from")
def _():
    layer, seen = dense(), []
    model = keras.Sequential([keras.Input((1,)), layer])
    vars(layer)["load_own_variables"] = lambda store: seen.append(store._h5_entry_path)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/a.weights.h5")
        model.load_weights(f"{folder}/a.weights.h5")
    return seen == ["layers/dense"]


@canary("concrete_function._inference_name", "and _forward_name, _backward_name end in a number")
def _():
    made = [
        concrete_function._inference_name("f"),
        concrete_function._forward_name("f"),
        concrete_function._backward_name("f"),
    ]
    return all(re.search(r"_[0-9]+$", each) for each in made)


@canary("control_flow_util_v2.unique_fn_name", "and unique_grad_fn_name end in a number")
def _():
    made = [
        control_flow_util_v2.unique_fn_name("scope", "f"),
        control_flow_util_v2.unique_grad_fn_name("f"),
    ]
    return all(re.search(r"_[0-9]+$", each) for each in made)


@canary("_disable_acd", "lets a function run only what its outputs need")
def _():
    variable = tf.Variable(0.0)

    def change():
        variable.assign_add(1.0)
        return tf.constant(2.0)

    for settings in ({}, {"experimental_attributes": {"_disable_acd": True}}):
        tf.function(change, autograph=False, **settings)()
    return variable.numpy() == 1


@canary("kernels.get_registered_kernels_for_op", "lists devices and the dtypes of attributes")
def _():
    found = [
        (each.device_type, one.name, tuple(one.allowed_values.list.type))
        for each in kernels.get_registered_kernels_for_op("MatMul").kernel
        for one in each.constraint
    ]
    return ("CPU", "T", (tf.float32.as_datatype_enum,)) in found


@canary("op_def_registry.get", "tells whether an operation has effects")
def _():
    known = [op_def_registry.get(each) for each in ("MatMul", "AssignVariableOp", "no such one")]
    return [each and each.is_stateful for each in known] == [False, True, None]


@canary("get_read_write_resource_inputs", "tells what an operation only reads")
def _():
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    change = tf.function(lambda: first.assign(second), autograph=False)
    graph = change.get_concrete_function().graph
    own = {id(handle): inner for handle, inner in graph.captures}
    reads = {
        id(variable): all(
            own[id(variable.handle)] in get_read_write_resource_inputs(each)[0]
            for each in own[id(variable.handle)].consumers()
        )
        for variable in (first, second)
    }
    return [*reads.values()] == [False, True]


@canary("get_resource_handle_data", "has the dtype of a variable's handle")
def _():
    read = tf.function(tf.Variable(1.0).read_value, autograph=False)
    ((_, own),) = read.get_concrete_function().graph.captures
    data = get_resource_handle_data(own)
    return data.is_set and data.shape_and_type[0].dtype == tf.float32.as_datatype_enum


@canary("context.context", "is asked of other workers, by these names")
def _():
    wanted = {
        "configure_coordination_service": {
            *("service_type", "service_leader", "heartbeat_timeout_in_ms", "coordinated_jobs")
        },
        "check_collective_ops_peer_health": {"task", "timeout_in_ms"},
        "abort_collective_ops": {"code", "message"},
    }
    return all(
        names <= inspect.signature(getattr(context.context(), method)).parameters.keys()
        for method, names in wanted.items()
    )


@canary("_current_frames", "has each thread's innermost frame")
def _():
    return sys._current_frames()[threading.get_ident()].f_code.co_filename == __file__


@canary("Context._physical_devices", "is None until TensorFlow is asked for its devices")
def _():
    tf.config.list_physical_devices()
    known = context.Context()._physical_devices
    return known is None and context.context()._physical_devices is not None


@canary("CoordinatedJob", "has a name and the number of its tasks")
def _():
    job = coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=2)
    return (job.name, job.num_tasks) == ("worker", 2)


@canary("is_op_determinism_enabled", "tells it, and disable_op_determinism turns it off")
def _():
    before = tf_config.is_op_determinism_enabled()
    tf.config.experimental.enable_op_determinism()
    during = tf_config.is_op_determinism_enabled()
    tf_config.disable_op_determinism()
    return (before, during, tf_config.is_op_determinism_enabled()) == (False, True, False)


@canary("DataAdapter", "is what fit takes as it is")
def _():
    class Mine(DataAdapter):
        pass

    mine = Mine()
    return data_adapters.get_data_adapter(mine) is mine


def in_thread(function):
    """What a function returns in a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@canary(
    "Graph._device_function_stack",
    "and _colocation_stack, _control_dependencies_stack, _distribution_strategy_stack, "
    "_variable_creator_stack, _name_stack are those of a thread, and may be set",
)
def _():
    graph = tf.Graph()
    graph.switch_to_thread_local()
    names = ("_device_function_stack", "_colocation_stack", "_control_dependencies_stack")
    names += ("_distribution_strategy_stack", "_variable_creator_stack", "_name_stack")

    def stacks():
        found = [getattr(graph, name) for name in names]
        return [each if isinstance(each, str) else each.copy() for each in found]

    def with_those():
        with tf.Graph.as_default(graph):
            for name, value in zip(names, own, strict=True):
                setattr(graph, name, value)
            operation = tf.constant(1.0).op
            return operation.device, operation.name, operation.control_inputs

    def makes(next_creator, **settings):
        return next_creator(**settings)

    with graph.as_default():
        first = tf.constant(0.0)
        with (
            tf.device("/cpu:1"),
            tf.name_scope("own"),
            tf.control_dependencies([first]),
            tf.variable_creator_scope(makes),
        ):
            own = stacks()
    empty = in_thread(lambda: [bool(each) for each in stacks()[2:]])
    device, name, inputs = in_thread(with_those)
    is_carried = device.endswith("CPU:1") and name == "own/Const" and inputs == [first.op]
    return is_carried and empty == [False] * 4 and own[4][0][1] is makes


@canary("context.eager_mode", "runs operations at once, within a graph; device_name is tf.device's")
def _():
    def inside():
        with tf.Graph().as_default(), context.eager_mode(), tf.device("/cpu:1"):
            name = context.context().device_name
            return tf.executing_eagerly() and name.endswith("CPU:1")

    return in_thread(inside) and context.context().device_name in (None, "")


@canary("Context._thread_local_data", "has op_callbacks, a list for each thread")
def _():
    seen = []

    def note(op_type, *_, **__):
        seen.append(op_type)

    context.context().add_op_callback(note)
    try:
        callbacks = list(context.context().op_callbacks)
    finally:
        context.context().remove_op_callback(note)

    def carried():
        without = context.context().op_callbacks
        context.context()._thread_local_data.op_callbacks = callbacks
        _ = tf.constant(1.0) + 1
        return list(without)

    return in_thread(carried) == [] and callbacks == [note] and "AddV2" in seen


@canary("summary_ops_v2._summary_state", "has the step and the writer, for each thread")
def _():
    def carried():
        before = tf.summary.experimental.get_step()
        vars(summary_ops_v2._summary_state).update(state)
        return before, tf.summary.experimental.get_step()

    tf.summary.experimental.set_step(7)
    state = dict(vars(summary_ops_v2._summary_state))
    tf.summary.experimental.set_step(None)
    return in_thread(carried) == (None, 7) and "writer" in state


@canary("global_state.GLOBAL_STATE_TRACKER", "has the dtype policy and more, for each thread")
def _():
    def carried():
        before = keras.config.dtype_policy().name
        vars(global_state.GLOBAL_STATE_TRACKER).update(state)
        return before, keras.config.dtype_policy().name

    keras.config.set_dtype_policy("mixed_bfloat16")
    state = dict(vars(global_state.GLOBAL_STATE_TRACKER))
    keras.config.set_dtype_policy("float32")
    return in_thread(carried) == ("float32", "mixed_bfloat16")


@canary("in_stateless_scope", "is true while Keras calls a layer for its shapes alone")
def _():
    seen = []

    class Seeing(layers.Layer):
        def call(self, x):
            seen.append(in_stateless_scope())
            return x

    layer = Seeing()
    layer(tf.ones((1, 1)))
    backend.compute_output_spec(layer, keras.KerasTensor((1, 1)))
    return seen[-2:] == [False, True] and not in_stateless_scope()


@canary("Layer._losses", "and _loss_ids are what add_loss adds to")
def _():
    layer = layers.Identity()
    layer.build((1,))
    layer.add_loss(tf.constant(2.0))
    (loss,), ids = layer._losses, layer._loss_ids
    layer._losses.clear()
    without = list(layer.losses)
    layer._losses.extend([loss])
    return isinstance(ids, set) and without == [] and list(layer.losses) == [loss]


def called_in(monkeypatch, owner, names, run):
    """The names of a module's functions that are called while `run` does, in order."""
    seen = []

    def noting(name, own):
        return lambda *args, **kwargs: (seen.append(name), own(*args, **kwargs))[1]

    for name in names:
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    run()
    return seen


@canary("gen_math_ops._sum, _max, _min, _all and _any", "are what reductions call, and x.sum ops")
def _(monkeypatch):
    names = ["_sum", "_max", "_min", "_all", "_any", "mean", "prod", "euclidean_norm"]

    def run():
        x = tf.ones((2, 2))
        keras.ops.sum(x), tf.reduce_max(x), tf.reduce_min(x)
        tf.reduce_all(x > 0), tf.reduce_any(x > 0)
        tf.reduce_mean(x), tf.reduce_prod(x), tf.math.reduce_euclidean_norm(x)

    return called_in(monkeypatch, gen_math_ops, names, run) == names


@canary("gen_math_ops._sum", "takes (input, axis, keep_dims, name)")
def _():
    of_all = [gen_math_ops._sum, gen_math_ops.mean, gen_math_ops.euclidean_norm]
    wanted = ["input", "axis", "keep_dims", "name"]
    return all(list(inspect.signature(each).parameters) == wanted for each in of_all)


@canary("gen_math_ops.mul", "and division, casts and matrix products are called by tf.*")
def _(monkeypatch):
    names = ["mul", "real_div", "div_no_nan", "cast", "mat_mul", "batch_mat_mul_v2"]

    def run():
        x = tf.ones((2, 2))
        x * 2.0, x / 2.0, tf.math.divide_no_nan(x, 2.0), tf.cast(tf.constant(1), tf.float32)
        x @ x, tf.ones((2, 2, 2)) @ tf.ones((2, 2, 2))

    return called_in(monkeypatch, gen_math_ops, names, tf.function(run)) == names


@canary("gen_linalg_ops.einsum", "is what tf.einsum calls, with (inputs, equation)")
def _(monkeypatch):
    x = tf.ones((2, 2))
    run = functools.partial(tf.einsum, "ij,jk->ik", x, x)
    given = list(inspect.signature(gen_linalg_ops.einsum).parameters)
    return called_in(monkeypatch, gen_linalg_ops, ["einsum"], run) == ["einsum"] and given == [
        "inputs",
        "equation",
        "name",
    ]


@canary("gen_nn_ops.l2_loss", "is tf.nn.l2_loss, and those of segments are those of tf.math")
def _():
    segments = [f"{sort}segment_{kind}" for sort in ("", "unsorted_") for kind in ("sum", "max")]
    same = [getattr(gen_math_ops, each) is getattr(tf.math, each) for each in segments]
    return gen_nn_ops.l2_loss is tf.nn.l2_loss and all(same)


@canary("while_loop.while_loop", "is what tf.map_fn and tf.while_loop call, with rounds or without")
def _(monkeypatch):
    rounds, own = [], while_loop.while_loop

    def note(*args, **kwargs):
        given = inspect.signature(own).bind(*args, **kwargs).arguments
        rounds.append(given.get("maximum_iterations"))
        return own(*args, **kwargs)

    monkeypatch.setattr(while_loop, "while_loop", note)
    tf.function(lambda: tf.map_fn(tf.square, tf.ones(3)))()
    tf.function(lambda: tf.while_loop(lambda n: n < 3, lambda n: n + 1, (0,)))()
    return rounds == [3, None]


@canary("control_flow_ops.pfor", "is what tf.vectorized_map and Jacobians call, with the rounds")
def _(monkeypatch):
    rounds, own = [], pfor_ops.pfor

    def note(body, iters, *args, **kwargs):
        rounds.append(int(iters))
        return own(body, iters, *args, **kwargs)

    monkeypatch.setattr(pfor_ops, "pfor", note)
    tf.vectorized_map(tf.square, tf.ones(3))
    with tf.GradientTape() as tape:
        x = tf.ones(2)
        tape.watch(x)
        y = x * x
    tape.jacobian(y, x)
    return rounds == [3, 2]


@canary("function_context.make_function_context", "tells which traces of a tf.function are apart")
def _(monkeypatch):
    traces, direct = [], function_context.make_function_context

    @tf.function
    def inner(x):
        traces.append(x)
        return x

    for number in (1, 1, 2):

        def make(*args, number=number, **kwargs):
            made = direct(*args, **kwargs)
            return type(made)((made.context, number), made.scope_type)

        monkeypatch.setattr(function_context, "make_function_context", make)
        inner(tf.ones(1))
    return len(traces) == 2


@canary("cond.cond", "is what tf.cond calls")
def _(monkeypatch):
    def run():
        tf.cond(tf.constant(True), lambda: 1, lambda: 2)

    return called_in(monkeypatch, cond_ops, ["cond"], run) == ["cond"]


@canary("_self_", "begins the names of what TensorFlow tracks of a model a second time")
def _():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.others = [keras.optimizers.SGD()]
    twice = [each for each in vars(model) if each.startswith("_self_")]
    return bool(twice) and "others" in vars(model)


@canary("ops.Graph._create_op_internal", "makes an operation, with its line")
def _(monkeypatch):
    made, direct = [], ops.Graph._create_op_internal

    def create(*args, **kwargs):
        made.append(direct(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(ops.Graph, "_create_op_internal", create)
    inner = tf.function(lambda x: tf.reverse(x, [0]), autograph=False)
    tf.function(lambda x: inner(x) @ x, autograph=False).get_concrete_function(tf.ones([2, 2]))
    found = {each.type: [frame.filename for frame in each.traceback] for each in made}
    return __file__ in found["ReverseV2"] and __file__ in found["MatMul"]


@canary("Graph._get_control_flow_context", "is None but in a loop of TensorFlow 1")
def _(_):
    found = []

    def body(i):
        found.append(tf.compat.v1.get_default_graph()._get_control_flow_context())
        return i + 1

    with tf.Graph().as_default() as graph:
        found.append(graph._get_control_flow_context())
        with tf.control_dependencies([tf.no_op()]):
            found.append(graph._get_control_flow_context())
        while_v1 = tf.compat.v1.while_loop
        tf.compat.v1.disable_control_flow_v2()
        try:
            while_v1(lambda i: i < 3, body, [tf.constant(0)])
        finally:
            tf.compat.v1.enable_control_flow_v2()
    return found[:2] == [None, None] and found[2] is not None


@canary("Graph._control_dependencies_stack", "is empty but within control_dependencies")
def _(_):
    with tf.Graph().as_default() as graph:
        found = [len(graph._control_dependencies_stack)]
        with tf.control_dependencies([tf.no_op()]):
            found.append(len(graph._control_dependencies_stack))
        found.append(len(graph._control_dependencies_stack))
    return found == [0, 1, 0]


@canary("distribute_lib.ReplicaContext", "has all_reduce and all_gather, without a strategy too")
def _(monkeypatch):
    context = tf.distribute.get_replica_context()
    names = ["all_reduce", "all_gather"]

    def run():
        context.all_reduce("SUM", tf.ones(1)), context.all_gather(tf.ones(1), axis=0)

    owner = distribute_lib.ReplicaContext
    return isinstance(context, owner) and called_in(monkeypatch, owner, names, run) == names


ATTENTIONS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def attention_of(layer, **settings):
    sizes = (4, 2, 1) if layer is keras.layers.GroupQueryAttention else (2, 4)
    return layer(*sizes, **settings)


@canary("nn.dot_product_attention", "computes the attention of layers without dropout")
def _(monkeypatch):
    names = ["dot_product_attention"]
    x = tf.ones((1, 3, 8))
    return all(
        called_in(monkeypatch, nn, names, lambda each=each: attention_of(each)(x, x)) == names
        for each in ATTENTIONS
    )


@canary("_compute_attention", "computes a layer's attention, and is told whether it trains")
def _(monkeypatch):
    x, found = tf.ones((1, 3, 8)), []
    for each in ATTENTIONS:
        own = each._compute_attention
        bind = inspect.signature(own).bind

        def noted(*args, own=own, bind=bind, **kwargs):
            found.append(bind(*args, **kwargs).arguments["training"])
            return own(*args, **kwargs)

        monkeypatch.setattr(each, "_compute_attention", noted)
        attention_of(each)(x, x, training=True)
    return found == [True, True]


@canary("_dropout", "is the rate of MultiHeadAttention, and `dropout` that of GroupQueryAttention")
def _():
    rates = [attention_of(each, dropout=0.5) for each in ATTENTIONS]
    return rates[0]._dropout == rates[1].dropout == 0.5 and not hasattr(rates[1], "_dropout")


@canary("_dropout_layer", "drops scores of a layer that trains, by one seed of its own generator")
def _():
    x, found = tf.ones((1, 3, 8)), []
    for each in ATTENTIONS:
        layer = attention_of(each, dropout=0.5)
        generator = (layer(x, x), layer._dropout_layer.seed_generator)[1]
        before = generator.state.value.numpy()
        layer(x, x, training=True)
        after, _ = generator.state.value.numpy(), generator.state.assign(before)
        found += [
            tuple(generator.next()) == tuple(before),
            (generator.state.numpy() == after).all(),
        ]
    return all(found)


@canary("_return_attention_scores", "is what GroupQueryAttention was called with")
def _():
    x, layer = tf.ones((1, 3, 8)), attention_of(keras.layers.GroupQueryAttention)
    layer(x, x, return_attention_scores=True)
    return layer._return_attention_scores


@canary("_layer_normalization", "computes what LayerNormalization calls, with six arguments")
def _(monkeypatch):
    found = []

    def noted(x, gamma=None, beta=None, axis=-1, epsilon=None, rms_scaling=False):
        found.append((gamma is not None, beta is not None, axis, epsilon, rms_scaling))
        return x

    monkeypatch.setattr(keras.src.ops.nn, "_layer_normalization", noted)
    keras.layers.LayerNormalization(epsilon=0.5)(tf.ones((2, 3)))
    return found in [[(True, True, axes, 0.5, False)] for axes in ([-1], [1])]  # 3.15, 3.16


@canary("nn.sparse_categorical_crossentropy", "calls tf.nn's by its name, with int64 labels")
def _(monkeypatch):
    found = []

    def noted(labels, logits):
        found.append((labels.dtype.name, logits.dtype.name, tuple(labels.shape)))
        return tf.zeros(labels.shape)

    monkeypatch.setattr(tf.nn, "sparse_softmax_cross_entropy_with_logits", noted)
    of_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    of_logits(tf.zeros((2, 1), tf.uint8), tf.zeros((2, 3), tf.bfloat16))
    keras.losses.SparseCategoricalCrossentropy()(tf.zeros((2,), tf.int32), tf.ones((2, 3)))
    return found == [("int64", "float32", (2,))] * 2


@canary("numpy.matmul", "computes the products of Dense and of ReversibleEmbedding")
def _(monkeypatch):
    tokens = layers.ReversibleEmbedding(5, 4)

    def run():
        layers.Dense(3)(tf.ones((2, 4)))
        tokens(tokens(tf.zeros((2,), tf.int32)), reverse=True)

    return called_in(monkeypatch, numpy, ["matmul"], run) == ["matmul"] * 2


@canary("numpy.concatenate", "joins the inputs of Concatenate")
def _(monkeypatch):
    x = tf.ones((2, 3))
    run = lambda: layers.Concatenate()([x, x])  # noqa: E731
    return called_in(monkeypatch, numpy, ["concatenate"], run) == ["concatenate"]


@canary("numpy.add", "adds the bias of a layer by tf.nn.bias_add and its name")
def _(monkeypatch):
    found = []

    def noted(value, bias, data_format=None):
        found.append((tuple(value.shape), tuple(bias.shape), data_format))
        return value

    monkeypatch.setattr(tf.nn, "bias_add", noted)
    layers.Dense(3)(tf.ones((2, 4)))
    layers.EinsumDense("ab,bc->ac", 3, bias_axes="c")(tf.ones((2, 4)))
    return found in [[((2, 3), (3,), layout)] * 2 for layout in ("NHWC", None)]  # 3.15, 3.16


@canary("nn.gelu", "is what the activation calls, with the sum itself")
def _(monkeypatch):
    totals, found, add = [], [], tf.nn.bias_add

    def added(*args, **kwargs):
        totals.append(add(*args, **kwargs))
        return totals[-1]

    def noted(x, approximate):
        found.append((x is totals[-1], approximate))
        return x

    monkeypatch.setattr(tf.nn, "bias_add", added)
    monkeypatch.setattr(nn, "gelu", noted)
    layers.Dense(3, activation="gelu")(tf.ones((2, 4)))
    keras.activations.gelu(layers.Dense(3)(tf.ones((2, 4))), approximate=True)
    return found == [(True, False), (True, True)]


@canary("backend.random", "has the dropout of layers, which calls TensorFlow's with a seed")
def _(monkeypatch):
    found = []

    def noted(x, rate, noise_shape, seed):
        found.append((rate, list(np.asarray(noise_shape)), seed.dtype, seed.shape))
        return x

    monkeypatch.setattr(tf.nn.experimental, "stateless_dropout", noted)
    x = tf.ones((2, 3, 4))
    layers.Dropout(0.5)(x, training=True)
    layers.SpatialDropout1D(0.25)(x, training=True)
    own = backend.random.dropout
    larger = lambda x, *rest, **more: own(x + 1, *rest, **more)  # noqa: E731
    monkeypatch.setattr(backend.random, "dropout", larger)
    changed = layers.Dropout(0.5)(x, training=True)
    wanted = [(0.5, [2, 3, 4]), (0.25, [2, 1, 4]), (0.5, [2, 3, 4])]
    return found == [(*each, tf.int32, (2,)) for each in wanted] and changed[0, 0, 0] == 2


@canary("_flash_attention", "is what a layer asks for, and False becomes None")
def _():
    asked = (True, None, False)
    found = [
        [attention_of(each, flash_attention=a)._flash_attention for a in asked]
        for each in ATTENTIONS
    ]
    # After `obey_flash_attention`, which a test before this one may have called, False is kept.
    return all(each[:2] == [True, None] and not each[2] for each in found)


@canary("xla.variadic_reduce", "reduces several tensors with one function of scalars")
def _():
    def joined(top, total, other_top, other_total):
        return tf.maximum(top, other_top), total + other_total

    @tf.function(jit_compile=True)
    def reduced(x, y):
        made = tf.function(joined).get_concrete_function(*[tf.TensorSpec([])] * 4)
        return xla.variadic_reduce([x, y], [-9.0, 0.0], [1], made)

    top, total = reduced(tf.constant([[1.0, 3, 2]]), tf.constant([[1.0, 5, 6]]))
    return (top.numpy().tolist(), total.numpy().tolist()) == ([3.0], [12.0])


@canary("xla.call_module", "puts StableHLO into a compiled function")
def _():
    text = """module @m { func.func public @main(%x: tensor<2xf32>) -> (tensor<2xf32>) {
      %y = stablehlo.add %x, %x : tensor<2xf32>
      return %y : tensor<2xf32> } }"""
    specs = {"Tout": [tf.float32], "Sout": [tf.TensorShape([2])]}

    @tf.function(jit_compile=True)
    def run(x):
        return xla.call_module([x], version=9, module=text, platforms=["CPU"], **specs)

    return list(run(tf.ones(2))[0].numpy()) == [2.0, 2.0]


@canary("record.should_record_backprop", "tells whether a tape wants a tensor's gradient")
def _():
    watched, other = tf.ones(2), tf.ones(2)
    with tf.GradientTape() as tape:
        tape.watch(watched)
        found = [record.should_record_backprop([each]) for each in (watched * 2, other * 2)]
    return found == [True, False]


@canary("record.record_operation", "gives a tape the gradient of what stop_recording hides")
def _():
    def run(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                with record.stop_recording():
                    y = x * 5
                record.record_operation("mine", [y], [x], lambda gradient: [gradient * 2 * x])
                z = y * 3
            first = inner.gradient(z, x)
        return first, outer.gradient(first, x)

    x = tf.constant(7.0)
    return [[float(each) for each in f(x)] for f in (run, tf.function(run))] == [[42, 6], [42, 6]]


@canary("nn.conv, .depthwise_conv and .separable_conv", "are what layers of convolutions call")
def _(monkeypatch):
    names = ["conv", "depthwise_conv", "separable_conv"]
    x, made = tf.ones((1, 4, 4, 2)), (layers.Conv2D, layers.DepthwiseConv2D, layers.SeparableConv2D)

    def run():
        made[0](2, 3, groups=2)(x)
        made[1](3)(x)
        made[2](2, 3)(x)

    return called_in(monkeypatch, nn, names, run) == names


@canary("gen_math_ops.add_n", "is what a tape sums gradients with")
def _(monkeypatch):
    def run():
        with tf.GradientTape() as tape:
            tape.watch(x := tf.ones(3))
            y = x * 2 + x * 3
        tape.gradient(y, x)

    return called_in(monkeypatch, gen_math_ops, ["add_n"], run) == ["add_n"]


@canary("numpy.add and tf.Tensor.__add__", "are what sums of layers and of tensors call")
def _(monkeypatch):
    x = tf.ones(3)
    of_layer = called_in(monkeypatch, numpy, ["add"], lambda: layers.Add()([x, x]))
    found = []
    monkeypatch.setattr(tf.Tensor, "__add__", lambda *both: found.append(both))
    tf.function(lambda: [tf.zeros(3) + tf.ones(3), None][1])()
    return of_layer == ["add"] and len(found) == 1


@canary("AutocastScope.maybe_cast", "casts a variable that a layer reads, by `dtype`, a name")
def _(monkeypatch):
    found = []
    real = AutocastScope.maybe_cast

    def noted(self, value):
        found.append((self.dtype, tuple(value.shape)))
        return real(self, value)

    layer = layers.Dense(2, dtype="mixed_bfloat16")
    layer.build((1, 3))
    monkeypatch.setattr(AutocastScope, "maybe_cast", noted)
    layer(tf.ones((1, 3)))
    return {*found} == {("bfloat16", (3, 2)), ("bfloat16", (2,))}


@canary(
    "_tfaccel_whole, _tfaccel_sum, _tfaccel_terms, _tfaccel_sums_of_rows, of a tensor",
    "are kept by what reads it",
)
def _():
    names = ["_tfaccel_whole", "_tfaccel_sum", "_tfaccel_terms", "_tfaccel_sums_of_rows"]
    found = []

    @tf.function(autograph=False)
    def run(x):
        y = x * 2
        for name in names:
            setattr(y, name, x)
        found.extend(getattr(tf.cast(y, tf.float64).op.inputs[0], name) is x for name in names)
        return y

    run(tf.ones(3))
    return found == [True] * 4


@canary("GradientTape._push_tape", "is called where a tape begins or goes on to record")
def _(monkeypatch):
    found, real = [], tf.GradientTape._push_tape
    monkeypatch.setattr(tf.GradientTape, "_push_tape", lambda self: found.append(1) or real(self))
    with tf.GradientTape() as tape:
        assert len(found) == 1
        with tape.stop_recording():
            pass
    return len(found) == 2


@canary("ForwardAccumulator._push_accumulator", "is called where an accumulator begins")
def _(monkeypatch):
    found, kind = [], tf.autodiff.ForwardAccumulator
    real = kind._push_accumulator
    monkeypatch.setattr(kind, "_push_accumulator", lambda self: found.append(1) or real(self))
    x = tf.ones(2)
    with kind(x, x) as along:
        y = 3 * x
    return len(found) == 1 and along.jvp(y).numpy().tolist() == [3, 3]


@canary("record.should_record_backprop", "is false where no tape records, as in recompute_grad")
def _():
    found, x = [], tf.ones(2)

    def seen(y):
        found.append(record.should_record_backprop([x]))
        return y

    seen(x)
    with tf.GradientTape() as tape:
        seen(x)
        tape.watch(x)
        seen(x)
        with tape.stop_recording():
            seen(x)
        tf.recompute_grad(seen)(x)
        seen(x)
    return found == [False, False, True, False, False, True]


@canary("multi_device_iterator_ops._create_device_dataset", "makes what a strategy iterates over")
def _(monkeypatch):
    made, real = [], multi_device_iterator_ops._create_device_dataset

    def create(*args):
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(multi_device_iterator_ops, "_create_device_dataset", create)
    data, devices = tf.data.Dataset.range(4), ["/cpu:0", "/cpu:1"]
    iterator = multi_device_iterator_ops.OwnedMultiDeviceIterator(data, devices=devices)
    read = [each.numpy() for each in iterator.get_next()]
    return read == [0, 1] and [each.options().autotune.enabled for each in made] == [False] * 2


@canary("ConcreteFunction._inference_function", "is called with other captures")
def _():
    one, two = tf.Variable(1.0), tf.Variable(10.0)
    function = tf.function(lambda x: one.assign_add(x), autograph=False)
    traced = function.get_concrete_function(tf.constant(2.0))
    (handle,) = traced.captured_inputs
    assert handle is one.handle
    traced._inference_function.call_with_captures((tf.constant(2.0),), {}, [two.handle])
    return one.numpy() == 1 and two.numpy() == 12


@canary("numpy.sqrt", "is what an Adam computes its square roots by")
def _(monkeypatch):
    seen, direct = [], numpy.sqrt
    monkeypatch.setattr(numpy, "sqrt", lambda x: seen.append(type(x)) or direct(x))
    optimizer, variable = keras.optimizers.Adam(), keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    optimizer.apply([tf.ones(2)])
    return len(seen) == 2 and issubclass(seen[1], keras.Variable)


@canary("_noinline", "makes TensorFlow translate a function that a branch calls once for XLA")
def _():
    def seconds(root):
        def fifty(x):
            for _ in range(50):
                x = root(x)
            return x

        @tf.function(jit_compile=True, autograph=False)
        def roots(x):
            return tf.cond(x[0] > 0, lambda: fifty(x), lambda: x)

        roots.get_concrete_function(tf.ones(2))
        began = time.perf_counter()
        roots.experimental_get_compiler_ir(tf.ones(2))(stage="hlo")
        return time.perf_counter() - began

    once = tf.function(tf.sqrt, autograph=False, experimental_attributes={"_noinline": True})
    once = once.get_concrete_function(tf.TensorSpec([2]))
    call = lambda x: tf.raw_ops.PartitionedCall(args=[x], Tout=[x.dtype], f=once)[0]  # noqa: E731
    return 3 * seconds(call) < seconds(tf.sqrt)  # 0.03 and 0.25


@canary("Graph._is_function, Graph._get_function", "have the graph of a function that is called")
def _():
    inner = tf.function(lambda x: tf.reverse(x, [0]), autograph=False)
    outer = tf.function(lambda x: inner(x), autograph=False)
    graph = outer.get_concrete_function(tf.TensorSpec([2])).graph
    (call,) = (each for each in graph.get_operations() if each.type == "PartitionedCall")
    name = call.node_def.attr["f"].func.name
    types = [each.type for each in graph._get_function(name).graph.get_operations()]
    return graph._is_function(name) and not graph._is_function("other") and "ReverseV2" in types


@canary("_XlaMustCompile", "is an attribute of the call of a function that XLA compiles")
def _():
    def marked(jit_compile):
        inner = tf.function(tf.sqrt, autograph=False, jit_compile=jit_compile)
        outer = tf.function(lambda x: inner(x), autograph=False)
        graph = outer.get_concrete_function(tf.TensorSpec([2])).graph
        calls = (each for each in graph.get_operations() if "Call" in each.type)
        return [each.node_def.attr["_XlaMustCompile"].b for each in calls]

    return [marked(True), marked(None)] == [[True], [False]]


@canary("Operation._update_input", "gives an operation of a traced function another input")
def _():
    @tf.function(autograph=False)
    def of_first(x, y):
        z = x + 1.0
        z.op._update_input(0, y)
        return z

    return of_first(tf.constant(1.0), tf.constant(10.0)) == 11


@canary("FuncGraph.experimental_acd_manager", "takes one out of the order of stateful ones")
def _():
    def waits(is_independent):
        @tf.function(autograph=False)
        def times():
            first, second = tf.timestamp(), tf.timestamp()
            if is_independent:
                second.graph.experimental_acd_manager.run_independently(second.op)
            return first + second

        operations = times.get_concrete_function().graph.get_operations()
        return [len(each.control_inputs) for each in operations if each.type == "Timestamp"]

    return [waits(False), waits(True)] == [[0, 1], [0, 0]]


@canary("_class", "is the attribute that places an operation with another one")
def _():
    with tf.Graph().as_default():
        one = tf.constant(1)
        with tf.compat.v1.colocate_with(one):
            return "_class" in tf.constant(2).op.node_def.attr


@canary("GradientTape._persistent", "tells whether a tape may compute several gradients")
def _():
    return [tf.GradientTape(each)._persistent for each in (False, True)] == [False, True]


@canary("Operation._remat_mode", "makes a layer call what `rematerialized_call` returns")
def _(monkeypatch):
    with keras.RematScope("list_of_layers", layer_names=["a"]):
        layer = keras.layers.Dense(1, name="a")
    mode = layer._remat_mode
    layer.build((None, 1))
    for owner in (Operation, keras.layers.Layer):
        assert "rematerialized_call" in vars(owner)
    times = lambda layer, call, *_, **__: lambda x: 100 + 0 * call(x)  # noqa: E731
    monkeypatch.setattr(keras.layers.Layer, "rematerialized_call", times)
    assert (mode.mode, mode.layer_names) == ("list_of_layers", ["a"])
    return layer(tf.ones((1, 1))) == 100


@canary("place_of_remat.remat", "is what keras.remat calls")
def _(monkeypatch):
    monkeypatch.setattr(place_of_remat, "remat", lambda function: "replaced")
    return keras.remat(tf.sin) == "replaced"


@pytest.mark.parametrize(("name", "does"), CANARIES, ids=[f"{n} {d}" for n, d in CANARIES])
def test_private_names_are_what_they_were(monkeypatch, name, does):
    check = CANARIES[name, does]
    expected = (
        f"tfaccel relies on this private name: {name} {does}. Keras {keras.__version__} with "
        f"TensorFlow {tf.__version__} has changed it"
    )
    try:
        holds = check(monkeypatch) if check.__code__.co_argcount else check()
    except Exception as error:  # gone, or called in another way
        pytest.fail(f"{expected} ({type(error).__name__}: {error})")
    assert bool(holds), expected
