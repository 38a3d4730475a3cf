"""`tfaccel.lint`: a model, its data and its step read, and judged by every rule.

table = tfaccel.lint(model, train, script="train.py")
print(table)
fixed = table.fix()         # a padded head, where there is one to pad, measured
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
from tfaccel.diagnostics.lint.words import shown
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
    """Returns what keeps Tensor Cores or the input idle, or is plainly wrong. Trains nothing.

    Args:
      model: any Keras model; one that is not built is built for the data.
      dataset: what it is to be trained on: a tf.data.Dataset, a tfaccel loader, a PyDataset, or
        arrays (x, y). Of tf.data some batches are drawn, for their labels, unless num_classes says
        how many there are; of a loader, none. None for the model alone.
      batch_size: of arrays, as `fit` is given it; 32 by default, as there.
      num_classes: of the first target that holds labels, where the data do not say; None to look.
      strategy: that the model should belong to; None for the loader's, or the model's own.
      xla: whether training is compiled with it; None for what model.compile was told.
      epochs: as `fit` is given them; None where you do not know them yet: how far batch norm's
        moving averages come is then not judged.
      script: a Python file, or source text, that uses them: looked through for `model(loader)`,
        waits in its loops, and what Python cannot read. It is not run. Of a notebook:
        script="\\n".join(In).

    Raises:
      UserError: model or dataset is something else, or the script is not there.
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
    """Returns what every rule says of the facts.

    Args:
      facts: of model, data and step.
      model: what they are of, to be fixed.
      strategy: that it belongs to; None for none.
      also: what else was found.
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
        parts.append(f"{count}examples of {' and '.join(map(shown, data.inputs))}")
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
    told, without_xla = _xla_of(model, replicas) if compiled else (None, None)
    return Step(
        precision=precision_of(read, model),
        tf32=tf.config.experimental.tensor_float_32_execution_enabled(),
        xla=told if xla is None else xla,
        without_xla=without_xla if xla is None else None,
        not_for_xla=in_xla.of_layers(model) or in_xla.of_batch(specs or ()),
        run_eagerly=bool(compiled and model.run_eagerly) or tf.config.functions_run_eagerly(),
        steps_per_execution=model.steps_per_execution if compiled else None,
        num_replicas=replicas,
        sync_batchnorm=is_synchronized(model),
        gpu=gpu_capability(),
    )


def _xla_of(model: keras.Model, num_replicas: int) -> tuple[bool, str | None]:
    """Returns whether XLA compiles a compiled model's training, and what keeps it off."""
    train = model.train_function
    if isinstance(train, Execution):  # of run.compile
        if train.without_xla:
            return train.xla, train.without_xla
        kept_off = model.test_function.xla and not train.xla
        return train.xla, "synchronized batch norm sums inside the step" if kept_off else None
    if model.jit_compile:
        return True, None
    # What makes stock Keras's jit_compile="auto" mean False, or the user's own word.
    if reason := in_xla.of_layers(model):
        return False, reason
    if num_replicas > 1:
        return False, "stock Keras has none with several replicas; run.compile has"
    return False, None


def precision_of(read: Model, model: keras.Model) -> str:
    """Returns what most products are computed in, as a dtype policy."""
    dtypes = [each.dtype for each in read.layers if each.multiplies]
    return policy_of(model) if not dtypes else max(dtypes, key=dtypes.count)


def gpu_capability() -> tuple[int, int] | None:
    """Returns the first GPU's compute capability; None where there is no GPU."""
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    return details.get("compute_capability")


@dataclasses.dataclass(frozen=True, repr=False)
class Lint(Table):
    """The table, and the fix of what can be padded.

    Attributes:
      fixer: makes the fix.
    """

    fixer: functools.partial = dataclasses.field(default=None, compare=False)

    def fix(self, *, keep: bool | None = None, num_steps: int = 30) -> Fix:
        """Pads heads to whole tiles, and measures: `.model` is the better one. Writes nothing.

        Where less than 1% of the model's tiles is padding, the gain could not be measured: then the
        model is not timed, and not padded but for `keep=True`.

        Where activations compute more than ReLU, what they cost is timed too: `.cost`.

        Args:
          keep: whether to return the padded model; None for where it is faster beyond the spread.
          num_steps: of each model that are timed.

        Raises:
          UserError: there is a head to pad, and the model is a subclassed one, or has a layer that
            cannot be copied, a Lambda say; the head has LoRA, or a regularizer or constraint that
            may see the padding; inputs are text, or of a size that neither model nor data say.
        """
        if keep is not None:
            check_flag("keep", keep)
        check_int("num_steps", num_steps, at_least=1)
        return self.fixer(keep=keep, num_steps=num_steps)
