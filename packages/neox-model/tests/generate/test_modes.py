import contextlib
import errno
import io
import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from neox_config.errors import NeoXError
from neox_config.schema.sections.generation import GenerationSection
from neox_data.tokenizers import build_tokenizer
from neox_model.errors import StopRequested
from neox_model.generate.batch import NewTokens, Request
from neox_model.generate.conversation import Conversation
from neox_model.generate.engine import Engine, Reply, Update
from neox_model.generate.modes import MODES, Job
from neox_model.generate.prompts import Prompts, read_prompts
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.refusals import refused, shows


class Shout:
    """Answers with the prompt in capitals and a random digit, one letter a step; nothing to no prompt."""

    def __init__(self) -> None:
        self.running: dict[int, list[int]] = {}
        self.said: dict[int, list[int]] = {}

    def submit(self, request: Request) -> int:
        ticket = len(self.said)
        digit = ord("0") + request.sampling.seed % 10
        self.running[ticket] = [*bytes(request.prompt).upper(), digit] if request.prompt else []
        self.said[ticket] = []
        return ticket

    def reply(self, ticket: int, reason: str, message: str | None = None) -> Reply:
        tokens = self.said[ticket]
        return Reply(
            tokens=tokens,
            log_probabilities=[-0.5] * len(tokens),
            text=bytes(tokens).decode(errors="replace"),
            finish_reason=reason,
            message=message,
            duration_seconds=0.01,
        )

    def step(self) -> list[Update]:
        updates = []
        for ticket, left in list(self.running.items()):
            new = left[:1]
            del left[:1]
            self.said[ticket] += new
            reply = None
            if not self.said[ticket]:
                reply = self.reply(ticket, "end-of-document", "nothing to say")
            elif not left:
                reply = self.reply(ticket, "maximum-tokens")
            if reply is not None:
                del self.running[ticket]
            text = bytes(new).decode(errors="replace")
            updates.append(Update(ticket=ticket, text=text, new=NewTokens(new, [-0.5]), reply=reply))
        return updates

    def cancel(self, ticket: int) -> Reply | None:
        del self.running[ticket]
        return self.reply(ticket, "interrupted", "interrupted")

    replies = Engine.replies


class FakeJob(Job):
    def engine(self, slots: int, capacity: int) -> Shout:
        return self.forward(slots, capacity)


def job(
    groups: Groups = SINGLE_PROCESS,
    seed: int = 1,
    engine: Callable[[], Shout] = Shout,
    **settings: object,
) -> Job:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    return FakeJob(
        GenerationSection(**settings),
        lambda slots, capacity: engine(),
        tokenizer,
        groups,
        seed=seed,
        seq_length=20_000,
    )


def typed(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content), encoding="ascii")


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("  first \n\n   \nsecond\nthird é\n", encoding="utf-8")
    return path


def test_prompts_are_stripped_lines_without_the_empty_ones(prompts):
    assert read_prompts(prompts) == [(1, "first"), (4, "second"), (5, "third é")]


