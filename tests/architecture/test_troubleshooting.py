"""The messages that docs/troubleshooting.md quotes are those that the packages print."""

import ast
import itertools
import re
from collections.abc import Iterator

from support.documents import read
from support.sources import sources

# In tables with the heading `message`, each quotation in the first column is one of ours; in those with
# `you see`, each one of several words that is neither a setting nor one of these, of other programs.
_OF_OTHER_PROGRAMS = {
    "No space left on device",
    "Resource temporarily unavailable",
    "Too many open files",
    "cannot start new thread",
    "torch.OutOfMemoryError: CUDA out of memory",
}
_SETTING = re.compile(r"[\w-]+: \w+")
# Arguments that contain documentation.
_DOCUMENTATION = ("doc", "epilog", "help", "none_means")
_TABLE = re.compile(r"^\| (message|you see) \|.*\n\|.*\n((?:\|.*\n)+)", re.MULTILINE)


def quoted_messages(text: str) -> list[str]:
    found = []
    for heading, rows in _TABLE.findall(text):
        for row in rows.splitlines():
            quoted = re.findall(r"`([^`]+)`", row.split(" | ")[0])
            found += [message for message in quoted if heading == "message" or is_message(message)]
    return found


def is_message(quoted: str) -> bool:
    return " " in quoted and quoted not in _OF_OTHER_PROGRAMS and not _SETTING.fullmatch(quoted)


def spoken(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module, without docstrings and the documentation of parameters and options."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not is_documentation(child)]


def is_documentation(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in _DOCUMENTATION
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the strings of a module that it can raise, log or print."""
    for node in spoken(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


def is_in(parts: list[str], text: str) -> bool:
    """Return whether the parts occur in the text one after the other."""
    place = 0
    for part in parts:
        place = text.find(part, place) + len(part)
        if place < len(part):
            return False
    return True


def unknown_messages(messages: list[str]) -> list[str]:
    unknown = {message: [part.strip() for part in message.split("...")] for message in messages}
    for text in itertools.chain.from_iterable(texts(source.tree) for source in sources()):
        for message in [message for message, parts in unknown.items() if is_in(parts, text)]:
            del unknown[message]
    return sorted(unknown)


def test_quoted_messages_are_printed_by_the_packages():
    messages = quoted_messages(read("docs/troubleshooting.md"))
    assert len(messages) > 40
    assert unknown_messages(messages) == []


def test_a_message_that_is_not_printed_is_found():
    wrong = ["the checkpoint contains a different modell: ...", "no progress for ... minutes (hang-timeout)"]
    table = "".join(f"| `{message}` | x |\n" for message in wrong)
    messages = quoted_messages("| message | cause |\n| --- | --- |\n" + table + "\n")
    assert unknown_messages(messages) == sorted(wrong)


def test_docstrings_and_documentation_are_no_messages():
    module = """
def load(path):
    "Raise the first."
    param(doc="the second", check=refuse("the third"))
    raise ValueError(f"the fourth: {path}")
"""
    assert {text for text in texts(ast.parse(module)) if "the" in text} == {
        "the third",
        "the fourth: \0",
        "the fourth: ",
    }
