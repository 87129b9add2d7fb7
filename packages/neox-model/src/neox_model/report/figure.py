"""Draw curves as inline SVG, with labels in HTML so that they stay readable at any width."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neox_model.report.markup import Html, element, json_block, number, trimmed
from neox_model.report.series import Curve

__all__ = ["MARKS", "Line", "Mark", "figure"]

MARKS: Mapping[str, str] = {
    "failure": "an attempt ended",
    "restart": "the next one continued from here",
    "skipped": "update skipped",
    "spike": "loss spike",
    "sdc": "copies differed",
}
"""Kind of a mark -> its text in the legend."""
_SIDE = 1000
# Marks of a kind that are closer than this part of the width become one.
_MARK_BINS = 250
# The points of a reduced curve begin and end a little inside its range.
_MARK_MARGIN = 0.02
_COLORS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a figure.

    Args:
        label: its name in the legend.
        curve: its points.
        is_faded: it shows iterations that were repeated later.
        has_dots: its points are marked, because they are few.
    """

    label: str
    curve: Curve
    is_faded: bool = False
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """An event on the axis of iterations: its kind selects the colour."""

    iteration: float
    kind: str
    text: str


class _Axes:
    """The ranges of both axes, and the places of values in the drawing."""

    def __init__(self, lines: Sequence[Line], *, is_log: bool) -> None:
        curves = [line.curve for line in lines]
        self.first, self.last = min(min(each.at) for each in curves), max(max(each.at) for each in curves)
        self.last = max(self.last, self.first + 1)
        low, high = min(min(each.low) for each in curves), max(max(each.high) for each in curves)
        self.is_log = is_log and low > 0 and high > 3 * low
        if self.is_log:
            self.low, self.high = low / 1.1, high * 1.1
        else:
            margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
            self.low = max(0.0, low - margin) if low >= 0 else low - margin
            self.high = high + margin

    def x(self, iteration: float) -> float:
        return (iteration - self.first) / (self.last - self.first) * _SIDE

    def y(self, value: float) -> float:
        low, high, value = (
            math.log10(each) if self.is_log else each for each in (self.low, self.high, value)
        )
        return (1 - (value - low) / (high - low)) * _SIDE

    def points(self, iterations: Sequence[float], values: Sequence[float]) -> list[str]:
        pairs = zip(iterations, values, strict=True)
        return [f"{self.x(iteration):.1f},{self.y(value):.1f}" for iteration, value in pairs]

    def grid(self) -> list[float]:
        """Return three to six round values."""
        if not self.is_log:
            return _round_values(self.low, self.high, 4)
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(exponents) <= 3 else (1,)
        found = [step * 10.0**exponent for exponent in exponents for step in steps]
        return [value for value in found[:: max(1, len(found) // 7)] if self.low <= value <= self.high]


def _round_values(low: float, high: float, count: int, *, least: float = 0.0) -> list[float]:
    """Return about `count` round values between two, at least `least` apart."""
    rough = max(least, (high - low) / count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((step * power for step in (1, 2, 5) if step * power >= rough), 10 * power)
    return [step * place for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def figure(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str,
    marks: Sequence[Mark] = (),
    is_log: bool = False,
    is_wide: bool = False,
    shown: Callable[..., str] = number,
    at: str = "iteration",
) -> Html:
    """Return a figure with title, legend, curves and a table of its values.

    Args:
        title: what it shows.
        lines: its curves; those without points are left out.
        unit: unit of the values, under the title.
        marks: events.
        is_log: a logarithmic axis of values, if all are positive.
        is_wide: it takes the whole width of the page.
        shown: formats a value with `digits` significant digits.
        at: what the horizontal axis counts.
    """
    lines = [line for line in lines if line.curve.at]
    if not lines:
        return Html("")
    axes = _Axes(lines, is_log=is_log)
    ends = [
        f"{line.label} from {shown(line.curve.mean[0])} at {at} {line.curve.at[0]:,.0f} to "
        f"{shown(line.curve.mean[-1])} at {line.curve.at[-1]:,.0f}"
        for line in lines
    ]
    grid = axes.grid()
    # As many digits as make the values differ.
    texts = ([trimmed(shown(value, digits=digits)) for value in grid] for digits in range(4, 16))
    labels = next((found for found in texts if len(set(found)) == len(grid)), [""] * len(grid))
    heights = [f"{axes.y(value):.1f}" for value in grid]
    drawing = element(
        "svg",
        element("title", f"{title}: {'; '.join(ends)}"),
        *(element("line", x1=0, x2=_SIDE, y1=y, y2=y, class_="grid") for y in heights),
        *(_drawn(line, place, axes) for place, line in enumerate(lines)),
        viewBox=f"0 0 {_SIDE} {_SIDE}",
        preserveAspectRatio="none",
        role="img",
    )
    names = [
        element("span", text, class_="y", style=f"top:{axes.y(value) / 10:.2f}%")
        for value, text in zip(grid, labels, strict=True)
    ]
    plot = element("div", drawing, *_placed(marks, axes), element("i", class_="cross"), class_="plot")
    return element(
        "figure",
        element("figcaption", element("b", title), element("small", unit + ", logarithmic" * axes.is_log)),
        element("ul", *_legend(lines, marks), class_="legend"),
        element("div", *names, plot, class_="frame"),
        element("div", *_iterations(axes), class_="xaxis"),
        element("output", "", class_="tip"),
        # What the script shows under the pointer.
        json_block(
            {"first": axes.first, "last": axes.last, "lines": [_values(line, shown) for line in lines]},
            class_="data",
        ),
        class_="wide" if is_wide else None,
    )


def _drawn(line: Line, place: int, axes: _Axes) -> Html:
    """Return the curve of the means, with the range of each bin behind it."""
    curve, color = line.curve, f"c{place % _COLORS}"
    faded = " faded" if line.is_faded else ""
    parts = []
    if not curve.is_exact:
        band = axes.points(curve.at, curve.high) + axes.points(curve.at, curve.low)[::-1]
        parts.append(element("polygon", points=" ".join(band), class_=f"band {color}{faded}"))
    middle = axes.points(curve.at, curve.mean)
    parts.append(element("polyline", points=" ".join(middle), class_=f"line {color}{faded}"))
    if line.has_dots or len(middle) == 1:
        for x, y in (point.split(",") for point in middle):
            parts.append(element("line", x1=x, x2=x, y1=y, y2=y, class_=f"dot {color}"))
    return element("g", *parts)


def _placed(marks: Sequence[Mark], axes: _Axes) -> Iterator[Html]:
    """Yield the visible marks; many of a kind in the same place become one that states their number."""
    bins: dict[tuple[str, int], list[Mark]] = {}
    for mark in marks:
        x = axes.x(mark.iteration) / _SIDE
        if -_MARK_MARGIN <= x <= 1 + _MARK_MARGIN:
            place = min(_MARK_BINS - 1, max(0, int(x * _MARK_BINS)))
            bins.setdefault((mark.kind, place), []).append(mark)
    for (kind, _), found in bins.items():
        text, iterations = found[0].text, [mark.iteration for mark in found]
        if len(found) > 1:
            span = f"iterations {min(iterations):,.0f} to {max(iterations):,.0f}"
            text = f"{len(found):,} x {MARKS[kind]}, {span}"
        left = min(_SIDE, max(0, axes.x(iterations[0]))) / 10
        yield element("i", class_=f"mark {kind}", style=f"left:{left:.2f}%", title=text)


def _iterations(axes: _Axes) -> Iterator[Html]:
    """Yield round iterations at their places; those at the ends do not leave the figure."""
    for value in _round_values(axes.first, axes.last, 5, least=1):
        left = axes.x(value) / 10
        shift = 0 if left < 4 else 100 if left > 96 else 50
        yield element("span", f"{value:,.0f}", style=f"left:{left:.2f}%;transform:translateX(-{shift}%)")


def _legend(lines: Sequence[Line], marks: Sequence[Mark]) -> Iterator[Html]:
    for place, line in enumerate(lines):
        key = f"key c{place % _COLORS}{' faded' if line.is_faded else ''}"
        lacks = f" ({line.curve.left_out:,} not finite)" if line.curve.left_out else ""
        yield element("li", element("i", class_=key), line.label + lacks)
    for kind in dict.fromkeys(mark.kind for mark in marks):
        yield element("li", element("i", class_=f"sign {kind}"), MARKS[kind])


def _values(line: Line, shown: Callable[..., str]) -> dict[str, Any]:
    """Return the label, places and formatted values of a curve."""
    bins = zip(line.curve.mean, line.curve.low, line.curve.high, strict=True)
    return {
        "label": line.label,
        "at": [round(at) for at in line.curve.at],
        "text": [
            shown(mean) if line.curve.is_exact else f"{shown(mean)} ({shown(low)} to {shown(high)})"
            for mean, low, high in bins
        ],
    }
