"""Which lines are messages, and how they decide the version."""

import pytest

from neox_launcher.protocol import messages
from neox_launcher.protocol.messages import TO_AGENT, decode_line, encode_message, own_version
from support.refusals import refused


def test_any_text_survives_as_one_line_of_ascii():
    text = "".join(map(chr, range(0x100))) + "\u2028\udcff\U0001f600"
    line = encode_message("output", {"text": text})
    assert line.isascii()
    assert b"\n" not in line
    assert decode_line(line) == {"kind": "output", "text": text}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind":' * 100_000,
        b"[1, 2]",
        b"null",
        b'{"kind": 3}',
        b'{"kind": null}',
        b'{"no": "kind"}',
        b'{"kind": "hello"',
        '{"kind": "é"}'.encode(),
        '{"kind": "hello"}'.encode("utf-16"),
        b'{"kind": "x", "number": ' + b"9" * 10_000 + b"}",
        b"\0" * 64,
    ],
)
def test_a_line_that_is_no_message_is_an_error(line):
    with refused((ValueError, RecursionError)):
        decode_line(line)


def test_the_version_changes_with_the_messages(monkeypatch):
    before = own_version()
    own_version.cache_clear()
    assert own_version() == before
    own_version.cache_clear()
    monkeypatch.setattr(messages, "TO_AGENT", {**TO_AGENT, "sing": {}})
    assert own_version() != before
    assert own_version().partition(" ")[0] == before.partition(" ")[0]
    own_version.cache_clear()
