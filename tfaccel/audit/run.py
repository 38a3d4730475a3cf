"""The whole audit of an experiment's data, in order: files, dry epochs, contact sheet.

ok = run(parse(get_config()), report=pathlib.Path("bad_files.txt"), sheet=None)
"""

import dataclasses
import logging
import pathlib
from collections.abc import Iterator

import numpy as np

from tfaccel.audit import contact_sheet, files, proof
from tfaccel.config import Config
from tfaccel.data.from_config import open_loader, open_source
from tfaccel.data.source import ArraySource, ImageSource
from tfaccel.run import Run

log = logging.getLogger("tfaccel")

NUM_EPOCHS = 2  # to see whether the order changes
NUM_SHOWN = 64  # images on the contact sheet


def run(config: Config, *, report: pathlib.Path | None, sheet: pathlib.Path | None) -> bool:
    """Audits training and test data, prints the verdict, and returns whether all is well.

    Bad files are well where `bad_files="skip"` leaves them out.

    Args:
      config: the experiment.
      report: where to write the list of bad files; None for the cache folder.
      sheet: where to write a PNG of augmented training images; None for none.

    Raises:
      UserError: the data are not there, or a path cannot be written.
    """
    # ----- Process: the same devices as training, for the same shards.
    this_run = Run(config.runtime)

    all_well = True
    for split in ("train", "test"):
        # ----- Files: every one is decoded once; a second audit looks at those that changed.
        source = open_source(config.data, split)
        if isinstance(source, ImageSource):
            found = files.scan_files(source, num_workers=this_run.threads, progress=True)
            print(found.summary(split))
            all_well &= len(found.bad_ids) == 0 or config.data.bad_files == "skip"
            source = files.usable(source, found)

        # ----- Epochs: what each replica is given, read off what its real pipeline gives.
        loader = _loader_of_ids(this_run, config, split, source)
        epochs = proof.record(_trace(loader, NUM_EPOCHS), loader.num_batches)
        verdict = proof.verdict(
            epochs,
            num_examples=len(source),
            shuffle=split == "train",
            last_batch=config.data.last_batch,
        )
        print(f"{split}: {verdict}")
        all_well &= verdict.ok

        # ----- Contact sheet: for people to look at.
        if sheet and split == "train":
            loader = open_loader(this_run, config, split, source=source)
            print(f"contact sheet: {contact_sheet.write(sheet, *_shown(loader))}")
    return all_well
