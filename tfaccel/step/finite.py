"""Finds infinite and NaN values in a training step, and keeps them out of the model.

`watched` runs a step and returns the first variable with such a value as a number.

    logs = watched(model, model.train_step, batch, xla=True)
    code = logs.pop(LOG)        # FINE, WEIGHTS or 1 + the index of a variable

With several replicas the checks are on sums over them, so every replica finds the same. A check
reads the gradients and the weights once each. The loss alone is not enough: a mean squared error of
0.3 does not show a NaN that a ReLU hid from it.

Without XLA, one `tf.cond` looks for the variable, in a branch that most steps do not take. There is
only one, because each branch delays the start, where Python traces it, and each step on a GPU.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfaccel.keras_internals.joined_kernels import joined_sums, joined_updates
from tfaccel.keras_internals.lowered_once import square_roots_once
from tfaccel.keras_internals.model_view import every_optimizer, variables_of
from tfaccel.keras_internals.patching import with_entry
from tfaccel.keras_internals.recording import noted
from tfaccel.keras_internals.shared_operations import scalars_shared
from tfaccel.keras_internals.traced import names_of_results
from tfaccel.keras_internals.variables import value_of
from tfaccel.keras_internals.written import written
from tfaccel.step.loss_scale import Overflows
from tfaccel.step.totals import Span

# Any other code is 1 + the index of a variable in `variables_of`.
FINE, WEIGHTS, OTHER = 0, -1, 2**40  # OTHER: the gradient of a variable that is not the model's
_NONE = OTHER + 1  # nothing was found; larger than any other code
LOG = "nonfinite"  # the key of the code in a step's logs, until Keras sees them
MOST_WHOLE = 4096  # values of a tensor of several axes that is checked whole with others
AT_ONCE = 32  # tensors that are checked together; XLA fuses at most about ninety operands


def watched(model, step: Callable, batch, *, xla: bool, compile_: Callable | None = None) -> dict:
    """Runs the model's own step on its only replica, and undoes changes that are not finite.

    Args:
      model: the model, within `as_replica`.
      step: the model's step, as a function of a batch.
      batch: the replica's batch.
      xla: whether XLA compiles what is traced.
      compile_: compiles the update alone with XLA, for a step that XLA does not compile; None to
        leave the update as it is.

    Returns:
      The step's logs, those of the loss scale, and the code.
    """
    metrics = model.metrics_variables
    before = [tf.convert_to_tensor(value_of(each)) for each in metrics]
    watch = Watch(model, xla=xla, compile_=compile_)
    with noted(_floating(model)) as recording, watch.updates(during=recording.paused):
        logs = step(batch)
    watch.put_back(recording.assigned())
    after = [tf.convert_to_tensor(value_of(each)) for each in metrics]
    spoilt = watch.spoilt(metrics, before, after)
    put_back_where(spoilt, metrics, before, after)
    return _with_results(model, logs, spoilt) | watch.scale_logs() | {LOG: watch.code()}


def _floating(model) -> list:
    """Returns the floating weights and state of a model, without its metrics."""
    metrics = {id(each) for each in model.metrics_variables}
    return [
        each
        for each in (*model.trainable_variables, *model.non_trainable_variables)
        if value_of(each).dtype.is_floating and id(each) not in metrics
    ]


def put_back_where(
    spoilt: tf.Tensor, variables: list, before: list[tf.Tensor], after: list | None = None
) -> None:
    """Gives Keras variables their values `before` the step if `spoilt`, else those `after` it.

    `after=None` reads the variables.
    """
    after = [value_of(each) for each in variables] if after is None else after
    for variable, old, new in zip(variables, before, after, strict=True):
        variable.assign(tf.where(spoilt, old, new))


def _with_results(model, logs: dict, spoilt: tf.Tensor) -> dict:
    """Returns the logs, with the results of metrics that were put back computed again."""
    results = model.get_metrics_result()
    of_metrics = names_of_results(logs, model.metrics_variables)
    return logs | {
        name: tf.where(spoilt, tf.cast(results[name], value.dtype), value)
        for name, value in logs.items()
        if name in results and name in of_metrics and tf.is_tensor(value)
        if value.shape == results[name].shape
    }


class Check(NamedTuple):
    """The result of a check of some values for infinity and NaN.

    Attributes:
      found: whether a value is bad.
      code: the code of the first variable with a bad value, or _NONE. Without XLA it is a function
        that finds the code, to be called in a branch that is taken if `found` is True.
    """

    found: tf.Tensor
    code: tf.Tensor | Callable[[], tf.Tensor]


class Watch:
    """Checks what one step does to one replica's model, and undoes what is not finite.

    Attributes:
      model: the model, within `as_replica`.
      compiles: whether XLA compiles the updates.
    """

    def __init__(self, model, *, xla: bool, compile_: Callable | None = None):
        """Takes the model, within `as_replica`, and the other arguments of `watched`."""
        self.model, self._xla, self._compile = model, xla, compile_
        self.compiles = xla or compile_ is not None
        self._graph = tf.compat.v1.get_default_graph()
        self._codes = {id(each): 1 + i for i, each in enumerate(variables_of(model))}
        self._checks, self._refused, self._overflows = [], [], Overflows()

    @contextlib.contextmanager
    def updates(
        self, spans: Sequence[Span] = (), during: Callable = contextlib.nullcontext
    ) -> Iterator[None]:
        """Within the context, the optimizer applies the gradients only if all of them are finite.

        Otherwise weights, slots and iterations do not change. If a dynamic loss scale overflows,
        Keras halves it; that is not a fault.

        Args:
          spans: the same gradients, uncut, if they were unpacked from vectors. Checking each span
            is faster than checking every gradient.
          during: makes a context in which the optimizer applies them.
        """

        def apply_during(optimizer, grads, trainable_variables=None) -> None:
            with during():
                self.apply(optimizer, grads, trainable_variables, spans=spans)

        with contextlib.ExitStack() as watched:
            for each in every_optimizer(self.model):
                apply = functools.partial(apply_during, each)
                watched.enter_context(replacing(each, apply=apply))
            yield

    def apply(
        self, optimizer, grads, trainable_variables=None, *, spans: Sequence[Span] = ()
    ) -> None:
        """Applies gradients only if all of them are finite.

        The arguments are Keras's. Without `trainable_variables` the gradients are for the model's.
        `spans` is as for `updates`. Slices, the gradient of an Embedding, become dense.
        """
        grads = [None if each is None else tf.convert_to_tensor(each) for each in grads]
        variables = list(trainable_variables or self.model.trainable_variables)
        if not optimizer.built:  # not inside the branch below
            optimizer.build(variables)
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        xla = self.compiles

        def apply_if_finite(grads: list, values: list) -> Check:
            if spans:
                own = [span._replace(values=each) for span, each in zip(spans, values, strict=True)]
                check = self._check_spans(own, variables, xla=xla)
            else:
                given = [each for each in zip(variables, grads, strict=True) if each[1] is not None]
                check = self._check(
                    [each for each, _ in given], [each for _, each in given], xla=xla
                )
            refused = check.found

            def apply():
                given = joined_updates(grads) if xla else grads
                with contextlib.ExitStack() as shared:
                    if xla:
                        shared.enter_context(square_roots_once())
                        shared.enter_context(scalars_shared())
                    type(optimizer).apply(optimizer, given, trainable_variables)

            if scales:
                with replacing(
                    optimizer, check_finite=lambda _: ~refused
                ):  # Keras need not check again
                    apply()
            else:
                tf.cond(refused, lambda: None, apply)
            return check

        check = self.compiled(apply_if_finite, grads, [each.values for each in spans])
        if self.is_in_step:  # a `train_step` that updates inside its own tf.cond cannot return it
            self.note(optimizer, check)

    @property
    def is_in_step(self) -> bool:
        """Whether the code that runs is in no branch, loop or function of the step."""
        return tf.compat.v1.get_default_graph() is self._graph

    def note(self, optimizer, check: Check) -> None:
        """Takes the check of the gradients that an optimizer has applied or refused."""
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self._overflows.add(optimizer, check.found)
        else:
            self._refused.append(check.found)
            self._checks.append(check)

    def scale_logs(self) -> dict[str, tf.Tensor]:
        """Returns the loss scales and whether they skipped updates; {} without a loss scale."""
        return self._overflows.logs(self.model)

    def put_back(self, changes: list[tuple]) -> None:
        """Undoes changes that are not finite, which the step's own code and its layers made.

        The state of the model is put back if any change or gradient is not finite. A trained weight
        is put back only if the weight itself is not finite.

        A change is a pair: a floating Keras variable, and its value before.
        """
        if not changes:
            return
        variables, before = [each for each, _ in changes], [each for _, each in changes]
        after = [tf.convert_to_tensor(value_of(each)) for each in variables]
        spoilt = _any([self.spoilt(variables, before, after), *self._refused])
        after = joined_updates(after) if self._xla else after
        trained = {id(each) for each in self.model.trainable_variables}
        for variable, old, new in zip(variables, before, after, strict=True):
            # A finite weight may have an update since then, by an optimizer that was not refused:
            # that of the other network of a GAN, for example. Such an update stays.
            own = ~tf.reduce_all(_good(new, old)) if id(variable) in trained else spoilt
            put_back_where(own, [variable], [old], [new])

    def spoilt(self, variables: list, before: list[tf.Tensor], after: list[tf.Tensor]) -> tf.Tensor:
        """Returns whether a finite value became infinite or NaN; a metric may start as infinity."""
        each = zip(variables, after, before, strict=True)
        floats = [values for values in each if values[1].dtype.is_floating]
        if not floats:
            return tf.constant(False)
        check = self._check(*zip(*floats, strict=True), xla=self._xla)
        self._checks.append(check)
        return check.found

    def code(self) -> tf.Tensor:
        """Returns the code of what was found, an int64 scalar: that of the first layer at fault.

        It is FINE; WEIGHTS if the model's weights are not finite; or 1 + the index of a variable in
        `variables_of`. That means the gradient of a variable that is trained, and the value of
        one that is not.
        """
        # A function returns int32 through the CPU, and each step would wait for the GPU.
        first = self._first()
        fine = _any([tf.equal(first, _NONE), *self._overflows.all()])
        first = tf.where(fine, tf.constant(FINE, tf.int64), first)
        trained = self.model.trainable_variables
        xla = self.compiles

        def weights_are_finite() -> tf.Tensor:
            return _all_finite([tf.convert_to_tensor(value_of(each)) for each in trained], xla=xla)

        finite = self.compiled(weights_are_finite)
        return tf.where(finite, first, tf.constant(WEIGHTS, tf.int64))

    def _first(self) -> tf.Tensor:
        """Returns the code of the first variable with a bad value in all checks, or _NONE."""
        known = [each.code for each in self._checks if not callable(each.code)]
        first = _least(known) if known else tf.constant(_NONE, tf.int64)
        others = [each for each in self._checks if callable(each.code)]
        if not others:
            return first
        return tf.cond(
            _any([each.found for each in others]),
            lambda: _least([first, *(each.code() for each in others)]),
            lambda: first,
        )

    def compiled(self, function: Callable, *arguments):
        """Calls a function, compiled with XLA if XLA compiles the update alone."""
        return (self._compile(function) if self._compile else function)(*arguments)

    def _check(self, variables, after, before=None, *, xla: bool) -> Check:
        """Checks one value for each variable; with `before`, only values that were finite then."""
        if not after:
            return Check(tf.constant(False), tf.constant(_NONE, tf.int64))
        if xla:
            return _check_in_xla(self.code_at(_index_in_each(after, before), variables))
        bad, sizes = ~_good(_packed(after), before and _packed(before)), _sizes(after)
        find = lambda: self.code_at(_index_of_first(bad, sizes), variables)  # noqa: E731
        return Check(tf.reduce_any(bad), find)

    def _check_spans(self, spans: Sequence[Span], variables, *, xla: bool) -> Check:
        """Checks the uncut gradients of the variables."""
        bad = [each._replace(values=~tf.math.is_finite(each.values)) for each in spans]
        find = lambda: self.code_at(index_in_spans(bad, len(variables)), variables)  # noqa: E731
        if xla:
            return _check_in_xla(find())
        return Check(_any([tf.reduce_any(each.values) for each in bad]), find)

    def code_at(self, index: tf.Tensor, variables) -> tf.Tensor:
        """Returns the code of the variable at an index; _NONE if the index is their number."""
        codes = [self._codes.get(id(each), OTHER) for each in variables]
        return tf.gather(tf.constant([*codes, _NONE], tf.int64), index)


def _check_in_xla(code: tf.Tensor) -> Check:
    return Check(tf.not_equal(code, _NONE), code)


def _index_in_each(after, before) -> tf.Tensor:
    """Returns the index of the first tensor with a bad value, or their number, for use in XLA.

    Each large matrix is reduced over its last axis where XLA computes it, or together with others.
    The results are then checked together, AT_ONCE at a time, and so are small tensors. Two
    kernels for each tensor would take 1 ms of a ResNet-50 step of 36 ms (H200, 2026-11-22). Nor can
    all go into one vector: XLA computed each update again inside it, and took over 10 minutes for a
    model of 4 dense layers (CPU, 2026-11-21).

    ResNet-50 has 856 tensors to check, so each operation per tensor lengthens the start, in Python,
    TensorFlow and XLA.
    """
    found = [
        tf.gather([*indices, len(after)], _index_of_first(~good, sizes))
        for indices, good, sizes in _good_in_parts(after, before)
    ]
    return _least(found)


def _good_in_parts(after, before) -> Iterator[tuple[list[int], tf.Tensor, list[int]]]:
    """Yields the indices of at most AT_ONCE tensors, a vector, and each tensor's size in it.

    The vector is True for good values of small tensors, and for good rows of large ones. This is
    for XLA; see `_index_in_each`.
    """
    before = before or [None] * len(after)
    large = iter(joined_sums([each for each in after if not is_small(each)]))
    pairs = [
        (now if is_small(now) else next(large), then)
        for now, then in zip(after, before, strict=True)
    ]
    kinds = {}
    for index, (now, _) in enumerate(pairs):
        kinds.setdefault(now.dtype if is_small(now) else None, []).append(index)
    axis = tf.constant(-1)
    for kind, indices in kinds.items():
        for start in range(0, len(indices), AT_ONCE):
            part = indices[start : start + AT_ONCE]
            now, then = zip(*(pairs[index] for index in part), strict=True)
            if kind is None:
                good = [
                    tf.reduce_all(_good(*each, _is_finite_for_xla), axis)
                    for each in zip(now, then, strict=True)
                ]
                yield part, _joined(good), _sizes(good)
            else:
                then = None if then[0] is None else _joined(then)
                yield part, _good(_joined(now), then, _is_finite_for_xla), _sizes(now)


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns all values in a vector, which XLA writes.

    XLA alone would choose the tensor again for each value that a thread of the reduction reads. The
    code of 13 such kernels was 0.3 of the code of a ResNet-50's step.
    """
    flat = tf.constant([-1])
    vectors = [each if len(each.shape) == 1 else tf.reshape(each, flat) for each in tensors]
    return vectors[0] if len(vectors) == 1 else written(tf.concat(vectors, axis=0))


