"""Rules about the batch size. Each rule takes Facts and yields findings.

findings = [*tail_batch(facts), *batch_rows(facts), *few_rows_in_batch_norm(facts)]
findings += late_averages(facts)
"""

from collections.abc import Iterator

from tfaccel.common.tables import counted, in_figures
from tfaccel.diagnostics.lint.facts import Data, Facts
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.products import MUCH, padded, share
from tfaccel.diagnostics.lint.words import layer_names, padding_count, percent, tile_share

# The largest share of batch norm's moving averages that may still be the initial value at the end,
# as in tfaccel/training/callbacks/near_chance.py.
MOST_INITIAL = 0.1


def batch_rows(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the rows of products on each replica are not a multiple of 8."""
    rows, batch, replicas = facts.rows, facts.data.global_batch_size, facts.step.num_replicas
    if rows is None or (rows % 8 == 0 and batch % replicas == 0):
        return
    touched = [each for each in facts.model.layers if each.multiplies and rows * each.positions % 8]
    lost = share(facts.model, touched) * (1 - rows / padded(rows, 8))
    if not touched and facts.model.layers and batch % replicas == 0:
        return
    on = f" give {rows} rows on each of {replicas} replicas" if replicas > 1 else ""
    whole = max(1, round(batch / (8 * replicas))) * 8 * replicas
    if facts.data.num_examples and whole > facts.data.num_examples:  # no step has more rows
        whole -= 8 * replicas
    if whole == 0:
        return
    yield Finding(
        "warning" if lost >= MUCH else "note",
        "data",
        f"batches of {batch}{on}, not a multiple of 8",
        "Tensor Cores multiply tiles of 8 rows: "
        f"{padding_count(padded(rows, 8), padded(rows, 8) - rows, 'row')}",
        f"{tile_share(lost)}: the affected layers have {percent(share(facts.model, touched))} of "
        "its multiplications",
        f"use a batch size of {whole}",
        f"--config.data.global_batch_size={whole}" if facts.step.from_config else None,
    )


def rows_of_pixels(facts: Facts) -> Iterator[str]:
    """Yields a remark if the batch is not a multiple of 8, but the rows of all products are."""
    rows = facts.rows
    if rows is None or rows % 8 == 0 or list(batch_rows(facts)):
        return
    yield (
        f"batches of {rows} on each replica, not a multiple of 8: the products' rows are examples "
        "times pixels, which is a multiple of 8"
    )


def tail_batch(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the last batch has fewer rows than the others."""
    data = facts.data
    if data.num_examples is None or not data.global_batch_size:
        return
    if data.last_batch == "drop" and data.num_examples < data.global_batch_size:
        yield Finding(
            "error",
            "data",
            f"{data.num_examples:,} examples do not fill one batch of {data.global_batch_size}",
            "the only batch is not full, so it is dropped",
            "training runs at all",
            f"use a batch size of at most {data.num_examples}, or do not drop the last batch",
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
        "the step is compiled again for the other shape; each row of the last batch has "
        f"{in_figures(data.global_batch_size / left, 2)} times the usual weight in the update"
        + ("; the number of its rows is not a multiple of 8" if odd else ""),
        f"one compilation; one of {batches} steps is "
        f"{percent(1 - left / data.global_batch_size)} empty",
        "use a tfaccel loader (last_batch='pad' counts every row once), or "
        f"batch({data.global_batch_size}, drop_remainder=True)",
    )


def _padding(data: Data, left: int) -> Iterator[Finding]:
    """Yields a finding if a large part of an epoch's rows is padding."""
    batch = data.global_batch_size
    rows = padded(data.num_examples, batch)
    lost = 1 - data.num_examples / rows
    if lost >= MUCH:
        yield Finding(
            "note",
            "data",
            f"{batch - left:,} of an epoch's {rows:,} rows are padding",
            f"{data.num_examples:,} examples in batches of {batch} leave {left} for the last one, "
            "which costs as much as a full one; loss and metrics ignore padding rows",
            f"{percent(lost)} of an epoch's time",
            "choose a batch size that divides the examples more evenly",
        )


def few_rows_in_batch_norm(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if batch norm computes its statistics over fewer than 16 examples."""
    layers = [each for each in facts.model.layers if each.kind == "BatchNormalization"]
    if not layers or facts.rows is None:
        return
    rows = facts.rows // facts.step.accumulation_steps
    rows *= facts.step.num_replicas if facts.step.sync_batchnorm else 1
    if rows < 16:
        several = facts.step.num_replicas > 1 and not facts.step.sync_batchnorm
        yield Finding(
            "warning",
            layer_names(layers),
            f"{counted(len(layers), 'batch norm layer')} with statistics over "
            f"{counted(rows, 'example')}",
            "statistics over so few examples are mostly noise: with 2 examples on each GPU, "
            "ResNet-50 on ImageNet had an error of 34.7%, and 24.1% with group norm (Wu and He "
            "2018, arXiv:1803.08494)",
            "accuracy, not time",
            "use 16 examples or more on each replica"
            + (", or step.sync_batchnorm" if several else "")
            + ", or GroupNormalization",
            "--config.step.sync_batchnorm=True" if several and facts.step.from_config else None,
        )


def late_averages(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the run has too few steps for batch norm's moving averages."""
    layers = [each for each in facts.model.layers if each.momentum]
    data, step = facts.data, facts.step
    if not layers or None in (data.num_examples, data.global_batch_size, step.epochs):
        return
    full, left = divmod(data.num_examples, data.global_batch_size)
    steps = (full + (left > 0 and data.last_batch != "drop")) * step.epochs
    momentum = max(each.momentum for each in layers)
    kept = momentum ** (steps * step.accumulation_steps)
    if kept < MOST_INITIAL:
        return
    yield Finding(
        "warning",
        layer_names(layers),
        f"{counted(len(layers), 'batch norm layer')} with momentum={momentum:.6g}, in a run of "
        f"{counted(steps, 'step')}",
        f"validation and the export use moving averages, and at the end {percent(kept)} of them is "
        "still the initial value; accuracy may be near chance there, even if it is good in "
        "training",
        "accuracy, not time",
        "use BatchNormalization(momentum=0.9), more epochs, or a smaller batch (more steps)",
    )
