"""The page of a run at the end of `tfaccel train`: report.html in the workdir.

Takes the trained model and the test images; gives the page. tfaccel/training/page/ writes it from
the run's files. Here the confusion matrix is added, if counting it costs little.

    with drawn(this_run, model, test, outcome, workdir=workdir):
        this_run.export(...)    # waits for another process most of the time

A thread draws within the context, so that the end of a run takes no longer. The page never fails a
run: a failure is a warning.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import pathlib
import shlex
from collections.abc import Iterator, Sequence

import keras
import numpy as np

from tfaccel.common.html_page import svg_of
from tfaccel.common.report import Code, html_of
from tfaccel.data.distribute import Loader
from tfaccel.experiment.evaluate.classes import NO_CLASS
from tfaccel.experiment.evaluate.pictures import confusion_figure
from tfaccel.experiment.evaluate.scores import Classes
from tfaccel.experiment.fit import Outcome
from tfaccel.experiment.scored import read_of, scored
from tfaccel.export import card
from tfaccel.process import waits
from tfaccel.run import Run
from tfaccel.training.page.page import try_to_write

log = logging.getLogger("tfaccel")

# What counting the confusions may cost: the larger of these seconds and this share of the training.
MOST_S, MOST_SHARE = 2.0, 0.01
# The network forward alone compiles in about this part of the time of a training step.
FORWARD_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class Confusions:
    """What a confusion matrix is drawn from.

    Attributes:
      labels: [n] integers, the true classes of the test images.
      predicted: [n] integers, the likeliest classes, NO_CLASS for outputs that are not finite.
      names: of all classes, in order.
    """

    labels: np.ndarray
    predicted: np.ndarray
    names: Sequence[str]

    def as_html(self) -> str:
        """Returns the drawn matrix."""
        return svg_of(confusion_figure(self.labels, self.predicted, self.names))


@dataclasses.dataclass(frozen=True)
class Missing:
    """Why there is no confusion matrix, and the command that draws it."""

    why: str
    workdir: pathlib.Path

    def as_html(self) -> str:
        """Returns the sentence and the command."""
        command = f"tfaccel evaluate --workdir={shlex.quote(str(self.workdir))}"
        return html_of(f"{self.why} This command draws it:") + html_of(Code(command))


@contextlib.contextmanager
def drawn(
    run: Run, model: keras.Model, test: Loader, outcome: Outcome, *, workdir: pathlib.Path
) -> Iterator[None]:
    """Within the context a thread writes the page; after it the page is there.

    Args:
      run: the process's run, of one worker or several; only the chief calls this.
      model: the trained model, in whose weights the averages stand, if there are any.
      test: the loader of the test images.
      outcome: of the whole training.
      workdir: of the run, with the logs of all epochs.
    """
    confusions = _confusions(run, model, test, outcome, workdir)

    def write() -> None:
        try_to_write(workdir, make_confusion=confusions.as_html if confusions else str)

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="page") as thread:
        writing = thread.submit(write)
        try:
            yield
        finally:
            with waits.on("drawing the run's page"):
                writing.result()


def _confusions(
    run: Run, model: keras.Model, test: Loader, outcome: Outcome, workdir: pathlib.Path
) -> Confusions | Missing | None:
    """Returns the confusions of the test images; None for a task that has none."""
    if test.data.source.task != "classes":
        return None
    if run.cluster.num_workers > 1:
        return Missing("It is not drawn for a run of several workers.", workdir)
    expected_s, most_s = expected_seconds(test, outcome), max(MOST_S, MOST_SHARE * outcome.seconds)
    if expected_s > most_s:
        why = f"Counting it would take about {expected_s:.0f} s, more than {most_s:.0f} s."
        log.info("report: no confusion matrix: %s", why)
        return Missing(why, workdir)
    try:
        with waits.on("counting the confusions of the test images"):
            return count_confusions(run, model, test)
    except Exception as error:  # such as no memory on the GPU: the training itself is good
        log.warning(
            "report: the confusions cannot be counted (%s: %s)", type(error).__name__, error
        )
        return Missing("Counting it failed; log.txt says why.", workdir)


def expected_seconds(test: Loader, outcome: Outcome) -> float:
    """Returns about how long the network takes to compile and to run over the test images."""
    rate = outcome.images_per_second or np.inf
    return FORWARD_SHARE * outcome.first_execution_seconds + test.num_examples / rate


def count_confusions(run: Run, model: keras.Model, test: Loader) -> Confusions:
    """Returns the true and the likeliest class of each test image, each image once."""
    scores = scored(run, model, Classes(num_named=1)).predict(test, verbose=0)
    return Confusions(
        labels=test.data.source.labels[read_of(test)],
        predicted=np.where(scores["is_finite"], scores["classes"][:, 0], NO_CLASS),
        names=card.completed(test.class_names, model.output_shape[-1]),
    )
