"""Runs a user's own DALI pipeline: any function decorated with `nvidia.dali.pipeline_def`.

`open_pipeline` runs the function once in Python, where a fault raises an exception; inside
TensorFlow it would end the process. It returns a `PipelineData`, which makes streams of the
pipeline's outputs.

    data = open_pipeline(pipe, {"root": "train"}, global_batch_size=256, num_replicas=2, ...)
    image, label = next(data.stream(placement, data.feed(replica_index=0)))

Private name relied on: DALI 2.4's Pipeline._graph_out.
"""

import contextlib
import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf
from nvidia.dali import Pipeline, types
from nvidia.dali.plugin import tf as dali_tf

from tfaccel.common.checks import check_choice, check_int
from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.config import LAST_BATCHES
from tfaccel.data.pipeline_plan import PipelineFeed, PipelinePlan, plan_by
from tfaccel.data.placement import Placement, untuned
from tfaccel.data.shards import check_even
from tfaccel.runtime.devices import Device

log = logging.getLogger("tfaccel")

# Arguments that the run decides on. It passes DALI's own to every pipeline, and the shard's only to
# functions that have such a parameter.
PIPELINE_ARGUMENTS = ("batch_size", "num_threads", "device_id", "seed", "prefetch_queue_depth")
SHARD_ARGUMENTS = ("shard_id", "num_shards", "replica_index")


@dataclasses.dataclass(frozen=True)
class PipelineData:
    """A user's pipeline and its plan, in the form that a Loader reads.

    Attributes:
      function: the function, decorated with `pipeline_def`.
      arguments: the user's arguments, by name.
      plan: how long an epoch is.
      spec: the `tf.TensorSpec`s of one replica's batch.
      prefetch_batches: batches that are made ahead of the step.
      class_names: empty, because no classes are known.
      skips_bad: False, because a file that cannot be read ends the run.
    """

    function: Callable
    arguments: Mapping
    plan: PipelinePlan
    spec: tuple[tf.TensorSpec, ...]
    prefetch_batches: int
    class_names: tuple[str, ...] = ()
    skips_bad: bool = False

    def facts(self) -> dict[str, object]:
        """Returns the facts that must be the same on all workers, by name: see `agreement`."""
        return {"plan": self.plan, "shapes": self.spec}

    def feed(
        self, replica_index: int, *, first: int = 0, lost: frozenset = frozenset()
    ) -> PipelineFeed:
        """Returns the feed of a replica from batch `first` on, counted from epoch 0."""
        return PipelineFeed(self.plan, replica_index, first)

    def stream(self, placement: Placement, feed: PipelineFeed) -> "PipelineStream":
        """Returns an endless stream of one replica's batches."""
        return PipelineStream(self, feed=feed, placement=placement)


class PipelineStream(Iterator):
    """An endless iterator over the outputs of one replica's pipeline.

    A batch is a tuple of tensors, each [rows, ...] on the replica's device, with the dtypes of the
    pipeline's outputs.

    Raises:
      UserError: `next` raises it if the pipeline fails. The stream has then ended.
    """

    def __init__(self, data: PipelineData, *, feed: PipelineFeed, placement: Placement):
        """Builds the pipeline.

        DALI's readers cannot start in the middle. To start at a later batch, the stream makes the
        earlier batches and drops them. So the examples and the random draws are those of an
        uninterrupted run with the same seed.

        Args:
          data: the pipeline.
          feed: which batch comes first.
          placement: device, threads and seed. Replicas need different seeds to draw differently.

        Raises:
          UserError: the pipeline cannot be built.
        """
        self._data, self._number, self._made = data, feed.first, 0
        self._is_over = False
        skipped = self._place(feed.first)
        if skipped:
            log.info("pipeline: makes and drops %d batches, to start after them", skipped)
        given = _given(data.function, feed, placement, prefetch_batches=data.prefetch_batches)
        with _faults_named(data.function), tf.device(placement.device.name):
            dataset = dali_tf.experimental.DALIDatasetWithInputs(
                pipeline=_make(data.function, given, data.arguments),
                output_shapes=tuple(each.shape for each in data.spec),
                output_dtypes=tuple(each.dtype for each in data.spec),
                # The data set's own values silently override the pipeline's, so they are repeated.
                **{name: given[name] for name in PIPELINE_ARGUMENTS if name != "seed"},
            )
            self._iterator = iter(untuned(dataset))

    def __next__(self):
        """Returns the next batch."""
        self._is_over = True  # until this call succeeds; a failure may lose a batch
        with _faults_named(self._data.function):
            while self._made < self._place(self._number):
                next(self._iterator)
                self._made += 1
            batch = next(self._iterator)
        self._made, self._number = self._made + 1, self._number + 1
        self._is_over = False
        return batch

    def skip_to(self, first: int) -> bool:
        """Moves the live pipeline ahead to a batch, which `next` then returns.

        The next call of `next` draws and drops the batches in between. An epoch that is abandoned
        then costs only its remaining batches. A new stream would make all batches of the run again.

        Args:
          first: the batch, counted from the start of epoch 0.

        Returns:
          Whether the stream can do so: False if it is past that batch, or has failed.
        """
        if self._is_over or first < self._number:
            return False
        self._number = first
        return True

    def _place(self, number: int) -> int:
        """Returns the pipeline's own number for the run's batch `number`."""
        epoch, step = divmod(number, self._data.plan.num_steps)
        return epoch * self._data.plan.batches_per_epoch + step


