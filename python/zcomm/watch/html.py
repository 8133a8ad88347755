"""Self-contained pages with tables and charts in inline SVG. Pure: data in, text out.

Invariant: every text from outside is escaped, and the page loads nothing. Charts are narrow, and side by side if the
page is wide enough. So their text is legible from 400 pixels of width on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --back: #fff; --line: #ddd; --soft: #f6f6f6; --gray: #888;
  --a: #1f6fb4; --b: #d95f02; --c: #b8b8b8; --d: #7b57a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --back: #16181c; --line: #3a3d44; --soft: #22252b; --a: #6cb2eb; --b: #f6a15a; --c: #5c6068;
    --d: #b39ddb; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
body { color: var(--ink); background: var(--back); overflow-wrap: anywhere; } a { color: var(--a); }
.table { overflow-x: auto; } table { border-collapse: collapse; margin: 1rem 0; overflow-wrap: normal; }
td, th { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); } th { text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: var(--soft); padding: 1rem; overflow-x: auto; white-space: pre-wrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
figure { margin: 0; max-width: 38rem; } figcaption { font-weight: 600; }
svg { display: block; width: 100%; height: auto; } svg text { font-size: 13px; fill: var(--ink); }
polyline { fill: none; stroke-width: 2; } .grid { stroke: var(--line); }
.key { margin: 0; font-size: .9rem; } .key span { white-space: nowrap; margin-right: 1rem; }
.key b { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
.warning { border-left: 4px solid var(--b); padding-left: .8rem; }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 440.0, 250.0, 52.0, 38.0, 12.0, 12.0
_TICKS = 4
_MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """A line or an area of a chart. color: a name of the style: "a", "b", "c", "d", "gray". kind: its CSS class."""

    name: str
    points: Points
    color: str
    kind: str = ""
    style: str = ""


def page(title: str, body: Sequence[str]) -> str:
    """Return a whole page. body: parts of HTML."""
    text = "\n".join(part for part in body if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{text}\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """Return a heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells that begin with a digit or a sign are numbers, on the right."""
    head = "<tr>" + "".join(f"<th>{escape(each)}</th>" for each in headings) + "</tr>\n" if headings else ""
    body = "\n".join(
        "<tr>" + "".join(f"<td{_kind(cell)}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="table"><table>\n{head}{body}\n</table></div>'


def _kind(cell: str) -> str:
    return ' class="number"' if cell[:1].isdigit() or cell[:1] in "+-" else ""


def charts(figures: Sequence[str]) -> str:
    """Return figures side by side; "" without any."""
    found = [figure for figure in figures if figure]
    return f'<div class="charts">\n{"".join(found)}</div>' if found else ""


def line_chart(title: str, unit: str, series: Sequence[Series], across: str = "step") -> str:
    """Draw lines over steps, from zero on unless a value is negative; "" without points. unit: of the values."""
    values = [y for each in series for _, y in each.points if math.isfinite(y)]
    if not values:
        return ""
    plot = _Plot.of([x for each in series for x, _ in each.points], min(0.0, *values), max(values))
    parts = plot.grid(across)
    for each in series:
        for part in _pieces(each.points):
            places = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in thinned(part))
            look = f"stroke: var(--{each.color}); {each.style}".strip()
            if len(part) == 1:  # a line of one point is not drawn
                x, y = plot.x(part[0][0]), plot.y(part[0][1])
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill: var(--{each.color})"/>')
            parts.append(f'<polyline class="{escape(each.kind or "line")}" points="{places}" style="{look}"/>')
    return _figure(f"{title}, {unit}", parts, [(each.name, each.color) for each in series if each.name])


def stacked_chart(title: str, unit: str, series: Sequence[Series], across: str = "step") -> str:
    """Draw areas upon each other. All series have the same places across; "" without points."""
    if not series or not series[0].points:
        return ""
    across_at = [x for x, _ in series[0].points]
    sums = [0.0] * len(across_at)
    layers: list[tuple[Series, list[float], list[float]]] = []
    for each in series:
        below, sums = sums, [low + y for low, (_, y) in zip(sums, each.points, strict=True)]
        layers.append((each, below, sums))
    plot = _Plot.of(across_at, 0.0, max(sums))
    parts = plot.grid(across)
    for each, below, above in layers:
        upper = thinned(list(zip(across_at, above, strict=True)))
        lower = thinned(list(zip(across_at, below, strict=True)))
        places = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in [*upper, *reversed(lower)])
        parts.append(f'<polygon style="fill: var(--{each.color})" points="{places}"/>')
    return _figure(f"{title}, {unit}", parts, [(each.name, each.color) for each in series])


def bars(title: str, unit: str, rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[tuple[str, str]]) -> str:
    """Draw one bar for each row, of parts upon each other. names: (name, color) of the parts; "" without rows."""
    rows = list(rows)
    if not rows:
        return ""
    top = max(sum(parts) for _, parts in rows) or 1.0
    each_at, left = 22.0, 70.0
    scale = (_WIDTH - left - 70.0) / top
    drawn = []
    for number, (name, parts) in enumerate(rows):
        y, x = 4 + number * each_at, left
        drawn.append(f'<text x="{left - 6:.0f}" y="{y + 13:.1f}" text-anchor="end">{escape(name)}</text>')
        for (_, color), value in zip(names, parts, strict=True):
            width = max(0.0, value) * scale
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="16" style="fill: var(--{color})"/>'
            )
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 13:.1f}">{number_words(sum(parts))}</text>')
    return _figure(f"{title}, {unit}", drawn, names, 8 + each_at * len(rows))


def _figure(title: str, parts: Sequence[str], names: Sequence[tuple[str, str]], height: float = _HEIGHT) -> str:
    keys = "".join(
        f'<span><b style="background: var(--{color})"></b>{escape(name)}</span>' for name, color in names if name
    )
    key = f'<p class="key">{keys}</p>' if keys else ""
    body = "\n".join(parts)
    size = f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(title)}"'
    return f"<figure><figcaption>{escape(title)}</figcaption>{key}\n<svg {size}>\n{body}\n</svg></figure>\n"


@dataclass(frozen=True)
class _Plot:
    """Place of values in a chart."""

    first: float
    last: float
    low: float
    top: float

    @staticmethod
    def of(across: Sequence[float], low: float, high: float) -> _Plot:
        first, last = min(across), max(across)
        step = _nice((high - low) / _TICKS or 1.0)
        low = math.floor(low / step) * step
        return _Plot(
            first, last if last > first else first + 1, low, low + max(1, math.ceil((high - low) / step)) * step
        )

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        value = min(max(value, self.low), self.top) if math.isfinite(value) else self.low
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (value - self.low) / (self.top - self.low)

    def grid(self, across: str) -> list[str]:
        """Return the lines and numbers of both axes."""
        parts = []
        step = _nice((self.top - self.low) / _TICKS)
        for tick in range(round((self.top - self.low) / step) + 1):
            value = self.low + tick * step
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number_words(value)}</text>')
        for value in dict.fromkeys(round(self.first + (self.last - self.first) * tick / 3) for tick in range(4)):
            anchor = "end" if value >= self.last else "middle"
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">{value}</text>'
            )
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 5}" text-anchor="end">{escape(across)}</text>')
        return parts


def _nice(size: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= size * 0.999)


def number_words(value: float) -> str:
    """Return a number in few characters."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3g}"


def _pieces(points: Points) -> list[Points]:
    """Cut a line where a value is not a number."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def thinned(points: Points, most: int = _MOST_POINTS) -> Points:
    """Return at most about ``most`` points, by averaging neighbours if there are more. Both ends are kept."""
    if len(points) <= most:
        return points
    size = -(-len(points) // most)
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return [points[0], *means[1:-1], points[-1]]
