"""Passes the operations of a traced step that can join the rows of a batch to a handler.

Takes a handler; while a step of the model's own is traced, TensorFlow's reductions, matrix
products, row counts, gradients and collectives go through it. tfaccel/step/row_handler.py has them.

    step = noticed(model.train_step)
    with operations_by(handler, metrics=model.metrics):
        step(batch)

A handler sees what the user wrote: their steps, losses, layers and functional operations. It does
not see what Keras's layers, metrics and optimizers compute, or how TensorFlow computes gradients.
"""

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.ops import cond as cond_ops
from tensorflow.python.ops import gen_linalg_ops, gen_math_ops, gen_nn_ops, while_loop
from tensorflow.python.ops.parallel_for import control_flow_ops as pfor_ops

from tfaccel.keras_internals.moved import Variable as TensorFlowVariable
from tfaccel.keras_internals.patching import patched

_REDUCTIONS = {
    "_sum": "sum",
    "mean": "mean",
    "prod": "prod",
    "_max": "max",
    "_min": "min",
    "_all": "all",
    "_any": "any",
    "euclidean_norm": "norm",
}
# What a metric computes; MeanMetricWrapper's `update_state` calls the user's function.
_OF_METRICS = {"update_state", "result", "reset_state"}
_SCALED = ("mul", "real_div", "div_no_nan")
_SEGMENTS = {f"unsorted_segment_{kind}": kind for kind in ("sum", "max", "min", "prod")}
_SEGMENTS |= {f"segment_{kind}": kind for kind in ("sum", "mean", "max", "min", "prod")}
_OF_SHAPES = ("StridedSlice", "GatherV2", "Prod", "Mul", "AddV2", "Sub", "Maximum", "Cast")
# Libraries whose layers compute each row by itself, except for batch normalization.
_LIBRARIES = ("keras.src.layers.", "keras_hub.", "keras_cv.")

_ASSIGN = TensorFlowVariable.assign
_noticed = threading.local()
_NUMBERS = itertools.count()


class Handler(Protocol):
    """Computes the operations. `direct` computes one as TensorFlow does."""

    def reduced(self, kind: str, direct: Callable, x, axes: list[int], keep_dims: bool):
        """Reduces x over axes. The kind is one of the values of `_REDUCTIONS`."""

    def contracted(self, direct: Callable, summed: list[tuple[tf.Tensor, int]]):
        """Computes a product that sums over an axis of some tensors."""

    def segmented(self, kind: str, direct: Callable, x):
        """Reduces groups of the entries along axis 0 of x. The kind is one of `_SEGMENTS`."""

    def squares(self, direct: Callable, x):
        """Returns half the sum of the squares of x."""

    def scaled(self, direct: Callable, x, y, *, divides: bool):
        """Multiplies or divides x by y; one of both is a number that is known when traced."""

    def counted(self, direct: Callable, x, number: int):
        """Casts a whole number, such as a number of rows, to a float."""

    def section(self, kind: str, number: int | None = 0):
        """Returns a context for "loop" or "branches", and for "cond", "body" or "branch N" in it.

        A loop may have a largest number of rounds: None if it is not known when traced.
        """

    def own_gradients(self):
        """Returns a context in which the step is traced, for the user's custom gradients."""

    def gradient(self, direct: Callable, target, sources, output_gradients):
        """Returns the gradients of the targets with respect to the sources."""

    def all_reduce(self, value, op: str):
        """Reduces one value of each replica: "sum" or "mean"."""

    def all_gather(self, value, axis: int):
        """Concatenates the replicas' values."""


@contextlib.contextmanager
def noticing(on: bool = True) -> Iterator[None]:
    """Within the context, in this thread, the handler sees operations, or does not."""
    before = getattr(_noticed, "on", False)
    _noticed.on = on
    try:
        yield
    finally:
        _noticed.on = before


