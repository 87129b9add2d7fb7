"""Draw curves as inline SVG, with labels in HTML so that they stay readable at any width."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Frame:
    """The ranges of both axes, and the places of values in the drawing."""

    first: float
    last: float
    low: float
    high: float
    is_log: bool

    def x(self, iteration: float) -> float:
        return (iteration - self.first) / (self.last - self.first) * _SIDE

    def y(self, value: float) -> float:
        low, high, value = (
            math.log10(each) if self.is_log else each for each in (self.low, self.high, value)
        )
        return (1 - (value - low) / (high - low)) * _SIDE


def figure(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str,
    marks: Sequence[Mark] = (),
    is_log: bool = False,
    is_wide: bool = False,
    shown: Callable[..., str] = number,
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
    """
    lines = [line for line in lines if line.curve.at]
    if not lines:
        return Html("")
    frame = _frame(lines, is_log=is_log)
    grid = [value for value in _ticks(frame) if frame.low <= value <= frame.high]
    ends = [
        f"{line.label} from {shown(line.curve.mean[0])} at iteration {line.curve.at[0]:,.0f} to "
        f"{shown(line.curve.mean[-1])} at {line.curve.at[-1]:,.0f}"
        for line in lines
    ]
    heights = [f"{frame.y(value):.1f}" for value in grid]
    drawing = element(
        "svg",
        element("title", f"{title}: {'; '.join(ends)}"),
        *(element("line", x1=0, x2=_SIDE, y1=y, y2=y, class_="grid") for y in heights),
        *(_drawn(line, place, frame) for place, line in enumerate(lines)),
        viewBox=f"0 0 {_SIDE} {_SIDE}",
        preserveAspectRatio="none",
        role="img",
    )
    labels = [
        element("span", text, class_="y", style=f"top:{frame.y(value) / 10:.2f}%")
        for value, text in zip(grid, _tick_texts(grid, shown), strict=True)
    ]
    plot = element(
        "div",
        drawing,
        *_placed(marks, frame),
        element("i", class_="cross"),
        class_="plot",
    )
    scale = ", logarithmic" if frame.is_log else ""
    return element(
        "figure",
        element("figcaption", element("b", title), element("small", unit + scale)),
        _legend(lines, marks),
        element("div", *labels, plot, class_="frame"),
        element("div", *_iterations(frame), class_="xaxis"),
        element("output", "", class_="tip"),
        _data(lines, frame, shown),
        class_="wide" if is_wide else None,
    )


def _frame(lines: Sequence[Line], *, is_log: bool) -> _Frame:
    first = min(min(line.curve.at) for line in lines)
    last = max(max(line.curve.at) for line in lines)
    low = min(min(line.curve.low) for line in lines)
    high = max(max(line.curve.high) for line in lines)
    is_log = is_log and low > 0 and high > 3 * low
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    if is_log:
        low, high = low / 1.1, high * 1.1
    else:
        low, high = (max(0.0, low - margin) if low >= 0 else low - margin), high + margin
    return _Frame(first, last if last > first else first + 1, low, high, is_log)


