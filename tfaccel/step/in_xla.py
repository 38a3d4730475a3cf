"""Decides whether XLA can compile a model's step, and gives the reason if it cannot.

    choice = Choice(model, wanted=True)
    choice.check_layers()                         # before anything runs
    choice.run(step, batch, forget=made.clear)    # calls the step; again without XLA if it must

It checks three things before the step has run:

  1. The layers. Keras marks a layer with `supports_jit=False` if XLA cannot compile it or compiles
     it badly. An LSTM, for example, runs 16,080 rows/s with cuDNN and 8,090 with XLA (one H100,
     2026-11-27).
  2. The batch. TensorFlow ends the process if a compiled function is called with strings. Ragged
     and sparse tensors have another size in each batch.
  3. The operations of the traced step and their dtypes. TensorFlow lists those that XLA supports.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.symbolic_build import OF_ANY_SIZE
from tfaccel.keras_internals.traced import has_effects, kernels_of
from tfaccel.keras_internals.unwound import unwound

# XLA's errors when it compiles, before anything runs, for faults that the lists do not show.
SAYS_NO = re.compile(
    r"No registered '(?P<name>\w+)' OpKernel for XLA_"
    r"|Detected unsupported operations when trying to compile graph"
    r"|must be a compile-time constant"
)
ARGUMENT = "_Arg"  # XLA's operation for each `Placeholder` of a function


class NotInXlaError(Exception):
    """XLA cannot compile a traced function; the message is the reason."""


class Choice:
    """Whether XLA compiles one step of a model: as wanted, until a check finds a reason against it.

    Attributes:
      on: whether XLA compiles the step.
      reason: why it does not although it was wanted; else None.
    """

    def __init__(self, model, *, wanted: bool, said: set | None = None, kernels=()):
        """Takes the model.

        Args:
          model: the model.
          wanted: whether XLA is to compile the step.
          said: the reasons already logged, shared by the model's steps.
          kernels: what has operations of the model computed by kernels that XLA may refuse, such
            as `Attentions` (tfaccel/step/attention/choose.py).
        """
        self.on, self.reason, self._kernels = wanted, None, kernels
        self._model, self._said = model, set() if said is None else said
        self._has_run = False

    def check_layers(self) -> None:
        """Checks the model's layers. A subclassed model may still lack some of its layers."""
        if self.on and (reason := of_layers(self._model)):
            self.turn_off(reason)

    def run(self, step: Callable, batch, *, forget: Callable[[], None]):
        """Returns `step()`. If XLA cannot compile the step, calls it again without XLA.

        Args:
          step: builds the functions that it needs according to `on`, and calls them.
          batch: the batch for the step.
          forget: called when XLA is turned off, to drop the functions that were compiled with it.

        Raises:
          Exception: whatever the step raises.
        """
        if self.on:
            if not self._has_run:
                self._has_run = True
                self.check_layers()
            if self.on and (reason := of_batch(batch)):
                self.turn_off(reason)
            if not self.on:
                forget()
        if not self.on:
            with unwound():
                return step()
        try:
            with unwound():
                return step()
        except NotInXlaError as error:
            reason = str(error)
        except (
            tf.errors.InvalidArgumentError,
            tf.errors.UnimplementedError,
            tf.errors.InternalError,
        ) as error:
            if any(each.turned_off_by(error.message) for each in self._kernels):
                forget()
                return self.run(step, batch, forget=forget)
            said = SAYS_NO.search(error.message)
            if not said:
                raise
            reason = f"XLA does not support an operation of the step ({said['name'] or said[0]})"
        self.turn_off(reason)
        forget()
        with unwound():
            return step()

    def turn_off(self, reason: str) -> None:
        """Turns XLA off, and says why."""
        self.on, self.reason = False, reason
        if reason not in self._said:
            self._said.add(reason)
            summary("step: without XLA, because %s", reason)


def of_layers(model) -> str | None:
    """Returns which layer, or layer within a layer, XLA cannot compile, and why; or None."""
    for layer in layers_of(model):
        if not layer.supports_jit:
            kind = type(layer).__name__
            return f"XLA cannot compile the layer {layer.name} ({kind}): supports_jit=False"
    return None


