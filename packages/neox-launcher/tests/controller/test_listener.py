"""The port of the launcher: agents with the token are accepted; guests can only lose their connection."""

import errno
import json
import random
import resource
import selectors
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

import pytest

from neox_config.errors import LaunchError
from neox_launcher.controller import listener as module
from neox_launcher.controller.listener import Listener
from neox_launcher.plan.plan import ANY_ENDPOINT, Endpoint
from neox_launcher.protocol import handshake
from neox_launcher.protocol.channel import Channel, ConnectionLostError
from neox_launcher.protocol.handshake import Introduction, OtherVersionError, connect, new_token
from neox_launcher.protocol.messages import own_version
from support.refusals import refused, shows

TOKEN = "the token of this launch"
HELLO = {"host": "h", "addresses": [], "time": 0.0, "number": 0, "name": None, "rank": None}
LIMIT_SECONDS = 60


class Served:
    """A listener that a thread serves, and what it has done."""

    def __init__(self, endpoint=ANY_ENDPOINT, *, is_local=True):
        self.selector = selectors.DefaultSelector()
        self.accepted, self.other_versions = [], []
        self.listener = Listener(
            TOKEN,
            self.selector,
            lambda channel, hello: self.accepted.append((channel, hello)),
            on_other_version=lambda host, version: self.other_versions.append((host, version)),
            is_local=is_local,
            endpoint=endpoint,
        )
        self._done, self._thread = threading.Event(), threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while not self._done.is_set():
            for key, _ in self.selector.select(timeout=0.01):
                key.data()
            self.listener.tick()

    @property
    def is_alive(self):
        """Return whether no exception has ended the thread."""
        return self._thread.is_alive()

    def connect(self):
        return connect(self.listener.addresses, self.listener.port, TOKEN, host="h")

    def let_in(self):
        """Connect an agent, and return its channel and the launcher's."""
        before, agent = len(self.accepted), self.connect()
        agent.send("hello", **HELLO)
        wait_for(lambda: len(self.accepted) > before)
        return agent, self.accepted[-1][0]

    def is_undisturbed(self):
        """Return whether the thread still serves agents."""
        agent, launcher = self.let_in()
        launcher.send("dump")
        answer = agent.next_message()
        agent.close()
        return self.is_alive and answer == {"kind": "dump"}

    def guest(self):
        return socket.create_connection((self.listener.addresses[0], self.listener.port), timeout=10)

    def close(self):
        self._done.set()
        self._thread.join()
        self.listener.close()
        for channel, _ in self.accepted:
            channel.close()
        self.selector.close()


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def serve():
    opened = []

    def start(*arguments, **options):
        opened.append(Served(*arguments, **options))
        return opened[-1]

    yield start
    for served in opened:
        served.close()


@pytest.fixture
def served(serve):
    return serve()


def read_to_end(connection):
    """Return all bytes that the other side sends until it closes the connection."""
    parts = []
    with connection:
        try:
            while part := connection.recv(4096):
                parts.append(part)
        except ConnectionResetError:
            pass
    return b"".join(parts)


def test_an_agent_with_the_token_is_let_in(served):
    agent, launcher = served.let_in()
    assert served.accepted[0][1] == {"kind": "hello", **HELLO}
    launcher.send("stop", number=2)
    assert agent.next_message() == {"kind": "stop", "number": 2}
    agent.send("trouble")
    assert launcher.next_message() == {"kind": "trouble"}
    agent.close()


def test_messages_that_follow_the_hello_at_once_are_not_lost(served):
    agent = served.connect()
    seal, sent = agent._seal, []
    agent.send_encoded = sent.append
    agent.send("hello", **HELLO)
    agent.send("signal", number=12)
    agent._socket.sendall(b"".join(seal.close(message) + b"\n" for message in sent))
    wait_for(lambda: served.accepted)
    launcher = served.accepted[0][0]
    assert list(launcher.messages()) == [{"kind": "signal", "number": 12}]
    agent.close()


def test_another_token_is_refused(served, monkeypatch):
    monkeypatch.setattr(handshake, "_RETRY_SECONDS", 0.0)
    with refused(ConnectionLostError, "cannot be reached"):
        connect(served.listener.addresses, served.listener.port, "guessed", host="h")
    assert served.accepted == []


SECRET = "ab" * 32
PROOF = {"kind": "proof", "proof": SECRET, "challenge": SECRET, "version": "1", "host": "h"}