def test_only_a_newline_ends_a_prompt_and_a_byte_order_mark_is_dropped(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\x0b\x0c\x1c\x85\u2028still one\r\n\rtwo\n".encode())
    assert read_prompts(path) == [(1, "one\x0b\x0c\x1c\x85\u2028still one"), (2, "two")]


def test_prompts_with_another_end_may_have_several_lines(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "prompts.txt"
    path.write_text("def one():\n    return 1\n<end>\n\n  two <end><end> last\nline\n")
    assert read_prompts(path, "<end>") == [
        (1, "def one():\n    return 1"),
        (5, "two"),
        (5, "last\nline"),
    ]
    assert "1 empty prompt is left out" in caplog.text
    path.write_text("one\nmore\n\ntwo\n\n")
    assert read_prompts(path, "\n\n") == [(1, "one\nmore"), (4, "two")]
    path.write_text("one<end>\n")
    assert read_prompts(path, "<end>") == [(1, "one")]


@pytest.mark.parametrize(
    ("end", "content", "prompts"),
    [
        ("\n", b"one\n\ntwo\n", ["one", "", "two"]),
        ("<end>", b"one\nmore<end> two <end>\nthree\n", ["one\nmore", "two", "three"]),
        ("<end>", b"one<end>\n", ["one"]),
        ("\n\n", b"one\nmore\n\ntwo\n\n", ["one\nmore", "two"]),
    ],
)
def test_prompts_of_standard_input_end_where_those_of_a_file_do(monkeypatch, capsys, end, content, prompts):
    monkeypatch.setattr("sys.stdin", typed(content))
    reader = Prompts(end)
    assert [reader.read() for _ in range(len(prompts) + 2)] == [*prompts, None, None]
    assert ("... " in capsys.readouterr().err) is any("\n" in prompt for prompt in prompts)


def test_an_interrupt_drops_the_lines_of_a_prompt_without_its_end(monkeypatch):
    lines = iter(["one\n", KeyboardInterrupt(), "two<end>\n"])

    def read(shown: str) -> str:
        line = next(lines)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    monkeypatch.setattr("neox_model.generate.prompts._read_line", read)
    reader = Prompts("<end>")
    with pytest.raises(KeyboardInterrupt):
        reader.read()
    assert reader.read() == "two"


def test_every_mode_ends_prompts_with_the_configured_string(tmp_path, monkeypatch):
    path, output = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    path.write_text("a\nb<end>c<end>")
    MODES["input-file"](job(sample_input_file=str(path), sample_output_file=str(output), prompt_end="<end>"))
    assert [line["context"] for line in read_lines(output)] == ["a\nb", "c"]
    monkeypatch.setattr("sys.stdin", typed(b"/help<end>a\nb<end>c<end>"))
    MODES["interactive"](job(sample_output_file=str(output), prompt_end="<end>"))
    assert [line["context"] for line in read_lines(output)] == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ("prompts.txt", "contains no")),
        (b"\xef\xbb\xbf\n \n", ("prompts.txt", "contains no")),
        (b"good\nb\xe4d\n", ("prompts.txt", "line 2")),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_refused_with_the_cause(tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with refused(NeoXError, *message):
        MODES["input-file"](job(sample_input_file=str(path)))
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_missing_prompt_file_is_named(tmp_path):
    with refused(NeoXError, "sample_input_file", "absent.txt"):
        read_prompts(tmp_path / "absent.txt")


def test_results_are_json_lines_in_a_file_and_text_on_standard_output(prompts, capsys):
    MODES["input-file"](job(sample_input_file=str(prompts)))
    lines = read_lines(prompts.with_name("prompts.txt.output.jsonl"))
    assert [line["context"] for line in lines] == ["first", "second", "third é"]
    assert [key for line in lines for key in line] == [
        *("context", "text", "length", "finished", "message", "duration_seconds"),
        *("prompt", "tokens", "log_probabilities", "finish_reason"),
    ] * 3
    assert lines[0]["text"][:-1] == "FIRST"
    assert (lines[0]["length"], lines[0]["finished"], lines[0]["message"]) == (6, False, None)
    assert (lines[0]["prompt"], lines[0]["finish_reason"]) == ("first", "maximum-tokens")
    assert (bytes(lines[0]["tokens"]).decode(), lines[0]["log_probabilities"]) == (
        lines[0]["text"],
        [-0.5] * 6,
    )
    shown = capsys.readouterr().out
    assert shows(shown, "sample 2", "3, 7")
    assert f"second{lines[1]['text']}" in shown
    assert sorted(path.name for path in prompts.parent.iterdir()) == [
        "prompts.txt",
        "prompts.txt.output.jsonl",
    ]


def test_unconditional_samples_start_from_nothing_and_no_text_is_null(tmp_path):
    output = tmp_path / "samples.jsonl"
    MODES["unconditional"](job(num_samples=2, sample_output_file=str(output)))
    lines = read_lines(output)
    assert [(line["context"], line["text"], line["length"], line["finished"]) for line in lines] == [
        ("", None, 0, True)
    ] * 2
    assert lines[0]["message"] == "nothing to say"


def test_a_text_without_a_prompt_has_no_tokens_that_a_tokenizer_adds():
    requests = []

    class Recording(Shout):
        def submit(self, request: Request) -> int:
            requests.append(request)
            return super().submit(request)

    tokenizer = SimpleNamespace(encode=lambda text: [1, *text.encode()])
    MODES["unconditional"](replace(job(num_samples=1, engine=Recording), tokenizer=tokenizer))
    assert [list(one.prompt) for one in requests] == [[]]


def test_interactive_answers_each_line_until_the_input_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", typed(b" one \n\ntwo"))
    MODES["interactive"](job(sample_output_file=str(tmp_path / "talk.jsonl")))
    assert [line["context"] for line in read_lines(tmp_path / "talk.jsonl")] == ["one", "two"]
    captured = capsys.readouterr()
    assert captured.out.startswith("ONE")
    assert "prompt" not in captured.out
    assert "prompt" in captured.err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"maximum_tokens": 9}, (3, 8 + 9)),
        ({"maximum_tokens": 9, "generation_batch_size": 2}, (2, 8 + 9)),
        ({"maximum_tokens": 50_000}, (3, 20_000)),
    ],
)
def test_the_engine_has_room_for_the_longest_prompt_and_its_text(prompts, settings, expected):
    sizes, requests = [], []

    class Recording(Shout):
        def submit(self, request: Request) -> int:
            requests.append(request)
            return super().submit(request)

    def engine(slots: int, capacity: int) -> Shout:
        sizes.append((slots, capacity))
        return Recording()

    MODES["input-file"](
        replace(job(sample_input_file=str(prompts), stop_strings=("x",), **settings), forward=engine)
    )
    # "third é" has eight bytes.
    assert sizes == [expected]
    assert {(one.maximum_tokens, one.stop_strings) for one in requests} == {
        (settings["maximum_tokens"], ("x",))
    }
    assert len({one.sampling.seed for one in requests}) == 3


