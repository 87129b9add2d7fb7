"""The messages that docs/troubleshooting.md quotes are those that the packages print."""

import ast
import re
from collections.abc import Iterator

from support.documents import read
from support.sources import sources

# In tables with the heading `message`, each quotation in the first column is one of ours; in those with
# `you see`, each one with `...` for its names and numbers.
_TABLE = re.compile(r"^\| (message|you see) \|.*\n\|.*\n((?:\|.*\n)+)", re.MULTILINE)


def quoted_messages(text: str) -> list[str]:
    found = []
    for heading, rows in _TABLE.findall(text):
        for row in rows.splitlines():
            quoted = re.findall(r"`([^`]+)`", row.split(" | ")[0])
            found += [message for message in quoted if heading == "message" or "..." in message]
    return found


def texts() -> Iterator[str]:
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values
                )


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
    for text in texts():
        for message in [message for message, parts in unknown.items() if is_in(parts, text)]:
            del unknown[message]
    return sorted(unknown)


def test_quoted_messages_are_printed_by_the_packages():
    messages = quoted_messages(read("docs/troubleshooting.md"))
    assert len(messages) > 60
    assert unknown_messages(messages) == []


def test_a_message_that_is_not_printed_is_found():
    wrong = ["the checkpoint contains a different modell: ...", "no progress for ... minutes (hang-timeout)"]
    table = "".join(f"| `{message}` | x |\n" for message in wrong)
    messages = quoted_messages("| message | cause |\n| --- | --- |\n" + table + "\n")
    assert unknown_messages(messages) == sorted(wrong)
