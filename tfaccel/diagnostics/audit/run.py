"""Audits an experiment's data, in order: files, dry epochs, contact sheet.

all_well = run(parse(get_config()), report=None, sheet=pathlib.Path("sheet.png"))
"""

import functools
import os
import pathlib

import numpy as np

from tfaccel.common.tables import show
from tfaccel.config import Config
from tfaccel.data.distribute import Loader
from tfaccel.data.proof.dry_epochs import dry_epochs
from tfaccel.data.scan import files
from tfaccel.data.scan.report import write_list
from tfaccel.data.source import ImageSource, as_stored
from tfaccel.data.sources.mask_values import with_grey_masks
from tfaccel.experiment.open_data import open_loader, open_source
from tfaccel.run import Run
from tfaccel.runtime.cluster import check_one_process, find
from tfaccel.training.logs import contact_sheet

NUM_SHOWN = 64  # images on the contact sheet


def run(config: Config, *, report: pathlib.Path | None, sheet: pathlib.Path | None) -> bool:
    """Audits training and test data, prints the verdict, and returns whether all is well.

    A bad file is no fault if `bad_files="skip"` excludes it.

    Args:
      config: the experiment.
      report: where to write the list of bad files; None writes it only to the cache folder.
      sheet: where to write a PNG of augmented training images; None writes none.

    Raises:
      UserError: the data does not exist, or a path cannot be written.
    """
    # ----- Process: the same devices as in training, so that the shards are the same.
    cluster = find(os.environ)
    check_one_process(cluster, "the audit")
    this_run = Run(config.runtime, cluster)

    all_well, faults = True, []
    for split in ("train", "test"):
        # ----- Files: decodes each file once; a second audit decodes only files that have changed.
        source = open_source(config.data, split)
        if isinstance(source, ImageSource):
            source = as_stored(source, config.data)
            if config.data.targets == "mask" and source.targets is not None:
                source = with_grey_masks(source)
            augment = config.train_images if split == "train" else config.test_images
            found = files.scan_files(
                source,
                num_workers=this_run.runtime.loader_threads,
                progress=True,
                smallest=files.smallest_window(config.data, augment),
                masks=config.data.targets == "mask",
            )
            show(found.summary(split))
            if bad := found.worst():
                show(bad)
            all_well &= len(found.bad_ids) == 0 or config.data.bad_files == "skip"
            faults += found.faults
            source = files.usable(source, found)

        # ----- Epochs: checks what each replica's real input pipeline gives.
        verdict = dry_epochs(
            this_run,
            source,
            functools.partial(open_loader, this_run, config, split),
            shuffle=split == "train",
            last_batch=config.data.last_batch,
            sampling=config.data.sampling if split == "train" else "uniform",
        )
        show(f"{split}: {verdict}")
        all_well &= verdict.ok

        # ----- Contact sheet: shows augmented images to people.
        if sheet and split == "train":
            loader = open_loader(this_run, config, split, source=source, bad_files="error")
            x, y = _shown(loader, this_run)
            contact_sheet.write_batch(
                sheet,
                x,
                y,
                settings=loader.data.images,
                class_names=loader.class_names,
                target_names=loader.data.source.target_names,
            )
            show(f"contact sheet: {sheet}")
    if report:
        write_list(report, faults)
    return all_well


def _shown(loader: Loader, this_run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first augmented images, and their labels or targets, from the loader."""
    local = this_run.strategy.experimental_local_results
    shown = []
    for batch in loader:
        x, y, *weight = (np.concatenate(local(each)) for each in batch)
        real = weight[0] > 0 if weight else np.ones(len(x), bool)
        shown += zip(x[real], y[real], strict=True)
        if len(shown) >= NUM_SHOWN:
            break
    x, y = (np.stack(each) for each in zip(*shown[:NUM_SHOWN], strict=True))
    return x, y