@contextlib.contextmanager
def noticing_nothing() -> Iterator[None]:
    """Within the context, in this thread, the handler sees no operation, whatever it is part of."""
    before = getattr(_noticed, "never", False)
    _noticed.never = True
    try:
        yield
    finally:
        _noticed.never = before


def is_noticing() -> bool:
    """Returns whether the handler sees operations in this thread."""
    return getattr(_noticed, "on", False) and not getattr(_noticed, "never", False)


def noticed(function: Callable) -> Callable:
    """Returns a function whose operations the handler sees, in the context of `operations_by`."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with noticing():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def operations_by(handler: Handler, *, metrics: Iterable[keras.metrics.Metric]) -> Iterator[None]:
    """Within the context, a handler computes what a function of `noticed` calls.

    Args:
      handler: The handler.
      metrics: The model's metrics, whose own code is not noticed, because the states of metrics are
        summed over the replicas later.
    """
    with contextlib.ExitStack() as patches:

        def replace(owner, name: str, make: Callable) -> None:
            original = getattr(owner, name)
            replacement = functools.wraps(original)(make(original))
            patches.enter_context(patched(owner, name, replacement))

        for name, kind in _REDUCTIONS.items():
            replace(gen_math_ops, name, functools.partial(_reducing, handler, kind))
        for name in _SCALED:
            divides = name != "mul"
            replace(gen_math_ops, name, functools.partial(_scaling, handler, divides))
        for name, kind in _SEGMENTS.items():
            for owner in (gen_math_ops, tf.math):  # tf.math has the same function
                replace(owner, name, functools.partial(_segmenting, handler, kind))
        replace(gen_math_ops, "cast", functools.partial(_casting, handler))
        for owner in (gen_nn_ops, tf.nn):
            replace(owner, "l2_loss", functools.partial(_squaring, handler))
        replace(gen_math_ops, "mat_mul", functools.partial(_matrix_product, handler))
        for name in ("batch_mat_mul_v2", "batch_mat_mul_v3"):
            replace(gen_math_ops, name, functools.partial(_batched_product, handler))
        replace(gen_linalg_ops, "einsum", functools.partial(_einsum, handler))
        replace(while_loop, "while_loop", functools.partial(_looping, handler))
        replace(pfor_ops, "pfor", functools.partial(_vectorizing, handler))
        replace(cond_ops, "cond", functools.partial(_branching, handler))
        replace(tf.GradientTape, "gradient", functools.partial(_gradient, handler))
        context = distribute_lib.ReplicaContext
        replace(context, "all_reduce", functools.partial(_all_reduce, handler))
        replace(context, "all_gather", functools.partial(_all_gather, handler))
        replace(keras.layers.Layer, "__call__", _layer_call)
        replace(BaseOptimizer, "apply", unnoticed)
        replace(keras.metrics.MeanMetricWrapper, "update_state", _with_noticed_function)
        for kind in _kinds_of(metrics):
            for name in _OF_METRICS & vars(kind).keys():
                if (kind, name) != (keras.metrics.MeanMetricWrapper, "update_state"):
                    replace(kind, name, unnoticed)
        yield


def traced_anew() -> contextlib.AbstractContextManager:
    """Returns a context in which each `tf.function` is traced again, where it is called in a trace.

    TensorFlow would take an earlier trace of the same shapes, even one for another device.
    """
    number = next(_NUMBERS)
    direct = function_context.make_function_context

    def make(*args, **kwargs):
        made = direct(*args, **kwargs)
        if tf.executing_eagerly():
            return made
        return type(made)((made.context, number), made.scope_type)

    return patched(function_context, "make_function_context", make)


def unassigned(
    variables: Iterable | None = None, *, tell: Callable = lambda variable, value: None
) -> contextlib.AbstractContextManager:
    """Returns a context in which Keras variables keep their values, whatever they are assigned.

    These are all variables, or those that are given. `tell` gets each variable and its value.
    """
    direct = TensorFlowVariable.assign
    kept = None if variables is None else {id(each) for each in variables}

    def assign(variable, value):
        tell(variable, value)
        return variable if kept is None or id(variable) in kept else direct(variable, value)

    return patched(TensorFlowVariable, "assign", assign)


def assigned() -> contextlib.AbstractContextManager:
    """Returns a context within `unassigned` in which variables do get what they are assigned."""
    return patched(TensorFlowVariable, "assign", _ASSIGN)


def _kinds_of(metrics: Iterable[keras.metrics.Metric]) -> list[type]:
    """Returns the classes of metrics, Keras's own and the user's."""
    found = [each for each in vars(keras.metrics).values() if isinstance(each, type)]
    found = [kind for each in (*found, *map(type, metrics)) for kind in each.__mro__]
    return list(
        {id(each): each for each in found if issubclass(each, keras.metrics.Metric)}.values()
    )


def unnoticed(direct: Callable) -> Callable:
    """Returns a function whose operations the handler does not see."""

    def call(*args, **kwargs):
        with noticing(on=False):
            return direct(*args, **kwargs)

    return call


def _with_noticed_function(direct: Callable) -> Callable:
    """Returns `MeanMetricWrapper.update_state`, which notices only the metric's function."""

    def update_state(metric, *args, **kwargs):
        function = metric._fn

        def noticed(*arguments, **settings):
            with noticing():
                return function(*arguments, **settings)

        metric.__dict__["_fn"] = noticed  # past Keras's tracking of attributes
        try:
            with noticing(on=False):
                return direct(metric, *args, **kwargs)
        finally:
            metric.__dict__["_fn"] = function

    return update_state