def test_a_conversation_has_room_for_the_text(tmp_path, monkeypatch):
    output = tmp_path / "talk.jsonl"
    # "oneONE1" and "two", with a newline, are 11 tokens.
    for room, expected in ((10, "two"), (11, "oneONE")):
        monkeypatch.setattr("sys.stdin", typed(b"one\ntwo\n"))
        MODES["interactive"](job(maximum_tokens=20_000 - room, sample_output_file=str(output)))
        assert str(read_lines(output)[1]["prompt"]).startswith(expected)


def test_samples_depend_on_the_seed(prompts):
    def texts(seed: int) -> list[object]:
        MODES["input-file"](job(sample_input_file=str(prompts), seed=seed))
        return [line["text"] for line in read_lines(prompts.with_name("prompts.txt.output.jsonl"))]

    assert texts(1) == texts(1)
    assert len({tuple(texts(seed)) for seed in range(5)}) > 1


def answer_as_replicas(prompts: str) -> None:
    MODES["input-file"](job(groups=create_groups(1, 1), sample_input_file=prompts))


def test_replicas_share_the_prompts_with_the_results_of_one_process(prompts):
    output = prompts.with_name("prompts.txt.output.jsonl")
    MODES["input-file"](job(sample_input_file=str(prompts)))
    alone = [line | {"duration_seconds": 0} for line in read_lines(output)]
    output.unlink()
    run_ranks(answer_as_replicas, size=2, prompts=str(prompts))
    assert [line | {"duration_seconds": 0} for line in read_lines(output)] == alone


def test_a_prompt_has_num_samples_continuations_with_seeds_of_their_own(tmp_path):
    output = tmp_path / "samples.jsonl"
    MODES["prompt"](job(prompt="say", num_samples=3, sample_output_file=str(output)))
    lines = read_lines(output)
    assert [line["context"] for line in lines] == ["say"] * 3
    assert {line["text"][:-1] for line in lines} == {"SAY"}
    assert len({line["text"] for line in lines}) > 1
    MODES["prompt"](job(prompt="say", sample_output_file=str(output)))
    assert len(read_lines(output)) == 1


class Overflowing(Shout):
    """The output of the model for the second text is not finite."""

    def reply(self, ticket: int, reason: str, message: str | None = None) -> Reply:
        made = super().reply(ticket, reason, message)
        return replace(made, is_finite=ticket != 1)


def test_output_of_the_model_that_is_not_finite_is_an_error(prompts, monkeypatch):
    with refused(NeoXError, "text 2"):
        MODES["input-file"](job(engine=Overflowing, sample_input_file=str(prompts)))
    partial = prompts.with_name("prompts.txt.output.jsonl.partial")
    assert [line["context"] for line in read_lines(partial)] == ["first"]
    monkeypatch.setattr("sys.stdin", typed(b"one\ntwo\n"))
    with refused(NeoXError, "text 2"):
        MODES["interactive"](job(engine=Overflowing))


class Refusing(Shout):
    """Has no room for the second prompt, and answers it first."""

    def step(self) -> list[Update]:
        updates = super().step()
        if 1 in self.running:
            del self.running[1]
            reply = self.reply(1, "prompt-too-long", "too long")
            updates.append(Update(ticket=1, text="", new=NewTokens([], []), reply=reply))
        return [update for update in updates if update.ticket != 1 or update.reply is not None]