def open_pipeline(
    function: Callable,
    arguments: Mapping,
    *,
    global_batch_size: int,
    num_replicas: int,
    last_batch: str,
    steps_per_epoch: int | None,
    device: Device,
    num_threads: int,
    prefetch_batches: int,
) -> PipelineData:
    """Runs one batch of the pipeline, and plans the epochs from its readers.

    Each replica runs one pipeline. The run passes DALI's batch_size (rows per replica),
    num_threads, device_id, seed (different on each replica) and prefetch_queue_depth. It also
    passes, to functions with such parameters: shard_id and num_shards over all workers,
    replica_index (the same as shard_id), and device ("gpu" or "cpu", unless the user gives it).

    A batch is the tuple of the pipeline's outputs, in which all samples of an output have one
    shape. If the second output has integers of shape (1,) for each sample, as labels from readers
    have, it becomes [rows] instead of [rows, 1]. Outputs on the CPU are copied to the GPU.

    Args:
      function: the function, decorated with `nvidia.dali.pipeline_def`.
      arguments: the user's arguments, by name.
      global_batch_size: examples per step over all replicas.
      num_replicas: number of replicas over all workers.
      last_batch: "pad", "drop" or "repeat", as in ImageConfig. "pad" needs readers with
        pad_last_batch=True. With "repeat", and with "drop" if readers do not pad, the examples
        that remain at the end of an epoch begin the next one.
      steps_per_epoch: number of steps in an epoch of a pipeline without a reader; else None.
      device: device of this worker's first replica, on which the pipeline is tried.
      num_threads: CPU threads of each pipeline.
      prefetch_batches: batches that are made ahead of the step.

    Raises:
      UserError: the pipeline cannot be built or run, its outputs are not batches, its readers are
        not sharded, or a setting does not suit them.
    """
    check_even(global_batch_size, num_replicas=num_replicas)
    check_choice("last_batch", last_batch, LAST_BATCHES)
    _check_function(function, arguments)
    endless = PipelinePlan(None, global_batch_size, num_replicas, steps_per_epoch, "drop")
    spec, readers = _try(function, arguments, endless, Placement(device, num_threads, seed=0))
    if (steps_per_epoch is None) != bool(readers):
        fix = (
            "but its reader gives the length of an epoch; remove it"
            if readers
            else "but it has no reader that ends the epoch; give a number, e.g. 1000"
        )
        raise UserError(f"steps_per_epoch={steps_per_epoch} for {_name(function)}, {fix}")
    if readers:
        plan = plan_by(
            readers,
            global_batch_size=global_batch_size,
            num_replicas=num_replicas,
            last_batch=last_batch,
        )
    else:
        check_int("steps_per_epoch", steps_per_epoch, at_least=1)
        plan = endless
    return PipelineData(function, dict(arguments), plan, spec, prefetch_batches)


def _try(function, arguments: Mapping, plan: PipelinePlan, placement: Placement):
    """Runs one batch, and returns the `tf.TensorSpec`s of the outputs and DALI's reader_meta()."""
    # It runs as the last replica, because a reader without shard arguments reads the first shard.
    feed = PipelineFeed(plan, replica_index=plan.num_replicas - 1)
    with _faults_named(function):
        # With one prefetched batch, a user's source is asked for this batch only.
        given = _given(function, feed, placement, prefetch_batches=1)
        pipeline = _make(function, given, arguments)
        pipeline.build()
        return _spec(function, pipeline.run(), plan.rows_per_replica), pipeline.reader_meta()


def _make(function, given: Mapping, arguments: Mapping) -> Pipeline:
    """Returns the pipeline, with all outputs on its device.

    On a GPU, DALI's data set takes only outputs on the GPU. So outputs on the CPU, such as labels
    from readers, are copied inside the pipeline, and the function needs no `.gpu()` for them.
    """
    pipeline = function(**{**given, **arguments})
    if given["device_id"] is not None:
        with pipeline:
            pipeline.set_outputs(*(each.gpu() for each in pipeline._graph_out))
    return pipeline


