"""What was measured, as text, Markdown, HTML and JSON."""

import dataclasses
import html.parser
import json
import math
import re

import PIL.Image
import pytest

from tfaccel.common.errors import UserError
from tfaccel.diagnostics.compare import page, plots
from tfaccel.diagnostics.compare.contest import Row
from tfaccel.diagnostics.compare.table import HEADS, Comparison
from tfaccel.diagnostics.compare.variants import Variant

pytestmark = pytest.mark.usefixtures("terminal")  # lines of 80 columns

LOSSES = tuple(2.3 * 0.97**step for step in range(60))


def row(number, variant, status, rates=(), **values):
    known = {"first_step_s": 33.3, "peak_mib": (23_200, 23_000), "losses": LOSSES, "apart": 0.0}
    return Row(number, variant, status, rates=list(rates), **((known if rates else {}) | values))


PLAIN = row(1, Variant("tf_data", "float32", False, 1), "plain", (657, 655, 660), times=1.0)
BEST = row(
    2,
    Variant("dali_gpu", "mixed_bfloat16", True, 8),
    "kept",
    (1_234_567, 1_234_000, 1_235_000),
    times=1879.0,
    apart=0.0123,
    why="1,879 times as fast as 1; losses agree: 1.2% apart, 3.0% allowed",
)
PARTED = row(
    3,
    Variant("memory", "mixed_float16", True, 1),
    "rejected",
    (900, 910, 905),
    times=1.3,
    apart=math.inf,
    losses=(*LOSSES[:40], math.nan),
    why="losses differ: infinitely apart, 3.0% allowed",
)
FAILED = row(
    4,
    Variant("dali_gpu", "TF32", True, 2),
    "failed",
    why="out of memory: <b>no</b> room | for 23 GiB\x1b[31m in /a/path/that/is/long",
)
CEILING = row(
    5,
    Variant("dali_gpu", "float16", True, 8),
    "ceiling",
    (2_000_000,) * 3,
    times=3000.0,
    apart=99.0,
)


def made(*rows, winner=BEST, **values):
    settings = {
        "title": "configs/<x>.py: resnet50, 1,000 images, batches of 256, on 8 x NVIDIA H200",
        "rows": rows or (PLAIN, BEST, PARTED, FAILED, CEILING),
        "winner": winner,
        "flags": ("--config.data.loader=dali_gpu", "--config.runtime.xla=True"),
        "command": "tfaccel train --config=configs/<x>.py",
        "how": "Measured well. " * 12,
        "tolerance": 0.03,
        "noise": 0.01,
        "settings": {"steps": 50},
        "environment": {"gpus": []},
    }
    return Comparison(**settings | values)


def test_text_has_80_columns_whatever_the_figures():
    text = str(made())
    table = text.partition("tfaccel train")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "\x1b" not in text
    assert repr(made()) == text
    lines = text.splitlines()
    assert any(each.startswith(">2 dali_gpu mixed_bfloat16  on    8 1,234,567") for each in lines)
    assert "2  kept      1,879 times as fast as 1" in text


def test_text_ends_with_the_command_that_trains_as_the_best_does():
    assert str(made()).endswith(
        "tfaccel train --config=configs/<x>.py \\\n    --config.data.loader=dali_gpu \\\n"
        "    --config.runtime.xla=True"
    )


def test_columns_stand_below_one_another():
    lines = str(made()).splitlines()
    head = next(each for each in lines if "images/s" in each)
    ends = head.index("images/s") + len("images/s")
    first = next(each for each in lines if each.startswith(" 1 tf_data"))
    assert first[:ends].endswith(" 657")
    assert first[: head.index("MiB") + 3].endswith(" 23,200")


def test_what_is_not_known_is_a_dash_and_what_is_not_finite_is_said():
    cells = dict(zip(HEADS, made().cells(FAILED), strict=True))
    assert cells["images/s"] == cells["apart"] == cells["MiB"] == cells["start"] == "-"
    assert dict(zip(HEADS, made().cells(PARTED), strict=True))["apart"] == "NaN"
    assert dict(zip(HEADS, made().cells(CEILING), strict=True))["apart"] == ">99%"
    once = dataclasses.replace(PARTED, rates=[900])  # of one stretch there is no spread
    assert dict(zip(HEADS, made().cells(once), strict=True))["spread"] == "-"


