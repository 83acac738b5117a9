"""Small charts as inline SVG: bars, spans and lines. No script, no font, no file beside the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 220, 52, 26, 14, 34
COLOURS = ("#2f6fde", "#e07b2f", "#3f9c6b", "#9b59b6")


def bars(labels: Sequence[str], rows: Mapping[str, Sequence[float]], *, unit: str) -> str:
    """Grouped bars, one group a label.

    Args:
        rows: values by name, each as long as `labels`.
    """
    top = _ceiling(max((v for row in rows.values() for v in row), default=0.0))
    group = _plot_width() / max(1, len(labels))
    width = min(36.0, group * 0.8 / max(1, len(rows)))
    parts = [_axes(top, unit)]
    for i, label in enumerate(labels):
        middle = LEFT + group * (i + 0.5)
        for j, (name, row) in enumerate(rows.items()):
            x, y = middle + (j - len(rows) / 2) * width, _y(row[i], top)
            title = f"<title>{escape(name)} {escape(label)}: {row[i]:.4g} {escape(unit)}</title>"
            parts.append(_box(x, y, width - 2, HEIGHT - BOTTOM - y, COLOURS[j % len(COLOURS)], title))
        parts.append(_text(middle, HEIGHT - BOTTOM + 15, label))
    return _figure(parts, list(rows) if len(rows) > 1 else [])


def spans(rows: Sequence[tuple[str, float, float]], *, unit: str) -> str:
    """Horizontal spans from a begin to an end, with the wait before it in grey."""
    end = _ceiling(max((stop for _, _, stop in rows), default=0.0))
    height = min(22.0, (HEIGHT - TOP - BOTTOM) / max(1, len(rows)))
    scale = _plot_width() / end
    parts = []
    for tick in range(5):
        value = end * tick / 4
        parts.append(_text(LEFT + value * scale, HEIGHT - BOTTOM + 15, _number(value)))
    parts.append(_text(LEFT + _plot_width() / 2, HEIGHT - 4, unit))
    for i, (label, start, stop) in enumerate(rows):
        y = TOP + i * height
        parts.append(_box(LEFT, y, start * scale, height - 4, "#ccd3dd", f"<title>waited {start:.3g} {unit}</title>"))
        title = f"<title>{escape(label)}: {start:.3g} to {stop:.3g} {unit}</title>"
        parts.append(_box(LEFT + start * scale, y, (stop - start) * scale, height - 4, COLOURS[0], title))
        parts.append(_text(LEFT - 6, y + height / 2 + 2, label, anchor="end"))
    return _figure(parts, [])


def lines(x: Sequence[float], rows: Mapping[str, Sequence[float]], *, unit: str, along: str) -> str:
    """Lines over a common axis that starts at the first value."""
    top = _ceiling(max((v for row in rows.values() for v in row), default=0.0))
    first, last = (x[0], x[-1]) if x else (0.0, 1.0)
    reach = (last - first) or 1.0
    parts = [_axes(top, unit)]
    for j, row in enumerate(rows.values()):
        points = [(LEFT + (a - first) / reach * _plot_width(), _y(b, top)) for a, b in zip(x, row, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        colour = COLOURS[j % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in points[:200]]
    for tick in range(5):
        value = first + reach * tick / 4
        parts.append(_text(LEFT + _plot_width() * tick / 4, HEIGHT - BOTTOM + 15, _number(value)))
    parts.append(_text(LEFT + _plot_width() / 2, HEIGHT - 4, along))
    return _figure(parts, list(rows) if len(rows) > 1 else [])


def _plot_width() -> float:
    return WIDTH - LEFT - RIGHT


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - max(0.0, value) / top)


def _ceiling(value: float) -> float:
    """The next round number above: 1, 2, 2.5 or 5 times a power of ten."""
    if not 1e-9 < value < float("inf"):
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * 0.9999)


def _number(value: float) -> str:
    """A tick's label, short: 25k, 1,250, 0.75, 0."""
    if abs(value) < 1e-6:
        return "0"
    for size, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e6 if unit == 'M' else 1e3):.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _axes(top: float, unit: str) -> str:
    out = []
    for tick in range(5):
        value = top * tick / 4
        y = _y(value, top)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e3e7ed"/>')
        out.append(_text(LEFT - 6, y + 4, _number(value), anchor="end"))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    out.append(
        f'<text x="11" y="{middle}" transform="rotate(-90 11 {middle})" text-anchor="middle">{escape(unit)}</text>'
    )
    return "".join(out)


def _box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect {shape} rx="2" fill="{colour}">{title}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(parts: Sequence[str], legend: Sequence[str]) -> str:
    dots = [f'<i style="background:{COLOURS[i % len(COLOURS)]}"></i>' for i in range(len(legend))]
    keys = "".join(f"<span>{dot}{escape(name)}</span>" for dot, name in zip(dots, legend, strict=True))
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
    return drawing + (f'<div class="legend">{keys}</div>' if keys else "")
