"""Where a run's numbers go: one interface, several writers.

Takes records, from `tfaccel.training.callbacks.logs`; each writer gives them a form. Only the chief
has writers.

    writers = make_writers(workdir, loader=train, num_epochs=90)  # in writers.py
    writers[0].steps({"step": 50, "epoch": 1, "seconds": 31.5, "loss": 6.91, ...})
    writers[0].epoch({"step": 5005, "epoch": 1, "seconds": 2410.0, "loss": 6.2, "val_loss": 5.8})
    writers[0].close()

A record is a flat dict of JSON-ready numbers. What has no value is not in it. Always there:

    step               steps done, counted over epochs
    epoch              the one that the step belongs to, from 1
    seconds            since the run began, those before a resume included
    images             trained on since the run began

and, where they are known:

    loss, accuracy...  means over the epoch so far, as Keras counts them; val_ in an epoch's record
    images_per_second  over all replicas, without compilation and validation; since the writer's
                       record before, or of the whole epoch
    eta_s              seconds until the run's end
    learning_rate      that the step was taken with
    loss_scale         where there is one
    skipped_steps      of the epoch so far, by the loss scale
    input_wait         0..1, part of the time of images_per_second in which the step waited for its
                       batch
    gpu0_memory_mib    in use on each GPU of this worker, by whichever process
    gpu0_utilisation   0..1, part of the last moment in which it computed
"""

Record = dict[str, float]

# What a record holds beside loss and metrics; and gpu0_, gpu1_, ...
OWN_NAMES = (
    "step",
    "epoch",
    "seconds",
    "images",
    "images_per_second",
    "eta_s",
    "learning_rate",
    "loss_scale",
    "skipped_steps",
    "input_wait",
)


class Writer:
    """One form of the log. A new one begins anew, over what an earlier run left in its place.

    Its methods may raise OSError, as on a full disk; what was written before then stays whole, and
    the next record is tried again.

    Attributes:
      name: what to call it when it fails.
      every_s: seconds between its records within an epoch; None for every so many steps.
      has_first_step: whether the first step has the first of those; if not, it comes `every_s`
        seconds after that step.
    """

    name: str
    every_s: float | None = None
    has_first_step: bool = True

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Goes on with what is there, less what is written again: call it before the first record.

        Args:
          step: the last whose record stays.
          epoch: the last whose record stays: that many are complete.
        """

    def steps(self, record: Record) -> None:
        """Takes a record within an epoch."""

    def epoch(self, record: Record) -> None:
        """Takes the record of an epoch that is complete, with its validation."""

    def close(self) -> None:
        """Takes no more."""


def metric_names(record: Record) -> list[str]:
    """Returns the names of loss and metrics: the loss first, and those of validation last."""
    names = [name for name in record if name not in OWN_NAMES and not name.startswith("gpu")]
    return sorted(
        names, key=lambda name: (name.startswith("val_"), not name.endswith("loss"), name)
    )
