"""The update of a replica that keeps one slice of each optimizer state (StepConfig.shard_states).

Each replica gets its slices of the summed gradients, updates its slices of the weights, and gathers
the new weights of all replicas (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054):

    layout = ScatteredGradients(totals, gradients_as=None, num_replicas=2)
    own = [collectives.reduce_scatter(each) for each in layout.pack(totals.gradients)]
    gradients, spans = layout.unpack(own)       # sums over the replicas: divide them by the rows
    watch = ShardedWatch(model, collectives, replica, xla=True)
    watch.apply(optimizer, gradients, weights, spans=spans)

Before the update, one small sum over the replicas tells each of them whether any gradient is
infinite or NaN, so that all skip the step together, and the norms of whole gradients for clipping.
`collectives` is a `Replica`, or an `InXla` in a function in which XLA makes the collectives.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.keras_internals import sharded_states
from tfaccel.keras_internals.lowered_once import square_roots_once
from tfaccel.keras_internals.optimizers import weights_of
from tfaccel.keras_internals.replica import InXla, Replica
from tfaccel.keras_internals.shared_operations import scalars_shared
from tfaccel.keras_internals.slices import in_slices, own_slice, slice_size, whole_of
from tfaccel.keras_internals.variables import value_of
from tfaccel.step import finite
from tfaccel.step.totals import BUCKET_BYTES, Span, Totals, sent_as

# The most bytes of a vector in XLA, so that its memory is free again before the next one's is
# needed. For the vectors between workers that XLA does not sum, see BUCKET_BYTES.
BUCKET_BYTES_IN_XLA = 128 << 20


def bucket_bytes_of(replica: Replica, *, in_xla: bool) -> int | None:
    """Returns the most bytes of a vector of slices; None for all of a dtype."""
    if in_xla:
        return BUCKET_BYTES_IN_XLA
    return BUCKET_BYTES if replica.is_of_workers else None


class ScatteredGradients:
    """The order of gradients in a few matrices, [replicas, values], of a dtype each.

    Row i has the slices of replica i. The gradients of the last layers are in the first matrix,
    because the backward pass computes them first.
    """

    def __init__(
        self,
        totals: Totals,
        *,
        gradients_as: str | None,
        num_replicas: int,
        bucket_bytes: int | None = None,
    ):
        """Decides the order for gradients like these.

        Args:
          totals: the totals of any replica; all replicas have the same variables.
          gradients_as: the dtype in which gradients are sent; None for their own dtype.
          num_replicas: the number of replicas of all workers.
          bucket_bytes: the most bytes of a matrix, unless one gradient is larger; None for no
            limit.
        """
        self._num_replicas = num_replicas
        self._dtypes = [each.dtype for each in totals.gradients]
        self._sent_as = [sent_as(each, gradients_as) for each in self._dtypes]
        self._sizes = [slice_size(each.shape, num_replicas) for each in totals.gradients]
        num_bytes = [
            num_replicas * size * dtype.size
            for size, dtype in zip(self._sizes, self._sent_as, strict=True)
        ]
        self._buckets = in_buckets(self._sent_as, num_bytes, bucket_bytes)

    def pack(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the matrices, in the order in which they are to be summed."""
        cut = functools.partial(in_slices, num_replicas=self._num_replicas)
        return [
            tf.concat(
                [cut(tf.cast(gradients[each], self._sent_as[each])) for each in bucket], axis=1
            )
            for bucket in self._buckets
        ]

    def unpack(self, own: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[Span]]:
        """Returns the slices of one replica, in the model's order, and a second time uncut.

        Args:
          own: the replica's row of each summed matrix, [values].
        """
        slices, spans = [None] * len(self._sizes), []
        for bucket, vector in zip(self._buckets, own, strict=True):
            sizes, start = [self._sizes[each] for each in bucket], 0
            for index, part in zip(bucket, tf.split(vector, sizes), strict=True):
                slices[index] = tf.cast(part, self._dtypes[index])
            for dtype, group in _alike(bucket, self._dtypes):
                sizes = [self._sizes[each] for each in group]
                values = tf.cast(vector[start : start + sum(sizes)], dtype)
                spans.append(Span(values, group, sizes))
                start += sum(sizes)
        return slices, spans