def proof_with(**changes):
    return json.dumps({**PROOF, **changes}).encode() + b"\n"


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 4 + b"\n",
        b'{"kind": "hello", "number": 0}\n',
        b'{"kind": 3}\n',
        b"[1, 2]\n",
        b"\xff\n",
        b"\n",
        b"\0\n",
        b"x" * 100_000,
        b"[" * 2000 + b"\n",
        b'{"a":' * 400 + b"\n",
        b'{"kind": "proof", "proof": ' + b"9" * 2000 + b"}\n",
        proof_with(),
        proof_with(proof=None),
        proof_with(proof="é" * 64),
        proof_with(proof="\udcff" * 64),
        proof_with(proof="½" * 64),
        proof_with(proof="ab"),
        proof_with(proof=[SECRET]),
        proof_with(challenge=[]),
        proof_with(challenge="\udcff" * 64),
        proof_with(challenge="\0" * 64),
        proof_with(version={}),
        proof_with(version="\udcff"),
        proof_with(host="\x1b[2J"),
        proof_with(host="x" * 300),
        json.dumps(PROOF, ensure_ascii=False).replace(SECRET, "é" * 64).encode() + b"\n",
        proof_with() * 10,
    ],
)
def test_a_message_of_a_guest_ends_its_connection_alone(served, words, capfd):
    connection = served.guest()
    with suppress(ConnectionError):
        connection.sendall(words)
    assert read_to_end(connection).count(b"\n") == 1  # The challenge, and nothing else.
    assert served.accepted == []
    assert served.is_undisturbed()
    err = capfd.readouterr().err
    assert err.startswith("neox-launch: refused a connection from 127.0.0.1: ")
    assert "caused" not in err  # The message was refused by a check, not by an accident.
    assert err.count("\n") == 1


def test_an_unexpected_exception_ends_the_connection_of_its_guest_alone(served, monkeypatch, capfd):
    def fail(introduction, message):
        raise RuntimeError("secret\n" * 100)

    with monkeypatch.context() as context:
        context.setattr(Introduction, "check", fail)
        connection = served.guest()
        connection.sendall(b'{"kind": "proof"}\n')
        read_to_end(connection)
    assert served.is_undisturbed()
    assert shows(capfd.readouterr().err, "neox-launch", "127.0.0.1", "RuntimeError")


def test_refusals_are_reported_once_a_minute(served, monkeypatch, capfd):
    for _ in range(50):
        connection = served.guest()
        connection.sendall(b"x\n")
        read_to_end(connection)
    assert capfd.readouterr().err.count("\n") == 1
    served.listener._next_report = 0.0
    connection = served.guest()
    connection.sendall(b"x\n")
    read_to_end(connection)
    assert shows(capfd.readouterr().err, "neox-launch", "127.0.0.1", "49 more")


def send_slowly(connection):
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        connection.sendall(b"x")
        time.sleep(0.02)


def test_a_guest_that_does_not_finish_in_time_is_dismissed(serve, monkeypatch, capfd):
    """A silent guest, half a line, and a line that arrives byte by byte."""
    monkeypatch.setattr(module, "_PROOF_SECONDS", 0.5)
    served = serve()
    silent, half, slow = (served.guest() for _ in range(3))
    half.sendall(b'{"kind": "pro')
    with pytest.raises(ConnectionError):
        send_slowly(slow)
    for connection in (silent, half):
        assert read_to_end(connection).count(b"\n") == 1
    slow.close()
    assert "within 0.5 s" in capfd.readouterr().err
    assert served.is_undisturbed()


def test_an_authenticated_agent_may_take_longer_for_its_hello(serve, monkeypatch):
    monkeypatch.setattr(module, "_PROOF_SECONDS", 0.2)
    served = serve()
    agent = served.connect()
    time.sleep(0.5)
    agent.send("hello", **HELLO)
    wait_for(lambda: served.accepted)
    agent.close()


def test_beyond_the_limit_the_guest_that_has_waited_longest_is_dismissed(serve, monkeypatch):
    monkeypatch.setattr(module, "_MOST_GUESTS", 3)
    served = serve()
    guests = [served.guest() for _ in range(4)]
    assert read_to_end(guests[0]).count(b"\n") == 1
    assert served.is_undisturbed()  # Which has dismissed the next one.
    for guest in guests[1:]:
        guest.close()


