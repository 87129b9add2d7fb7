"""Write HTML: everything that comes from a file is escaped here, in one place."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

__all__ = [
    "Html",
    "badge",
    "cell",
    "clock",
    "duration",
    "element",
    "json_block",
    "number",
    "plain",
    "printable",
    "size",
    "table",
]


class Html(str):
    """A piece of a page; any other text is escaped before it becomes one."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: str | float | None) -> Html:
    """Return an element; texts are escaped, pieces of class `Html` are not.

    Args:
        name: name of the element.
        content: texts and pieces.
        attributes: by name, `class_` for `class`, `_` for `-`; None leaves one out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{''.join(map(_escaped, content))}</{name}>")


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], *, class_: str | None = None) -> Html:
    """Return a table that scrolls by itself on a narrow screen; the first column has the rows' headings."""
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in heading)))
    lines = [
        element("tr", *(cell(text, is_heading=place == 0) for place, text in enumerate(row))) for row in rows
    ]
    return element("div", element("table", head, element("tbody", *lines), class_=class_), class_="scroll")


def cell(text: str, *, is_heading: bool = False) -> Html:
    """Return a cell of a table."""
    return element("th", text, scope="row") if is_heading else element("td", text)


def badge(text: str, kind: str) -> Html:
    """Return a short label; the kind selects its colour."""
    return element("span", text, class_=f"badge {kind}")


def json_block(value: Any, *, class_: str) -> Html:
    """Return values for the page's script, which no text in them can end."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return Html(f'<script type="application/json" class="{class_}">{text}</script>')


def number(value: float | None, *, digits: int = 4) -> str:
    """Format a number with some significant digits: `1,234`, `0.6385`, `3.4e-07`; `-` for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits - 1}g}"


def size(value: float | None, *, digits: int = 3) -> str:
    """Format a number of bytes with some significant digits: `1.5 GiB`."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{_significant(value, digits)} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1024
    return f"{_significant(value, digits)} TiB"


def _significant(value: float, digits: int) -> str:
    """Format a number without an exponent and without zeros at the end of its fraction."""
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def clock(seconds: float | None) -> str:
    """Format a time in seconds since 1970 as date and time in UTC."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float | None) -> str:
    """Format a duration: `12.3 s`, `4 min 10 s`, `3 h 5 min`, `2 d 4 h`."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.3g} s"
    for unit, smaller, length, part in (("min", "s", 60, 1), ("h", "min", 3600, 60), ("d", "h", 86400, 3600)):
        limit = {"min": 3600, "h": 86400}.get(unit, math.inf)
        if seconds < limit:
            return f"{int(seconds // length)} {unit} {int(seconds % length // part)} {smaller}"
    raise AssertionError("the last unit has no limit")


def plain(value: Any) -> str:
    """Return a plain value as JSON, or as Python writes it if it holds a number that is not finite."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return repr(value)


def printable(text: str) -> str:
    r"""Return a text that UTF-8 can encode: lone surrogates are written as `\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escaped(text: str) -> str:
    if isinstance(text, Html):
        return text
    return html.escape(printable(text))
