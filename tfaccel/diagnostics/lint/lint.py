"""`tfaccel.lint`: reads a model, its data and its step, and applies every rule.

table = tfaccel.lint(model, train, script="train.py")
print(table)
fixed = table.fix()         # pads a head, if there is one to pad, and measures
"""

import dataclasses
import functools
import os
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfaccel.common.checks import check_flag, check_int
from tfaccel.common.errors import UserError
from tfaccel.data.distribute import Loader
from tfaccel.diagnostics.lint import batches, fits, layers, speed, tensor_cores
from tfaccel.diagnostics.lint.facts import Facts, Model, Step
from tfaccel.diagnostics.lint.findings import Finding, Table
from tfaccel.diagnostics.lint.fix import Fix, fixed
from tfaccel.diagnostics.lint.read_data import read_data, shapes_of
from tfaccel.diagnostics.lint.read_model import by_input_name, read_model, with_pixels
from tfaccel.diagnostics.lint.script import in_script
from tfaccel.diagnostics.lint.words import shape_text
from tfaccel.keras_internals.float32_layers import policy_of
from tfaccel.keras_internals.model_view import is_synchronized
from tfaccel.step import in_xla
from tfaccel.step.functions import Execution

RULES = (
    fits.takes_the_data,
    fits.scales_once,
    fits.scales_at_all,
    fits.gives_the_classes,
    fits.gives_the_targets,
    layers.linear_chains,
    layers.outside_scope,
    layers.narrow_outputs,
    layers.float32_heads,
    layers.channels_first,
    batches.few_rows_in_batch_norm,
    batches.late_averages,
    layers.saturating,
    speed.precision,
    speed.xla,
    speed.sync_points,
    speed.shuffling,
    batches.tail_batch,
    tensor_cores.input_features,
    tensor_cores.widths,
    batches.batch_rows,
)
REMARKS = (
    tensor_cores.few_channels,
    batches.rows_of_pixels,
    layers.math_heavy,
    speed.not_judged,
)


def lint(
    model: keras.Model,
    dataset=None,
    *,
    batch_size: int | None = None,
    num_classes: int | None = None,
    strategy: tf.distribute.Strategy | None = None,
    xla: bool | None = None,
    epochs: int | None = None,
    script: str | os.PathLike | None = None,
) -> "Lint":
    """Finds faults, and reasons for idle Tensor Cores or input. Trains nothing.

    Args:
      model: any Keras model; a model that is not built is built for the data.
      dataset: the training data: a tf.data.Dataset, a tfaccel loader, a PyDataset, or arrays
        (x, y). lint draws some batches of a tf.data.Dataset to see their labels, unless you pass
        num_classes. It draws nothing from a loader. None checks the model alone.
      batch_size: the batch size for arrays, as you pass it to `fit`; 32 by default, as in `fit`.
      num_classes: the number of classes of the first target that holds labels. Pass it if the data
        does not tell; None reads labels.
      strategy: the strategy of the model's variables; None uses the loader's, or the model's.
      xla: whether XLA compiles training; None uses the setting of model.compile.
      epochs: the epochs, as you pass them to `fit`; None if you do not know them yet, and then
        batch norm's moving averages are not checked.
      script: a Python file, or source text, that uses the model and the data. lint searches it for
        `model(loader)`, for waits in loops, and for syntax errors, but does not run it. For a
        notebook, pass script="\\n".join(In).

    Raises:
      UserError: the type of model or dataset is not supported, or the script does not exist.
    """
    if not isinstance(model, keras.Model):
        raise UserError(f"model={type(model).__name__}; expected a keras.Model")
    if batch_size is not None:
        check_int("batch_size", batch_size, at_least=1)
    if epochs is not None:
        check_int("epochs", epochs, at_least=1)
    data, specs = read_data(dataset, batch_size=batch_size, num_classes=num_classes)
    if specs is not None:
        specs = by_input_name(model, specs)
        data = dataclasses.replace(data, inputs=shapes_of(specs))
    strategy = strategy or _strategy_of(model, dataset)
    read = with_pixels(read_model(model, data_specs=specs, strategy=strategy), model, data)
    step = _step_of(model, read, strategy, specs, xla=xla)
    step = dataclasses.replace(step, epochs=epochs)
    found = [] if script is None else in_script(script)
    return judge(Facts(read, data, step), model=model, strategy=strategy, also=found)