def test_a_prompt_that_is_too_long_is_reported_with_its_line_and_has_a_result(prompts, caplog):
    MODES["input-file"](job(engine=Refusing, sample_input_file=str(prompts)))
    lines = read_lines(prompts.with_name("prompts.txt.output.jsonl"))
    assert [(line["context"], line["finish_reason"]) for line in lines] == [
        ("first", "maximum-tokens"),
        ("second", "prompt-too-long"),
        ("third é", "maximum-tokens"),
    ]
    assert shows(caplog.text, "1", "line 4")


def test_a_conversation_is_continued_and_can_be_forgotten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", typed(b"one\ntwo\n/history\n/new\n/help\nthree\n"))
    output = tmp_path / "talk.jsonl"
    MODES["interactive"](job(sample_output_file=str(output)))
    first, second, third = read_lines(output)
    assert [line["context"] for line in (first, second, third)] == ["one", "two", "three"]
    assert second["prompt"] == f"one{first['text']}\ntwo"
    assert (first["prompt"], third["prompt"]) == ("one", "three")
    shown = capsys.readouterr().err
    assert f"{second['prompt']}{second['text']}\n(a new conversation)" in shown.replace(
        "prompt (/help for commands, Ctrl-D to exit)> ", ""
    )
    assert "/new starts" in shown


def test_an_unknown_command_is_not_a_prompt_but_a_path_or_a_comment_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", typed(b"/foo\n/usr/bin\n// sort\n/foo bar\n"))
    output = tmp_path / "talk.jsonl"
    MODES["interactive"](job(sample_output_file=str(output)))
    assert [line["context"] for line in read_lines(output)] == ["/usr/bin", "// sort", "/foo bar"]
    shown = capsys.readouterr().err
    assert shows(shown, "/foo", "/help")
    assert "Ctrl-D to exit" in shown


def test_without_history_every_prompt_is_a_text_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed(b"one\ntwo\n"))
    output = tmp_path / "talk.jsonl"
    MODES["interactive"](job(sample_output_file=str(output), interactive_history=False))
    assert [line["prompt"] for line in read_lines(output)] == ["one", "two"]


def test_the_oldest_turns_are_left_out_if_they_do_not_fit(caplog):
    talk = Conversation(build_tokenizer("CharLevelTokenizer"), room=12, keeps_history=True)
    shout = Shout()
    for context in ("ab", "cd", "ef"):
        prompt, tokens = talk.prompt(context)
        assert bytes(tokens).decode() == prompt
        shout.said[0] = list(context.upper().encode())
        talk.add(context, shout.reply(0, "maximum-tokens"))
    assert prompt == "abAB\ncdCD\nef"
    assert not caplog.records
    assert talk.prompt("gh")[0] == "cdCD\nefEF\ngh"
    assert shows(caplog.text, "oldest 1", "3 turns")
    too_long = "a prompt that is too long by itself"
    assert talk.prompt(too_long)[0] == too_long
    talk.add(too_long, shout.reply(0, "prompt-too-long"))
    assert talk.prompt("gh")[0] == "cdCD\nefEF\ngh"


class Interrupted(Shout):
    """Sends this process a signal when the request with this number has two letters."""

    def __init__(self, number: int, request: int = 1) -> None:
        super().__init__()
        self.number, self.request = number, request

    def step(self) -> list[Update]:
        updates = super().step()
        if self.request in self.running and len(self.said[self.request]) == 2:
            signal.raise_signal(self.number)
        return updates


class OneByOne(Interrupted):
    """Answers a request only when those before it are answered."""

    def step(self) -> list[Update]:
        first = min(self.running)
        others = {ticket: self.running.pop(ticket) for ticket in list(self.running) if ticket != first}
        updates = super().step()
        self.running |= others
        return updates


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_generation_keeps_and_names_its_results(prompts, caplog, number, code):
    partial = prompts.with_name("prompts.txt.output.jsonl.partial")
    before = signal.getsignal(number)
    for kept in (partial, prompts.with_name("prompts.txt.output.jsonl.1.partial")):
        with pytest.raises(StopRequested) as raised:
            MODES["input-file"](job(engine=lambda: OneByOne(number), sample_input_file=str(prompts)))
        assert raised.value.exit_code == code
        assert shows(caplog.text, "1 result", partial)
        assert kept.exists()
    assert [line["context"] for line in read_lines(kept)] == ["first"]
    assert signal.getsignal(number) == before
    MODES["input-file"](job(sample_input_file=str(prompts)))
    assert sorted(path.name for path in prompts.parent.iterdir()) == [
        "prompts.txt",
        "prompts.txt.output.jsonl",
        "prompts.txt.output.jsonl.1.partial",
        "prompts.txt.output.jsonl.2.partial",
    ]


