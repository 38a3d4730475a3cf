"""The functions that `fit`, `evaluate` and `predict` call for each execution.

`set_functions` sets them on a compiled model. Keras makes its own functions only if none are set.

    set_functions(model, strategy, StepConfig(), xla=True)

On one replica the model's own `train_step` is one function: forward, backward, loss scaling,
clipping and update. On several replicas, this order makes N replicas equal one device:

  1. Each replica, in one XLA function: forward and backward on its rows. Each gradient is that of
     the scaled loss, averaged over the rows, times the number of rows.
  2. Between the replicas: gradients, moving statistics, metrics and row counts are summed, packed
     in one buffer per dtype. tfaccel/step/metrics.py is about metrics that cannot be summed.
  3. Each replica, in one XLA function, on the same sums and so with the same result: division by
     the rows of all replicas, finite check, unscaling, clipping, update or skip, change of the loss
     scale.

On the GPUs of one process the three are one XLA function with XLA's own collective. Each GPU goes
from one stage to the next without the host, and the host does not wait for the end of a step. The
replicas' functions meet only in that sum. So they run without TensorFlow's order of side effects,
which would delay the results of one GPU until all have ended: a step took 49 ms with that order and
43 ms without it (40 dense layers of 4,096, batch 4,096, two H100s, 2026-11-26).

Elsewhere TensorFlow's collective sums between two XLA functions. XLA has no collective on the CPU;
and with several processes only TensorFlow's collectives can be aborted when a peer has died.

With `shard_states` each replica updates its own slices of the weights, and then all of them gather
the new weights (tfaccel/step/sharded_update.py).

Steps of one execution are one launch where their batches come together, as `Deferred`: from a
loader, or gathered from data of the user's own (tfaccel/data/gathered.py). Others are a launch
each.

Some steps cannot be cut so, because they need values of all replicas before their pass has ended: a
`train_step` that updates weights more than once, or a loss that is no mean over rows. Their values
are joined where they compute them (tfaccel/step/whole_batch.py). `_Step` finds out which way a step
needs. On the GPUs of one process it is one XLA function either way. Elsewhere it runs without XLA.

A step with an infinite or NaN gradient is skipped on every replica (tfaccel/step/finite.py has the
details). `model.train_function.nonfinite` has the codes of what was found.

Gradients of an Embedding, which are slices, are made dense before the sum, and before the update of
one replica. (If a batch has an id twice, stock Keras's Adam squares each slice; this step squares
their sum, as Keras does on JAX.)

A finite check or a clip before the sum would see only a part of the gradient. Stock Keras does both
before the sum: weights become -inf if only replica 1 overflows, and 30 and -10 clipped to 1 make 0
instead of 1.
"""

import contextlib
import functools
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.config import StepConfig
from tfaccel.data.deferred import Deferred
from tfaccel.data.gathered import Launches
from tfaccel.keras_internals import row_operations
from tfaccel.keras_internals.function_names import Alike, alike, own_numbers
from tfaccel.keras_internals.model_view import (
    is_of_keras,
    is_synchronized,
    labels_for,
    runs_eagerly,
)
from tfaccel.keras_internals.recording import JoinsRowsError
from tfaccel.keras_internals.replica import InXla, Replica, local_replicas
from tfaccel.keras_internals.stateful import local_batches_alike
from tfaccel.keras_internals.traced import UNORDERED
from tfaccel.process import waits
from tfaccel.step import (
    compared_rows,
    eager,
    finite,
    in_xla,
    labels,
    loss_scale,
    metrics,
    mixing,
    padding,
    plain_steps,
    replica_steps,
    returned,
)
from tfaccel.step import totals as totals_lib
from tfaccel.step.at_once import AtOnce
from tfaccel.step.attention.choose import attentions_on
from tfaccel.step.depthwise.choose import Depthwises
from tfaccel.step.gelu.choose import Gelus
from tfaccel.step.layer_norm.choose import LayerNorms
from tfaccel.step.memory.need import Need, measured
from tfaccel.step.merged_results import UsesResultsError
from tfaccel.step.own_kernels import kernels_on
from tfaccel.step.predict import Predict
from tfaccel.step.recoverable import Recoverable
from tfaccel.step.remat.choose import Remat
from tfaccel.step.row_alarm import Alarm, AsksRowsError, MayJoinError
from tfaccel.step.row_plan import Plan, planned
from tfaccel.step.shapes import Shapes, rows_of_all, telling_rows
from tfaccel.step.whole_batch import Rows, reduced

