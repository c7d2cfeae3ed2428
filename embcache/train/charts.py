"""Charts as plain HTML and inline SVG: they need no script, no font and no other file, and stretch to any width.

Lines live in an SVG that is stretched without scaling its strokes; every label is HTML placed in percent, so text keeps
its size on a phone and on paper. ``page.SCRIPT`` adds the pointer's read-out where scripts run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

__all__ = ["Series", "bar_table", "calibration_plot", "compact", "duration", "line_chart", "stacked_bar"]

MAX_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One line: name, colour class (``c1`` to ``c6``), points; ``raw`` is the same data, unsmoothed, drawn faint."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False
    raw: Sequence[float] | None = None


@dataclass(frozen=True)
class Mark:
    """A horizontal reference (``y``) or a vertical event (``x``) with a label."""

    label: str
    x: float | None = None
    y: float | None = None


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    marks: Sequence[Mark] = (),
    digits: int = 4,
    zero: bool = False,
) -> str:
    """A chart over training steps; points that are not finite are left out. Empty where there is nothing to draw."""
    shown = [_thinned(s) for s in map(_finite, series) if len(s.x)]
    if not shown:
        return ""
    x_axis = _axis([x for s in shown for x in s.x] + [m.x for m in marks if m.x is not None], steps=5, pad=0.0)
    heights = [y for s in shown for y in _without_outliers(s.y)]
    y_axis = _axis(heights + _room(heights, marks) + ([0.0] if zero else []), steps=4, pad=0.06)
    lines, dots = [], []
    for s in shown:
        if s.raw is not None:
            lines.append(f'<path class="raw {s.colour}" d="{_path(s.x, s.raw, x_axis, y_axis)}"/>')
        if len(s.x) > 1:
            lines.append(f'<path class="{s.colour}" d="{_path(s.x, s.y, x_axis, y_axis)}"/>')
        if s.dots or len(s.x) == 1:
            dots += [
                f'<i class="dot {s.colour}" style="left:{x_axis.percent(x)};bottom:{y_axis.percent(y)}"></i>'
                for x, y in zip(s.x, s.y, strict=True)
            ]
    for m in marks:
        lines.append(_mark_line(m, x_axis, y_axis))
        dots.append(_mark_label(m, x_axis, y_axis))
    data = {
        "x": [x_axis.low, x_axis.high],
        "y": [y_axis.low, y_axis.high],
        "digits": digits,
        "series": [
            {"name": s.name, "c": s.colour, "x": [*map(_rounded, s.x)], "y": [*map(_rounded, s.y)]} for s in shown
        ],
    }
    legend = "".join(f'<span><i class="key {s.colour}"></i>{escape(s.name)}</span>' for s in shown)
    if len(shown) == 1:
        legend = f"<span>{escape(note)}</span>" if note else ""
    return (
        f'<figure class="chart" data-chart="{escape(json.dumps(data))}"><figcaption><b>{escape(title)}</b>'
        f'<span class="legend">{legend}</span></figcaption>{_frame(lines, dots, x_axis, y_axis)}'
        '<div class="x-name">step</div></figure>'
    )


def calibration_plot(bins: Sequence[tuple[float, float, float]]) -> str:
    """Predicted against observed rate on logarithmic axes, two standard errors as bars.

    Args: bins: (weight, mean prediction, observed rate) in order of the prediction.
    """
    usable = [(w, p, y) for w, p, y in bins if p > 0 and y > 0]
    if len(usable) < 2:
        return ""
    values = [math.log10(v) for _, p, y in usable for v in (p, y)]
    axis = _Axis(min(values) - 0.12, min(max(values) + 0.12, 0.02), _log_ticks(min(values) - 0.12, max(values) + 0.12))
    lines = ['<path class="ideal" d="M0 1000L1000 0"/>']
    dots = []
    for w, p, y in usable:
        error = 2 * math.sqrt(y * (1 - y) / w)
        low, high = math.log10(max(y - error, y / 10)), math.log10(min(y + error, 1.0))
        x = axis.at(math.log10(p)) * 1000
        bottom, top = 1000 - axis.at(low) * 1000, 1000 - axis.at(high) * 1000
        lines.append(f'<path class="c1 error" d="M{x:.1f} {bottom:.1f}V{top:.1f}"/>')
        tip = f"predicted {p:.4f}, observed {y:.4f} ± {error:.4f}, {compact(w)} samples"
        dots.append(
            f'<i class="dot big c1" title="{tip}" style="left:{axis.percent(math.log10(p))};'
            f'bottom:{axis.percent(math.log10(y))}"></i>'
        )
    return (
        '<figure class="chart square"><figcaption><b>Calibration</b><span class="legend"><span>observed click rate by '
        f"predicted, two standard errors</span></span></figcaption>{_frame(lines, dots, axis, axis)}"
        '<div class="x-name">predicted rate</div></figure>'
    )


def stacked_bar(title: str, parts: Sequence[tuple[str, float]], note: str = "") -> str:
    """Seconds per stage: one bar in proportion, and the list with seconds and shares."""
    total = sum(seconds for _, seconds in parts)
    if total <= 0:
        return ""
    bar, rows = [], []
    for i, (name, seconds) in enumerate(sorted(parts, key=lambda part: -part[1])):
        share = seconds / total
        colour = f"c{min(i, 5) + 1}"
        label = f"{name}: {duration(seconds)}, {share:.1%}"
        bar.append(f'<i class="{colour}" style="width:{100 * share:.3f}%" title="{escape(label)}"></i>')
        cells = f'<td><i class="key {colour}"></i>{escape(name)}</td><td>{duration(seconds)}</td><td>{share:.1%}</td>'
        rows.append(f"<tr>{cells}</tr>")
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b><span class="legend">{escape(note)}</span>'
        f'</figcaption><div class="stack">{"".join(bar)}</div><table class="stages">{"".join(rows)}</table></figure>'
    )


def bar_table(headers: Sequence[str], rows: Sequence[Sequence[str]], shares: Sequence[float]) -> str:
    """A table whose second column carries a bar (``shares`` in [0, 1]); first column left, the others right."""
    head = "".join(f"<th>{escape(h)}</th>" for h in headers)
    body = []
    for row, share in zip(rows, shares, strict=True):
        bar = f'<span><i style="width:{100 * min(max(share, 0), 1):.2f}%"></i></span>'
        cells = [f"<td>{escape(row[0])}</td>", f'<td class="meter">{bar}<b>{escape(row[1])}</b></td>']
        cells += [f"<td>{escape(cell)}</td>" for cell in row[2:]]
        body.append(f"<tr>{''.join(cells)}</tr>")
    table = f'<table class="tables"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def compact(value: float) -> str:
    """A number in four characters or so.

    >>> [compact(v) for v in (0, 7, 950, 12_345, 1_500_000, 1.02e12, 0.25)]
    ['0', '7', '950', '12.3 k', '1.5 M', '1.02 T', '0.25']
    """
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}" if value != int(value) else str(int(value))


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> [duration(s) for s in (0.004, 2.5, 75, 4000)]
    ['4 ms', '2.5 s', '1 min 15 s', '1 h 6 min']
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class _Axis:
    """A range with its ticks; positions in [0, 1]."""

    def __init__(self, low: float, high: float, ticks: Sequence[tuple[float, str]]) -> None:
        self.low, self.high = low, high
        self.ticks = [(value, label) for value, label in ticks if low <= value <= high]

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def percent(self, value: float) -> str:
        return f"{100 * self.at(value):.2f}%"


def _axis(values: Sequence[float], steps: int, pad: float) -> _Axis:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    margin = (high - low) * pad
    bottom = low - margin if low != 0 else 0.0
    top = high + margin
    step = _nice_step((top - bottom) / steps)
    ticks = [(i * step, _tick(i * step, step)) for i in range(math.ceil(bottom / step), math.floor(top / step) + 1)]
    return _Axis(bottom, top, ticks)


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def _tick(value: float, step: float) -> str:
    if abs(value) >= 1000:
        return compact(value)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if f"{step:e}".startswith("2.5") and step < 10 else 0)
    return f"{value:.{decimals}f}"


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    digits = (1, 2, 5) if high - low < 2.2 else (1,)
    places = [(digit, exponent) for exponent in range(math.floor(low), 1) for digit in digits]
    return [(math.log10(d) + e, f"{d * 10.0**e:.6f}".rstrip("0").rstrip(".")) for d, e in places]


def _frame(lines: Sequence[str], dots: Sequence[str], x_axis: _Axis, y_axis: _Axis) -> str:
    grid = "".join(f'<path class="grid" d="M0 {1000 - 1000 * y_axis.at(v):.1f}H1000"/>' for v, _ in y_axis.ticks)
    y_labels = "".join(f'<span class="yt" style="bottom:{y_axis.percent(v)}">{t}</span>' for v, t in y_axis.ticks)
    x_labels = "".join(f'<span class="xt" style="left:{x_axis.percent(v)}">{t}</span>' for v, t in x_axis.ticks)
    return (
        f'<div class="area"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{grid}'
        f"{''.join(lines)}</svg>{y_labels}{x_labels}{''.join(dots)}</div>"
    )


def _path(xs: Sequence[float], ys: Sequence[float], x_axis: _Axis, y_axis: _Axis) -> str:
    points = (f"{1000 * x_axis.at(x):.1f} {1000 - 1000 * y_axis.at(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return "M" + "L".join(points)


def _mark_line(m: Mark, x_axis: _Axis, y_axis: _Axis) -> str:
    if m.y is not None:
        return f'<path class="mark" d="M0 {1000 - 1000 * y_axis.at(m.y):.1f}H1000"/>'
    return f'<path class="mark" d="M{1000 * x_axis.at(m.x or 0.0):.1f} 0V1000"/>'


def _mark_label(m: Mark, x_axis: _Axis, y_axis: _Axis) -> str:
    if m.y is not None:
        side = "over" if y_axis.at(m.y) > 0.5 else "under"
        return f'<span class="mark-label {side}" style="left:4px;bottom:{y_axis.percent(m.y)}">{escape(m.label)}</span>'
    at = x_axis.at(m.x or 0.0)
    place = f"right:{100 - 100 * at:.2f}%" if at > 0.5 else f"left:{100 * at:.2f}%"
    return f'<span class="mark-label event" style="{place};top:0">{escape(m.label)}</span>'


def _room(heights: Sequence[float], marks: Sequence[Mark]) -> list[float]:
    """Heights that keep room for the labels of horizontal marks beyond the data."""
    values = [m.y for m in marks if m.y is not None]
    low, high = min([*heights, *values]), max([*heights, *values])
    away = [v + (0.13 if v > (low + high) / 2 else -0.13) * (high - low) for v in values]
    return values + away


def _finite(s: Series) -> Series:
    keep = [i for i, (x, y) in enumerate(zip(s.x, s.y, strict=True)) if math.isfinite(x) and math.isfinite(y)]
    raw = None if s.raw is None else [s.raw[i] if math.isfinite(s.raw[i]) else s.y[i] for i in keep]
    return Series(s.name, s.colour, [s.x[i] for i in keep], [s.y[i] for i in keep], s.dots, raw)


def _thinned(s: Series) -> Series:
    """At most MAX_POINTS points: means of consecutive ones."""
    n = len(s.x)
    if n <= MAX_POINTS:
        return s
    edges = [i * n // MAX_POINTS for i in range(MAX_POINTS + 1)]

    def means(values: Sequence[float]) -> list[float]:
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]

    return Series(s.name, s.colour, means(s.x), means(s.y), s.dots, None if s.raw is None else means(s.raw))


def _without_outliers(values: Sequence[float]) -> list[float]:
    """Values between the 1st and the 99th percentile (all when few): the first steps must not flatten the rest."""
    ordered = sorted(values)
    cut = len(ordered) // 100 if len(ordered) >= 50 else 0
    return ordered[cut : len(ordered) - cut]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
