"""Whether XLA can compile a model's step, and the reason where it cannot.

Takes a model, a batch and what was traced; gives a reason in words, or None.

    choice = Choice(model, wanted=True)
    choice.layers()                               # looks at the layers, before anything runs
    choice.run(step, batch, forget=made.clear)    # steps; again without XLA where it has to

Three things are looked at, each before the step has run:

  1. the layers: Keras marks those that XLA cannot compile, or compiles badly, `supports_jit=False`
     (an LSTM that cuDNN computes, say: 16,080 rows/s so, 8,090 by XLA; one H100, 2026-11-27);
  2. the batch: TensorFlow ends the process where a compiled function is called with strings, and
     ragged or sparse tensors are of another size each time;
  3. the operations of the traced step, and their dtypes: TensorFlow lists what XLA has.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.keras_internals.layers import layers_of
from tfaccel.keras_internals.symbolic_build import OF_ANY_SIZE
from tfaccel.keras_internals.traced import has_effects, kernels_of

# What XLA says as it compiles, before anything runs, of what the lists do not tell.
SAYS_NO = re.compile(
    r"No registered '(?P<name>\w+)' OpKernel for XLA_"
    r"|Detected unsupported operations when trying to compile graph"
    r"|must be a compile-time constant"
)
ARGUMENT = "_Arg"  # what XLA takes for each `Placeholder` of a function


class NotInXlaError(Exception):
    """XLA cannot compile what was traced; the message is the reason."""


class Choice:
    """Whether XLA compiles one step of a model: as asked for, until something is in the way.

    Attributes:
      on: whether it does.
      reason: why not, where it was asked for; else None.
    """

    def __init__(self, model, *, wanted: bool, said: set | None = None):
        """Takes the model, and what was said of it already, so that its steps say it once."""
        self.on, self.reason = wanted, None
        self._model, self._said = model, set() if said is None else said
        self._looked = False

    def layers(self) -> None:
        """Looks at the model's layers, of which a subclassed model may not have all yet."""
        if self.on and (reason := of_layers(self._model)):
            self._turn_off(reason)

    def run(self, step: Callable, batch, *, forget: Callable[[], None]):
        """Returns `step()`, which is called once more, without XLA, where XLA cannot compile it.

        Args:
          step: makes what it needs by what `on` says, and calls it.
          batch: that it steps on.
          forget: called where XLA is given up: what was compiled is of no use then.

        Raises:
          Exception: whatever the step raises.
        """
        if self.on:
            if not self._looked:
                self._looked = True
                self.layers()
            if self.on and (reason := of_batch(batch)):
                self._turn_off(reason)
            if not self.on:
                forget()
        if not self.on:
            return step()
        try:
            return step()
        except NotInXlaError as error:
            reason = str(error)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            said = SAYS_NO.search(error.message)
            if not said:
                raise
            reason = f"an operation of the step has no form for XLA ({said['name'] or said[0]})"
        self._turn_off(reason)
        forget()
        return step()

    def _turn_off(self, reason: str) -> None:
        self.on, self.reason = False, reason
        if reason not in self._said:
            self._said.add(reason)
            summary("step: without XLA, because %s", reason)


def of_layers(model) -> str | None:
    """Returns which layer says that XLA cannot compile it, also one inside other layers."""
    for layer in layers_of(model):
        if not layer.supports_jit:
            kind = type(layer).__name__
            return f"the layer {layer.name} ({kind}) is not for XLA (supports_jit=False)"
    return None


def of_batch(batch) -> str | None:
    """Returns what a batch, or the specs of one, have that no compiled function is called with."""
    for each in tf.nest.flatten(batch):
        if getattr(each, "dtype", None) == tf.string:
            return "a batch has strings, which XLA has not"
        if isinstance(each, OF_ANY_SIZE):
            kind = type(each).__name__.removesuffix("Spec")
            return (
                f"a batch has a {kind}, whose size differs from batch to batch, and "
                "XLA compiles each size anew"
            )
    return None


def checked(function: Callable, *, on_gpu: bool) -> Callable:
    """Returns a function to be compiled, which looks at what was traced as soon as it was.

    Raises (when it is traced):
      NotInXlaError: XLA lacks an operation of it.
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


# The operations of what was traced.


def _of_graph(graph, outputs, device: str) -> str | None:
    with tf.init_scope():
        _register_kernels()
    definition = graph.as_graph_def()
    functions = {each.signature.name: each for each in definition.library.function}
    kept = [each.op.name for each in tf.nest.flatten(outputs) if tf.is_tensor(each)]
    bodies = [(definition.node, kept)]
    bodies += [(each.node_def, _returned(each)) for each in functions.values()]
    for nodes, kept in bodies:
        lacking = [each for each in nodes if not _has_kernel(each, functions, device)]
        # What nothing needs is left out before XLA sees it; to ask for that takes longer.
        if lacking and (needed := _needed(nodes, kept)):
            for each in lacking:
                if each.name in needed:
                    dtypes = " of strings" if _takes_strings(each) else ""
                    return f"an operation of the step has no form for XLA ({each.op}{dtypes})"
    return None


@functools.cache  # once for a process: the list is empty till then
def _register_kernels() -> None:
    with tf.device("/cpu:0"):
        tf.function(lambda: tf.constant(0), jit_compile=True, autograph=False)()


def _has_kernel(node: tf.compat.v1.NodeDef, functions: dict, device: str) -> bool:
    if node.op in functions:
        return True
    if node.op == "Placeholder":
        return _fits(node, kernels_of(ARGUMENT, device), renamed={"T": "dtype"})
    return _fits(node, kernels_of(node.op, device))


def _fits(node: tf.compat.v1.NodeDef, known: Sequence[dict], renamed: dict | None = None) -> bool:
    return any(
        all(
            allowed.issuperset(_types(node, (renamed or {}).get(name, name)))
            for name, allowed in kernel.items()
        )
        for kernel in known
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
    """Returns the names of what a function runs: what it returns, what has effects, and before."""
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
