"""Explanations of YAML syntax errors."""

import pytest
import yaml

from neox_config.read.reading import _Loader
from neox_config.read.syntax import explain_syntax, lines_of

# text -> line, part of the explanation, part of the remedy
SLIPS = [
    ("a: 1\nb:\n\tc: 1\n", 3, "a tab is used", "replace the tab with spaces"),
    ("seed 1\nlr: 2\n", 2, "do not fit to the line above", "correct the colon"),
    ("a: 1\nseed\n", 2, "missing colon and space", "write name: value"),
    ("block\n  a: 1\n", 2, "do not fit to the line above", "correct the colon or the indentation"),
    ("save: a: b\n", 1, "a second colon", "put a value with a colon in quotes"),
    ("a:\n    b: 1\n  c: 2\n", 3, "not match any block above", "indent the line like"),
    ("a: 'x' y\n", 1, "something after a complete value", "put the whole value in quotes"),
    ("{a: 1,\n b: [2\n", 2, "or a closing bracket", "add it"),
    ("a: {b: 1]\n", 1, "or a closing bracket", "add it"),
    ("a: [1,, 2]\n", 1, "expected a comma, a value or a closing", "add it"),
    ('a: 1\nb: "C:\\Users\\x"\n', 2, "no such escape", "use single quotes, or / instead of"),
    ('a: 1\nb: "\\UFFFFFFFFF"\n', 2, "no such escape", "use single quotes, or / instead of"),
    ('a: "\\U00110000"\n', 1, "no such escape", "use single quotes, or / instead of"),
    ("a: *b\n", 1, "starts with a character of YAML", "put it in quotes"),
    ("a: `x`\n", 1, "starts with a character of YAML", "put it in quotes"),
    ("a: 'x\nb: 1\n", 1, "a quoted value is never closed", "add the closing quote"),
    ("a: 1\n--- \nb: 1\n", 2, "a second YAML document starts here", "remove the ---"),
    ("a: !<x y\n", 1, "expected", "look for a missing comma, quote or bracket"),
]


@pytest.mark.parametrize(("text", "line", "what", "remedy"), SLIPS)
def test_a_syntax_error_is_reported_at_its_line(text, line, what, remedy):
    with pytest.raises(yaml.MarkedYAMLError) as error:
        yaml.compose(text, Loader=_Loader)
    found = explain_syntax(error.value)
    assert found[0] == line
    assert what in found[1]
    assert remedy in found[2]


def test_line_breaks_match_yaml():
    assert lines_of("a\r\nb\x85c\u2028d\x0be") == ["a", "b", "c", "d\x0be"]