def judge(facts: Facts, *, model: keras.Model, strategy, also: Sequence[Finding]) -> "Lint":
    """Applies every rule to the facts. The table includes the findings in `also`.

    A fix needs the model, and the strategy of its variables; None for no strategy.
    """
    findings = [each for rule in RULES for each in rule(facts)]
    return Lint(
        findings=(*also, *findings),
        title=_title(facts),
        remarks=tuple(each for remark in REMARKS for each in remark(facts)),
        fixer=functools.partial(fixed, facts, model, strategy),
    )


def _title(facts: Facts) -> str:
    data = facts.data
    parts = [facts.model.name]
    if data.inputs:
        count = "" if data.num_examples is None else f"{data.num_examples:,} "
        parts.append(f"{count}examples of {' and '.join(map(shape_text, data.inputs))}")
    if data.global_batch_size:
        parts.append(f"batches of {data.global_batch_size}")
    if facts.step.num_replicas > 1:
        parts.append(f"{facts.step.num_replicas} replicas")
    return ", ".join(parts)


# How the step runs.


def _strategy_of(model: keras.Model, dataset) -> tf.distribute.Strategy | None:
    found = dataset.strategy if isinstance(dataset, Loader) else model.distribute_strategy
    kinds = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    return found if isinstance(found, kinds) else None


def _step_of(model: keras.Model, read: Model, strategy, specs, *, xla: bool | None) -> Step:
    replicas = strategy.num_replicas_in_sync if strategy else 1
    compiled = getattr(model, "compiled", False)
    is_on, without_xla = _xla_of(model, replicas) if compiled else (None, None)
    return Step(
        precision=precision_of(read, model),
        tf32=tf.config.experimental.tensor_float_32_execution_enabled(),
        xla=is_on if xla is None else xla,
        without_xla=without_xla if xla is None else None,
        not_for_xla=in_xla.of_layers(model) or in_xla.of_batch(specs or ()),
        run_eagerly=bool(compiled and model.run_eagerly) or tf.config.functions_run_eagerly(),
        steps_per_execution=model.steps_per_execution if compiled else None,
        num_replicas=replicas,
        sync_batchnorm=is_synchronized(model),
        gpu=gpu_capability(),
    )


def _xla_of(model: keras.Model, num_replicas: int) -> tuple[bool, str | None]:
    """Returns whether XLA compiles the training of a compiled model, and why not if it does not."""
    train = model.train_function
    if isinstance(train, Execution):  # made by run.compile
        if train.without_xla:
            return train.xla, train.without_xla
        kept_off = model.test_function.xla and not train.xla
        reason = "synchronized batch norm needs an all-reduce inside the step"
        return train.xla, reason if kept_off else None
    if model.jit_compile:
        return True, None
    # jit_compile="auto" became False for this reason, or the user set jit_compile=False.
    if reason := in_xla.of_layers(model):
        return False, reason
    if num_replicas > 1:
        return False, "stock Keras does not use XLA with several replicas, but run.compile does"
    return False, None


def precision_of(read: Model, model: keras.Model) -> str:
    """Returns the dtype policy of most matrix products."""
    dtypes = [each.dtype for each in read.layers if each.multiplies]
    return policy_of(model) if not dtypes else max(dtypes, key=dtypes.count)


def gpu_capability() -> tuple[int, int] | None:
    """Returns the first GPU's compute capability, or None if there is no GPU."""
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    return details.get("compute_capability")


@dataclasses.dataclass(frozen=True, repr=False)
class Lint(Table):
    """The findings, and `fixer`, which makes the fix that pads heads."""

    fixer: functools.partial = dataclasses.field(default=None, compare=False)

    def fix(self, *, keep: bool | None = None, num_steps: int = 30) -> Fix:
        """Pads heads to whole tiles and measures the gain. Writes nothing.

        `.model` is the better model. If less than 1% of the model's tiles is padding, the gain
        would be too small to measure. The model is then not timed, and padded only if keep=True.

        If activations compute more than ReLU, `.cost` says what they cost.

        Args:
          keep: whether to return the padded model; None returns it if it is faster beyond the
            spread of single steps.
          num_steps: how many steps of each model are timed.

        Raises:
          UserError: there is a head to pad, but the model is subclassed or has a layer that cannot
            be copied, such as a Lambda; or the head has LoRA, or a regularizer or constraint that
            may see the padding; or an input is text, or its size is not known.
        """
        if keep is not None:
            check_flag("keep", keep)
        check_int("num_steps", num_steps, at_least=1)
        return self.fixer(keep=keep, num_steps=num_steps)