def _layer_call(direct: Callable) -> Callable:
    def call(layer, *args, **kwargs):
        with noticing(on=is_noticing_in(layer)):
            return direct(layer, *args, **kwargs)

    return call


def is_noticing_in(layer: keras.layers.Layer) -> bool:
    """Returns whether the handler sees the operations of a layer that is called now.

    A layer of Keras computes each row by itself, so only the user's layers are noticed. Models are
    noticed if their caller is. Batch normalization is never noticed: each replica normalizes with
    its own rows unless you ask for the rows of all.
    """
    if isinstance(layer, keras.layers.BatchNormalization):
        return False
    if isinstance(layer, keras.Model):
        return is_noticing()
    is_users = not type(layer).__module__.startswith(_LIBRARIES)
    return is_users or isinstance(layer, keras.layers.Lambda)


def _reducing(handler: Handler, kind: str, direct: Callable) -> Callable:
    def reduce(input, axis, keep_dims=False, name=None):
        compute = functools.partial(direct, axis=axis, keep_dims=keep_dims, name=name)
        if not is_noticing():
            return compute(input)
        x, known = tf.convert_to_tensor(input), tf.get_static_value(tf.convert_to_tensor(axis))
        if known is None or x.shape.rank is None:
            return compute(x)
        axes = sorted({int(each) % max(1, x.shape.rank) for each in known.reshape(-1)})
        with noticing(on=False):
            return handler.reduced(kind, compute, x, axes, bool(keep_dims))

    return reduce


def _scaling(handler: Handler, divides: bool, direct: Callable) -> Callable:
    def scale(x, y, name=None):
        compute = functools.partial(direct, name=name)
        if not is_noticing():
            return compute(x, y)
        with noticing(on=False):
            return handler.scaled(noticed(compute), x, y, divides=divides)

    return scale


def _segmenting(handler: Handler, kind: str, direct: Callable) -> Callable:
    def sums(data, *args, **kwargs):
        compute = functools.partial(direct, data, *args, **kwargs)
        if not is_noticing():
            return compute()
        with noticing(on=False):
            return handler.segmented(kind, compute, tf.convert_to_tensor(data))

    return sums


