import io
import logging
import re
import shutil

import pytest

from tfaccel.training.logs.terminal import Terminal

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

    encoding = "utf-8"

    def isatty(self):
        return True

    @property
    def lines(self):
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if part == "\x1b[2K":
                lines[row] = ""
            elif part == "\x1b[1A":
                row -= 1
            elif part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                lines += [""] if row == len(lines) else []
            elif not part.startswith("\x1b"):  # a colour, or the cursor shown or hidden
                lines[row] = lines[row][:column].ljust(column) + part
                column += len(part)
        return lines[: row + 1]  # down to the cursor


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert shutil.get_terminal_size().columns == 80


def make(stream):
    return Terminal(num_epochs=90, steps_per_epoch=5005, stream=stream)


def without_bar(line):
    return re.sub(" [━╸╺]+", "", line)


def test_a_terminal_has_a_bar_that_changes_and_keeps_each_epochs_numbers():
    screen = Screen()
    terminal = make(screen)
    terminal.steps(RECORD | {"step": 10060})
    place = "epoch 3/90 50/5005  ETA 3:12:45"
    assert [without_bar(each) for each in screen.lines] == [f"{place}  loss 2.345  lr 0.1"]
    assert screen.lines[0].count("━") >= 19
    terminal.steps(RECORD | {"step": 10110, "loss": 2.0})
    assert [without_bar(each) for each in screen.lines] == [
        "epoch 3/90 100/5005  ETA 3:12:45  loss 2.000  lr 0.1"
    ]
    assert max(map(len, screen.lines)) < 80
    terminal.epoch(TESTED)
    assert screen.lines == [
        "epoch 3/90  loss 2.345  accuracy 0.4567  val_loss 2.012  val_accuracy 0.5123 …",
        "",
    ]
    assert terminal.every_s == 0.25
    terminal.close()


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (40, "epoch 3/90  loss 2.345  ETA 3:12:45 …"),
        (80, "epoch 3/90  loss 2.345  accuracy 0.4567  val_loss 2.012  val_accuracy 0.5123 …"),
        (
            100,
            "epoch 3/90  loss 2.345  accuracy 0.4567  val_loss 2.012  val_accuracy 0.5123  "
            "lr 0.1  ETA 3:12:45 …",
        ),
        (
            120,
            "epoch 3/90  loss 2.345  accuracy 0.4567  val_loss 2.012  val_accuracy 0.5123  "
            "12,340 images/s  lr 0.1  ETA 3:12:45 …",
        ),
        (
            400,
            "epoch 3/90  loss 2.345  accuracy 0.4567  val_loss 2.012  val_accuracy 0.5123  "
            "12,340 images/s  lr 0.1  loss scale 32,768  skipped 2  input wait 2%  "
            "GPU 45.2 GiB 97%  ETA 3:12:45",
        ),
    ],
)
def test_an_epochs_line_is_one_and_holds_whole_numbers(monkeypatch, columns, line):
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen()
    make(screen).epoch(TESTED)
    assert screen.lines == [line, ""]


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_metric_with_a_long_name_is_whole_or_not_there(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen()
    terminal = make(screen)
    name = "mean_intersection_over_union_of_all_classes_without_the_background_and_the_border"
    many = {f"{name}_{index}": 0.5 for index in range(3)} | {f"val_{name}_0": 0.5}
    terminal.epoch(TESTED | many)
    terminal.steps(RECORD | many)
    line, bar = screen.lines
    assert max(len(line), len(bar)) < columns
    assert "mean_" not in line.replace(f"{name}_0 0.5000", "")
    assert line.startswith("epoch 3/90  loss 2.345")
    assert "loss 2.345" in bar
    terminal.close()


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_asks_for_less_gets_it(monkeypatch, variable, value):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    make(screen).steps(RECORD)
    assert re.search(r"\x1b\[[0-9;]+m", screen.getvalue())
    monkeypatch.setenv(variable, value)
    screen = Screen()
    terminal = make(screen)
    terminal.steps(RECORD)
    terminal.epoch(TESTED)
    terminal.close()
    assert not re.search(r"\x1b\[[0-9;]+m", screen.getvalue())
    if variable == "TERM":
        assert "\x1b" not in screen.getvalue()
        assert "\r" not in screen.getvalue()


def test_a_forced_colour_makes_no_terminal_of_a_file(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    terminal = make(stream)
    terminal.steps(RECORD)
    terminal.epoch(TESTED)
    assert "\x1b" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 2


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
    assert terminal.every_s == 60
    assert not terminal.has_first_step


@pytest.mark.parametrize("columns", [5, 20, 59])
def test_a_narrow_terminal_wraps_nothing(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen()
    terminal = make(screen)
    terminal.epoch(TESTED)
    terminal.steps(RECORD)
    assert max(map(len, screen.lines)) < columns + 1
    terminal.close()
    assert len(screen.lines) == 2


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