def test_nothing_remains_of_a_generation_stopped_before_its_first_result(prompts):
    with pytest.raises(StopRequested):
        MODES["input-file"](
            job(engine=lambda: OneByOne(signal.SIGINT, request=0), sample_input_file=str(prompts))
        )
    assert [path.name for path in prompts.parent.iterdir()] == ["prompts.txt"]


def test_interrupt_ends_the_reply_and_not_the_session(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed(b"one\ntwo\nthree\n"))
    output = tmp_path / "talk.jsonl"
    before = signal.getsignal(signal.SIGINT)
    MODES["interactive"](job(engine=lambda: Interrupted(signal.SIGINT), sample_output_file=str(output)))
    found = [(line["context"], line["text"][:3], line["message"]) for line in read_lines(output)]
    # The interrupted reply is part of the conversation as far as it is.
    assert found == [("one", "ONE", None), ("two", "ON", "interrupted"), ("three", "ONE", None)]
    assert [len(line["text"]) for line in read_lines(output)][1] == 2
    assert read_lines(output)[2]["prompt"].splitlines()[1:] == ["twoON", "three"]
    assert signal.getsignal(signal.SIGINT) == before


class Watched(Shout):
    """Records for each reply how it is announced to the launcher."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.announced, self.seen = folder / "rank-0.interruptible", []

    def submit(self, request: Request) -> int:
        self.seen.append(self.announced.read_text())
        return super().submit(request)


def test_replies_of_an_interactive_session_can_be_interrupted_by_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed(b"one\ntwo\n"))
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    watched = Watched(tmp_path)
    MODES["interactive"](job(engine=lambda: watched))
    assert watched.seen == ["0", "1"]
    assert not watched.announced.exists()


def test_termination_ends_an_interactive_session_and_keeps_the_replies(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sys.stdin", typed(b"one\ntwo\nthree\n"))
    with refused(StopRequested, "SIGTERM"):
        MODES["interactive"](
            job(engine=lambda: Interrupted(signal.SIGTERM), sample_output_file=str(tmp_path / "talk.jsonl"))
        )
    assert [line["context"] for line in read_lines(tmp_path / "talk.jsonl.partial")] == ["one"]
    assert "1 result is" in caplog.text


@pytest.mark.parametrize("content", [None, b'{"context": "earlier"}\n'])
def test_a_session_without_a_reply_keeps_the_results_of_an_earlier_one(
    tmp_path, monkeypatch, caplog, content
):
    monkeypatch.setattr("sys.stdin", typed(b"\n\n"))
    output = tmp_path / "talk.jsonl"
    if content is not None:
        output.write_bytes(content)
    MODES["interactive"](job(sample_output_file=str(output)))
    kept = {} if content is None else {"talk.jsonl": content}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    outcome = "is not written" if content is None else "keeps the results of an earlier generation"
    assert f"{output} {outcome}" in caplog.text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_standard_input_that_cannot_be_read_is_named_and_not_the_results(tmp_path, monkeypatch, is_terminal):
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    stream = SimpleNamespace(
        buffer=SimpleNamespace(readline=fail), isatty=lambda: is_terminal, reconfigure=lambda **_: None
    )
    monkeypatch.setattr("sys.stdin", stream)
    monkeypatch.setattr("builtins.input", fail)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    with refused(NeoXError, "standard input", "Input/output"):
        MODES["interactive"](job(sample_output_file=str(tmp_path / "texts.jsonl")))


def test_undecodable_bytes_of_a_typed_prompt_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed(b"\xef\xbb\xbfone\xff\n\xe4\xb8\xad\n" + b"x" * 10_000))
    MODES["interactive"](job(sample_output_file=str(tmp_path / "talk.jsonl")))
    contexts = [line["context"] for line in read_lines(tmp_path / "talk.jsonl")]
    assert contexts == ["one\ufffd", "中", "x" * 10_000]


TERMINAL = """
import signal, sys
from neox_model.generate.interruption import Interrupts
from neox_model.generate.modes import _ask
from neox_model.generate.prompts import Prompts
interrupts, typed = Interrupts(), Prompts("\\n")
with interrupts.handled():
    while (line := _ask(typed, interrupts)) is not None:
        print("got", len(line), line[:5], flush=True)
