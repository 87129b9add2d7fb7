"""The control connection: both sides prove themselves, and nobody else is listened to."""

import selectors
import socket
import threading
import time

import pytest

from neox_launcher.control import Channel, ConnectionLostError, connect, prove
from neox_launcher.reception import Reception

TOKEN = "the token of this launch"


@pytest.fixture
def reception():
    """A reception that is served by a thread; who was let in."""
    with selectors.DefaultSelector() as selector:
        welcomed, done = [], threading.Event()
        reception = Reception(
            TOKEN, selector, lambda channel, hello: welcomed.append((channel, hello)), is_local=True
        )

        def serve():
            while not done.is_set():
                for key, _ in selector.select(timeout=0.01):
                    key.data()

        thread = threading.Thread(target=serve)
        thread.start()
        reception.welcomed = welcomed
        yield reception
        done.set()
        thread.join()
        reception.close()
        for channel, _ in welcomed:
            channel.close()


def stranger(reception):
    return socket.create_connection((reception.addresses[0], reception.port), timeout=10)


def read_to_end(connection):
    with connection:
        parts = []
        try:
            while part := connection.recv(4096):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def test_who_knows_the_token_is_let_in_and_both_can_talk(reception):
    channel = connect(reception.addresses, reception.port, TOKEN)
    channel.send("hello", text="a\nb \udcff é")
    deadline = time.monotonic() + 60
    while not reception.welcomed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other, hello = reception.welcomed[0]
    assert hello == {"kind": "hello", "text": "a\nb \udcff é"}
    other.send("orders", size="x" * 1_000_000)
    assert channel.next_message() == {"kind": "orders", "size": "x" * 1_000_000}
    channel.close()


def test_another_token_does_not_open(reception):
    with pytest.raises(ConnectionLostError, match=r"cannot be reached at port .*closed the connection"):
        connect(reception.addresses, reception.port, "guessed")
    assert reception.welcomed == []


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind": "hello", "node": 0}\n',
        b'{"kind": "proof", "proof": null, "challenge": []}\n',
        b'{"kind": 3}\n',
        b"[1, 2]\n",
        b"\xff\n",
        b"x" * 100_000,
    ],
)
def test_strangers_are_shown_out_whatever_they_say(reception, words):
    connection = stranger(reception)
    connection.sendall(words)
    assert read_to_end(connection).count(b"\n") == 1  # The challenge, and nothing else.
    assert reception.welcomed == []
    connect(reception.addresses, reception.port, TOKEN).close()


def test_a_proof_that_was_overheard_is_of_no_use(reception):
    """Challenges are fresh, and roles differ: neither side's proof serves anybody else."""
    assert prove(TOKEN, "node", "a", "b") != prove(TOKEN, "launcher", "a", "b")
    first, second = stranger(reception), stranger(reception)
    assert first.recv(4096) != second.recv(4096)
    for connection in (first, second):
        connection.close()


def test_a_node_talks_to_nobody_but_its_launcher():
    """Another program that listens there, without the token, learns nothing and gives no orders."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend():
            channel = Channel(impostor.accept()[0])
            channel.send("challenge", challenge="c")
            answer = channel.next_message()
            channel.send("proof", proof=prove("guessed", "launcher", answer["challenge"], "c"))
            channel.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionLostError, match="not the launcher of this job"):
            connect(["127.0.0.1"], impostor.getsockname()[1], TOKEN)
        thread.join()


def test_the_address_that_answers_is_found_among_several(reception):
    connect(["127.0.0.1", *reception.addresses], reception.port, TOKEN).close()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionLostError, match=r"127\.0\.0\.1: Connection refused"):
        connect(["127.0.0.1"], port, TOKEN)