def in_buckets(
    dtypes: Sequence[tf.DType], num_bytes: Sequence[int], most: int | None
) -> list[list[int]]:
    """Returns the indices of tensors in groups of one dtype, the last tensors first.

    Args:
      dtypes: of the tensors.
      num_bytes: of the tensors.
      most: the most bytes of a group, unless one tensor is larger; None for no limit.
    """
    buckets = []
    for dtype in sorted(set(dtypes), key=str):
        own, total = [], 0
        for index in reversed([index for index, each in enumerate(dtypes) if each == dtype]):
            if most and own and total + num_bytes[index] > most:
                buckets.append(own)
                own, total = [], 0
            own.insert(0, index)
            total += num_bytes[index]
        buckets.append(own)
    return buckets


def _alike(indices: Sequence[int], dtypes: Sequence[tf.DType]) -> Iterator[tuple]:
    """Yields a dtype and the adjacent indices that have it."""
    group = []
    for index in indices:
        if group and dtypes[group[-1]] != dtypes[index]:
            yield dtypes[group[-1]], group
            group = []
        group.append(index)
    if group:
        yield dtypes[group[-1]], group


class ShardedWatch(finite.Watch):
    """A Watch whose updates are those of this replica's slices; then it gathers the weights."""

    def __init__(
        self,
        model,
        collectives: Replica | InXla,
        replica: Replica,
        *,
        xla: bool,
        compile_: Callable | None = None,
        bucket_bytes: int | None = None,
    ):
        """Takes the model, within `as_replica`.

        Args:
          model: the model. Its optimizers are sharded.
          collectives: makes the collectives of this replica.
          replica: the replica.
          xla: whether XLA compiles what is traced.
          compile_: compiles what lies between the collectives with XLA; None to leave it as it is.
          bucket_bytes: the most bytes of new weights that are gathered at once; None for no limit.
        """
        super().__init__(model, xla=xla, compile_=compile_)
        self._collectives, self._replica = collectives, replica
        self._bucket_bytes = bucket_bytes

    def apply(
        self, optimizer, grads, trainable_variables=None, *, spans: Sequence[Span] = ()
    ) -> None:
        """Applies gradients only if all of them are finite, on all replicas.

        Args:
          optimizer: it is sharded.
          grads: with `spans` this replica's slices of the gradients, [slice] each; else the whole
            gradients, which all replicas have in common.
          trainable_variables: the weights; None for the model's.
          spans: the slices, uncut.
        """
        weights = list(trainable_variables or self.model.trainable_variables)
        if not self.is_in_step:
            raise UserError(
                "shard_states=True, but train_step applies gradients within a tf.cond, a loop or a "
                "tf.function, where the replicas cannot gather the weights; apply them outside, or "
                "set shard_states=False"
            )
        if not optimizer.built:
            optimizer.build(weights)
        if not spans:
            given = [each for each in zip(weights, grads, strict=True) if each[1] is not None]
            weights = [each for each, _ in given]
            cut = {"index": self._replica.index, "num_replicas": self._replica.num_replicas}
            grads = [own_slice(tf.convert_to_tensor(each), **cut) for _, each in given]
            spans = [Span(own, [index], [own.shape[0]]) for index, own in enumerate(grads)]
        found, code, norms = self._agreed(optimizer, grads, weights, spans)
        averages = sharded_states.inner_of(optimizer).ema_overwrite_frequency
        # An average may replace also weights without gradients.
        changed = weights_of(optimizer) if averages else weights
        slices = sharded_states.slices_of(optimizer, changed)
        update = functools.partial(self._update, optimizer, weights, slices)
        self._gather(changed, self.compiled(update, grads, found, norms))
        self._constrain([each for each in weights if each.constraint is not None], found)
        self.note(optimizer, finite.Check(found, code))

    def _agreed(self, optimizer, grads, weights, spans) -> tuple:
        """Returns whether a gradient is bad on any replica, the code of the first, and norms.

        The norms are those of whole gradients, for `sharded_states.updating`.
        """
        replica, inner = self._replica, sharded_states.inner_of(optimizer)
        clips = sharded_states.clips_each(inner) or sharded_states.clips_all(inner)
        dtype = tf.float64 if any(each.dtype == tf.float64 for each in grads) else tf.float32

        def own(grads: list, values: list) -> tf.Tensor:
            bad = [
                span._replace(values=~tf.math.is_finite(each))
                for span, each in zip(spans, values, strict=True)
            ]
            index = tf.cast(finite.index_in_spans(bad, len(weights)), dtype)
            of_all = index * tf.one_hot(replica.index, replica.num_replicas, dtype=dtype)
            if not clips:
                return of_all
            clipped = sharded_states.values_to_clip(optimizer, grads, weights)
            squares = [tf.reduce_sum(tf.square(tf.cast(each, dtype))) for each in clipped]
            if not sharded_states.clips_each(inner):
                squares = [tf.add_n(squares)]
            return tf.concat([of_all, tf.stack(squares)], axis=0)

        sums = self._collectives.sum_of(
            self.compiled(own, list(grads), [each.values for each in spans])
        )
        first = tf.cast(tf.reduce_min(sums[: replica.num_replicas]), tf.int32)
        norms = tf.unstack(tf.sqrt(sums[replica.num_replicas :])) if clips else None
        return first < len(weights), self.code_at(first, weights), norms

    def _update(self, optimizer, weights, slices, grads, found, norms) -> list[tf.Tensor]:
        """Updates this replica's slices unless `found`; returns those that are to be gathered."""
        cut = {"index": self._replica.index, "num_replicas": self._replica.num_replicas}
        every = weights_of(optimizer)
        for weight, own in zip(every, sharded_states.slices_of(optimizer, every), strict=True):
            value_of(own).assign(own_slice(tf.convert_to_tensor(value_of(weight)), **cut))
        own = sharded_states.slices_of(optimizer, weights)

        def apply() -> None:
            with contextlib.ExitStack() as contexts:
                contexts.enter_context(sharded_states.updating(optimizer, norms))
                if self.compiles:
                    contexts.enter_context(square_roots_once())
                    contexts.enter_context(scalars_shared())
                type(optimizer).apply(optimizer, grads, own)

        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            with finite.replacing(optimizer, check_finite=lambda _: ~found):
                apply()
        else:
            tf.cond(found, lambda: None, apply)
        return [tf.convert_to_tensor(value_of(each)) for each in slices]

    def _gather(self, weights: Sequence, own: Sequence[tf.Tensor]) -> None:
        """Gives the weights the values of which each replica has a slice."""
        num_bytes = [self._replica.num_replicas * each.shape[0] * each.dtype.size for each in own]
        for bucket in in_buckets([each.dtype for each in own], num_bytes, self._bucket_bytes):
            slices = self._collectives.gather_slices(tf.concat([own[each] for each in bucket], 0))
            sizes = [own[each].shape[0] for each in bucket]
            for index, part in zip(bucket, tf.split(slices, sizes, axis=1), strict=True):
                weight = value_of(weights[index])
                weight.assign(whole_of(part, weight.shape))

    def _constrain(self, weights: Sequence, found: tf.Tensor) -> None:
        """Applies the constraints of weights, which need whole ones."""
        for each in weights:
            before = tf.convert_to_tensor(value_of(each))
            after = tf.cast(each.constraint(before), before.dtype)
            value_of(each).assign(tf.where(found, before, after))
