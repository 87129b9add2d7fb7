"""Explain YAML syntax errors in terms of what the user wrote instead of the parser's state.

The parser reports where it stopped and what it was parsing; common mistakes are recognized from that.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

__all__ = ["TOO_DEEP", "Slip", "explain_syntax", "lines_of"]

# Message of our loader.
TOO_DEEP = "nested too deeply"
_UNKNOWN_REMEDY = "look for a missing comma, quote or bracket"
_NAME_AND_VALUE = re.compile(r"\s*([\w.-]+)\s*[:=\s]\s*(\S.*)")


@dataclass(frozen=True, slots=True)
class Slip:
    """One syntax error.

    Args:
        line: line number, starting at 1; None if the parser does not report it.
        what: description of the error.
        remedy: what to do.
    """

    line: int | None
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class _Scene:
    """The file and the position where the parser stopped; line numbers start at 1.

    Args:
        lines: lines of the file.
        problem: message of the parser.
        line: line where the parser stopped.
        column: column where the parser stopped, starting at 0.
        start: first line of the element that was being parsed.
        match: match of `problem` with a row of _SLIPS.
    """

    lines: list[str]
    problem: str
    line: int
    column: int
    start: int
    match: Any = None

    def text(self, line: int) -> str:
        """Return a line of the file, or an empty string after its end."""
        return self.lines[line - 1] if 0 < line <= len(self.lines) else ""

    def indent(self, line: int) -> int:
        """Return the number of leading blanks of a line."""
        return len(self.text(line)) - len(self.text(line).lstrip())

    def before(self, line: int) -> int:
        """Return the number of the last line above that is neither empty nor a comment, or 0."""
        above = range(line - 1, 0, -1)
        return next((each for each in above if self.text(each).split("#")[0].strip()), 0)


def explain_syntax(error: yaml.MarkedYAMLError, text: str) -> Slip:
    """Return the mistake that most likely caused a parser error.

    Args:
        error: error raised by the parser.
        text: text that was parsed.
    """
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or ""
    if mark is None:
        return Slip(None, problem, _UNKNOWN_REMEDY)
    start = error.context_mark.line + 1 if error.context_mark is not None else mark.line + 1
    lines = lines_of(text)
    # Brackets without end take long to scan; before another error there are few.
    opened = None if TOO_DEEP in problem else _opened_above(text, mark.line, mark.column)
    if opened is not None:
        what = f"the quoted value that begins here ends only in line {mark.line + 1:,}"
        return Slip(opened, what, "add the closing quote")
    for pattern, explain in _SLIPS:
        match = re.search(pattern, problem)
        if match is not None:
            return explain(_Scene(lines, problem, mark.line + 1, mark.column, start, match))
    return Slip(mark.line + 1, problem, _UNKNOWN_REMEDY)


def _opened_above(text: str, line: int, column: int) -> int | None:
    """Return the line of the quote that is closed just before an error, in a later line; None without one.

    Where a closing quote is forgotten, the next quote of the file closes the value, and what follows that is
    the error.
    """
    with suppress(yaml.YAMLError):  # What comes before the error is enough.
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            begin, end = token.start_mark, token.end_mark
            if (begin.line, begin.column) >= (line, column):
                return None
            is_quoted = isinstance(token, yaml.ScalarToken) and token.style in ("'", '"')
            if is_quoted and begin.line < end.line == line and end.column <= column:
                return int(begin.line) + 1
    return None


def lines_of(text: str) -> list[str]:
    """Split a text into lines as YAML does, which differs from `str.splitlines`."""
    return re.split(r"\r\n|[\r\n\x85\u2028\u2029]", text)


def _tab(scene: _Scene) -> Slip:
    if "\t" in re.match(r"\s*", scene.text(scene.line)).group():  # type: ignore[union-attr]
        return Slip(scene.line, "the line is indented with a tab", "replace the tab with spaces")
    return Slip(scene.line, "found a tab at the start of a value", "replace the tab with spaces")


def _no_colon(scene: _Scene) -> Slip:
    return _without_colon(scene, scene.start)


def _without_colon(scene: _Scene, line: int) -> Slip:
    """Explain a line that is not of the form `name: value`."""
    text = scene.text(line).rstrip()
    if len(text.split()) == 1 and ":" not in text and scene.indent(line + 1) > scene.indent(line):
        return Slip(line, "missing colon after the name of a block", f"write {text.strip()}:")
    found = _NAME_AND_VALUE.fullmatch(text)
    remedy = f"write {found[1]}: {found[2]}" if found else "write name: value"
    return Slip(line, "missing colon and space between name and value", remedy)


def _unexpected_colon(scene: _Scene) -> Slip:
    text, above = scene.text(scene.line), scene.before(scene.line)
    if re.search(r":\s", text[: scene.column]):
        name, _, value = text.strip().partition(": ")
        what = "the value contains a colon followed by a space"
        return Slip(scene.line, what, f"write {name}: '{value.strip()}'")
    if above and ":" not in scene.text(above):
        return _without_colon(scene, above)
    return _too_deep(scene, above)


def _too_deep(scene: _Scene, above: int) -> Slip:
    what = f"the line is indented deeper than line {above}, which already has a value"
    remedy = f"indent both lines equally, or remove the value of line {above}"
    return Slip(scene.line, what, remedy)


def _odd_indentation(scene: _Scene) -> Slip:
    above = scene.before(scene.line)
    if above and scene.indent(above) < scene.indent(scene.line):
        return _too_deep(scene, above)
    what = "the indentation does not match any block above"
    return Slip(scene.line, what, "indent the line like the other lines of its block")


def _left_over(scene: _Scene) -> Slip:
    rest = scene.text(scene.line)[scene.column :].strip()
    what = f"found {rest!r} after a complete value"
    if rest == ",":
        return Slip(scene.line, what, "remove such commas, or put braces around the whole file: { ... }")
    return Slip(scene.line, what, "remove it, or put the whole value in quotes")


def _bracket(scene: _Scene) -> Slip:
    """Explain an error inside a list or mapping in brackets."""
    closing, found = scene.match[1], scene.match[2]
    opening = {"}": "{", "]": "["}[closing]
    if found == "<stream end>":
        return Slip(scene.start, f"{opening} is never closed", f"add the closing {closing}")
    if found in "}]":
        what = f"found {found}, but the {opening} of line {scene.start} is not closed"
        return Slip(scene.line, what, f"close it with {closing}")
    remedy = (
        f"add the comma here or at the end of the previous line, or close line {scene.start} with {closing}"
    )
    return Slip(scene.line, "missing comma between two entries", remedy)


def _no_value(scene: _Scene) -> Slip:
    if scene.match[1] == ",":
        return Slip(scene.line, "missing value before a comma", "remove one comma, or add the value")
    if scene.match[1] == "<stream end>":
        return Slip(scene.start, "a bracket is never closed", "add the closing bracket")
    return Slip(scene.line, f"found {scene.match[1]} instead of a value", "add the value")


def _escape(scene: _Scene) -> Slip:
    return _invalid_escape(scene.line, scene.match[1])


def _short_escape(scene: _Scene) -> Slip:
    before = scene.text(scene.line)[: scene.column]
    return _invalid_escape(scene.line, before[before.rfind("\\") + 1 :][:1])


def _invalid_escape(line: int, character: str) -> Slip:
    what = f"\\{character} is not a valid escape sequence in double quotes"
    return Slip(line, what, "use single quotes, or / instead of \\")


def _alias(scene: _Scene) -> Slip:
    what = f"the alias *{scene.match[1]} has no anchor &{scene.match[1]} before it"
    return Slip(scene.line, what, "put text that begins with * in quotes")


def _sign(scene: _Scene) -> Slip:
    return Slip(scene.line, f"a value starts with {scene.match[1]}", "put the value in quotes")


def _open_quote(scene: _Scene) -> Slip:
    return Slip(scene.start, "a quoted value is never closed", "add the closing quote")


def _nested(scene: _Scene) -> Slip:
    return Slip(scene.line, "it is nested too deeply", "reduce the nesting; no parameter needs it")


def _second_document(scene: _Scene) -> Slip:
    return Slip(scene.line, "a second YAML document starts here", "split the file in two, or remove the ---")


# Pattern of the parser's message -> explanation; the first match is used.
_SLIPS: tuple[tuple[str, Callable[[_Scene], Slip]], ...] = (
    (r"found character '\\t'", _tab),
    (r"could not find expected ':'", _no_colon),
    (r"mapping values are not allowed", _unexpected_colon),
    (r"expected <block end>, but found '(<block mapping start>|-|<block sequence start>)'", _odd_indentation),
    (r"expected <block end>, but found", _left_over),
    (r"expected ',' or '([}\]])', but got '(.+)'", _bracket),
    (r"expected the node content, but found '(.+)'", _no_value),
    (r"found unknown escape character '(.)'", _escape),
    (r"expected escape sequence of \d hexadecimal numbers", _short_escape),
    (r"found undefined alias '(.*)'", _alias),
    (r"found character '(.)' that cannot start", _sign),
    (r"found unexpected end of stream", _open_quote),
    (r"but found another document", _second_document),
    (TOO_DEEP, _nested),
)