def test_a_short_curve_does_not_cut_the_others():
    above, below = plots.loss_figure(made()).axes
    for chart in (above, below):
        last = [line.get_xdata()[-1] for line in chart.get_lines()]
        assert min(last) < 41  # PARTED's
        assert sorted(last)[1] > 50


@pytest.mark.parametrize("rates", [(2_000_000,) * 3, (1_000_000, 2_000_000, 3_900_000)])
def test_every_label_is_within_the_picture(rates):
    """Also beside the longest bar, or a stretch that was far quicker than the others."""
    longest = dataclasses.replace(CEILING, rates=list(rates))
    figure = plots.speed_figure(made(PLAIN, BEST, longest))
    figure.draw_without_rendering()
    ends = [each.get_window_extent().x1 for each in figure.axes[0].texts]
    assert len(ends) == 3
    assert max(ends) < figure.bbox.x1


def test_nothing_ran():
    comparison = made(FAILED, winner=None, flags=())
    assert comparison.exit_code == 1
    assert "nothing ran" in str(comparison)
    assert "nothing ran" in comparison.as_markdown()
    assert "nothing ran" in comparison._repr_html_()


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (1.0, "the first variant that ran is the best: dali_gpu, "),
        (1.5, r"the best is dali_gpu, .*: 1\.50 times as fast as the first variant that ran"),
    ],
)
def test_where_the_plain_one_failed_no_other_is_called_so(times, words):
    winner = dataclasses.replace(BEST, times=times)
    assert re.match(words, made(FAILED, winner, winner=winner).summary)


def test_markdown_has_as_many_cells_in_each_row():
    lines = [each for each in made().as_markdown().splitlines() if each.startswith("|")]
    assert len(lines) == 2 + 5
    assert {each.replace("\\|", "").count("|") for each in lines} == {len(HEADS) + 1}
    assert "- **4 failed**: out of memory" in made().as_markdown()


class Page(html.parser.HTMLParser):
    """What a page says, what it asks the network for, and whether its tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.links, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br", "path", "use", "rect", "link"):
            self.open.append(tag)
        self.links += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith("#")
        ]

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_notebook_has_a_table_without_markup_of_others():
    shown = Page(made()._repr_html_())
    text = "".join(shown.texts)
    assert "<b>no</b> room" in text  # as text
    assert "configs/<x>.py" in text
    assert not shown.open
    assert "\x1b" not in text


def test_the_folder_has_a_page_that_needs_no_other_file(tmp_path):
    page.check_folder(tmp_path / "report")
    page.write(made(), tmp_path / "report")
    shown = Page((tmp_path / "report" / "report.html").read_text())
    assert shown.links == []
    assert not shown.open
    text = "".join(shown.texts)
    assert "The best is dali_gpu, mixed_bfloat16, XLA, 8 GPUs" in text
    assert "training loss" in text or "viewport" in (tmp_path / "report/report.html").read_text()
    written = json.loads((tmp_path / "report" / "results.json").read_text())
    assert written["winner"] == 2
    assert written["rows"][2]["losses"][-1] is None  # NaN is no JSON
    assert written["rows"][0]["variant"]["loader"] == "tf_data"
    assert (tmp_path / "report" / "report.md").read_text() == made().as_markdown()
    for name in ("speed.png", "losses.png"):
        with PIL.Image.open(tmp_path / "report" / name) as image:
            assert image.width > 500
    with pytest.raises(UserError, match="not empty"):
        page.check_folder(tmp_path / "report")


def test_pages_of_one_row_and_of_none_that_ran():
    assert "the plain variant is the best" in page.page(made(PLAIN, winner=PLAIN)).lower()
    assert "Nothing ran" in page.page(made(FAILED, winner=None, flags=()))