def is_small(tensor) -> bool:
    """Returns whether a tensor or variable is checked with others, not reduced by itself before."""
    return len(tensor.shape) < 2 or tensor.shape.num_elements() <= MOST_WHOLE


def _all_finite(values: list[tf.Tensor], *, xla: bool) -> tf.Tensor:
    """Returns whether all values are finite."""
    if not values:
        return tf.constant(True)
    if not xla:
        return tf.reduce_all(tf.math.is_finite(_packed(values)))
    # XLA would turn the "all" of a concatenation into an "all" of each tensor: 276 kernels in a
    # step of a ViT-B/16 (TensorFlow 2.21, H200, 2026-11-28).
    return tf.equal(_index_in_each(values, None), len(values))


def index_in_spans(bad: Sequence[Span], num_gradients: int) -> tf.Tensor:
    """Returns the index of the first gradient with a bad value, or their number: an int32 scalar.

    The values of the spans are bools, True for each bad value of the gradients.
    """
    found = [
        tf.gather([*span.indices, num_gradients], _index_of_first(span.values, span.sizes))
        for span in bad
    ]
    return _least(found)


def _any(bools: Sequence[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(operator.or_, bools) if bools else tf.constant(False)


def _least(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(tf.minimum, numbers)


def _index_of_first(bad: tf.Tensor, sizes: list[int]) -> tf.Tensor:
    """Returns the index of the part with the first True, or the number of parts: an int32 scalar.

    XLA fuses the passes over all values into one. Without XLA, call this only if `bad` has a True.

    Args:
      bad: [values of all parts] bool.
      sizes: the number of values in each part.
    """
    num_bad = tf.size(bad)
    first = tf.reduce_min(tf.where(bad, tf.range(num_bad), num_bad))
    return tf.reduce_sum(tf.cast(first >= np.cumsum(sizes, dtype=np.int32), tf.int32))


def _sizes(parts: list[tf.Tensor]) -> list[int]:
    """Returns the number of values of each part."""
    return [each.shape.num_elements() for each in parts]


def _good(after, before, is_finite: Callable = tf.math.is_finite) -> tf.Tensor:
    """Returns True for each value that is finite, or that was not finite before."""
    good = is_finite(after)
    return good if before is None else good | ~is_finite(before)


def _is_finite_for_xla(values) -> tf.Tensor:
    """Returns True for each finite value.

    TensorFlow 2.21 takes 5 ms to make XLA's program of each IsFinite, and less than 1 ms of most
    operations (CPU, 2026-11-29). The 644 of a ResNet-50 took half of the time before XLA begins.
    """
    difference = tf.subtract(values, values)  # 0, or NaN
    return tf.equal(difference, difference)


def _packed(values) -> tf.Tensor:
    """Returns all values in one vector, in a dtype that can hold each of them.

    Without XLA this saves two kernels for each tensor.
    """
    dtype = tf.float64 if any(each.dtype == tf.float64 for each in values) else tf.float32
    flat = tf.constant([-1])
    return tf.concat([tf.reshape(tf.cast(each, dtype), flat) for each in values], axis=0)


@contextlib.contextmanager
def replacing(optimizer, **methods) -> Iterator[None]:
    """Within the context, replaces methods of this optimizer."""
    with contextlib.ExitStack() as entries:
        for name, method in methods.items():  # past Keras's tracking of attributes
            entries.enter_context(with_entry(optimizer.__dict__, name, method))
        yield
