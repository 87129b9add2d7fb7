import pytest

from neox_config.problems import Problem, in_words, list_problems


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("\n", r'"\n"'),
        ("", '""'),
        (" a", '" a"'),
        ("a\tb", r'"a\tb"'),
        ("a\x7fb", r'"a\u007fb"'),
        ("969, 30, 1", "969, 30, 1"),
        ("größer", "größer"),
        (True, "true"),
        ("x" * 99, "x" * 57 + "..."),
    ],
)
def test_values_that_would_not_be_seen_are_quoted(value, text):
    assert in_words(value) == text


def test_a_line_break_is_seen_in_a_list_of_problems():
    problem = Problem("prompt_end", "is not used", value=in_words("\n"))
    assert list_problems([problem], ["a.yml"]) == 'a.yml: 1 problem\n\n  prompt_end: "\\n"\n    is not used'