def _check_function(function, arguments: Mapping) -> None:
    if not getattr(function, "_is_pipeline_def", False):
        raise UserError(
            f"{_name(function)} is not a DALI pipeline function; decorate it with "
            "@nvidia.dali.pipeline_def, and give the function without calling it"
        )
    parameters = inspect.signature(function).parameters
    ours = (*PIPELINE_ARGUMENTS, *SHARD_ARGUMENTS)
    others = {*parameters, *inspect.signature(Pipeline).parameters}.difference(ours)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            raise UserError(
                f"{_name(function)} takes **{name}, which DALI does not allow in a pipeline "
                "function; list its parameters by name"
            )
    for name in PIPELINE_ARGUMENTS:
        if name in parameters:
            raise UserError(
                f"the parameter '{name}' of {_name(function)} hides DALI's own; remove it, and "
                "read the value from nvidia.dali.Pipeline.current()"
            )
    for name in arguments:
        if name in ours:
            raise UserError(f"the run itself gives '{name}' to {_name(function)}; remove it")
        if name not in others:
            raise UserError(
                f"{_name(function)} has no parameter '{name}'"
                f"{did_you_mean(name, set(parameters).difference(ours))}"
            )
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue  # stays empty
        known = name in SHARD_ARGUMENTS or name == "device" or name in arguments
        if not known and parameter.default is parameter.empty:
            raise UserError(f"{_name(function)} needs '{name}'; give {name}=...")


def _given(
    function, feed: PipelineFeed, placement: Placement, *, prefetch_batches: int
) -> dict[str, object]:
    """Returns the arguments that the run passes to the function."""
    device_id = placement.device.cuda_ordinal
    by_name = {
        "shard_id": feed.replica_index,
        "num_shards": feed.plan.num_replicas,
        "replica_index": feed.replica_index,
        "device": "cpu" if device_id is None else "gpu",
    }
    parameters = inspect.signature(function).parameters
    return {
        "batch_size": feed.plan.rows_per_replica,
        "num_threads": placement.num_threads,
        "device_id": device_id,
        "seed": placement.seed,
        "prefetch_queue_depth": prefetch_batches,
        **{name: value for name, value in by_name.items() if name in parameters},
    }


def _spec(function, outputs, rows: int) -> tuple[tf.TensorSpec, ...]:
    """Returns the `tf.TensorSpec`s of batches like these outputs of DALI."""
    specs = []
    for index, output in enumerate(outputs):
        if len(output) != rows:
            raise UserError(
                f"output {index} of {_name(function)} has {len(output)} samples, expected {rows}, "
                "the rows of a batch; make its source give that many"
            )
        shapes = list(dict.fromkeys(output.shape()))
        if len(shapes) > 1:
            raise UserError(
                f"output {index} of {_name(function)} has samples of different shapes, e.g. "
                f"{shapes[0]} and {shapes[1]}; give all one shape, e.g. with fn.resize or fn.crop"
            )
        shape, dtype = shapes[0], tf.as_dtype(types.to_numpy_type(output.dtype))
        if index == 1 and shape == (1,) and dtype.is_integer:
            shape = ()  # DALI's data set drops the dimension if the requested shape lacks it
            log.info("pipeline: output 1, %s [rows, 1], becomes labels [rows]", dtype.name)
        specs.append(tf.TensorSpec((rows, *shape), dtype))
    return tuple(specs)


@contextlib.contextmanager
def _faults_named(function):
    """Turns an exception of a pipeline into one sentence with its cause."""
    try:
        yield
    except (UserError, tf.errors.ResourceExhaustedError):
        raise
    except StopIteration as error:
        raise UserError(
            f"an external source of {_name(function)} has ended; give it a source without end, "
            "e.g. a callable, or cycle=True"
        ) from error
    except Exception as error:
        raise UserError(f"{_name(function)} failed: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """Returns the cause and its place, extracted from DALI's and TensorFlow's traces."""
    text = re.sub(r"\{\{.*?\}\}\s*|\[Op:.*", "", str(error))
    found = re.search(r"operator `(.+?)`.*encountered:\s*(.+?)\n", text, re.DOTALL)
    if found:
        return f"{found[1]}: {found[2]}"
    lines = [line for line in text.splitlines() if line and not line.startswith("Critical error")]
    return f"{type(error).__name__}: {next(iter(lines), '').strip()}"


def _name(function) -> str:
    return f"{getattr(function, '__name__', type(function).__name__)}()"
