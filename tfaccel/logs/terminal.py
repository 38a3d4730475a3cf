"""What a person sees of a run: a line per epoch, and how far it is within one.

Takes records; gives text. On a terminal the present epoch is one line that changes, and an epoch's
numbers stay, broken between two of them where the terminal is narrow. In a file or pipe it is a
line per epoch, and one every half minute, with no control characters.

    epoch 3/90  loss 2.345  accuracy 0.4567  val_loss 2.012  val_accuracy 0.5123
        12340 images/s  lr 0.1  input wait 2%  GPU 45.2 GiB 97%  ETA 3:12:45
"""

import contextlib
import io
import logging
import shutil
import sys
from typing import TextIO

from tfaccel.logs import Record, Writer, metric_names
from tfaccel.redact import escaped
from tfaccel.table_text import in_figures

log = logging.getLogger("tfaccel")

ERASE = "\r\x1b[K"  # to the line's beginning, and what is on it
INDENT = "    "


class Terminal(Writer):
    """Writes to standard output, or another stream."""

    name = "the terminal"

    def __init__(self, *, num_epochs: int, steps_per_epoch: int, stream: TextIO | None = None):
        """Takes what the numbers are parts of.

        Args:
          num_epochs: of the whole run.
          steps_per_epoch: of training.
          stream: where to write; None for standard output.
        """
        self._num_epochs, self._steps_per_epoch = num_epochs, steps_per_epoch
        self._stream = stream or sys.stdout or io.StringIO()  # a process may have none
        self._redraws = self._stream.isatty()
        self.every_s = 1.0 if self._redraws else 30.0
        self._shows_status = False
        if self._redraws:
            log.addFilter(self._make_way)

    def steps(self, record: Record) -> None:
        """Shows how far the epoch is."""
        done = record["step"] - (record["epoch"] - 1) * self._steps_per_epoch
        place = f"{self._place(record)}  {done}/{self._steps_per_epoch}"
        fields = [place, *_eta(record), *_numbers(record)]
        if self._redraws:
            # The carriage return lets what others write begin at the line's beginning.
            line = _lines(fields, width=self._width)[0]
            self._write(f"{ERASE}{line}\r")
            self._shows_status = True
        else:
            self._write("  ".join(fields) + "\n")

    def epoch(self, record: Record) -> None:
        """Writes the epoch's numbers, in place of how far it was."""
        self._erase()
        fields = [self._place(record), *_numbers(record), *_eta(record)]
        lines = _lines(fields, width=self._width) if self._redraws else ["  ".join(fields)]
        self._write("\n".join(lines) + "\n")

    def close(self) -> None:
        """Leaves the cursor on an empty line."""
        self._erase()
        log.removeFilter(self._make_way)

    def _place(self, record: Record) -> str:
        return f"epoch {record['epoch']}/{self._num_epochs}"

    @property
    def _width(self) -> int:
        return shutil.get_terminal_size().columns - 1  # some wrap where the last column is filled

    def _make_way(self, _) -> bool:
        """A log's filter, which lets all pass: what it prints comes where the status line was."""
        with contextlib.suppress(OSError):  # the terminal is gone, the log may go elsewhere
            self._erase()
        return True

    def _erase(self) -> None:
        if self._shows_status:
            self._shows_status = False
            self._write(ERASE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _numbers(record: Record) -> list[str]:
    """Returns what there is of a record's numbers, in their fixed order."""
    shown = [f"{escaped(name)} {_short(record[name])}" for name in metric_names(record)]
    forms = {
        "images_per_second": lambda rate: f"{rate:,.0f} images/s",
        "learning_rate": lambda rate: f"lr {in_figures(rate, 4)}",
        "loss_scale": lambda scale: f"loss scale {in_figures(scale)}",
        "skipped_steps": lambda steps: f"skipped {steps:,}",
        "input_wait": lambda part: f"input wait {part:.0%}",
    }
    shown += [form(record[name]) for name, form in forms.items() if name in record]
    return shown + _gpus(record)


def _gpus(record: Record) -> list[str]:
    """Returns the fullest GPU's memory and the idlest one's utilisation."""
    memory = [record[name] for name in record if name.endswith("_memory_mib")]
    used = [record[name] for name in record if name.endswith("_utilisation")]
    shown = [f"{max(memory) / 1024:.1f} GiB"] if memory else []
    shown += [f"{min(used):.0%}"] if used else []
    return [" ".join(["GPU", *shown])] if shown else []


def _eta(record: Record) -> list[str]:
    if not record.get("eta_s"):  # not known yet, or over
        return []
    minutes, seconds = divmod(round(record["eta_s"]), 60)
    hours, minutes = divmod(minutes, 60)
    return [f"ETA {hours}:{minutes:02}:{seconds:02}"]


def _short(number: float) -> str:
    """Returns a number of four digits that count; more before the point."""
    return in_figures(number, 4, zeros=True)


def _lines(fields: list[str], *, width: int) -> list[str]:
    """Returns the fields in lines that fit; a field that is too long by itself is cut."""
    lines = [fields[0][:width]]
    for field in fields[1:]:
        if len(lines[-1]) + 2 + len(field) <= width:
            lines[-1] += f"  {field}"
        else:
            lines.append(f"{INDENT}{field}"[:width])
    return lines
