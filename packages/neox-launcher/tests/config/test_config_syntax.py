"""What a person wrote, behind the errors of the parser."""

import pytest
import yaml

from neox_launcher.config.reading import compose
from neox_launcher.config.syntax import explain_syntax, lines_of

# text -> line, part of what is told, remedy
SLIPS = [
    ("a: 1\nb:\n\tc: 1\n", 3, "indented with a tab", "replace the tab by spaces"),
    ('a: 1\n"b":\t- c\n', 2, "a tab stands where a value should begin", "replace the tab"),
    ("seed 1\nlr: 2\n", 1, "a colon and a space are missing", "write seed: 1"),
    ("a: 1\nseed\n", 2, "a colon and a space are missing", "write name: value"),
    ("block\n  a: 1\n", 1, "missing behind the name of a block", "write block:"),
    ("a: 1\n# what\n  b: 2\n", 3, "deeper than line 1", "or take the value of line 1 out"),
    ("save: a: b\n", 1, "holds a colon and a space", "write save: 'a: b'"),
    ("a:\n    b: 1\n  c: 2\n", 3, "no block above it begins", "indent it exactly"),
    ("a: 'x' y\n", 1, "'y' stands behind a value", "put the whole value in quotes"),
    ("a: [1, 2],\n", 1, "',' stands behind a value", "leave such commas out, or put braces around"),
    ("{a: 1,\n b: [2\n", 2, "its [ is never closed", "add the ]"),
    ("a: {b: 1]\n", 1, "] stands where the { of line 1 is still open", "close it with }"),
    ("{'a': 1\n'b': 2}\n", 2, "not separated by a comma", "at the end of the line before"),
    ("a: [1,, 2]\n", 1, "a comma has no value before it", "leave out one comma"),
    ('a: "\\d"\n', 1, "\\d is no escape", "use single quotes"),
    ("a: *b\n", 1, "*b repeats something", "put text that begins with * in quotes"),
    ("a: `x`\n", 1, "a value begins with `", "put the value in quotes"),
    ("a: 'x\nb: 1\n", 1, "a quote is opened here", "add the closing quote"),
    ("a: 1\n--- \nb: 1\n", 2, "a second document begins here", "take the --- out"),
]


def slip_of(text):
    with pytest.raises(yaml.MarkedYAMLError) as found:
        compose(text)
    return explain_syntax(found.value, text)


@pytest.mark.parametrize(("text", "line", "what", "remedy"), SLIPS)
def test_a_slip_is_told_where_it_was_made(text, line, what, remedy):
    slip = slip_of(text)
    assert slip.line == line
    assert what in slip.what
    assert remedy in slip.remedy


def test_an_unknown_slip_keeps_the_parsers_words():
    slip = slip_of("a: !<x y\n")
    assert slip.what
    assert slip.remedy == "look for a missing comma, quote or bracket"


def test_lines_are_those_of_yaml():
    assert lines_of("a\r\nb\x85c\u2028d\x0be") == ["a", "b", "c", "d\x0be"]