log = logging.getLogger("tfaccel")

# Where the replicas' values are joined: after each replica's pass, or within the step. ASK: as the
# plan of the step says. (README.md of this folder has the words.)
AFTER, ASK, WITHIN = "after", "ask", "within"


def set_functions(
    model,
    strategy,
    config: StepConfig,
    *,
    xla: bool,
    flash_attention: bool,
    begin_without_xla: bool,
) -> None:
    """Sets the functions that `fit`, `evaluate` and `predict` call for each execution.

    Keras makes its own functions only if none are set. Its `compile` removes them.
    """
    replicas = local_replicas(strategy)
    devices = [each.device for each in replicas]
    chosen = {
        "attention": attentions_on(devices, wanted=xla and flash_attention),
        "gelu": kernels_on(Gelus, devices, wanted=xla),
        "depthwise": kernels_on(Depthwises, devices, wanted=xla),
        "norm_kernels": kernels_on(LayerNorms, devices, wanted=xla),
    }
    replicas = [each.like(**chosen) for each in replicas]
    kernels = [each for each in chosen.values() if each is not None]
    choose = functools.partial(in_xla.Choice, model, said=set(), kernels=kernels)
    choices = [choose(wanted=xla) for _ in range(3)]
    eagerly = runs_eagerly(model)
    for each in choices if not eagerly else ():
        each.check_layers()
    trains, tests, predicts = choices

    said = set()  # what an eager step has logged

    def make(name: str, **settings) -> "_Step":
        step = getattr(model, name)
        if name == "train_step" and not is_of_keras(model, name):
            step = loss_scale.unscaled(model, step)
        step = row_operations.noticed(step)
        are_probabilities = config.mixes_labels and labels_for(model) == "classes"
        step = labels.watched(step, are_probabilities=are_probabilities)
        made = _Step(model, strategy, config, step, replicas, said=said, **settings)
        parts = config.accumulation_steps if made.trains else 1
        if made.several or parts > 1:
            if is_synchronized(model):
                made.join_within("synchronized batch norm")
            elif not is_of_keras(model, name):
                made.ask(is_own=True)
        return made

    if begin_without_xla and not xla:
        summary("step: begin_without_xla changes nothing, because XLA is off")
    elif begin_without_xla and strategy.num_replicas_in_sync > 1:
        summary("step: training waits for XLA, because begin_without_xla is for one replica")
    train = make(
        "train_step",
        choice=trains,
        updates_in_xla=xla,
        trains=True,
        begins_at_once=begin_without_xla,
    )
    test = make("test_step", choice=tests, trains=False)
    num_parts = config.accumulation_steps
    in_parts = f", the batch in {num_parts} parts" if num_parts > 1 else ""
    with_xla = "with" if trains.on else "without"
    if eagerly:
        with eager.said_once(said):
            eager.say()
    else:
        log.info("step: %s, %s XLA%s", _in_words(replicas, xla=trains.on), with_xla, in_parts)
    model.train_function = Execution(model, train)
    model.test_function = Execution(model, test)
    model.predict_function = Predict(model, strategy, replicas, predicts, said)


def _in_words(replicas: list[Replica], *, xla: bool) -> str:
    """Returns how the step is divided into functions, for the log."""
    num_replicas = replicas[0].num_replicas
    if num_replicas == 1:
        return "one function"
    if xla and replicas[0].reduces_in_xla:
        return f"one function with the sum over {num_replicas} replicas"
    return f"split around the sum over {num_replicas} replicas"


