"""The loss of a run as a picture: an SVG of our own, a few kilobytes. Pure.

The same points give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["loss_svg"]

Point = tuple[int, float]
"""Step and loss."""

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 34, 40
_MOST_POINTS = 600
_TRAIN, _HELD_OUT = "#9aa4b2", "#c2410c"


def loss_svg(train: Sequence[Point], held_out: Sequence[Point], *, title: str, best_step: int | None) -> str:
    """Return the picture: training loss as a line, held-out loss as a line with dots, the best one ringed."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" fill="#111827" font-size="13">{_escape(title)}</text>',
    ]
    points = [*train, *held_out]
    if not points:
        parts.append(f'<text x="{_LEFT}" y="{_HEIGHT // 2}" fill="#6b7280">no step was taken yet</text>')
        return "\n".join([*parts, "</svg>", ""])
    last = max(1, max(step for step, _ in points))
    low, high, ticks = _axis([loss for _, loss in points])

    def place(point: Point) -> tuple[float, float]:
        step, loss = point
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - loss) / (high - low)
        return round(x, 1), round(y, 1)

    right = _WIDTH - _RIGHT
    for tick in ticks:
        y = place((0, tick))[1]
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:g}" text-anchor="end" fill="#6b7280">{tick:g}</text>')
    for step in (0, last // 2, last) if last > 1 else (0, last):
        x = place((step, low))[0]
        parts.append(
            f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" fill="#6b7280">{step}</text>'
        )
    parts.append(f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end" fill="#6b7280">step</text>')
    parts += _line([place(point) for point in _thinned(train)], _TRAIN)
    parts += _line([place(point) for point in held_out], _HELD_OUT)
    for point in held_out:
        x, y = place(point)
        ring = f'<circle cx="{x}" cy="{y}" r="6" fill="none" stroke="{_HELD_OUT}"/>'
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{_HELD_OUT}"/>']
        parts += [ring] if point[0] == best_step else []
    legend = [("training", _TRAIN)] + ([("held out", _HELD_OUT)] if held_out else [])
    for number, (name, colour) in enumerate(legend):
        parts.append(
            f'<text x="{right}" y="{_TOP + 14 + 16 * number}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _line(places: Sequence[tuple[float, float]], colour: str) -> list[str]:
    if len(places) < 2:
        return []
    drawn = " ".join(f"{x},{y}" for x, y in places)
    return [f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.5"/>']


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most `_MOST_POINTS`: means of neighbours, where there are more."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], math.fsum(loss for _, loss in group) / len(group)) for group in groups]


def _axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return the lower and the upper end, and round values between them."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1.0, abs(high)):
        # Wide enough that the two are different numbers, however large they are.
        wide = max(0.5, abs(high) / 100)
        low, high = low - wide, high + wide
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * by for by in (1, 2, 5, 10) if (high - low) / (step * by) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return first * step, last * step, [round(number * step, 10) for number in range(first, last + 1)]


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
