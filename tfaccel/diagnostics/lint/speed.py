"""Rules about how the step runs and how the data arrives. Each takes Facts and yields findings.

findings = [*precision(facts), *xla(facts), *sync_points(facts), *shuffling(facts)]
"""

from collections.abc import Iterator

from tfaccel.common.tables import in_figures
from tfaccel.diagnostics.lint.facts import Facts
from tfaccel.diagnostics.lint.findings import Finding

# configs/mnist.py, one H200, 2026-11-22, batches of 2,560: 945,000 images/s with 24 steps in an
# execution, 385,000 with one. The difference is what an execution costs besides its steps.
EXECUTION_S = 2560 / 385_000 - 2560 / 945_000
# Images/s of stock Keras's `fit`: ResNet-50, 224 x 224, batches of 256, mixed_float16, one H200.
STOCK, STOCK_XLA = 853, 6078
# A tenth of an H200's peak in float16, which is 989 TFLOP/s according to its data sheet.
FLOPS = 0.1 * 989e12


def precision(facts: Facts) -> Iterator[Finding]:
    """Yields a finding on float32 on a GPU with Tensor Cores."""
    step = facts.step
    if step.precision != "float32" or not step.has_tensor_cores:
        return
    in_tf32 = step.tf32 and step.gpu >= (8, 0)
    yield Finding(
        "note" if in_tf32 else "warning",
        "precision",
        "float32" + (" with products in TF32" if in_tf32 else ": Tensor Cores are idle"),
        "products are twice as fast in 16 bits as in TF32, and activations take half the memory"
        if in_tf32
        else "float32 products run on the CUDA cores",
        "products up to twice as fast, and half the bytes in all other operations"
        if in_tf32
        else "products on Tensor Cores: 8 times as fast on V100 (125, not 15.7 TFLOP/s)",
        "use mixed_float16 (tfaccel scales the loss)"
        + (", or mixed_bfloat16" if step.gpu >= (8, 0) else ""),
        "--config.runtime.precision=mixed_float16" if step.from_config else None,
    )


def xla(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if XLA does not compile the step, whatever the reason."""
    step = facts.step
    if step.run_eagerly or (step.xla is not False and not step.without_xla):
        return
    if not step.gpu and not step.without_xla:
        return  # on a CPU, most steps are faster without XLA
    if step.not_for_xla:
        yield _not_for_xla(step.not_for_xla)
        return
    reason = step.without_xla
    yield Finding(
        "warning" if step.gpu else "note",
        "step",
        f"training runs without XLA: {reason}" if reason else "XLA is off",
        "each operation is a separate kernel that reads and writes its values in GPU memory",
        f"stock Keras trained ResNet-50 at {STOCK} images/s without XLA, and at {STOCK_XLA:,} with "
        "XLA (mixed_float16, one H200)"
        + ("" if step.gpu else "; on the CPU, XLA gains little and compiles for long"),
        "remove that if you can" if reason else "set xla=True (jit_compile=True in stock Keras)",
        "--config.runtime.xla=True" if step.from_config and not reason else None,
    )


def _not_for_xla(reason: str) -> Finding:
    """Returns the note on a model or data that XLA cannot compile. It needs no fix."""
    return Finding(
        "note",
        "step",
        f"training runs without XLA: {reason}",
        "Keras and TensorFlow use other code for this, which XLA cannot compile",
        "an LSTM with the default settings trained at 16,080 rows/s without XLA, by cuDNN, and at "
        "8,090 with XLA (use_cudnn=False; one H100)",
        "do nothing for an LSTM or GRU; move text, hashing and lookups into the data's `map`, so "
        "that XLA compiles the rest",
    )


def sync_points(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the device waits for Python in each step."""
    step = facts.step
    if step.run_eagerly:
        yield run_eagerly("step", "run_eagerly=True")
        return
    seconds = _step_s(facts)
    # Without XLA, the host launches each operation anyway, and batches go one by one.
    has_launches = step.gpu and step.compiles and step.steps_per_execution == 1
    if has_launches and seconds and seconds < EXECUTION_S:
        steps = _steps_of_epoch(facts)
        yield Finding(
            "note",
            "step",
            "one step in each execution",
            f"a step is small: {in_figures(1000 * seconds, 2)} ms at a tenth of an H200's peak; "
            f"a launch cost {1000 * EXECUTION_S:.1f} ms on an H200 (configs/mnist.py)",
            "2.5 times as fast in configs/mnist.py",
            f"set steps_per_execution={steps or '...'}, which must divide the steps of an epoch",
            f"--config.train.steps_per_execution={steps}" if steps and step.from_config else None,
        )


def run_eagerly(where: str, what: str) -> Finding:
    """Returns the finding on a step that runs eagerly."""
    return Finding(
        "warning",
        where,
        what,
        "each operation waits for Python, and XLA compiles nothing",
        "everything that compilation gains",
        "remove it when you have finished debugging",
    )


def _step_s(facts: Facts) -> float | None:
    """Returns the time of a step's products; backward has twice as many as forward."""
    multiplies = sum(each.multiplies for each in facts.model.layers)
    if not multiplies or facts.rows is None:
        return None
    return 3 * 2 * multiplies * facts.rows / FLOPS


def _steps_of_epoch(facts: Facts) -> int | None:
    if facts.data.num_examples is None:
        return None
    return -(-facts.data.num_examples // facts.data.global_batch_size)


def shuffling(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the training data always has the same order."""
    if facts.data.shuffles is False:
        yield Finding(
            "warning",
            "data",
            "nothing shuffles the examples",
            "every epoch has the same batches in the same order; if the data is sorted by class, a "
            "batch has only one class",
            "accuracy, not time",
            "set shuffle=True" if facts.data.is_tfaccel else "add shuffle(...) before batch(...)",
        )


def not_judged(facts: Facts) -> Iterator[str]:
    """Yields remarks on what could not be checked."""
    data, step, model = facts.data, facts.step, facts.model
    if data.inputs and data.num_examples is None and data.last_batch == "smaller":
        yield "last batch: not checked, because the data does not tell the number of examples"
    if data.inputs and data.shuffles is None:
        yield "shuffling: not checked, because the data does not tell whether it shuffles"
    if any(each.is_integer and each.num_classes is None for each in data.targets):
        yield "number of classes: not checked, because the data does not tell it; pass num_classes"
    if step.xla is None and not step.run_eagerly:
        yield "XLA: not checked; pass xla=True or xla=False, or a compiled model"
    if step.precision == "float32" and step.gpu is None:
        yield "float32: this machine has no GPU; on a GPU with Tensor Cores, use mixed_float16"
    if model.unknown:
        names = ", ".join(model.unknown)
        yield f"layers whose multiplications are not known, and count as none: {names}"
