"""What people read: numbers, nothing of others that acts, and a pipe that is gone."""

import subprocess
import sys

import pytest

from tfaccel.common.tables import as_html, counted, in_figures


def test_html_and_counts():
    assert as_html("<b>\x00&") == r"&lt;b&gt;\x00&amp;"
    assert (counted(1, "note"), counted(1000, "note")) == ("1 note", "1,000 notes")


NUMBERS = [
    (0, "0"),
    (-0.0, "0"),
    (2520.0, "2,520"),
    (2523.4, "2,523"),
    (2.52, "2.52"),
    (2.5, "2.5"),
    (999.96, "1,000"),
    (-12.345, "-12.3"),
    (0.0012, "0.0012"),
    (0.000012345, "0.0000123"),
    (6e-8, "0.00000006"),
    (1.234e-12, "1.23e-12"),
    (32768, "32,768"),
    (1234567.8, "1,234,568"),
    (67108864.0, "67,108,864"),
    (3e20, "3e20"),
    (float("inf"), "inf"),
    (float("nan"), "nan"),
]


@pytest.mark.parametrize(("value", "text"), NUMBERS, ids=[text for _, text in NUMBERS])
def test_numbers_are_as_people_write_them(value, text):
    assert in_figures(value) == text


def test_zeros_are_kept_where_numbers_stand_above_each_other():
    zeros = [in_figures(each, 4, zeros=True) for each in (2.3, 0.0, 1000.0, 1e-12)]
    assert zeros == ["2.300", "0.000", "1,000", "1.000e-12"]


def test_a_reader_that_has_gone_is_no_failure():
    program = (
        "import sys; from tfaccel.common.tables import show; sys.stdin.read(); show('x'); show('y')"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
