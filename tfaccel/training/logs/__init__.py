"""The writers of a run's numbers: terminal, files and TensorBoard, with one interface.

Takes records from `tfaccel.training.callbacks.logs`; each writer writes them in its own form. Only
the chief has writers.

    writers = make_writers(workdir, loader=train, num_epochs=90)  # in writers.py
    writers[0].steps({"step": 50, "epoch": 1, "seconds": 31.5, "loss": 6.91, ...})
    writers[0].epoch({"step": 5005, "epoch": 1, "seconds": 2410.0, "loss": 6.2, "val_loss": 5.8})
    writers[0].close()

A record is a flat dict of JSON-ready numbers. A number without a value is not in it. Each record
has:

    step               steps done, counted across epochs
    epoch              the epoch of the step, from 1
    seconds            since the run began, including the time before a resume
    images             number of images trained on since the run began

and, if they are known:

    loss, accuracy...  Keras's means over the epoch so far; an epoch's record has val_ names, too
    images_per_second  of all replicas, without compilation and validation; in an epoch's record
                       over the epoch, else since this writer's previous record
    eta_s              seconds until the end of the run
    learning_rate      of this step
    loss_scale         if the loss is scaled
    skipped_steps      steps of the epoch so far that the loss scale skipped; of an optimizer that
                       is not the compiled one, loss_scale/NAME and skipped_steps/NAME
    input_wait         0..1, the part of the time for images_per_second in which the steps waited
                       for their batches
    gpu0_memory_mib    memory in use on each GPU of this worker, by all processes
    gpu0_utilisation   0..1, the part of the last moment in which the GPU computed
"""

Record = dict[str, float]

# The fields of a record that are not metrics. Fields that begin with gpu are not metrics either.
OWN_NAMES = ("step", "epoch", "seconds", "images", "images_per_second", "eta_s")
OWN_NAMES += ("learning_rate", "loss_scale", "skipped_steps", "input_wait")


class Writer:
    """Writes records in one form. A new writer overwrites the files that an earlier run left.

    Its methods may raise OSError, for example on a full disk. Earlier records then stay complete,
    and the next record is tried again.

    Attributes:
      name: for messages about a failure.
      every_s: seconds between two records within an epoch; None if `Logs.every_steps` decides.
      has_first_step: whether the first step has a record. If not, the first record follows
        `every_s` seconds after that step.
    """

    name: str
    every_s: float | None = None
    has_first_step: bool = True

    def resume_at(self, *, step: int, epoch: int) -> None:
        """Keeps the records of an earlier run up to a step. It is called before the first record.

        Args:
          step: the last step whose records stay.
          epoch: the last epoch whose record stays; it is complete.
        """

    def steps(self, record: Record) -> None:
        """Writes a record within an epoch."""

    def epoch(self, record: Record) -> None:
        """Writes the record of a complete epoch, including its validation."""

    def close(self) -> None:
        """Closes the files. There are no more records."""


def metric_names(record: Record) -> list[str]:
    """Returns the names of loss and metrics: the loss first, the validation's names last."""
    names = [
        name
        for name in record
        if name.partition("/")[0] not in OWN_NAMES and not name.startswith("gpu")
    ]
    return sorted(
        names, key=lambda name: (name.startswith("val_"), not name.endswith("loss"), name)
    )