def test_no_free_descriptor_at_accept_is_survived_without_a_busy_loop(served, monkeypatch, capfd):
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.5)
    guests = [served.guest() for _ in range(4)]
    for guest in guests:
        guest.recv(4096)
    real, failures = served.listener._socket, []

    class Exhausted:
        def __getattr__(self, name):
            return getattr(real, name)

        def accept(self):
            if not failures or time.monotonic() < failures[0] + 0.4:
                failures.append(time.monotonic())
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

    monkeypatch.setattr(served.listener, "_socket", Exhausted())
    assert served.is_undisturbed()
    assert len(failures) == 1
    assert "(ulimit -n)" in capfd.readouterr().err
    for guest in guests:
        guest.close()


def test_after_the_port_is_closed_no_connection_is_accepted(served):
    waiting = served.guest()
    waiting.recv(4096)
    agent, launcher = served.let_in()
    served.listener.close()
    assert read_to_end(waiting) == b""
    with pytest.raises(ConnectionRefusedError):
        served.guest()
    launcher.send("dump")
    assert agent.next_message() == {"kind": "dump"}
    assert not served.listener.is_open
    agent.close()


def test_guests_leave_descriptors_for_agents():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert module._allow_many_connections() == min(hard, 65_536) or soft > 65_536


# Versions


def test_an_agent_of_another_version_is_reported_with_its_host(served, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(handshake, "own_version", lambda: "0.0.1 (messages 1234)")
        context.setattr("neox_launcher.controller.listener.own_version", lambda: "0.2.0")
        # The agent runs in this process: both sides use the same function for their own version.
        agent = Channel(served.guest())
        handshake._introduce(agent, TOKEN, "old-host")
    wait_for(lambda: served.other_versions)
    assert served.other_versions == [("old-host", "0.0.1 (messages 1234)")]
    assert served.accepted == []
    with refused(ConnectionLostError, "closed the connection"):
        agent.next_message()
    agent.close()
    assert served.is_undisturbed()


def test_an_agent_names_both_versions_if_the_launcher_has_another():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            channel = Channel(server.accept()[0])
            introduction = Introduction(TOKEN, channel)
            introduction.start()
            message = channel.next_message()
            introduction.check(message)
            channel.close()

        def start_as_other(introduction):
            introduction._channel.send("challenge", challenge=introduction._challenge, version="9.9")

        thread = threading.Thread(target=pretend)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Introduction, "start", start_as_other)
            patch.setattr(Introduction, "check", check_as_other)
            thread.start()
            with pytest.raises(OtherVersionError) as raised:
                connect(["127.0.0.1"], server.getsockname()[1], TOKEN, host="h")
            thread.join()
    assert shows(raised.value, "neox-launcher 9.9", f"host {own_version()}")


def check_as_other(introduction, message):
    """Answer the proof of an agent as a launcher of version 9.9."""
    said = (introduction._challenge, "9.9", message["challenge"], message["version"], message["host"])
    introduction._channel.send("proof", proof=handshake._derive(TOKEN, "proof of launcher", *said))


# Authentication


def test_an_agent_accepts_only_its_launcher():
    """Another program listening on the port without the token receives no secret and cannot send orders."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend():
            channel = Channel(impostor.accept()[0])
            channel.send("challenge", challenge=SECRET, version=own_version())
            channel.next_message()
            channel.send("proof", proof=SECRET)
            channel.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with refused(ConnectionLostError, "not the launcher"):
            connect(["127.0.0.1"], impostor.getsockname()[1], TOKEN, host="h")
        thread.join()


@pytest.mark.parametrize("answer", [b"{}\n", b"[" * 2000 + b"\n", b"\xff\n", b"x" * 5000, b""])
def test_an_agent_survives_any_answer(answer, monkeypatch):
    monkeypatch.setattr(handshake, "_MOST_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend():
            with impostor.accept()[0] as connection:
                connection.sendall(answer)

        thread = threading.Thread(target=pretend)
        thread.start()
        with refused(ConnectionLostError, "the launcher cannot"):
            connect(["127.0.0.1"], impostor.getsockname()[1], TOKEN, host="h")
        thread.join()


def test_a_handshake_that_is_cut_off_is_repeated(monkeypatch):
    monkeypatch.setattr(handshake, "_RETRY_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            server.accept()[0].close()
            channel = Channel(server.accept()[0])
            introduction = Introduction(TOKEN, channel)
            introduction.start()
            introduction.check(channel.next_message())
            channel.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        connect(["127.0.0.1"], server.getsockname()[1], TOKEN, host="h").close()
        thread.join()


def test_a_proof_cannot_be_used_again(served):
    """Challenges differ, so a recorded proof is worth nothing in another connection."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        recorded = []

        def eavesdrop():
            agent, launcher = relay.accept()[0], served.guest()
            agent.sendall(launcher.recv(4096))
            recorded.append(agent.recv(4096))
            launcher.sendall(recorded[0])
            agent.sendall(launcher.recv(4096))
            agent.close()
            launcher.close()

        thread = threading.Thread(target=eavesdrop)
        thread.start()
        connect(["127.0.0.1"], relay.getsockname()[1], TOKEN, host="h").close()
        thread.join()
    replaying = served.guest()
    replaying.sendall(recorded[0])
    assert read_to_end(replaying).count(b"\n") == 1
    assert served.accepted == []


