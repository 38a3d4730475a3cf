"""Shows the progress of a run: a bar within an epoch, and a line for each epoch.

Takes records; gives text. A terminal shows the current epoch as a bar, and a complete epoch as a
line with its most important numbers, as many as fit; metrics.csv has all of them. A file, a pipe or
a terminal that cannot move its cursor (TERM=dumb) gets a line with all numbers for each epoch, and
one per minute within an epoch. These lines have no control characters.

    epoch 3/90  loss 2.345  accuracy 0.4567  val_loss 2.012  val_accuracy 0.5123
    epoch 4/90 ━━━━━━━━━━━━━━━━━━━━  2310/5005  ETA 3:12:45  loss 2.301  12340 images/s

The numbers are on the host already, so the bar does not wait for a device.
"""

import contextlib
import io
import logging
import shutil
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

import rich.console
import rich.progress

from tfaccel.common.redact import escaped
from tfaccel.common.tables import in_figures
from tfaccel.training.logs import Record, Writer, metric_names

log = logging.getLogger("tfaccel")

BAR_EVERY_S = 0.25
LINE_EVERY_S = 60.0
BAR_COLUMNS = 20
NARROW_COLUMNS = 60  # a narrower terminal shows the numbers without the bar
MORE = " …"  # at the end of a line from which numbers are missing


class Terminal(Writer):
    """Writes to standard output, or another stream."""

    name = "the terminal"
    has_first_step = False

    def __init__(self, *, num_epochs: int, steps_per_epoch: int, stream: TextIO | None = None):
        """Takes the epochs of the whole run, and a stream; None for standard output."""
        self._num_epochs, self._steps_per_epoch = num_epochs, steps_per_epoch
        self._stream = stream or sys.stdout or io.StringIO()  # sys.stdout may be None
        self._redirects = self._stream is sys.stdout
        console = rich.console.Console(file=self._stream)
        # Ask the stream, too: with FORCE_COLOR, the console treats a file as a terminal.
        self._redraws = self._stream.isatty() and console.is_interactive
        self.has_first_step = self._redraws
        self.every_s = BAR_EVERY_S if self._redraws else LINE_EVERY_S
        self._more = MORE if "utf" in (self._stream.encoding or "utf-8").lower() else ""
        self._bar, self._lock = None, threading.RLock()  # other threads may log
        if self._redraws:
            log.addFilter(self._erase_before_log)

    def steps(self, record: Record) -> None:
        """Shows the progress of the epoch."""
        done = record["step"] - (record["epoch"] - 1) * self._steps_per_epoch
        count = f"{done}/{self._steps_per_epoch}"
        if self._redraws:
            self._draw(record, done, count)
        else:
            fields = [f"{self._place(record)}  {count}", *_eta(record), *_numbers(record)]
            self._write("  ".join(fields) + "\n")

    def epoch(self, record: Record) -> None:
        """Writes the epoch's numbers in place of its progress."""
        self._erase()
        fields = [self._place(record), *_numbers(record), *_eta(record)]
        if self._redraws:
            ranks = _ranks(fields, record)
            self._write(_fitted(fields, ranks, width=_columns() - 1, more=self._more) + "\n")
        else:
            self._write("  ".join(fields) + "\n")

    def close(self) -> None:
        """Leaves the cursor on an empty line."""
        self._erase()
        log.removeFilter(self._erase_before_log)

    def _place(self, record: Record) -> str:
        return f"epoch {record['epoch']}/{self._num_epochs}"

    def _draw(self, record: Record, done: int, count: str) -> None:
        place, columns = self._place(record), _columns()
        bar_columns = BAR_COLUMNS if columns >= NARROW_COLUMNS else 0
        # Some terminals wrap a line that fills the last column.
        width = columns - 1 - len(place) - (bar_columns + 2 if bar_columns else 1)
        fields = [count, *_eta(record), *_numbers(record)]
        # The count and the ETA have priority over the numbers.
        ranks = [*range(len(fields) - len(_numbers(record))), *_ranks(fields, record)]
        text = _fitted(fields, ranks, width=max(1, width), more="")
        with self._lock:
            if self._bar is None:
                self._bar = self._make_bar(bar_columns, columns)
                self._bar.add_task(place, total=self._steps_per_epoch, completed=done, text=text)
                self._bar.start()
                # rich hides the cursor, and a killed process would leave it hidden.
                self._bar.console.show_cursor(True)
                return
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=done, description=place, text=text, refresh=True)

    def _make_bar(self, bar_columns: int, columns: int) -> rich.progress.Progress:
        parts = [
            rich.progress.TextColumn("{task.description}", markup=False, style="none"),
            *([rich.progress.BarColumn(bar_columns)] if bar_columns else []),
            rich.progress.TextColumn("{task.fields[text]}", markup=False, style="none"),
        ]
        return rich.progress.Progress(
            *parts,
            # A new console, because the terminal's width may have changed.
            console=rich.console.Console(file=self._stream, highlight=False, width=columns),
            auto_refresh=False,  # no thread beside the steps
            transient=True,
            redirect_stdout=self._redirects,
            redirect_stderr=self._redirects,
        )

    def _erase_before_log(self, _) -> bool:
        """Erases the bar before a log line is printed. It is a filter that lets all lines pass."""
        with contextlib.suppress(OSError):  # the terminal is gone; the log may go elsewhere
            self._erase()
        return True

    def _erase(self) -> None:
        with self._lock:
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.stop()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _numbers(record: Record) -> list[str]:
    """Returns a record's numbers in their fixed order, as text."""
    shown = [_metric(name, record) for name in metric_names(record)]
    forms = {
        "images_per_second": lambda rate: f"{rate:,.0f} images/s",
        "learning_rate": lambda rate: f"lr {in_figures(rate, 4)}",
        "loss_scale": lambda scale: f"loss scale {in_figures(scale)}",
        "skipped_steps": lambda steps: f"skipped {steps:,}",
        "input_wait": lambda part: f"input wait {part:.0%}",
    }
    shown += [form(record[name]) for name, form in forms.items() if name in record]
    return shown + _gpus(record)


