"""Explain YAML syntax errors: the parser reports where it stopped and what it was parsing."""

import re

import yaml

__all__ = ["TOO_DEEP", "explain_syntax", "lines_of"]

# Message of our loader.
TOO_DEEP = "nested too deeply"
_COLON = ("missing colon and space between name and value", "write name: value, or name: before a block")
_BRACKET = ("expected a comma, a value or a closing bracket", "add it")
# Pattern of the parser's message -> what is wrong, and what to do; the first match is used.
_SLIPS = {
    r"found character '\\t'": ("a tab is used for indentation", "replace the tab with spaces"),
    r"could not find expected ':'": _COLON,
    r"mapping values are not allowed": (
        "a second colon, or a name and value that do not fit to the line above",
        "put a value with a colon in quotes, or correct the colon or the indentation of one of the two lines",
    ),
    r"expected <block end>, but found '(<block mapping start>|-|<block sequence start>)'": (
        "the indentation does not match any block above",
        "indent the line like the other lines of its block",
    ),
    r"expected <block end>, but found": (
        "there is something after a complete value",
        "remove it, or put the whole value in quotes",
    ),
    r"expected ',' or|expected the node content": _BRACKET,
    r"unknown escape character|expected escape sequence": (
        "there is no such escape sequence in double quotes",
        "use single quotes, or / instead of \\",
    ),
    r"undefined alias|that cannot start": ("a value starts with a character of YAML", "put it in quotes"),
    r"unexpected end of stream": ("a quoted value is never closed", "add the closing quote"),
    r"another document": ("a second YAML document starts here", "split the file in two, or remove the ---"),
    TOO_DEEP: ("it is nested too deeply", "reduce the nesting; no parameter needs it"),
}


def explain_syntax(error: yaml.MarkedYAMLError) -> tuple[int | None, str, str]:
    """Return the line of a parser error from 1, what is wrong there, and what to do.

    What is not closed is reported where it begins; the line is None if the parser does not report it.
    """
    problem = error.problem or error.context or ""
    found = [slip for pattern, slip in _SLIPS.items() if re.search(pattern, problem)]
    what, remedy = found[0] if found else (problem, "look for a missing comma, quote or bracket")
    is_open = found[:1] == [_COLON] or "end of stream" in problem or "<stream end>" in problem
    mark = error.context_mark if is_open and error.context_mark else error.problem_mark or error.context_mark
    return None if mark is None else mark.line + 1, what, remedy


def lines_of(text: str) -> list[str]:
    """Split a text into lines as YAML does, which differs from `str.splitlines`."""
    return re.split(r"\r\n|[\r\n\x85\u2028\u2029]", text)
