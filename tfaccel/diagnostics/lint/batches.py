"""Rules: what the size of the batch leaves empty, or makes noisy. Each takes Facts.

findings = [*tail_batch(facts), *batch_rows(facts), *few_rows_in_batch_norm(facts)]
findings += late_averages(facts)
"""

from collections.abc import Iterator

from tfaccel.common.tables import counted, in_figures
from tfaccel.diagnostics.lint.facts import Data, Facts
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.products import MUCH, padded, share
from tfaccel.diagnostics.lint.words import named, of_tiles, of_which, percent

# Of batch norm's averages, the part from before training from which on it is said, as in
# tfaccel/training/callbacks/near_chance.py.
STILL = 0.1


def batch_rows(facts: Facts) -> Iterator[Finding]:
    """Yields a batch that is no multiple of 8 on each replica, where products have its rows."""
    rows, batch, replicas = facts.rows, facts.data.global_batch_size, facts.step.num_replicas
    if rows is None or (rows % 8 == 0 and batch % replicas == 0):
        return
    touched = [each for each in facts.model.layers if each.multiplies and rows * each.positions % 8]
    lost = share(facts.model, touched) * (1 - rows / padded(rows, 8))
    if not touched and facts.model.layers and batch % replicas == 0:
        return
    on = f" on each of {replicas} replicas" if replicas > 1 else ""
    whole = max(1, round(batch / (8 * replicas))) * 8 * replicas
    if facts.data.num_examples and whole > facts.data.num_examples:  # a step would have those alone
        whole -= 8 * replicas
    if whole == 0:
        return
    yield Finding(
        "warning" if lost >= MUCH else "note",
        "data",
        f"batches of {batch}, so {rows} rows{on}: not a multiple of 8",
        "Tensor Cores multiply tiles of 8 rows: "
        f"{of_which(padded(rows, 8), padded(rows, 8) - rows, 'row')}",
        f"{of_tiles(lost)}: {percent(share(facts.model, touched))} of its multiplications are in "
        "layers whose rows are the batch's",
        f"a batch of {whole}",
        f"--config.data.global_batch_size={whole}" if facts.step.from_config else None,
    )


def rows_of_pixels(facts: Facts) -> Iterator[str]:
    """Yields a remark on an odd batch whose products have pixels for rows."""
    rows = facts.rows
    if rows is None or rows % 8 == 0 or list(batch_rows(facts)):
        return
    yield (
        f"batches of {rows} on each replica, not a multiple of 8: the products' rows are the "
        "batch times the pixels, and those are"
    )


def tail_batch(facts: Facts) -> Iterator[Finding]:
    """Yields a last batch with fewer rows than the others."""
    data = facts.data
    if data.num_examples is None or not data.global_batch_size:
        return
    if data.last_batch == "drop" and data.num_examples < data.global_batch_size:
        yield Finding(
            "error",
            "data",
            f"{data.num_examples:,} examples make no batch of {data.global_batch_size}",
            "the only batch is not full, and is dropped",
            "none: it does not train",
            f"a batch of at most {data.num_examples}, or one that is not dropped",
        )
    left = data.num_examples % data.global_batch_size
    if not left or data.last_batch not in ("smaller", "pad"):
        return
    if data.last_batch == "pad":
        yield from _padding(data, left)
        return
    batches = -(-data.num_examples // data.global_batch_size)
    odd = left // facts.step.num_replicas % 8
    yield Finding(
        "warning",
        "data",
        f"the last of {batches} batches has {left} rows, not {data.global_batch_size} "
        f"({data.num_examples:,} examples)",
        "for another shape the step is compiled once more; each of its rows weighs "
        f"{in_figures(data.global_batch_size / left, 2)} times as much in the update"
        + ("; it is no multiple of 8" if odd else ""),
        f"one compilation; a step in {batches} that is "
        f"{percent(1 - left / data.global_batch_size)} empty",
        "a tfaccel loader (last_batch='pad' counts every row once), or "
        f"batch({data.global_batch_size}, drop_remainder=True)",
    )


def _padding(data: Data, left: int) -> Iterator[Finding]:
    """Yields where a good part of an epoch's rows is padding."""
    batch = data.global_batch_size
    rows = padded(data.num_examples, batch)
    lost = 1 - data.num_examples / rows
    if lost >= MUCH:
        yield Finding(
            "note",
            "data",
            f"{batch - left:,} of an epoch's {rows:,} rows are padding",
            f"{data.num_examples:,} examples in batches of {batch} leave {left} for the last one, "
            "which costs as much as the others; loss and metrics do not count it",
            f"{percent(lost)} of an epoch's time",
            "a batch that divides the examples more evenly",
        )


def few_rows_in_batch_norm(facts: Facts) -> Iterator[Finding]:
    """Yields batch norm whose statistics are of fewer than 16 examples."""
    layers = [each for each in facts.model.layers if each.kind == "BatchNormalization"]
    if not layers or facts.rows is None:
        return
    rows = facts.rows // facts.step.accumulation_steps
    rows *= facts.step.num_replicas if facts.step.sync_batchnorm else 1
    if rows < 16:
        several = facts.step.num_replicas > 1 and not facts.step.sync_batchnorm
        yield Finding(
            "warning",
            named(layers),
            f"{counted(len(layers), 'batch norm layer')}, whose statistics are of "
            f"{counted(rows, 'example')}",
            "they are then mostly noise: with 2 examples on each GPU, ResNet-50 on ImageNet erred "
            "34.7%, and 24.1% with group norm (Wu and He 2018, arXiv:1803.08494)",
            "accuracy, not time",
            "16 examples or more on each replica"
            + (", or step.sync_batchnorm" if several else "")
            + ", or GroupNormalization",
            "--config.step.sync_batchnorm=True" if several and facts.step.from_config else None,
        )


def late_averages(facts: Facts) -> Iterator[Finding]:
    """Yields batch norm whose moving averages are at the end in part what they were before."""
    layers = [each for each in facts.model.layers if each.momentum]
    data, step = facts.data, facts.step
    if not layers or None in (data.num_examples, data.global_batch_size, step.epochs):
        return
    full, left = divmod(data.num_examples, data.global_batch_size)
    steps = (full + (left > 0 and data.last_batch != "drop")) * step.epochs
    momentum = max(each.momentum for each in layers)
    kept = momentum ** (steps * step.accumulation_steps)
    if kept < STILL:
        return
    yield Finding(
        "warning",
        named(layers),
        f"{counted(len(layers), 'batch norm layer')} with momentum={momentum:.6g}, in a run of "
        f"{counted(steps, 'step')}",
        f"validation and the export use moving averages, of which {percent(kept)} is still the "
        "value from before training at the end: accuracy may be near chance there, however good it "
        "is in training",
        "accuracy, not time",
        "BatchNormalization(momentum=0.9), more epochs, or a smaller batch (more steps an epoch)",
    )