def test_tokens_are_long_and_unique():
    assert len(new_token()) == 64
    assert new_token() != new_token()


def test_a_token_may_contain_any_byte(served):
    served.listener.token = "\udcff é"
    connect(served.listener.addresses, served.listener.port, "\udcff é", host="h").close()


def test_the_first_address_that_answers_is_used(served):
    addresses = ["127.0.0.1", *served.listener.addresses]
    connect(addresses, served.listener.port, TOKEN, host="h").close()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with refused(ConnectionLostError, "127.0.0.1"):
        connect(["127.0.0.1"], port, TOKEN, host="h")


# Where it listens


def test_a_chosen_port_is_used_and_can_be_used_again_by_a_restart(serve):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = serve(Endpoint(port=port), is_local=False)
    assert first.listener.port == port
    agent, _ = first.let_in()
    first.listener.close()
    second = serve(Endpoint(port=port), is_local=False)
    assert second.is_undisturbed()
    agent.close()


def test_a_port_in_use_is_refused(serve):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(LaunchError) as raised:
            serve(Endpoint(address="127.0.0.1", port=port), is_local=False)
    assert shows(raised.value, f"launcher-port: {port} cannot")


def test_a_chosen_address_is_the_only_one(serve):
    served = serve(Endpoint(address="localhost"), is_local=False)
    assert served.listener.addresses == ("localhost",)
    assert served.listener._socket.getsockname()[0] in ("127.0.0.1", "::1")
    assert served.is_undisturbed()


def test_an_address_of_another_machine_listens_everywhere_and_says_so(serve, capfd):
    served = serve(Endpoint(address="192.0.2.1"), is_local=False)
    assert served.listener.addresses == ("192.0.2.1",)
    assert served.listener._socket.getsockname()[0] in ("::", "0.0.0.0")
    assert shows(capfd.readouterr().err, "neox-launch: launcher-address 192.0.2.1")


def test_an_address_that_cannot_be_resolved_is_refused(serve):
    with refused(LaunchError, "launcher-address: no-such-host.invalid", code="unknown-address"):
        serve(Endpoint(address="no-such-host.invalid"), is_local=False)


def test_without_a_list_of_addresses_hosts_connect_to_the_name_of_this_machine(serve, monkeypatch):
    monkeypatch.setattr(module, "own_addresses", lambda fallback: [fallback])
    assert serve(is_local=False).listener.addresses == (socket.gethostname(),)


def test_a_job_on_this_machine_uses_the_loopback_interface(serve):
    served = serve(Endpoint(address="192.0.2.1", port=1), is_local=True)
    assert served.listener.addresses == ("127.0.0.1",)
    assert served.listener._socket.getsockname()[0] == "127.0.0.1"


# Random and structured lines

UNUSUAL = [
    "",
    "\0",
    "\udcff",
    "é" * 64,
    "9" * 5000,
    SECRET,
    -1,
    2**70,
    1e999,
    None,
    True,
    [],
    {},
    [[[]]],
    {"": {}},
]
KINDS = ["challenge", "proof", "hello", "orders", "kill", "leave", "output", "ended", 3, None]


def random_bytes(rng):
    return rng.randbytes(rng.choice([0, 1, 10, 64, 500, 2047, 2048, 5000]))


def random_fields(rng):
    names = ["proof", "challenge", "version", "host", "number", "rank", "exit_code", "orders"]
    fields = {rng.choice(names): rng.choice(UNUSUAL) for _ in range(rng.randrange(6))}
    return json.dumps({"kind": rng.choice(KINDS), **fields}).encode()