def _ticks(frame: _Frame) -> list[float]:
    """Return three to six round values."""
    if frame.is_log:
        exponents = range(math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high)) + 1)
        steps = (1, 2, 5) if len(exponents) <= 3 else (1,)
        found = [step * 10.0**exponent for exponent in exponents for step in steps]
        return found[:: max(1, len(found) // 7)]
    step = _round_step((frame.high - frame.low) / 4)
    start = math.ceil(frame.low / step)
    return [step * place for place in range(start, math.floor(frame.high / step) + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((step * power for step in (1, 2, 5) if step * power >= rough), 10 * power)


def _drawn(line: Line, place: int, frame: _Frame) -> Html:
    """Return the curve of the means, with the range of each bin behind it."""
    curve, color = line.curve, f"c{place % _COLORS}"
    faded = " faded" if line.is_faded else ""
    parts = []
    if not curve.is_exact:
        upper = [_point(x, y, frame) for x, y in zip(curve.at, curve.high, strict=True)]
        lower = [_point(x, y, frame) for x, y in zip(curve.at, curve.low, strict=True)]
        parts.append(
            element("polygon", points=" ".join([*upper, *reversed(lower)]), class_=f"band {color}{faded}")
        )
    middle = [_point(x, y, frame) for x, y in zip(curve.at, curve.mean, strict=True)]
    parts.append(element("polyline", points=" ".join(middle), class_=f"line {color}{faded}"))
    if line.has_dots or len(middle) == 1:
        parts += [
            element("line", x1=x, x2=x, y1=y, y2=y, class_=f"dot {color}")
            for x, y in (point.split(",") for point in middle)
        ]
    return element("g", *parts)


def _point(iteration: float, value: float, frame: _Frame) -> str:
    return f"{frame.x(iteration):.1f},{frame.y(value):.1f}"


def _placed(marks: Sequence[Mark], frame: _Frame) -> Iterator[Html]:
    """Yield the visible marks; many of a kind in the same place become one that states their number."""
    bins: dict[tuple[str, int], list[Mark]] = {}
    for mark in marks:
        x = frame.x(mark.iteration) / _SIDE
        if -_MARK_MARGIN <= x <= 1 + _MARK_MARGIN:
            place = min(_MARK_BINS - 1, max(0, int(x * _MARK_BINS)))
            bins.setdefault((mark.kind, place), []).append(mark)
    for (kind, _), found in bins.items():
        first, text = found[0].iteration, found[0].text
        if len(found) > 1:
            iterations = [mark.iteration for mark in found]
            span = f"iterations {min(iterations):,.0f} to {max(iterations):,.0f}"
            text = f"{len(found):,} x {MARKS[kind]}, {span}"
        left = f"left:{min(_SIDE, max(0, frame.x(first))) / 10:.2f}%"
        yield element("i", class_=f"mark {kind}", style=left, title=text)


def _iterations(frame: _Frame) -> list[Html]:
    """Return round iterations at their places; those at the ends do not leave the figure."""
    step = max(1, round(_round_step((frame.last - frame.first) / 5)))
    values = range(math.ceil(frame.first / step) * step, math.floor(frame.last) + 1, step)
    found = []
    for value in values:
        left = frame.x(value) / 10
        shift = 0 if left < 4 else 100 if left > 96 else 50
        style = f"left:{left:.2f}%;transform:translateX(-{shift}%)"
        found.append(element("span", f"{value:,}", style=style))
    return found


def _tick_texts(values: Sequence[float], shown: Callable[..., str]) -> list[str]:
    """Format values with as many digits as make them differ."""
    for digits in range(4, 16):
        texts = [trimmed(shown(value, digits=digits)) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _legend(lines: Sequence[Line], marks: Sequence[Mark]) -> Html:
    entries = []
    for place, line in enumerate(lines):
        key = f"key c{place % _COLORS}{' faded' if line.is_faded else ''}"
        lacks = f" ({line.curve.left_out:,} not finite)" if line.curve.left_out else ""
        entries.append(element("li", element("i", class_=key), line.label + lacks))
    kinds = {mark.kind: MARKS[mark.kind] for mark in marks}
    entries += [element("li", element("i", class_=f"sign {kind}"), text) for kind, text in kinds.items()]
    return element("ul", *entries, class_="legend")


def _data(lines: Sequence[Line], frame: _Frame, shown: Callable[..., str]) -> Html:
    """Return what the script shows under the pointer: per line its label, places and formatted values."""
    content = [
        {
            "label": line.label,
            "at": [round(at) for at in line.curve.at],
            "text": [
                shown(mean) if line.curve.is_exact else f"{shown(mean)} ({shown(low)} to {shown(high)})"
                for mean, low, high in zip(line.curve.mean, line.curve.low, line.curve.high, strict=True)
            ],
        }
        for line in lines
    ]
    return json_block({"first": frame.first, "last": frame.last, "lines": content}, class_="data")