def of_batch(batch) -> str | None:
    """Returns why no compiled function can take a batch, or a batch with these specs; or None."""
    for each in tf.nest.flatten(batch):
        if getattr(each, "dtype", None) == tf.string:
            return "a batch has strings, which XLA does not support"
        if isinstance(each, OF_ANY_SIZE):
            kind = type(each).__name__.removesuffix("Spec")
            return (
                f"a batch has a {kind}: its size differs from batch to batch, and XLA compiles "
                "each size again"
            )
    return None


def checked(function: Callable, *, on_gpu: bool) -> Callable:
    """Returns a function to compile that checks its operations as soon as it was traced.

    Raises (when it is traced):
      NotInXlaError: XLA does not support an operation.
    """

    @functools.wraps(function)
    def traced(*arguments):
        outputs = function(*arguments)
        if not tf.executing_eagerly():
            device = "XLA_GPU_JIT" if on_gpu else "XLA_CPU_JIT"
            if reason := _of_graph(tf.compat.v1.get_default_graph(), outputs, device):
                raise NotInXlaError(reason)
        return outputs

    return traced


# The operations of a traced function.


def _of_graph(graph, outputs, device: str) -> str | None:
    with tf.init_scope():
        _register_kernels()
    definition = graph.as_graph_def()
    functions = {each.signature.name: each for each in definition.library.function}
    leaves = tf.nest.flatten(outputs, expand_composites=True)
    kept = [each.op.name for each in leaves if tf.is_symbolic_tensor(each)]  # not variables
    bodies = [(definition.node, kept)]
    bodies += [(each.node_def, _returned(each)) for each in functions.values()]
    for nodes, kept in bodies:
        lacking = [each for each in nodes if not _has_kernel(each, functions, device)]
        # XLA never sees operations that no output needs. To find those takes longer, so it is last.
        if lacking and (needed := _needed(nodes, kept)):
            for each in lacking:
                if each.name in needed:
                    dtypes = " of strings" if _takes_strings(each) else ""
                    return f"XLA does not support an operation of the step ({each.op}{dtypes})"
    return None


@functools.cache  # once for a process, because the list is empty before the first compilation
def _register_kernels() -> None:
    with tf.device("/cpu:0"):
        tf.function(lambda: tf.constant(0), jit_compile=True, autograph=False)()


# TensorFlow takes 1.6 ms to list the kernels of an operation, and a step has thousands of nodes.
_kernels_of = functools.cache(kernels_of)


def _has_kernel(node: tf.compat.v1.NodeDef, functions: dict, device: str) -> bool:
    if node.op in functions:
        return True
    is_argument = node.op == "Placeholder"
    return any(
        all(
            allowed.issuperset(_types(node, "dtype" if is_argument else name))
            for name, allowed in kernel.items()
        )
        for kernel in _kernels_of(ARGUMENT if is_argument else node.op, device)
    )


def _types(node: tf.compat.v1.NodeDef, name: str) -> Sequence[int]:
    value = node.attr[name]
    return value.list.type if value.HasField("list") else [value.type]


def _takes_strings(node: tf.compat.v1.NodeDef) -> bool:
    return any(
        tf.string.as_datatype_enum in _types(node, name)
        for name, value in node.attr.items()
        if value.HasField("type") or value.list.type
    )


def _returned(function) -> list[str]:
    outputs = [*function.ret.values(), *function.control_ret.values()]
    return [each.partition(":")[0] for each in outputs]


def _needed(nodes, kept: Sequence[str]) -> set[str]:
    """Returns the names of the operations that a function runs: outputs, side effects, inputs."""
    by_name = {each.name: each for each in nodes}
    waiting = [*kept, *_with_effects(nodes)]
    needed = set()
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in needed:
            needed.add(name)
            waiting += [each.lstrip("^").partition(":")[0] for each in by_name[name].input]
    return needed


def _with_effects(nodes) -> Iterator[str]:
    for each in nodes:
        if has_effects(each.op) and each.op != "Placeholder":
            yield each.name