def _casting(handler: Handler, direct: Callable) -> Callable:
    def cast(x, DstT, *args, **kwargs):  # noqa: N803 (TensorFlow's name)
        compute = functools.partial(direct, DstT=DstT, *args, **kwargs)  # noqa: B026
        if is_noticing() and tf.as_dtype(DstT).is_floating:
            tensor = tf.convert_to_tensor(x)
            if tensor.dtype.is_integer and tensor.shape.rank == 0:
                known = known_when_traced(tensor)
                if known is not None:
                    with noticing(on=False):
                        return handler.counted(lambda: compute(tensor), tensor, int(known))
                if (chosen := _counted_of(tensor)) is not None:
                    with noticing(on=False):
                        return handler.contracted(lambda: compute(tensor), [(chosen, 0)])
        return compute(x)

    return cast


def _counted_of(number: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor of whose size a number is computed, if it is known only when it runs.

    A mask has chosen some of the rows, for example. None if the number is computed otherwise.
    """
    if hasattr(number, "numpy"):
        return None
    if number.op.type in ("Shape", "Size"):
        (counted,) = number.op.inputs
        return counted if counted.shape.rank and counted.shape[0] is None else None
    if number.op.type not in (*_OF_SHAPES, "Pack", "ConcatV2", "Identity"):
        return None
    found = map(_counted_of, number.op.inputs)
    return next((each for each in found if each is not None), None)


def computed(tensor: tf.Tensor):
    """Returns the value of whole numbers that depend on sizes alone; None of others."""
    return known_when_traced(
        tensor, (*_OF_SHAPES, "FloorMod", "Range", "ReverseV2", "Roll", "Reshape")
    )


def known_when_traced(tensor: tf.Tensor, types: Sequence[str] = _OF_SHAPES) -> np.ndarray | None:
    """Returns the value of a number that is known when traced; else None.

    TensorFlow does not know what is computed from a known shape, such as `tf.shape(x)[0]`.

    Args:
      tensor: the number, of any dtype; with other types, any tensor.
      types: the operations that may compute it from values that TensorFlow knows.
    """
    known = tf.get_static_value(tensor)
    if known is not None or hasattr(tensor, "numpy") or tensor.op.type not in types:
        return known
    values = [known_when_traced(each, types) for each in tensor.op.inputs]
    if any(each is None for each in values):
        return None
    compute = getattr(tf.raw_ops, tensor.op.type)
    names = [each for each in inspect.signature(compute).parameters if each != "name"]
    settings = {each: tensor.op.get_attr(each) for each in names[len(values) :]}
    with tf.init_scope(), noticing(on=False):
        return compute(**dict(zip(names, values, strict=False)), **settings).numpy()


def _squaring(handler: Handler, direct: Callable) -> Callable:
    def squares(t, name=None):
        if not is_noticing():
            return direct(t, name=name)
        with noticing(on=False):
            return handler.squares(functools.partial(direct, name=name), tf.convert_to_tensor(t))

    return squares


def _matrix_product(handler: Handler, direct: Callable) -> Callable:
    def product(a, b, transpose_a=False, transpose_b=False, *args, **kwargs):
        compute = functools.partial(direct, a, b, transpose_a, transpose_b, *args, **kwargs)
        if not is_noticing():
            return compute()
        a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
        with noticing(on=False):
            return handler.contracted(noticed(compute), [(a, 0 if transpose_a else 1)])

    return product


def _batched_product(handler: Handler, direct: Callable) -> Callable:
    def product(x, y, adj_x=False, adj_y=False, *args, **kwargs):
        compute = functools.partial(direct, x, y, adj_x=adj_x, adj_y=adj_y, *args, **kwargs)  # noqa: B026
        if not is_noticing():
            return compute()
        x = tf.convert_to_tensor(x)
        rank = x.shape.rank
        with noticing(on=False):
            summed = [(x, rank - 2 if adj_x else rank - 1)] if rank else []
            return handler.contracted(noticed(compute), summed)

    return product


def _einsum(handler: Handler, direct: Callable) -> Callable:
    def einsum(inputs, equation, name=None):
        compute = functools.partial(direct, inputs, equation, name=name)
        if not is_noticing() or "..." in equation:
            return compute()
        text = equation if isinstance(equation, str) else equation.decode()
        terms, output = text.replace(" ", "").split("->")
        summed = [
            (tf.convert_to_tensor(tensor), axis)
            for tensor, term in zip(inputs, terms.split(","), strict=True)
            for axis, letter in enumerate(term)
            if letter not in output
        ]
        with noticing(on=False):
            return handler.contracted(noticed(compute), summed)

    return einsum


def _gradient(handler: Handler, direct: Callable) -> Callable:
    def gradient(tape, target, sources, output_gradients=None, unconnected_gradients=None):
        unconnected = unconnected_gradients or tf.UnconnectedGradients.NONE

        def compute(output_gradients):
            return direct(tape, target, sources, output_gradients, unconnected)

        if not is_noticing():
            return compute(output_gradients)
        with noticing(on=False):
            return handler.gradient(compute, target, sources, output_gradients)

    return gradient


def _looping(handler: Handler, direct: Callable) -> Callable:
    """Returns `tf.while_loop`, which `tf.map_fn`, `tf.scan` and loops of autograph call, too."""
    signature = inspect.signature(direct)

    def loop(*args, **kwargs):
        if not is_noticing():
            return direct(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        rounds = given.get("maximum_iterations")
        with handler.section("loop", 0 if rounds is None else _rounds(rounds)):
            parts = {each: _part(handler, each, given[each]) for each in ("cond", "body")}
            with noticing(on=False):
                return direct(**(given | parts))

    return loop


def _vectorizing(handler: Handler, direct: Callable) -> Callable:
    """Returns what `tf.vectorized_map` calls, and Jacobians."""

    def pfor(loop_fn, iters, *args, **kwargs):
        if not is_noticing():
            return direct(loop_fn, iters, *args, **kwargs)
        with handler.section("loop", _rounds(iters)):
            body = _part(handler, "body", loop_fn)
            with noticing(on=False):
                return direct(body, iters, *args, **kwargs)

    return pfor


def _branching(handler: Handler, direct: Callable) -> Callable:
    """Returns `tf.cond`, which `tf.case` and branches of autograph call, too."""

    def cond(pred, true_fn=None, false_fn=None, *args, **kwargs):
        if not is_noticing():
            return direct(pred, true_fn, false_fn, *args, **kwargs)
        with handler.section("branches"):
            parts = [
                each and _part(handler, f"branch {index}", each)
                for index, each in enumerate((true_fn, false_fn))
            ]
            with noticing(on=False):
                return direct(pred, *parts, *args, **kwargs)

    return cond


def _rounds(number) -> int | None:
    known = known_when_traced(tf.convert_to_tensor(number))
    return None if known is None else int(known)


def _part(handler: Handler, kind: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def part(*args, **kwargs):
        with noticing():
            if not is_noticing():  # in a loop with a round for each row
                return function(*args, **kwargs)
            with handler.section(kind):
                return function(*args, **kwargs)

    return part


def _all_reduce(handler: Handler, direct: Callable) -> Callable:
    def all_reduce(context, reduce_op, value, options=None):
        if not is_noticing():  # an optimizer of Keras, for example
            return direct(context, reduce_op, value, options)
        op = str(getattr(reduce_op, "value", reduce_op)).lower()
        with noticing(on=False):
            return tf.nest.map_structure(lambda each: handler.all_reduce(each, op), value)

    return all_reduce


def _all_gather(handler: Handler, direct: Callable) -> Callable:
    def all_gather(context, value, axis, options=None):
        if not is_noticing():
            return direct(context, value, axis, options)
        with noticing(on=False):
            return tf.nest.map_structure(lambda each: handler.all_gather(each, axis), value)

    return all_gather
