"""A sealed channel carries messages, and refuses everything that its peer has not just sent."""

import socket
import subprocess

import pytest

from neox_launcher.protocol.channel import (
    LONGEST_UNSEALED,
    Channel,
    ConnectionLostError,
    Seal,
    own_addresses,
)
from neox_launcher.protocol.messages import encode_message
from support.refusals import refused

NOT_AUTHENTIC = "its message is not authentic"


@pytest.fixture
def tapped():
    """An agent's channel, and the socket through which an intruder sees and writes its bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = Channel(socket.create_connection(server.getsockname()))
        wire = server.accept()[0]
    wire.settimeout(10)
    agent.seal(Seal(sending=b"a", receiving=b"b"))
    yield agent, wire
    agent.close()
    wire.close()


def launchers_seal():
    return Seal(sending=b"b", receiving=b"a")


def line_of(seal, kind, **content):
    return seal.close(encode_message(kind, content)) + b"\n"


def test_both_sides_send_and_receive(sealed_channels):
    launcher, agent = sealed_channels()
    agent.send("output", rank=0, stream="stdout", text="a\nb \udcff é")
    assert launcher.next_message() == {
        "kind": "output",
        "rank": 0,
        "stream": "stdout",
        "text": "a\nb \udcff é",
    }
    launcher.send("orders", orders={"size": "x" * 200_000})
    assert agent.next_message() == {"kind": "orders", "orders": {"size": "x" * 200_000}}
    for number in range(3):
        agent.send("signal", number=number)
    assert [launcher.next_message()["number"] for _ in range(3)] == [0, 1, 2]


def test_a_message_that_arrives_in_parts_is_read_once_complete(tapped):
    agent, wire = tapped
    line = line_of(launchers_seal(), "stop", number=2)
    wire.sendall(line[:70])
    agent.read()
    assert list(agent.messages()) == []
    wire.sendall(line[70:] + b"half")
    assert list(agent.receive()) == [{"kind": "stop", "number": 2}]


def test_an_injected_message_is_refused(tapped):
    agent, wire = tapped
    wire.sendall(b"0" * 64 + b'{"kind": "kill"}\n')
    with refused(ConnectionLostError, NOT_AUTHENTIC):
        agent.next_message()


@pytest.mark.parametrize("line", [b"\n", b"x\n", b'{"kind": "kill"}\n', b"\xff" * 100 + b"\n"])
def test_a_line_without_a_mark_is_refused(tapped, line):
    agent, wire = tapped
    wire.sendall(line)
    with refused(ConnectionLostError, NOT_AUTHENTIC):
        agent.next_message()


def test_a_changed_message_is_refused(tapped):
    agent, wire = tapped
    wire.sendall(line_of(launchers_seal(), "stop", number=2).replace(b"2}", b"9}"))
    with refused(ConnectionLostError, NOT_AUTHENTIC):
        agent.next_message()


def test_a_repeated_message_is_refused(tapped):
    agent, wire = tapped
    wire.sendall(line_of(launchers_seal(), "dump") * 2)
    assert agent.next_message() == {"kind": "dump"}
    with refused(ConnectionLostError, NOT_AUTHENTIC):
        agent.next_message()


def test_reordered_messages_are_refused(tapped):
    agent, wire = tapped
    seal = launchers_seal()
    first, second = line_of(seal, "dump"), line_of(seal, "kill")
    wire.sendall(second + first)
    with refused(ConnectionLostError, NOT_AUTHENTIC):
        agent.next_message()


def test_an_omitted_message_is_noticed_at_the_next(tapped):
    agent, wire = tapped
    seal = launchers_seal()
    line_of(seal, "dump")
    wire.sendall(line_of(seal, "leave"))
    with refused(ConnectionLostError, NOT_AUTHENTIC):
        agent.next_message()


def test_a_message_that_is_sent_back_is_refused(tapped):
    agent, wire = tapped
    agent.send("trouble")
    wire.sendall(wire.recv(4096))
    with refused(ConnectionLostError, NOT_AUTHENTIC):
        agent.next_message()


def test_long_messages_are_refused_before_they_are_complete(tapped, monkeypatch):
    monkeypatch.setattr("neox_launcher.protocol.channel._LONGEST", 1000)
    agent, wire = tapped
    wire.sendall(b"x" * 1001)
    with refused(ConnectionLostError, "its message is"):
        agent.next_message()


@pytest.mark.parametrize("end", [b"", b"\n", b"\n{}"])
def test_a_peer_that_is_not_authenticated_cannot_send_long_messages(end):
    with socket.create_server(("127.0.0.1", 0)) as server:
        channel = Channel(socket.create_connection(server.getsockname()))
        wire = server.accept()[0]
    wire.sendall(b'{"kind": "' + b"x" * LONGEST_UNSEALED + b'"}' + end)
    with refused(ConnectionLostError, "its message is"):
        channel.next_message()
    wire.close()
    channel.close()


def test_a_peer_without_patience_does_not_delay_this_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = socket.create_connection(server.getsockname())
        channel = Channel(server.accept()[0], patience=0)
    channel.read()
    assert list(channel.messages()) == []
    wire.close()
    channel.close()


@pytest.mark.parametrize(
    "answer",
    [subprocess.TimeoutExpired("hostname", 10), OSError("no memory"), "", "\n", "10.0.0.1 fd00::1 \n"],
)
def test_addresses_of_this_host_have_a_fallback(monkeypatch, answer):
    def run(*arguments, **options):
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(arguments, 0, stdout=answer)

    monkeypatch.setattr("neox_launcher.protocol.channel.subprocess.run", run)
    assert own_addresses(fallback="here") == (answer.split() if str(answer).startswith("10") else ["here"])
