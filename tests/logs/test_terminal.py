import io
import logging
import re
import shutil

import pytest

from tfaccel.logs.terminal import Terminal

RECORD = {
    "step": 15015,
    "epoch": 3,
    "seconds": 7300.0,
    "images": 3843501,
    "accuracy": 0.45671,
    "loss": 2.34549,
    "images_per_second": 12340.4,
    "eta_s": 11565.3,
    "learning_rate": 0.1,
    "loss_scale": 32768.0,
    "skipped_steps": 2,
    "input_wait": 0.021,
    "gpu0_memory_mib": 46285,
    "gpu0_utilisation": 0.97,
    "gpu1_memory_mib": 40000,
    "gpu1_utilisation": 0.99,
}
TESTED = RECORD | {"val_accuracy": 0.5123, "val_loss": 2.012}


class Screen(io.StringIO):
    """A terminal's lines, as a person sees them."""

    def isatty(self):
        return True

    @property
    def lines(self):
        lines = [""]
        column = 0
        for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if part == "\x1b[K":
                lines[-1] = lines[-1][:column]
            elif part == "\r":
                column = 0
            elif part == "\n":
                lines.append("")
                column = 0
            else:
                lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
                column += len(part)
        return lines


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert shutil.get_terminal_size().columns == 80


def make(stream):
    return Terminal(num_epochs=90, steps_per_epoch=5005, stream=stream)


def test_a_terminal_has_one_line_that_changes_and_keeps_each_epochs_numbers():
    screen = Screen()
    terminal = make(screen)
    terminal.steps(RECORD | {"step": 10060})
    place = "epoch 3/90  50/5005  ETA 3:12:45"
    shown = f"{place}  loss 2.345  accuracy 0.4567"
    assert screen.lines == [f"{shown}  12,340 images/s"]
    terminal.steps(RECORD | {"step": 10110, "loss": 2.0})
    assert screen.lines == [
        "epoch 3/90  100/5005  ETA 3:12:45  loss 2.000  accuracy 0.4567  12,340 images/s"
    ]
    terminal.epoch(TESTED)
    assert screen.lines == [
        "epoch 3/90  loss 2.345  accuracy 0.4567  val_loss 2.012  val_accuracy 0.5123",
        "    12,340 images/s  lr 0.1  loss scale 32,768  skipped 2  input wait 2%",
        "    GPU 45.2 GiB 97%  ETA 3:12:45",
        "",
    ]
    assert max(map(len, screen.lines)) < 80
    terminal.close()


def test_what_others_log_has_lines_of_its_own(capfd):
    screen = Screen()
    terminal = make(screen)
    handler = logging.StreamHandler(screen)
    log = logging.getLogger("tfaccel")
    log.addHandler(handler)
    try:
        terminal.steps(RECORD)
        log.warning("checkpoint: short")
        terminal.steps(RECORD)
        terminal.close()
        log.warning("after")
    finally:
        log.removeHandler(handler)
    assert screen.lines == ["checkpoint: short", "after", ""]


def test_a_file_has_whole_lines_without_control_characters():
    stream = io.StringIO()
    terminal = make(stream)
    terminal.steps(RECORD | {"step": 10060})
    terminal.epoch(TESTED)
    terminal.close()
    numbers = (
        "12,340 images/s  lr 0.1  loss scale 32,768  skipped 2  input wait 2%  GPU 45.2 GiB 97%"
    )
    metrics = "loss 2.345  accuracy 0.4567"
    assert stream.getvalue().splitlines() == [
        f"epoch 3/90  50/5005  ETA 3:12:45  {metrics}  {numbers}",
        f"epoch 3/90  {metrics}  val_loss 2.012  val_accuracy 0.5123  {numbers}  ETA 3:12:45",
    ]
    assert terminal.every_s == 30


def test_a_narrow_terminal_wraps_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    screen = Screen()
    terminal = make(screen)
    terminal.epoch(TESTED)
    terminal.steps(RECORD)
    terminal.close()
    assert max(map(len, screen.getvalue().replace("\r", "\n").split("\n"))) < 20 + len("\x1b[K")


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (0.0, "0.000"),
        (1e-7, "0.0000001000"),
        (2.3, "2.300"),
        (123456.7, "123,457"),
        (1e12, "1,000,000,000,000"),
        (1e-12, "1.000e-12"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(loss, shown):
    stream = io.StringIO()
    make(stream).epoch({"step": 5005, "epoch": 1, "seconds": 1.0, "images": 1, "loss": loss})
    assert stream.getvalue() == f"epoch 1/90  loss {shown}\n"
