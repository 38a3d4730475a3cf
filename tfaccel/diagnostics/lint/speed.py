"""Rules: how the step runs, and how the input comes. Each takes Facts and gives findings.

findings = [*precision(facts), *xla(facts), *sync_points(facts), *shuffling(facts)]
"""

from collections.abc import Iterator

from tfaccel.common.tables import in_figures
from tfaccel.diagnostics.lint.facts import Facts
from tfaccel.diagnostics.lint.findings import Finding

# configs/mnist.py, one H200, 2026-11-22: 945,000 images/s with 24 steps in an execution, 385,000
# with one, of batches of 2,560. So each execution costs about so much beside its steps.
EXECUTION_S = 2560 / 385_000 - 2560 / 945_000
# Images/s of stock Keras's `fit`: ResNet-50, 224 x 224, batches of 256, mixed_float16, one H200.
STOCK, STOCK_XLA = 853, 6078
# A tenth of what an H200 multiplies and adds in float16 at most: 989 TFLOP/s, by its data sheet.
FLOPS = 0.1 * 989e12


def precision(facts: Facts) -> Iterator[Finding]:
    """Yields float32 on a GPU with Tensor Cores."""
    step = facts.step
    if step.precision != "float32" or not step.has_tensor_cores:
        return
    in_tf32 = step.tf32 and step.gpu >= (8, 0)
    yield Finding(
        "note" if in_tf32 else "warning",
        "precision",
        "float32" + (", whose products are TF32" if in_tf32 else ": Tensor Cores are idle"),
        "they multiply twice as fast in 16 bits as in TF32, and activations take half the memory"
        if in_tf32
        else "float32 products run on the CUDA cores",
        "up to 2 times in products, and half the bytes elsewhere"
        if in_tf32
        else "in products, what Tensor Cores are faster by: 8 times on V100 (125 to 15.7 TFLOP/s)",
        "mixed_float16, which tfaccel scales the loss for"
        + (", or mixed_bfloat16" if step.gpu >= (8, 0) else ""),
        "--config.runtime.precision=mixed_float16" if step.from_config else None,
    )


def xla(facts: Facts) -> Iterator[Finding]:
    """Yields a step that is not compiled, by the user's word or by another's."""
    step = facts.step
    if step.run_eagerly or (step.xla is not False and not step.without_xla):
        return
    if not step.gpu and not step.without_xla:
        return  # on a CPU most steps are quicker without it
    if step.not_for_xla:
        yield _not_for_xla(step.not_for_xla)
        return
    reason = step.without_xla
    yield Finding(
        "warning" if step.gpu else "note",
        "step",
        f"training falls back to no XLA: {reason}" if reason else "XLA is off",
        "each operation is a kernel of its own, which reads and writes its values in GPU memory",
        f"stock Keras trained ResNet-50 at {STOCK} images/s without, {STOCK_XLA:,} with it "
        "(mixed_float16, one H200)"
        + ("" if step.gpu else "; little on the CPU, for a long compilation"),
        "leave that out, if you can" if reason else "xla=True (jit_compile=True in stock Keras)",
        "--config.runtime.xla=True" if step.from_config and not reason else None,
    )


def _not_for_xla(reason: str) -> Finding:
    """Returns the finding of a model or data that XLA cannot compile: nothing is to be mended."""
    return Finding(
        "note",
        "step",
        f"training goes without XLA: {reason}",
        "Keras and TensorFlow have other code for that, which XLA cannot compile",
        "an LSTM as it comes trained at 16,080 rows/s without XLA, by cuDNN, and at 8,090 with it "
        "(use_cudnn=False; one H100)",
        "nothing for an LSTM or GRU; text, hashing and lookups can move into the data's `map`, so "
        "that XLA compiles the rest",
    )


def sync_points(facts: Facts) -> Iterator[Finding]:
    """Yields what makes the device wait for Python."""
    step = facts.step
    if step.run_eagerly:
        yield run_eagerly("step", "run_eagerly=True")
        return
    seconds = _step_s(facts)
    if step.gpu and step.steps_per_execution == 1 and seconds and seconds < EXECUTION_S:
        steps = _steps_of_epoch(facts)
        yield Finding(
            "note",
            "step",
            "one step in each execution",
            f"a step is small, {in_figures(1000 * seconds, 2)} ms at a tenth of an H200's peak, "
            f"and launching one cost {1000 * EXECUTION_S:.1f} ms on an H200 (configs/mnist.py)",
            "2.5 times in configs/mnist.py",
            f"steps_per_execution={steps or '...'}, which divides the steps of an epoch",
            f"--config.train.steps_per_execution={steps}" if steps and step.from_config else None,
        )


def run_eagerly(where: str, what: str) -> Finding:
    """Returns what there is to say of a step that is not compiled at all."""
    return Finding(
        "warning",
        where,
        what,
        "each operation waits for Python, and there is no XLA",
        "all that compilation gives",
        "leave it out once you have found what you looked for",
    )


def _step_s(facts: Facts) -> float | None:
    """Returns how long a step's products take: forward, and twice as many backward."""
    multiplies = sum(each.multiplies for each in facts.model.layers)
    if not multiplies or facts.rows is None:
        return None
    return 3 * 2 * multiplies * facts.rows / FLOPS


def _steps_of_epoch(facts: Facts) -> int | None:
    if facts.data.num_examples is None:
        return None
    return -(-facts.data.num_examples // facts.data.global_batch_size)


def shuffling(facts: Facts) -> Iterator[Finding]:
    """Yields training data that come in one order."""
    if facts.data.shuffles is False:
        yield Finding(
            "warning",
            "data",
            "nothing shuffles the examples",
            "every epoch has the same batches in the same order; sorted by class, a batch is of "
            "one class",
            "accuracy, not time",
            "shuffle=True" if facts.data.is_tfaccel else "shuffle(...) before batch(...)",
        )


def not_judged(facts: Facts) -> Iterator[str]:
    """Yields remarks on what could not be known."""
    data, step, model = facts.data, facts.step, facts.model
    if data.inputs and data.num_examples is None and data.last_batch == "smaller":
        yield "a last batch with fewer rows: not judged, the data do not say how many there are"
    if data.inputs and data.shuffles is None:
        yield "shuffling: not judged, the data do not say"
    if any(each.is_integer and each.num_classes is None for each in data.targets):
        yield "number of classes: not judged, the data do not say; give num_classes"
    if step.xla is None and not step.run_eagerly:
        yield "XLA: not judged; give xla=True or False, or a compiled model"
    if step.precision == "float32" and step.gpu is None:
        yield "float32: there is no GPU here; on one with Tensor Cores use mixed_float16"
    if model.unknown:
        yield (
            f"layers whose multiplications are not known, and count as none: "
            f"{', '.join(model.unknown)}"
        )