def changed_proof(rng):
    """Return a proof with one unusual field, or with a few changed, removed or inserted bytes."""
    if rng.random() < 0.5:
        return json.dumps({**PROOF, rng.choice([*PROOF, "more"]): rng.choice(UNUSUAL)}).encode()
    line = bytearray(json.dumps(PROOF).encode())
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(line))
        line[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(line)


def nested(rng):
    return rng.choice([b"[", b'{"a":', b'{"kind":[']) * rng.randrange(1, 1000)


def sealed(rng):
    """Return a line that looks as after a handshake."""
    return rng.randbytes(32).hex().encode() + random_fields(rng)


def binary_protocol(rng):
    hellos = [b"\x16\x03\x01\x02\x00\x01", b"SSH-2.0-x\r", b"GET / HTTP/1.1\r\n\r", b"\x80\x2e\x01\x00\x02"]
    return rng.choice(hellos) + random_bytes(rng)


KINDS_OF_LINES = [random_bytes, random_fields, changed_proof, nested, sealed, binary_protocol]


def attack(served, rng, recorded):
    """Open one connection, send lines in one or several parts, and close it early or read to its end."""
    with suppress(ConnectionError), served.guest() as guest:
        # Reset at its end, so that 100,000 connections do not use up the ports of this machine.
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if rng.random() < 0.5:
            guest.recv(4096)
        lines = [rng.choice(KINDS_OF_LINES)(rng) for _ in range(rng.choice([0, 1, 1, 1, 2, 5]))]
        if rng.random() < 0.1:
            lines.insert(0, recorded)
        words = b"\n".join(lines) + rng.choice([b"", b"\n"])
        cut = rng.randrange(len(words) + 1)
        for part in (words[:cut], words[cut:]) if rng.random() < 0.3 else (words,):
            guest.sendall(part)
        if rng.random() < 0.3 and words.endswith(b"\n") and any(lines):
            while guest.recv(4096):
                pass


class Conversation:
    """An agent that talks to the launcher, which returns every number, until it is stopped."""

    def __init__(self, served):
        self._agent, launcher = served.let_in()
        served.selector.register(launcher, selectors.EVENT_READ, lambda: self._answer(launcher))
        self.num_answers, self.error, self._done = 0, None, threading.Event()
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def _answer(self, launcher):
        for message in launcher.receive():
            launcher.send("stop", number=message["number"])

    def _talk(self):
        try:
            while not self._done.is_set():
                self._agent.send("signal", number=self.num_answers)
                assert self._agent.next_message() == {"kind": "stop", "number": self.num_answers}
                self.num_answers += 1
        except Exception as error:
            self.error = error

    def end(self):
        self._done.set()
        self._thread.join()


def recorded_proof(served):
    """Return the proof of a real agent in another connection."""
    channel, recorded = Channel(served.guest()), []
    send = channel.send_encoded
    channel.send_encoded = lambda message: (recorded.append(message), send(message))
    handshake._introduce(channel, TOKEN, "h")
    channel.close()
    return recorded[0]


def fuzz(served, num_connections, seed):
    rng, recorded, conversation = random.Random(seed), recorded_proof(served), Conversation(served)
    try:
        for number in range(num_connections):
            attack(served, rng, recorded)
            if number % 100 == 0:
                assert conversation.error is None, f"after connection {number} of seed {seed}"
                assert served.is_alive, f"after connection {number} of seed {seed}"
    finally:
        conversation.end()
    assert conversation.error is None
    assert conversation.num_answers > num_connections / 100
    assert len(served.accepted) == 1  # The agent of the conversation.
    assert served.other_versions == []
    assert served.is_undisturbed()
    wait_for(lambda: not served.listener._unauthenticated and not served.listener._authenticated)
    return conversation.num_answers


def test_random_lines_of_guests_do_not_disturb_a_connected_agent(served, capfd):
    fuzz(served, 300, seed=1)
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.sweep
def test_100_000_connections_of_guests_do_not_disturb_a_connected_agent(served):
    seed, started = random.randrange(2**32), time.monotonic()
    num_answers = fuzz(served, 100_000, seed)
    seconds = time.monotonic() - started
    sys.stderr.write(f"\nseed {seed}: {num_answers:,} messages answered meanwhile, {seconds:.0f} s\n")