def _metric(name: str, record: Record) -> str:
    # Four significant digits, or more if the number has more before the point.
    return f"{escaped(name)} {in_figures(record[name], 4, zeros=True)}"


def _gpus(record: Record) -> list[str]:
    """Returns the fullest GPU's memory and the idlest one's utilisation."""
    memory = [record[name] for name in record if name.endswith("_memory_mib")]
    used = [record[name] for name in record if name.endswith("_utilisation")]
    shown = [f"{max(memory) / 1024:.1f} GiB"] if memory else []
    shown += [f"{min(used):.0%}"] if used else []
    return [" ".join(["GPU", *shown])] if shown else []


def _eta(record: Record) -> list[str]:
    if not record.get("eta_s"):  # it is unknown, or the run is over
        return []
    minutes, seconds = divmod(round(record["eta_s"]), 60)
    hours, minutes = divmod(minutes, 60)
    return [f"ETA {hours}:{minutes:02}:{seconds:02}"]


def _ranks(fields: Sequence[str], record: Record) -> list[int]:
    """Returns the indices of fields, the most important first.

    The order is: the first field; the loss and its validation's value; the first other metric and
    its validation's value; the ETA; the speed; then the rest.
    """
    names = metric_names(record)
    trained = [name for name in names if not name.startswith("val_")][:2]
    pairs = [each for name in trained for each in (name, f"val_{name}") if each in names]
    first = [_metric(name, record) for name in pairs or names[:1]]
    heads = ["ETA ", *(each for each in fields if each.endswith(" images/s"))]
    chosen = [0, *(fields.index(each) for each in first)]
    chosen += [
        index for head in heads for index, each in enumerate(fields) if each.startswith(head)
    ]
    return list(dict.fromkeys([*chosen, *range(len(fields))]))


def _fitted(fields: Sequence[str], ranks: Sequence[int], *, width: int, more: str) -> str:
    """Returns a line of the most important fields that fit into `width` columns, in their order.

    Args:
      fields: the first one is always in the line, and is cut if needed.
      ranks: the indices of the fields, the most important first.
      width: of the line, in columns.
      more: the end of a line from which fields are missing.
    """
    whole = "  ".join(fields)
    if len(whole) <= width:
        return whole
    chosen, left = {0}, width - len(fields[0]) - len(more)
    for index in ranks:
        needed = 2 + len(fields[index])
        if index not in chosen and needed <= left:
            chosen.add(index)
            left -= needed
    return ("  ".join(fields[index] for index in sorted(chosen)) + more)[:width]
