"""Tests assert codes, fields and values; a sentence in a test keeps its words from being improved."""

import ast
from collections.abc import Iterator

from support.sources import ROOT

# Of all tests; it only falls.
MOST = 0.05
WORDS = 4


def asserts_a_sentence(test: ast.AST) -> bool:
    """Return whether a test has `match=`, or compares with a text of four or more words."""
    nodes = list(ast.walk(test))
    return any(isinstance(node, ast.keyword) and node.arg == "match" for node in nodes) or any(
        isinstance(text, ast.Constant) and isinstance(text.value, str) and len(text.value.split()) >= WORDS
        for node in nodes
        for text in _compared(node)
    )


def _compared(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a comparison, `refused` or `shows` compares, without keys and arguments of calls in it."""
    if isinstance(node, ast.Compare):
        todo = [node.left, *node.comparators]
    else:
        is_ours = isinstance(node, ast.Call) and getattr(node.func, "id", None) in {"refused", "shows"}
        todo = [*node.args] if is_ours else []
    while todo:
        yield (one := todo.pop())
        if not isinstance(one, ast.Subscript | ast.Call):
            todo.extend(ast.iter_child_nodes(one))


def test_few_tests_assert_a_sentence():
    files = [path for folder in ("packages", "tests") for path in (ROOT / folder).rglob("test_*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    found = sum(map(asserts_a_sentence, tests))
    assert found <= MOST * len(tests), f"{found} of {len(tests)} assert a sentence: assert codes and values"


def test_what_counts_as_a_sentence():
    def counts(text: str) -> bool:
        return asserts_a_sentence(ast.parse(text))

    assert counts('with pytest.raises(E, match="x"): pass')
    assert counts('assert a == ["one two three four"]')
    assert counts('refused(E, "one two three four")')
    assert not counts(
        'x = "one two three four"; assert shows(found["one two three four"], "one two three", 4)'
    )
