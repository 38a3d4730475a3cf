"""Runs two epochs of a loader without training, and judges them.

print(dry_epochs(run, source, functools.partial(run.loader, image_size=(8, 8), ...), ...))
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from tfaccel.data.distribute import Loader
from tfaccel.data.proof import proof
from tfaccel.data.sampling import ClassSampling
from tfaccel.data.source import ArraySource, ImageSource

NUM_EPOCHS = 2  # two epochs show whether the order changes


def dry_epochs(
    this_run,
    source: ImageSource | ArraySource,
    make_loader: Callable[..., Loader],
    *,
    shuffle: bool,
    last_batch: str,
    sampling: str = "uniform",
) -> proof.Verdict:
    """Returns the verdict on two epochs of a loader, which has the examples' indices as labels.

    Args:
      this_run: the `tfaccel.Run`, of one process.
      source: the examples.
      make_loader: makes the loader from `source=...` and fields of ImageConfig.
      shuffle: whether each epoch should have a new order.
      last_batch: "pad", "drop" or "repeat", as in ImageConfig.
      sampling: how often each class should come, as in DataConfig.
    """
    loader = make_loader(
        source=_numbered(source),
        bad_files="error",
        targets="image",
        ignore_class=None,
        sampling="uniform",
    )
    by_class = None
    if sampling != "uniform":
        # The labels are numbers of examples here, so the plan is drawn by the source's own labels.
        by_class = ClassSampling(sampling, source.labels)
        plan = dataclasses.replace(loader.data.plan, sampling=by_class)
        loader.data = dataclasses.replace(loader.data, plan=plan)
    trace = _trace(loader, this_run, NUM_EPOCHS)
    return proof.verdict(
        proof.record(trace, loader.num_batches),
        num_examples=len(source),
        shuffle=shuffle,
        last_batch=last_batch,
        sampling=by_class,
    )


def _numbered(source: ImageSource | ArraySource) -> ImageSource | ArraySource:
    """Returns the source with each example's index as its label, and without targets."""
    ids = np.arange(len(source), dtype=np.int32)
    return dataclasses.replace(source, labels=ids, class_names=(), target_names=(), targets=None)


def _trace(loader: Loader, this_run, num_epochs: int) -> Iterator[list[tuple]]:
    """Yields for each step, for each local replica: (ids, real, fingerprints of the draws)."""
    local = this_run.strategy.experimental_local_results
    feeds = [
        loader.data.feed(this_run.first_replica + index)
        for index in range(len(this_run.runtime.devices))
    ]
    for epoch in range(num_epochs):
        for step, (_, label, *weight) in enumerate(loader):
            ids = [each.numpy() for each in local(label)]
            weights = (
                [each.numpy() for each in local(weight[0])] if weight else map(np.ones_like, ids)
            )
            draws = [feed.draws(epoch * loader.num_batches + step) for feed in feeds]
            yield [
                (each, real > 0, proof.fingerprints(drawn))
                for each, real, drawn in zip(ids, weights, draws, strict=True)
            ]
