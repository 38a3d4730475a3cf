"""Draws a comparison: the speed of each variant, and its losses.

speed_figure(comparison).savefig("speed.png")
"""

from tfaccel.diagnostics.compare.contest import Row
from tfaccel.diagnostics.compare.judge import distances, means
from tfaccel.diagnostics.compare.table import Comparison

COLORS = {
    "winner": "#2e7d32",
    "kept": "#81b884",
    "plain": "#5f6b76",
    "rejected": "#b9c0c7",
    "ceiling": "#8e6bbf",
}
DIFFERS = "#c62828"
MAX_POINTS = 40  # of a curve; each point is the mean of consecutive steps
DPI = 120


def color_of(comparison: Comparison, row: Row) -> str:
    """Returns the colour of a row's bar."""
    return COLORS.get("winner" if row is comparison.winner else row.status, COLORS["rejected"])


def speed_figure(comparison: Comparison):
    """Returns a figure with a bar for each variant that was measured; at least one must be.

    The length of a bar is the variant's `times`, not its images per second: other users of the
    machine may distort a comparison between different minutes. A line shows the range from the
    slowest stretch to the fastest.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps figures; it takes half a second

    rows = [each for each in comparison.rows if each.rates]
    figure = Figure((8, 1.1 + 0.36 * len(rows)), layout="constrained")
    chart = figure.subplots()
    places = range(len(rows))
    spans = [span(each) for each in rows]
    errors = [
        [each.times - least, most - each.times]
        for each, (least, most) in zip(rows, spans, strict=True)
    ]
    chart.barh(
        places,
        [each.times for each in rows],
        xerr=list(zip(*errors, strict=True)),
        color=[color_of(comparison, each) for each in rows],
        error_kw={"ecolor": "#282828", "elinewidth": 1, "capsize": 2},
        height=0.72,
    )
    labels = [
        chart.annotate(
            f"{row.times:.2f}  {row.status}, {row.rate:,.0f} images/s",
            (end, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        for place, row, (_, end) in zip(places, rows, spans, strict=True)
    ]
    chart.set_yticks(list(places), [f"{each.number}  {each.variant}" for each in rows], fontsize=8)
    chart.invert_yaxis()
    chart.set_title("times as fast as the first", loc="left", fontsize=10)
    chart.tick_params(axis="x", labelsize=8)
    chart.grid(axis="x", alpha=0.25)
    chart.set_axisbelow(True)
    chart.spines[["top", "right", "left"]].set_visible(False)
    chart.tick_params(axis="y", length=0)
    chart.set_xlim(0, _right_edge(figure, chart, labels, [end for _, end in spans]))
    return figure


def _right_edge(figure, chart, labels: list, ends: list[float]) -> float:
    """Returns the right end of the x axis at which each label fits beside its bar."""
    for each in labels:
        each.set_in_layout(False)  # otherwise the layout makes the chart narrower for the labels
    figure.draw_without_rendering()  # computes the widths of the labels and of the chart
    width = chart.get_window_extent().width
    shares = [1 - (each.get_window_extent().width + 20) / width for each in labels]
    return max(end / share for end, share in zip(ends, shares, strict=True))


def span(row: Row) -> tuple[float, float]:
    """Returns the `times` of the row's slowest and fastest stretch."""
    return min(row.rates) / row.rate * row.times, max(row.rates) / row.rate * row.times


def loss_figure(comparison: Comparison):
    """Returns a figure of each variant's losses, and of their distance from the reference's.

    At least one row must have losses.
    """
    from matplotlib.figure import Figure

    figure = Figure((6.4, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    rows = [each for each in comparison.rows if each.losses]
    reference = _reference(comparison)
    others = sum(_label(comparison, each) is None for each in rows)
    for row in sorted(rows, key=lambda each: _label(comparison, each) is not None):
        label, style = _label(comparison, row), _style(comparison, row, reference)
        if label is None and others:
            label, others = f"{others} more", 0
        length = min(len(row.losses), len(reference.losses))
        losses, wanted = row.losses[:length], reference.losses[:length]
        curve = means(losses, MAX_POINTS)
        above.plot(_middles(curve, length), curve, label=label, **style)
        apart = [100 * each for each in distances(losses, wanted)]
        below.plot(_middles(apart, length), apart, marker="o", markersize=3, **style)
    limit = 100 * comparison.tolerance
    below.axhspan(-limit, limit, color="#2e7d32", alpha=0.08, linewidth=0)
    below.text(0, limit, f" {limit:.1f}% allowed", va="bottom", fontsize=8, color="#2e7d32")
    # The limits ignore curves that are far off, as pure float16's may be. The other curves would
    # become one flat line otherwise.
    smooth = means(reference.losses, MAX_POINTS)
    above.set_ylim(min(0, *smooth), 1.25 * max(smooth))
    below.set_ylim(-2 * limit, 2 * limit)
    above.set_title("training loss", loc="left", fontsize=10)
    below.set_title(
        f"distance from the loss of {reference.number}, in five parts, %", loc="left", fontsize=10
    )
    below.set_xlabel("step", fontsize=9)
    above.legend(frameon=False, fontsize=8)
    for chart in (above, below):
        chart.grid(alpha=0.25)
        chart.tick_params(labelsize=8)
        chart.spines[["top", "right"]].set_visible(False)
    return figure


def _reference(comparison: Comparison) -> Row:
    """Returns the first row that ran; the other rows' losses are compared with its losses."""
    return next(each for each in comparison.rows if each.losses)


def _label(comparison: Comparison, row: Row) -> str | None:
    """Returns the row's legend; None for a row that agrees with the reference and is not best."""
    words = f"{row.number}  {row.variant}"
    if row is comparison.winner:
        return f"{words} (best)"
    if _differs(comparison, row):
        return f"{words} (differs)"
    return words if row is _reference(comparison) or row.status == "ceiling" else None


def _differs(comparison: Comparison, row: Row) -> bool:
    return row.apart is not None and row.apart > comparison.tolerance and row.status != "ceiling"


def _style(comparison: Comparison, row: Row, reference: Row) -> dict:
    if row is reference:
        return {"color": "#282828", "linewidth": 2.4, "alpha": 0.9}
    if _differs(comparison, row):
        return {"color": DIFFERS, "linewidth": 1.4, "linestyle": "--"}
    color = color_of(comparison, row)
    return {"color": color, "linewidth": 1.6 if row is comparison.winner else 1.0}


def _middles(parts, length: int) -> list[float]:
    return [(index + 0.5) * length / len(parts) for index in range(len(parts))]