class Execution:
    """The steps of one execution, as a function of an iterator over batches.

    Attributes:
      launched: makes the logs for Keras from the logs and codes of an execution that the device is
        still running; None to give Keras the logs as they are.
      kept: a list that collects the codes of all launches; None to keep only the last execution's.
    """

    launched: Callable[[dict, Sequence[tf.Tensor]], dict] | None = None
    kept: list[tf.Tensor] | None = None

    def __init__(self, model, step: "_Step"):
        """Takes the model, which has `steps_per_execution`, and the function of one batch."""
        self._model, self._step = model, step
        self._found, self._launched = [], Launches(model.steps_per_execution)

    def when_traced(self, tell: Callable[[Need], None]) -> None:
        """Lets `tell` be called with what a step needs, each time that one has been traced."""
        self._step.tell = tell

    @property
    def xla(self) -> bool:
        """Whether XLA compiles the steps, as far as is known yet: see tfaccel/step/in_xla.py."""
        return self._step.choice.on and not runs_eagerly(self._model)

    @property
    def is_without_xla_yet(self) -> bool:
        """Whether training has begun without XLA, and XLA's step is not used yet."""
        return self._step.is_without_xla_yet

    @property
    def without_xla(self) -> str | None:
        """The reason why XLA does not compile the steps although you asked for it; or None."""
        return self._step.choice.reason

    def __call__(self, iterator: Iterator) -> dict:
        """Returns the last step's logs, with `skipped_steps` summed over all steps.

        Raises:
          StopIteration: there is no batch.
          Exception: whatever `launched` raises.
        """
        logs = self._launch(iterator)
        return logs if self.launched is None else self.launched(logs, self._found)

    def _launch(self, iterator: Iterator) -> dict:
        logs, found = _collected(self._launches(iterator))
        if logs is None:
            raise StopIteration
        self._found = found
        if self.kept is not None:
            self.kept += found
        return logs

    def _launches(self, iterator: Iterator) -> Iterator[dict]:
        """Yields the logs of each launch; a launch has several steps if that is possible."""
        padded, num_steps = getattr(iterator, "pads", False), self._model.steps_per_execution
        done = 0
        while done < num_steps:
            deferred = self.take(iterator)
            try:
                batch = next(iterator) if deferred is None else None
            except StopIteration:
                break
            if deferred is None:
                done += 1
                logs = self._step(batch, padded=padded)
            else:
                done += len(deferred[0])
                logs = self._step.in_a_row(deferred, padded=padded)
            del batch, deferred  # many megabytes, so free them before taking the next
            yield logs

    def take(self, iterator: Iterator) -> list[Deferred] | None:
        """Returns each replica's batches for a launch of several steps.

        Returns None if the next launch has only one step, and at the end of an epoch.
        """
        num_steps = self._model.steps_per_execution
        if num_steps == 1 or not hasattr(iterator, "take"):
            return None
        why = self.why_one_by_one(ends_alike=getattr(iterator, "ends_alike", False))
        are_made = getattr(iterator, "are_made", False)
        if not (are_made or self._step.can_be_in_a_row):
            return None
        if why is not None and are_made and self._step.trains:
            self.launches.say(why)
        # A test is too short to be worth compiling a second launch length for its last steps.
        return iterator.take(num_steps, may_wait=why is None)

    @property
    def launches(self) -> Launches:
        """What decides how many batches of the user's own data go in one launch."""
        if self._launched.most != self._model.steps_per_execution:  # the user may change it
            self._launched = Launches(self._model.steps_per_execution)
        return self._launched

    def why_one_by_one(self, *, ends_alike: bool = False) -> str | None:
        """Returns why finished batches do not wait for others of their launch; None if they do.

        `ends_alike` says that the data has the same number of batches on every worker.
        """
        if runs_eagerly(self._model):
            return "the steps run eagerly"
        if not self.xla:
            return "XLA does not compile the steps"
        if not self._step.can_be_in_a_row:
            return "the sum over the replicas is not part of one XLA function"
        if self._step.is_of_workers and not ends_alike:
            return "each worker's data may end with another batch"
        if not self._step.trains:
            return "a test is too short to be worth compiling launches of its own"
        return None

    @property
    def nonfinite(self) -> np.ndarray:
        """The codes that the last execution's training steps found: [steps], from `Watch.code`.

        Reading it waits for the device, and copies one small array from it.
        """
        if not self._found:
            return np.zeros(0, np.int64)
        codes = [tf.reshape(each, [-1]) for each in self._found]  # of launches, and single steps
        return tf.concat(codes, axis=0).numpy()


def _collected(launches: Iterable[dict]) -> tuple[dict | None, list]:
    """Returns the last launch's logs, with `skipped_steps` of all launches, and all codes."""
    logs, codes, skipped = None, [], {}
    for logs in launches:
        codes.append(logs.pop(finite.LOG, None))
        for name in filter(loss_scale.is_skipped, logs):
            skipped.setdefault(name, []).append(logs[name])
    for name, each in skipped.items():
        # Add only tensors: copying a Python number to the GPU would wait for its running work.
        logs[name] = functools.reduce(operator.add, each)
    return logs, codes


