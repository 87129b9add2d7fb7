"""Write HTML: everything that comes from a file is escaped here, in one place."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from neox_config.formats import format_duration

__all__ = [
    "Html",
    "clock",
    "duration",
    "element",
    "json_block",
    "number",
    "plain",
    "printable",
    "size",
    "table",
    "trimmed",
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
        element("tr", element("th", first, scope="row"), *(element("td", text) for text in others))
        for first, *others in rows
    ]
    return element("div", element("table", head, element("tbody", *lines), class_=class_), class_="scroll")


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


def trimmed(text: str) -> str:
    """Drop the zeros at the end of a decimal fraction."""
    return text.rstrip("0").rstrip(".") if "." in text and text[-1] == "0" else text


def size(value: float | None, *, digits: int = 3) -> str:
    """Format a number of bytes with some significant digits: `1.5 GiB`."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{trimmed(number(value, digits=digits))} {unit}"


def clock(seconds: float | None) -> str:
    """Format a time in seconds since 1970 as date and time in UTC."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float | None) -> str:
    """Format a duration: `0.25 s`, `12.3 s`, `4:10`, `3:05:00`, `2 d 04:46`."""
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)


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