"""


def wait_for_output(terminal: int, text: bytes, seen: bytearray) -> None:
    deadline = time.monotonic() + 300
    while text not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536)
    assert text in seen


def wait_until_it_waits(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process sleeps: Python reacts late to a signal that comes just before it does."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S":
            return
        time.sleep(0.01)
    raise AssertionError("the process does not wait for input")


@pytest.mark.slow
def test_terminal_takes_long_lines_several_pasted_lines_and_interrupts():
    terminal, worker_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL], stdin=worker_side, stdout=worker_side, stderr=worker_side
    )
    os.close(worker_side)
    seen, prompt = bytearray(), b"prompt (/help for commands, Ctrl-D to exit)> "
    wait_for_output(terminal, prompt, seen)
    wait_until_it_waits(process)
    process.send_signal(signal.SIGINT)
    wait_for_output(terminal, b"press Ctrl-D to exit", seen)
    # Before its next prompt, readline has not prepared the terminal, and the kernel cuts long lines.
    wait_for_output(terminal, prompt, seen[seen.index(b"press Ctrl-D to exit") :])
    os.set_blocking(terminal, False)
    left, seen = b"a" * 9_999 + b"\nsecond\nb\xc3\xa4d\n", bytearray()
    deadline = time.monotonic() + 300
    while seen.count(b"got") < 3 and time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(terminal, left[:512]) :] if left else left
        with contextlib.suppress(BlockingIOError):
            seen += os.read(terminal, 65536)
    # Ctrl-D between two prompts is lost, because readline changes the terminal's mode.
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.write(terminal, b"\x04")
            seen += os.read(terminal, 65536)
        time.sleep(0.1)
    assert process.wait(timeout=300) == 0
    got = [line for line in seen.decode().splitlines() if line.startswith("got")]
    assert got == ["got 9999 aaaaa", "got 6 secon", "got 3 bäd"]
    os.close(terminal)


@pytest.mark.slow
def test_terminal_as_input_alone_answers_all_prompts(tmp_path):
    # As with neox-launch: standard output and standard error are not the terminal.
    terminal, worker_side = pty.openpty()
    settings = termios.tcgetattr(worker_side)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(worker_side, termios.TCSANOW, settings)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL], stdin=worker_side, stdout=out, stderr=errors
        )
    os.close(worker_side)
    os.write(terminal, b"one\nsecond\n")
    while (tmp_path / "out").read_text() != "got 3 one\ngot 6 secon\n":
        assert process.poll() is None
        time.sleep(0.1)
    os.write(terminal, b"\x04")
    assert process.wait(timeout=300) == 0
    errors = (tmp_path / "errors").read_text()
    assert errors.count("prompt (/help for commands, Ctrl-D to exit)> ") == 3
    os.close(terminal)


class Selective(Shout):
    """Has no room for prompts that begin with an x; its answers have no digit."""

    def submit(self, request: Request) -> int:
        ticket = super().submit(request)
        self.running[ticket] = self.running[ticket][:-1]
        return ticket

    def step(self) -> list[Update]:
        updates = []
        for update in super().step():
            if self.said[update.ticket][0] == ord("X"):
                self.running.pop(update.ticket, None)
                reply = replace(self.reply(update.ticket, "prompt-too-long", "too long"), tokens=[], text="")
                update = replace(update, reply=reply)
            updates.append(update)
        return updates


def test_of_ten_thousand_prompts_each_has_one_result_in_their_order(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    kinds = ("same", "{}", "  é{}\t", "", "x{}", "   ")
    lines = [kinds[number % len(kinds)].format(number) for number in range(15_000)]
    expected = [line.strip() for line in lines if line.strip()]
    assert len(expected) == 10_000
    path, output = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    path.write_text("\n".join(lines))
    MODES["input-file"](job(engine=Selective, sample_input_file=str(path), sample_output_file=str(output)))
    found = [json.loads(line) for line in output.read_text().split("\n")[:-1]]
    assert [one["context"] for one in found] == expected
    # Bytes that are not ASCII have no capitals.
    texts = [None if text.startswith("x") else text.encode().upper().decode() for text in expected]
    assert [one["text"] for one in found] == texts
    assert [path.name for path in tmp_path.glob("results*")] == ["results.jsonl"]
    assert shows(caplog.text, "10,000", "5,000")
    assert "10,000 results: " in caplog.text
    assert shows(caplog.text, "2,500", "line 5", "line 11")
