"""Writes a comparison as a self-contained HTML page, with a folder for the whole report.

write(comparison, pathlib.Path("report"))    # report.html, report.md, results.json and two PNGs
"""

import pathlib

from tfaccel.common.disk_errors import not_written
from tfaccel.common.errors import UserError
from tfaccel.common.html_page import html_page, svg_of
from tfaccel.common.report import Code, html_of
from tfaccel.common.tables import as_html
from tfaccel.diagnostics.compare import plots
from tfaccel.diagnostics.compare.contest import Row
from tfaccel.diagnostics.compare.table import MEANINGS, Comparison

STYLE = """\
.about, .small { color: #5f6b76; font-size: 0.9em }
table { font-size: 0.82em }
td { white-space: nowrap }
.why td:last-child { white-space: normal; color: #5f6b76 }
.bar { margin: 0.55em 0; overflow: visible }
.bar div { overflow: visible }
.bar .label { display: flex; justify-content: space-between; gap: 1em; font-size: 0.88em }
.bar .rate { white-space: nowrap; font-variant-numeric: tabular-nums }
.track { background: #f0f2f4; border-radius: 3px; height: 0.85em; position: relative }
.fill { border-radius: 3px; height: 100% }
.span { position: absolute; top: 0.36em; height: 2px; background: #282828 }
svg { width: 100%; min-width: 28em; max-width: 40em; height: auto }
"""
BODY = """\
<p class="about">{title}</p>
{command}
{bars}
<h2>Everything measured</h2>
<div>{table}</div>
<div class="why">{reasons}</div>
<div class="why small">{meanings}</div>
{picture}
<h2>Method</h2>
<p>{how}</p>"""
BARS = """\
<h2>Speed relative to the first variant, and images per second</h2>
{bars}
<p class="small">The thin line shows the range from the slowest stretch to the fastest.</p>"""
PICTURE = """\
<h2>Losses</h2>
<div>{picture}</div>"""


def check_folder(folder: pathlib.Path) -> None:
    """Creates the folder.

    Raises:
      UserError: the folder is not empty, or it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"out {folder} is not empty; give a new folder")
    except OSError as error:
        raise UserError(
            f"out {folder} {not_written(error, folder)}, or give another folder"
        ) from error


def write(comparison: Comparison, folder: pathlib.Path) -> None:
    """Writes the page, the Markdown table, the figures as JSON, and the pictures.

    A picture without data is not written.

    Raises:
      UserError: a file cannot be written, for example because the disk is full.
    """
    try:
        (folder / "results.json").write_text(f"{comparison.as_json()}\n")
        (folder / "report.md").write_text(comparison.as_markdown())
        (folder / "report.html").write_text(page(comparison))
        if _has_rates(comparison):
            plots.speed_figure(comparison).savefig(folder / "speed.png", dpi=plots.DPI)
        if _has_losses(comparison):
            plots.loss_figure(comparison).savefig(folder / "losses.png", dpi=plots.DPI)
    except OSError as error:
        raise UserError(
            f"out {folder} {not_written(error, folder)}, or give another folder"
        ) from error


def page(comparison: Comparison) -> str:
    """Returns the HTML page."""
    summary = comparison.summary
    body = BODY.format(
        title=as_html(comparison.title),
        command=html_of(Code(comparison.train_command)) if comparison.has_best else "",
        bars=BARS.format(bars=_bars(comparison)) if _has_rates(comparison) else "",
        table=html_of(comparison.figures),
        reasons=html_of(comparison.reasons),
        meanings=html_of(MEANINGS),
        picture=PICTURE.format(picture=svg_of(plots.loss_figure(comparison)))
        if _has_losses(comparison)
        else "",
        how=as_html(comparison.how),
    )
    heading = f"{summary[:1].upper()}{summary[1:]}"
    return html_page(heading, body, width="60em", style=STYLE)


def _has_rates(comparison: Comparison) -> bool:
    return any(each.rates for each in comparison.rows)


def _has_losses(comparison: Comparison) -> bool:
    return any(each.losses for each in comparison.rows)


def _bars(comparison: Comparison) -> str:
    rows = [each for each in comparison.rows if each.rates]
    most = max(plots.span(each)[1] for each in rows)
    return "\n".join(_bar(comparison, each, most) for each in rows)


def _bar(comparison: Comparison, row: Row, most: float) -> str:
    from_, to = (100 * each / most for each in plots.span(row))
    best = " <b>best</b>" if row is comparison.winner else ""
    color = plots.color_of(comparison, row)
    return (
        f'<div class="bar"><div class="label"><span>{row.number} {as_html(str(row.variant))} '
        f'<span class="small">{as_html(row.status)}</span>{best}</span>'
        f'<span class="rate"><b>{row.times:.2f}</b> {row.rate:,.0f}/s</span></div>'
        '<div class="track">'
        f'<div class="fill" style="width:{100 * row.times / most:.1f}%;background:{color}"></div>'
        f'<div class="span" style="left:{from_:.1f}%;width:{to - from_:.1f}%"></div></div></div>'
    )
