"""Which lines are messages, and which messages are known."""

import pytest

from neox_launcher.protocol import messages
from neox_launcher.protocol.messages import (
    TO_AGENT,
    TO_LAUNCHER,
    UnknownMessageError,
    check_message,
    decode_line,
    encode_message,
    own_version,
)


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
def test_a_line_that_is_no_message_is_a_value_error(line):
    with pytest.raises(ValueError, match=r".") as raised:
        decode_line(line)
    assert isinstance(raised.value, ValueError)


HELLO = {
    "kind": "hello",
    "host": "h",
    "addresses": ["10.0.0.1"],
    "time": 1,
    "number": 0,
    "name": None,
    "rank": None,
}
ENDED = {"kind": "ended", "failures": [{"rank": 0}], "overran": [1], "facts": {"0": {"a": [1]}}}


@pytest.mark.parametrize(
    ("message", "schema"),
    [
        (HELLO, TO_LAUNCHER),
        ({**HELLO, "time": 0.5, "rank": 3, "number": None}, TO_LAUNCHER),
        (ENDED, TO_LAUNCHER),
        ({"kind": "dumped", "ranks": {"1": {"stacks": "..."}}}, TO_LAUNCHER),
        ({"kind": "ready", "port": None}, TO_LAUNCHER),
        ({"kind": "start", "master_addr": "a", "master_port": 1}, TO_AGENT),
        ({"kind": "kill"}, TO_AGENT),
    ],
)
def test_known_messages_pass(message, schema):
    check_message(message, schema)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"kind": "kill"}, "the message 'kill'"),
        ({"kind": "x" * 10_000}, f"the message '{'x' * 40}'"),
        ({**HELLO, "color": "red"}, "the field 'color' of the message 'hello'"),
        ({name: HELLO[name] for name in HELLO if name != "host"}, "the field 'host' of the message 'hello'"),
        ({**HELLO, "addresses": [1]}, "the field 'addresses' of the message 'hello'"),
        ({**HELLO, "number": "0"}, "the field 'number' of the message 'hello'"),
        ({**HELLO, "number": True}, "the field 'number' of the message 'hello'"),
        ({**HELLO, "time": "now"}, "the field 'time' of the message 'hello'"),
        ({**ENDED, "failures": {}}, "the field 'failures' of the message 'ended'"),
        ({"kind": "dumped", "ranks": {"1": {"stacks": 3}}}, "the field 'ranks' of the message 'dumped'"),
    ],
)
def test_an_unknown_message_is_described(message, words):
    with pytest.raises(UnknownMessageError) as raised:
        check_message(message, TO_LAUNCHER)
    assert str(raised.value) == words


def test_the_version_changes_with_the_messages(monkeypatch):
    before = own_version()
    own_version.cache_clear()
    assert own_version() == before
    own_version.cache_clear()
    monkeypatch.setattr(messages, "TO_AGENT", {**TO_AGENT, "sing": {}})
    assert own_version() != before
    assert own_version().partition(" ")[0] == before.partition(" ")[0]
    own_version.cache_clear()
