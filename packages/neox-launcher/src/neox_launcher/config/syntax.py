"""What is wrong with a file that is not YAML, told by what a person wrote instead of by the parser's state.

The parser says where it could not go on and what it was doing; the usual slips that lead there are known.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

__all__ = ["Slip", "explain_syntax", "lines_of"]

_UNKNOWN_REMEDY = "look for a missing comma, quote or bracket"
_NAME_AND_VALUE = re.compile(r"\s*([\w.-]+)\s*[:=\s]\s*(\S.*)")


@dataclass(frozen=True, slots=True)
class Slip:
    """One slip in a file's syntax.

    Args:
        line: counted from 1; None when the parser does not say.
        what: why it is not YAML.
        remedy: what to do.
    """

    line: int | None
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class _Scene:
    """The file and where the parser stopped; lines are counted from 1.

    Args:
        lines: of the file.
        problem: the parser's words.
        line: where it stopped.
        column: and in which column, from 0.
        start: line where what it was reading began.
        match: of the problem with a row of _SLIPS.
    """

    lines: list[str]
    problem: str
    line: int
    column: int
    start: int
    match: Any = None

    def text(self, line: int) -> str:
        """A line of the file; empty behind its end."""
        return self.lines[line - 1] if 0 < line <= len(self.lines) else ""

    def indent(self, line: int) -> int:
        """Blanks that a line begins with."""
        return len(self.text(line)) - len(self.text(line).lstrip())

    def before(self, line: int) -> int:
        """The last line above that is neither empty nor a comment; 0 when there is none."""
        above = range(line - 1, 0, -1)
        return next((each for each in above if self.text(each).split("#")[0].strip()), 0)


def explain_syntax(error: yaml.MarkedYAMLError, text: str) -> Slip:
    """The slip that most likely led to an error.

    Args:
        error: of the parser.
        text: what it read.
    """
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or ""
    if mark is None:
        return Slip(None, problem, _UNKNOWN_REMEDY)
    start = error.context_mark.line + 1 if error.context_mark is not None else mark.line + 1
    lines = lines_of(text)
    for pattern, explain in _SLIPS:
        match = re.search(pattern, problem)
        if match is not None:
            return explain(_Scene(lines, problem, mark.line + 1, mark.column, start, match))
    return Slip(mark.line + 1, problem, _UNKNOWN_REMEDY)


def lines_of(text: str) -> list[str]:
    """The lines of a text as YAML counts them, which is not as `str.splitlines` does."""
    return re.split(r"\r\n|[\r\n\x85\u2028\u2029]", text)


def _tab(scene: _Scene) -> Slip:
    if "\t" in re.match(r"\s*", scene.text(scene.line)).group():  # type: ignore[union-attr]
        return Slip(scene.line, "it is indented with a tab", "replace the tab by spaces")
    return Slip(scene.line, "a tab stands where a value should begin", "replace the tab by spaces")


def _no_colon(scene: _Scene) -> Slip:
    return _without_colon(scene, scene.start)


def _without_colon(scene: _Scene, line: int) -> Slip:
    """The slip of a line that is no `name: value`."""
    text = scene.text(line).rstrip()
    if len(text.split()) == 1 and ":" not in text and scene.indent(line + 1) > scene.indent(line):
        return Slip(line, "a colon is missing behind the name of a block", f"write {text.strip()}:")
    found = _NAME_AND_VALUE.fullmatch(text)
    remedy = f"write {found[1]}: {found[2]}" if found else "write name: value"
    return Slip(line, "a colon and a space are missing between name and value", remedy)


def _unexpected_colon(scene: _Scene) -> Slip:
    text, above = scene.text(scene.line), scene.before(scene.line)
    if re.search(r":\s", text[: scene.column]):
        name, _, value = text.strip().partition(": ")
        return Slip(scene.line, "its value holds a colon and a space", f"write {name}: '{value.strip()}'")
    if above and ":" not in scene.text(above):
        return _without_colon(scene, above)
    return _too_deep(scene, above)


def _too_deep(scene: _Scene, above: int) -> Slip:
    what = f"it is indented deeper than line {above}, which has a value already"
    remedy = f"let both begin in the same column, or take the value of line {above} out"
    return Slip(scene.line, what, remedy)


def _odd_indentation(scene: _Scene) -> Slip:
    above = scene.before(scene.line)
    if above and scene.indent(above) < scene.indent(scene.line):
        return _too_deep(scene, above)
    what = "it begins in a column in which no block above it begins"
    return Slip(scene.line, what, "indent it exactly as the lines that it belongs to")


def _left_over(scene: _Scene) -> Slip:
    rest = scene.text(scene.line)[scene.column :].strip()
    what = f"{rest!r} stands behind a value that is complete"
    if rest == ",":
        return Slip(scene.line, what, "leave such commas out, or put braces around the whole file: { ... }")
    return Slip(scene.line, what, "leave it out, or put the whole value in quotes")


def _bracket(scene: _Scene) -> Slip:
    """A list or mapping in brackets does not go on as it must."""
    closing, found = scene.match[1], scene.match[2]
    opening = {"}": "{", "]": "["}[closing]
    if found == "<stream end>":
        return Slip(scene.start, f"its {opening} is never closed", f"add the {closing}")
    if found in "}]":
        what = f"{found} stands where the {opening} of line {scene.start} is still open"
        return Slip(scene.line, what, f"close it with {closing}")
    remedy = (
        f"add the comma, here or at the end of the line before; or close line {scene.start} with {closing}"
    )
    return Slip(scene.line, "two entries are not separated by a comma", remedy)


def _no_value(scene: _Scene) -> Slip:
    if scene.match[1] == ",":
        return Slip(scene.line, "a comma has no value before it", "leave out one comma, or add the value")
    if scene.match[1] == "<stream end>":
        return Slip(scene.start, "its bracket is never closed", "add the closing bracket")
    return Slip(scene.line, f"{scene.match[1]} stands where a value should be", "add the value")


def _escape(scene: _Scene) -> Slip:
    what = f"\\{scene.match[1]} is no escape, and in double quotes a backslash begins one"
    return Slip(scene.line, what, "use single quotes, or / instead of \\")


def _alias(scene: _Scene) -> Slip:
    what = f"*{scene.match[1]} repeats something that is not marked with &{scene.match[1]} before it"
    return Slip(scene.line, what, "put text that begins with * in quotes")


def _sign(scene: _Scene) -> Slip:
    return Slip(scene.line, f"a value begins with {scene.match[1]}", "put the value in quotes")


def _open_quote(scene: _Scene) -> Slip:
    return Slip(scene.start, "a quote is opened here and never closed", "add the closing quote")


def _second_document(scene: _Scene) -> Slip:
    return Slip(scene.line, "a second document begins here", "make two files of it, or take the --- out")


# The parser's words -> the slip; the first that fits counts.
_SLIPS: tuple[tuple[str, Callable[[_Scene], Slip]], ...] = (
    (r"found character '\\t'", _tab),
    (r"could not find expected ':'", _no_colon),
    (r"mapping values are not allowed", _unexpected_colon),
    (r"expected <block end>, but found '(<block mapping start>|-|<block sequence start>)'", _odd_indentation),
    (r"expected <block end>, but found", _left_over),
    (r"expected ',' or '([}\]])', but got '(.+)'", _bracket),
    (r"expected the node content, but found '(.+)'", _no_value),
    (r"found unknown escape character '(.)'", _escape),
    (r"found undefined alias '(.*)'", _alias),
    (r"found character '(.)' that cannot start", _sign),
    (r"found unexpected end of stream", _open_quote),
    (r"but found another document", _second_document),
)
