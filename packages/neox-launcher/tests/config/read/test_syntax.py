"""Explanations of YAML syntax errors."""

import pytest
import yaml

from neox_config.read.reading import compose
from neox_config.read.syntax import explain_syntax, lines_of

# text -> line, part of the explanation, remedy
SLIPS = [
    ("a: 1\nb:\n\tc: 1\n", 3, "indented with a tab", "replace the tab with spaces"),
    ('a: 1\n"b":\t- c\n', 2, "a tab at the start of a value", "replace the tab"),
    ("seed 1\nlr: 2\n", 1, "missing colon and space", "write seed: 1"),
    ("a: 1\nseed\n", 2, "missing colon and space", "write name: value"),
    ("block\n  a: 1\n", 1, "missing colon after the name of a block", "write block:"),
    ("a: 1\n# what\n  b: 2\n", 3, "deeper than line 1", "or remove the value of line 1"),
    ("save: a: b\n", 1, "contains a colon followed by a space", "write save: 'a: b'"),
    ("a:\n    b: 1\n  c: 2\n", 3, "not match any block above", "indent the line like"),
    ("a: 'x' y\n", 1, "found 'y' after a complete value", "put the whole value in quotes"),
    ("a: [1, 2],\n", 1, "found ',' after a complete value", "remove such commas, or put braces around"),
    ("{a: 1,\n b: [2\n", 2, "[ is never closed", "add the closing ]"),
    ("a: {b: 1]\n", 1, "found ], but the { of line 1 is not closed", "close it with }"),
    ("{'a': 1\n'b': 2}\n", 2, "missing comma between two entries", "at the end of the previous line"),
    ("a: [1,, 2]\n", 1, "missing value before a comma", "remove one comma"),
    ('a: "\\d"\n', 1, "\\d is not a valid escape", "use single quotes"),
    ('a: 1\nb: "C:\\Users\\x"\n', 2, "\\U is not a valid escape", "use single quotes, or / instead of"),
    ('b: "\\xg1"\n', 1, "\\x is not a valid escape", "use single quotes"),
    ('a: 1\nb: "x\nc: 2\nd: "y"\ne: 3\n', 2, "begins here ends only in line 4", "add the closing quote"),
    ("a: 'x\nb: 2\nc: 'y: z'\n", 1, "begins here ends only in line 3", "add the closing quote"),
    ("a: 'x\nb: 2 # it's\nc: 3\n", 1, "begins here ends only in line 2", "add the closing quote"),
    ("a: 'x\n  y' z\nb: 2\n", 1, "begins here ends only in line 2", "add the closing quote"),
    ("a: *b\n", 1, "the alias *b has no anchor &b before it", "put text that begins with * in quotes"),
    ("a: `x`\n", 1, "a value starts with `", "put the value in quotes"),
    ("a: 'x\nb: 1\n", 1, "a quoted value is never closed", "add the closing quote"),
    ("a: 1\n--- \nb: 1\n", 2, "a second YAML document starts here", "remove the ---"),
]


def slip_of(text):
    with pytest.raises(yaml.MarkedYAMLError) as found:
        compose(text)
    return explain_syntax(found.value, text)


@pytest.mark.parametrize(("text", "line", "what", "remedy"), SLIPS)
def test_a_syntax_error_is_reported_at_its_line(text, line, what, remedy):
    slip = slip_of(text)
    assert slip.line == line
    assert what in slip.what
    assert remedy in slip.remedy


def test_an_unknown_slip_keeps_the_parsers_words():
    slip = slip_of("a: !<x y\n")
    assert slip.what
    assert slip.remedy == "look for a missing comma, quote or bracket"


def test_line_breaks_match_yaml():
    assert lines_of("a\r\nb\x85c\u2028d\x0be") == ["a", "b", "c", "d\x0be"]


@pytest.mark.parametrize("text", ["save: " + "[," * 5000, "save: " + "[- " * 5000, "save: " + "'[" * 5000])
def test_brackets_behind_the_error_are_not_read_again(monkeypatch, text):
    # Reading n open brackets takes n x n steps.
    count, scan = 0, yaml.scan

    def counted(*args, **options):
        nonlocal count
        for token in scan(*args, **options):
            count += 1
            yield token

    monkeypatch.setattr("neox_config.read.syntax.yaml.scan", counted)
    with pytest.raises(yaml.MarkedYAMLError) as found:
        compose(text)
    assert explain_syntax(found.value, text).line == 1
    assert 0 < count < 20