class _Step:
    """A training or test step over this process's replicas, as a function of a batch.

    Attributes:
      tell: is called with the step's need of memory when it has been traced; None to measure none.
    """

    tell: Callable[[Need], None] | None = None

    def __init__(
        self,
        model,
        strategy,
        config,
        step,
        replicas,
        *,
        choice: in_xla.Choice,
        said: set[str],
        trains: bool,
        updates_in_xla: bool = False,
        begins_at_once: bool = False,
    ):
        self._model, self._strategy, self._replicas = model, strategy, replicas
        self._config, self.choice, self.trains = config, choice, trains
        self.several = strategy.num_replicas_in_sync > 1
        self._join, self._is_own, self._asks_rows = AFTER, False, False
        self._merges_results = False
        self._plans, self._is_plain = {}, False  # by the shapes of the batch
        self._constants = {}  # logs that are no numbers
        self._rows_of_all = None  # of each replica's batch; None if known only when the step runs
        summed = self.several or (trains and config.accumulation_steps > 1)
        self._step = returned.as_tensors(step, self._constants, summed=summed)
        self._updates_in_xla = updates_in_xla and self.updates_on_gpu
        # Taken now, so that the order of `fit` and `evaluate` does not change the names.
        self._numbers = own_numbers()
        # One function for each (padded, make_batch); most models need only one.
        self._made = {}
        self._shapes = Shapes("step" if trains else "test step")
        self._parts = config.accumulation_steps if trains else 1
        self._telling_rows = functools.partial(telling_rows, strategy, parts=self._parts)
        self._lengths = set()  # the lengths of the launches of several steps, so far
        self._in_lanes, self._said = eager.met_by_lanes(replicas), said
        self._begins_at_once = begins_at_once
        self._at_once, self._plain_numbers = None, own_numbers()
        self._remat = Remat(model, config.remat if trains else None)

    @property
    def updates_on_gpu(self) -> bool:
        """Whether compiling the update with XLA is worth the time: on a CPU it is not."""
        return self._replicas[0].is_gpu

    @property
    def can_be_in_a_row(self) -> bool:
        """Whether several steps can be one function, as far as is known yet."""
        return (not self.several or self._sums_in_xla) and not runs_eagerly(self._model)

    @property
    def is_of_workers(self) -> bool:
        """Whether other processes have replicas, too."""
        return self._replicas[0].is_of_workers

    @property
    def _sums_in_xla(self) -> bool:
        return self.choice.on and self._replicas[0].reduces_in_xla

    def ask(self, *, is_own: bool = False) -> None:
        """Lets a plan say where the replicas' values are joined.

        With `is_own` the step is the model's own, so the plan also says whether it is plain.
        """
        self._join, self._is_own = ASK, is_own
        self._made.clear()

    def join_within(self, why: str) -> None:
        """Joins the replicas' values where the step computes them; the log says `why`.

        XLA can do that if it sums over the replicas.
        """
        self._join = WITHIN
        self._made.clear()
        if self.choice.on and self.several and not self._replicas[0].reduces_in_xla:
            self.choice.turn_off(f"values of all replicas are joined within the step ({why})")

    def _joining(self, run: Callable[[], dict]) -> dict:
        """Returns `run()`, and runs it again if its trace shows that the step joins values."""
        while True:
            try:
                return run()
            except MayJoinError:
                self.ask()
            except AsksRowsError:
                self._asks_rows = True
            except JoinsRowsError as error:
                self._merges_results |= isinstance(error, UsesResultsError)
                log.info("step: values are joined where the step computes them, because %s", error)
                self.join_within(str(error))

    def rows_of(
        self,
        replica: Replica,
        step,
        batch,
        *,
        are_full: bool,
        padded: bool,
        num_rows: int,
        weight,
        of_part=None,
        collectives: InXla | None = None,
    ):
        """Returns the handler of the step (step/row_handler.py) for a replica's batch.

        Args:
          replica: the replica.
          step: the step, as a function of a batch.
          batch: the batch.
          are_full: whether every replica has as many rows as this one.
          padded: whether rows may be padding.
          num_rows: its number of rows; 0 if the batch is a row that stands in.
          weight: the number of rows that count.
          of_part: the Part of the batch, if it is traced in parts side by side.
          collectives: the replica's, if XLA compiles them.

        Raises:
          JoinsRowsError: the step needs values of all replicas where it computes them.
        """
        if self._join == AFTER:
            return Alarm(num_rows)
        within = self._join == WITHIN
        shapes = tf.nest.map_structure(lambda each: getattr(each, "shape", None), batch)
        key = within, str(shapes)
        if key not in self._plans:
            self._plans[key] = self._planned(step, replica, batch, padded=padded)
            if self._plans[key][0].reduces_itself:
                log.info("step: it calls all_reduce, so its reductions cover each replica's rows")
            elif self._config.reductions == "all_replicas":
                compared_rows.say(self._plans[key][0].compared, self._said)
        plan, why_not = self._plans[key]
        if self._join == ASK:
            if why_not is not None:
                raise JoinsRowsError(why_not)
            if self._is_own and not self._is_plain:
                self._is_plain = True
                log.info("step: it is plain, so values are joined after each replica's pass")
            return Alarm(None)
        is_known = not self.is_of_workers or self._asks_rows
        if plan.gathers and not (is_known or tf.executing_eagerly()):
            raise AsksRowsError
        reduce = functools.partial(reduced, replica, collectives=collectives)
        own_rows = num_rows if of_part is None else of_part.num_rows_of_batch
        rows_of_all = [own_rows] * replica.num_replicas if are_full else self._rows_of_all
        if of_part is not None:
            reduce = functools.partial(of_part.sum, reduce=reduce)
            rows_of_all = None if rows_of_all is None else of_part.sizes(rows_of_all)
            replica = of_part.of(replica)
        return Rows(
            replica,
            plan,
            batch,
            num_rows=num_rows,
            weight=weight,
            reduce=reduce,
            rows_of_all=rows_of_all,
            reduces_rows=self._config.reductions == "all_replicas",
            gradients_as=self._config.gradients_as,
            joins_in_loops=of_part is None and runs_eagerly(self._model),
            merges_results=self._merges_results or runs_eagerly(self._model),
        )

    def _planned(self, step, replica: Replica, batch, *, padded: bool) -> tuple[Plan, str | None]:
        """Returns the plan of a step, and why values are joined within the step, if they are."""
        if self._is_own and self._join == ASK:
            has_padding = padded and plain_steps.has_weights(batch)
            settings = {"in_parts": self._parts > 1, "has_padding": has_padding}
            return plain_steps.analyzed(self._model, step, replica, batch, **settings)
        within = self._join == WITHIN
        if not within and runs_eagerly(self._model):
            step = metrics.checking_uses(self._model, replica, step)
        plan = planned(self._model, step, replica, batch, within=within)
        return plan, "a loss or a reduction is no mean over rows" if plan.joins else None

    def __call__(self, batch, *, padded: bool) -> dict:
        batches = local_batches_alike(self._model, self._strategy, batch, len(self._replicas))
        with self._telling_rows(batches), self._wait(f"a {self._name}", batches):
            return self._on(batches, padded=padded)

    @property
    def is_without_xla_yet(self) -> bool:
        """Whether steps still run without XLA because XLA compiles them meanwhile."""
        return self._begins_at_once and self._at_once is not None and not self._at_once.is_over

    @property
    def _name(self) -> str:
        return "training step" if self.trains else "test step"

    def _wait(self, what: str, batches) -> contextlib.AbstractContextManager:
        """Tells what the step does while it runs for long, as when it is first compiled."""

        of = functools.partial(self._described, batches)
        return waits.on(f"running {what}", of=of, is_usual=True)

    def _described(self, batches) -> str:
        """Returns what the program of a step depends on, but for the code of its layers."""
        shapes = tf.nest.map_structure(lambda each: getattr(each, "shape", None), batches)
        num_weights = sum(math.prod(each.shape) for each in self._model.weights)
        device, policy = self._replicas[0].device, keras.config.dtype_policy().name
        return f"{self._model.name}, {num_weights} weights, {shapes}, {policy}, {device}"

    def _on(self, batches: list, *, padded: bool) -> dict:
        rows = functools.partial(rows_of_all, self._strategy, batches)
        if runs_eagerly(self._model):
            if self._join == AFTER:
                self._join = ASK  # a step that ended half-way could not be run again
            self._rows_of_all = rows(asks=False)
            run = functools.partial(self._eagerly, batches, padded=padded)
            return self._joining(run)

        def run():
            self._rows_of_all = rows(asks=self._asks_rows)
            step = self._function(padded, None)
            with self._shapes.watched(step, batches):
                if self.several:
                    return step([(each,) for each in batches])[0]  # the replicas' logs are equal
                return self._run(step, padded, None, (batches[0],))

        joining = functools.partial(self._joining, run)
        return self.choice.run(joining, batches, forget=self._made.clear) | self._constants

    def _eagerly(self, batches: list, *, padded: bool) -> dict:
        """Runs the step as Python, which Keras and TensorFlow can be told to do at any time."""
        step = self._make(padded or self._config.zero_weight_is_padding, None, eagerly=True)
        with eager.said_once(self._said):
            eager.say()
            if self.several:
                return step([(each,) for each in eager.as_tensors(batches)])[0]
            with tf.device(self._replicas[0].device):
                return step(eager.as_tensors(batches[0]))

    def in_a_row(self, deferred: list[Deferred], *, padded: bool) -> dict:
        """Runs one step for each of the replicas' deferred batches, all in one function.

        Returns:
          The logs of the last step, `skipped_steps` of all steps, and each step's code, [steps].
        """

        def run():
            if not self.can_be_in_a_row:
                return self._one_by_one(deferred, padded=padded)
            self._rows_of_all = None  # deferred batches are full
            step = self._function(padded, deferred[0].make)  # equal for all replicas
            self._explain_if_shorter(len(deferred[0]))
            arguments = [(dict(each.inputs), dict(each.shared)) for each in deferred]
            specs = [each.specs() for each in deferred]
            with self._shapes.watched(step, specs, in_launch=True):
                if self.several:
                    return step(arguments)[0]
                return self._run(step, padded, deferred[0].make, arguments[0])

        inputs = [dict(each.inputs) for each in deferred]
        joining = functools.partial(self._joining, run)
        what = f"{counted(len(deferred[0]), self._name)} in one execution"
        with self._telling_rows([]), self._wait(what, inputs):
            return self.choice.run(joining, inputs, forget=self._made.clear) | self._constants

    def _one_by_one(self, deferred: list[Deferred], *, padded: bool) -> dict:
        """Runs the same steps one by one, after XLA turned out to lack an operation of the step."""
        self._rows_of_all = None
        step = self._function(padded, None)

        def steps():
            for index in range(len(deferred[0])):
                arguments = []
                for replica, each in zip(self._replicas, deferred, strict=True):
                    with tf.device(replica.device):
                        arguments.append((each.at(index),))
                yield dict(step(arguments)[0])

        logs, codes = _collected(steps())
        return logs | {finite.LOG: tf.stack(codes)}

    def _explain_if_shorter(self, num_steps: int) -> None:
        """Explains, before it happens, why the last steps of an epoch take long."""
        if self._lengths and num_steps not in self._lengths:
            log.info(
                "step: compiling again, because this launch has %d steps and others have %d; "
                "choose a steps_per_execution that divides the steps of an epoch",
                num_steps,
                max(self._lengths),
            )
        self._lengths.add(num_steps)

    def _run(self, step: Callable, padded: bool, make_batch: Callable | None, arguments: tuple):
        """Runs a step of one replica, at first without XLA if that is wanted."""
        if not (self.trains and self.choice.on):
            return step(*arguments)
        if self._at_once is None:
            optimizer = getattr(self._model.optimizer, "name", None)
            of = f"{self._described(arguments)}, {optimizer}, {self._config}"
            self._at_once = AtOnce(self._model, of, begins=self._begins_at_once)
        if self._at_once.is_over:
            return step(*arguments)
        plain = self._without_xla(padded, make_batch) if self._begins_at_once else None
        return self._at_once(step, plain, arguments)

    def _without_xla(self, padded: bool, make_batch: Callable | None) -> Alike:
        settings = padded or self._config.zero_weight_is_padding, make_batch
        key = "plain", *settings
        if key not in self._made:
            plain = self._make(*settings, xla=False)
            plain = self._compile(plain, of_launch=make_batch is not None, xla=False)
            self._made[key] = alike(plain, self._plain_numbers)
        return self._made[key]

    def _function(self, padded: bool, make_batch: Callable | None) -> Callable:
        settings = padded or self._config.zero_weight_is_padding, make_batch
        key = *settings, str(self._rows_of_all) if self._asks_rows else None
        if key not in self._made:
            made = self._compile(self._make(*settings), of_launch=make_batch is not None)
            self._made[key] = alike(made, self._numbers)
        return self._made[key]

    def _make(
        self,
        padded: bool,
        make_batch: Callable | None,
        *,
        xla: bool | None = None,
        eagerly: bool = False,
    ) -> Callable:
        """Returns the step as a function of the batches of all local replicas, or of the only one.

        With `make_batch` the function takes deferred batches instead, makes them inside, and runs
        several steps. With `eagerly` it runs as Python.
        """
        model, config, step, trains = self._model, self._config, self._step, self.trains
        parts, xla = self._parts, (self.choice.on if xla is None else xla) and not eagerly
        if padded:
            step = padding.leave_out_padding(model, step)
        weigh = functools.partial(totals_lib.weight_of, padding=padded)
        pass_ = functools.partial(
            totals_lib.make_totals,
            model,
            step,
            weigh=weigh,
            parts=parts,
            xla=xla,
            remat=self._remat,
        )
        if config.mixes_labels or (trains and config.cutout_pixels):
            change = mixing.mixed(model, config) if trains else mixing.as_probabilities(model)
            step, pass_ = replica_steps.on_changed(change, step, pass_, self._replicas[0])
        within = self._join == WITHIN

        def joining(replica: Replica) -> Callable:
            are_full = make_batch is not None
            rows_of = functools.partial(self.rows_of, replica, are_full=are_full, padded=padded)
            return functools.partial(pass_, rows_of=rows_of, within=within)

        settings = {"xla": xla, "updates_in_xla": self._updates_in_xla and not eagerly}
        if self.several or parts > 1:
            settings["within"] = within
        if self.several:
            settings |= {"make_batch": make_batch, "trains": trains}
            settings |= {"gradients_as": config.gradients_as, "shards": config.shard_states}
            replicas = self._in_lanes if eagerly else self._replicas
            run = {"run": functools.partial(eager.in_lanes, model)} if eagerly else {}
            steps = [
                replica_steps.replica_step(model, joining(each), each, **settings)
                for each in replicas
            ]
            tell_rows = xla and replicas[0].reduces_in_xla and metrics.gathers(model)
            is_unknown = self.is_of_workers and make_batch is None and not self._asks_rows
            if tell_rows and is_unknown:
                raise AsksRowsError  # XLA gathers rows at places that it knows beforehand
            rows_of_all = self._rows_of_all if self.is_of_workers else None
            run |= {"tell_rows": tell_rows, "rows_of_all": rows_of_all}
            return functools.partial(replica_steps.split_step, model, replicas, steps, **run)
        replica = self._replicas[0]
        if parts > 1:
            whole = functools.partial(
                replica_steps.accumulating_step, model, joining(replica), replica, **settings
            )
        else:
            whole = functools.partial(
                replica_steps.whole_step,
                model,
                step,
                replica,
                trains=trains,
                remat=self._remat,
                **settings,
            )
        return replica_steps.from_deferred(whole, make_batch, trains=self.trains)

    def _compile(self, made: Callable, *, of_launch: bool, xla: bool | None = None) -> Callable:
        xla = self.choice.on if xla is None else xla
        made = waits.traced(made, self._name, xla=xla)
        is_compiled = xla and not self.several
        if is_compiled:
            made = in_xla.checked(made, on_gpu=self._replicas[0].is_gpu)
        if self.tell is not None:
            how = {"xla": xla, "replicas": self._replicas, "of_launch": of_launch}
            made = measured(made, self.tell, **how)
        # TensorFlow counts the traces of all functions with one code together, and warns of
        # retracing after a few stages or models. A partial is counted by itself.
        made = functools.partial(made)
        compile_ = functools.partial(
            tf.function,
            autograph=False,
            jit_compile=is_compiled,
            experimental_attributes=UNORDERED if xla and self._sums_in_xla else None,
        )
        if xla or self._updates_in_xla:
            return Recoverable(compile_, made, self._model)
        return compile_(made)
