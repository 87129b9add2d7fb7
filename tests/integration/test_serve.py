"""`neox-launch serve`: the server of a trained model, with OpenAI's client and others."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from support.browser import showing_page
from support.launches import launch
from support.served import Server, serving, write_trained_model

pytestmark = pytest.mark.slow

KEY = "sk-test-0123456789"
# Of different lengths; each continues otherwise.
PROMPTS = ["abc", "z", "mnopq", "aabb", "xyzabcdefgh", "q" * 30, "hij", "tuvw", "ace", "zyx", "k", "bcdbcd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("served")
    write_trained_model(found)
    (found / "key").write_text(KEY + "\n")
    return found


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, "--set", "serve.chat_template=chat.jinja") as found:
        yield found


def client(server: Server, key: str = "none"):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)


def text_of(server: Server, prompt: str, **fields) -> str:
    status, body = server.complete(prompt=prompt, max_tokens=20, **fields)
    assert status == 200, body
    return body["choices"][0]["text"]


def generated(folder, prompts: list[str]) -> list[dict]:
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    settings = {"sample-input-file": "prompts.txt", "sample-output-file": "texts.jsonl", "maximum-tokens": 20}
    arguments = [part for item in settings.items() for part in ("--set", "{}={}".format(*item))]
    done = launch(folder, "generate", "job.yml", *arguments, seconds=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]


def test_completions_are_the_texts_of_neox_launch_generate(folder, server):
    expected = generated(folder, PROMPTS)
    status, body = server.complete(prompt=PROMPTS, max_tokens=20, logprobs=0)
    assert status == 200
    for number, (choice, line) in enumerate(zip(body["choices"], expected, strict=True)):
        assert choice["index"] == number
        assert choice["text"] == (line["text"] or "")
        count = line["length"]
        assert choice["logprobs"]["token_logprobs"][:count] == pytest.approx(
            line["log_probabilities"], abs=1e-4
        )
        ends = line["finish_reason"] == "end-of-document"
        assert choice["finish_reason"] == ("stop" if ends else "length")
    assert body["usage"]["completion_tokens"] == sum(line["length"] for line in expected)
    ids = [[ord(letter) for letter in prompt] for prompt in PROMPTS]
    assert [one["text"] for one in server.complete(prompt=ids, max_tokens=20)[1]["choices"]] == [
        one["text"] for one in body["choices"]
    ]


def test_streams_equal_whole_answers(server):
    openai = client(server)
    options = {"model": "runs", "max_tokens": 20, "seed": 3, "n": 2, "logprobs": 3, "echo": True}
    whole = openai.completions.create(prompt=PROMPTS[:3], **options)
    assert len({choice.text for choice in whole.choices}) == 6
    texts, values = [""] * 6, [[] for _ in range(6)]
    reasons = [None] * 6
    usage = None
    chunks = openai.completions.create(
        prompt=PROMPTS[:3], stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            values[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    for streamed, choice in zip(values, whole.choices, strict=True):
        assert streamed[0] is None
        assert streamed[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-5)
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_chats_are_completions_of_the_rendered_conversation(server):
    openai = client(server)
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "xyz"}]
    options = {"model": "runs", "messages": messages, "temperature": 0, "max_completion_tokens": 9}
    chat = openai.chat.completions.create(logprobs=True, top_logprobs=2, **options)
    choice = chat.choices[0]
    assert choice.message.role == "assistant"
    rendered = "system:ab;user:xyz;assistant:"
    body = server.complete(prompt=rendered, max_tokens=9, logprobs=2)[1]
    assert choice.message.content == body["choices"][0]["text"]
    assert chat.usage.prompt_tokens == len(rendered)
    values = [one.logprob for one in choice.logprobs.content]
    assert values == pytest.approx(body["choices"][0]["logprobs"]["token_logprobs"], abs=1e-5)
    assert all(one.top_logprobs[0].logprob == one.logprob for one in choice.logprobs.content)
    streamed = openai.chat.completions.create(stream=True, **options)
    deltas = [chunk.choices[0].delta for chunk in streamed]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content


# Short, because the model has room for 96 letters.
WITH_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}{{ call.function.arguments }}>{% endfor %}"
    ";{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def rendered_with_tools(messages: list) -> str:
    """Return the text of a conversation, whose messages are objects of the client or dicts."""
    text = "[f]"
    for message in messages:
        fields = message if isinstance(message, dict) else message.model_dump()
        calls = (call["function"] for call in fields.get("tool_calls") or ())
        written = "".join("<{name}{arguments}>".format(**call) for call in calls)
        text += f"{fields['role'][0]}{fields['content'] or ''}{written};"
    return text + "a"


def test_a_conversation_of_six_turns_with_tools_and_streams_takes_what_the_client_returned(folder):
    openai = pytest.importorskip("openai")
    from openai.types.chat import ChatCompletionMessage

    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
    messages: list = []

    def streamed(chats, **options):
        chunks = [*chats.create(stream=True, stream_options={"include_usage": True}, **options)]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        return {"role": "assistant", "content": "".join(texts)}, chunks[-1].usage

    def helped(chats, **options):
        with chats.stream(stream_options={"include_usage": True}, **options) as stream:
            for _ in stream:
                pass
        final = stream.get_final_completion()
        return final.choices[0].message.model_dump(), final.usage

    def whole(chats, **options):
        found = chats.create(**options)
        return found.choices[0].message, found.usage

    def dumped(chats, **options):
        found = chats.create(logprobs=True, top_logprobs=2, **options)
        return found.choices[0].message.model_dump(), found.usage

    def read(chats, **options):
        found = chats.parse(**options)
        return found.choices[0].message, found.usage

    (folder / "tools.jinja").write_text(WITH_TOOLS)
    with serving(folder, "--set", "serve.chat_template=tools.jinja") as server:
        chats = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
        ).chat.completions
        for number, turn in enumerate((whole, streamed, helped, dumped, read, whole)):
            messages.append({"role": "user", "content": "uvwxyz"[number]})
            if number == 3:
                messages.append(ChatCompletionMessage(role="assistant", content=None, tool_calls=[call]))
                messages.append({"role": "tool", "tool_call_id": "1", "content": "3"})
            prompt = rendered_with_tools(messages)
            text = server.complete(prompt=prompt, max_tokens=4)[1]["choices"][0]["text"]
            # The client's helpers refuse an answer that is cut at max_tokens.
            stop = text[2:3] or ";"
            options = {"model": "runs", "temperature": 0, "max_tokens": 4, "stop": stop}
            answer, usage = turn(chats, messages=messages, tools=[tool], **options)
            messages.append(answer)
            assert rendered_with_tools(messages) == f"{prompt}{text.partition(stop)[0]};a", turn.__name__
            assert usage.prompt_tokens == len(prompt)
    assert len(messages) == 14


def test_log_probabilities_with_echo_are_those_of_the_model(server):
    text = "abcdeab"
    status, body = server.complete(prompt=text, max_tokens=0, echo=True, logprobs=2)
    found = body["choices"][0]
    assert (status, found["text"], found["finish_reason"]) == (200, text, "length")
    assert found["logprobs"]["tokens"] == list(text)
    assert found["logprobs"]["text_offset"] == list(range(len(text)))
    values, tops = found["logprobs"]["token_logprobs"], found["logprobs"]["top_logprobs"]
    assert (values[0], tops[0]) == (None, None)
    for place in range(1, len(text)):
        # The next token after each beginning, by itself.
        one = server.complete(prompt=text[:place], max_tokens=1, logprobs=20)[1]["choices"][0]["logprobs"]
        assert values[place] == pytest.approx(
            one["top_logprobs"][0].get(text[place], values[place]), abs=1e-4
        )
        best = max(one["top_logprobs"][0].values())
        assert max(tops[place].values()) == pytest.approx(best, abs=1e-4)
        assert len(tops[place]) == 2


def test_sixteen_clients_get_their_own_answers(server):
    expected = {prompt: text_of(server, prompt) for prompt in PROMPTS}
    # Greedy texts depend on the prompt alone; sampled ones also on the seed.
    drawn = {seed: text_of(server, "abc", temperature=1.5, seed=seed) for seed in range(4)}
    assert len(set(expected.values())) > 6
    assert len(set(drawn.values())) > 1

    def one_client(number: int) -> list[str]:
        wrong = []
        for turn in range(4):
            prompt = PROMPTS[(5 * number + turn) % len(PROMPTS)]
            if text_of(server, prompt) != expected[prompt]:
                wrong.append(prompt)
            if (
                text_of(server, "abc", temperature=1.5, seed=(number + turn) % 4)
                != drawn[(number + turn) % 4]
            ):
                wrong.append(f"seed {number}")
        return wrong

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one_client, range(16))) == [[]] * 16


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"prompt": "a", "max_tokens": 500}, 400, "at most 96"),
        ({"prompt": "a" * 90, "max_tokens": 7}, 400, "maximum length is 96 tokens"),
        ({"prompt": "a", "suffix": "b"}, 400, 'suffix: "b" is not supported'),
        ({"prompt": "a", "max_tokens": 0}, 400, "requires echo"),
        ({"prompt": "a", "unknown": 1}, 400, "unknown"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[1], [-1]]}, 400, "prompt"),
        ({"prompt": [100000]}, 400, "token id 100000"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "a", "model": "other"}, 404, "does not exist"),
        ({"prompt": ["a"] * 100, "n": 100}, 400, "at most 260"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_requests_are_refused_with_the_reason(server, fields, status, words):
    found, body = server.complete(**fields)
    assert (found, words in body["error"]["message"]) == (status, True), body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"


def test_requests_that_are_no_api_calls_are_refused_in_the_same_form(server):
    path = "/v1/completions"
    cases = [
        (404, ("GET", "/v1/nothing")),
        (405, ("GET", path)),
        (400, ("POST", path, b'{"prompt":')),
        (400, ("POST", path, b"[1]")),
        (400, ("POST", path, b"\xff\xfe")),
        (400, ("POST", path, b"[" * 100_000)),
        (400, ("POST", path, b'{"prompt": "a"}', {"Content-Type": "text/plain"})),
        (413, ("POST", path, b" " * (4 * 1024 * 1024 + 1))),
        (400, ("POST", "/v1/chat/completions", {"messages": []})),
        (400, ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "\ufdd0"}]})),
    ]
    for status, arguments in cases:
        found, body = server.request(*arguments)
        assert found == status, (arguments[:2], body)
        assert body["error"]["message"]
    assert server.request("GET", "/health") == (200, {"status": "ok", "texts": 0})


def test_other_sites_and_other_names_are_refused(server):
    own = f"http://127.0.0.1:{server.port}"
    assert server.request("GET", "/health", headers={"Origin": own})[0] == 200
    for origin in ("http://evil.example", "null", f"http://localhost:{server.port}", own + "1"):
        status, body = server.request("GET", "/health", headers={"Origin": origin})
        assert (status, body["error"]["code"]) == (403, "origin_not_allowed"), origin
    for host in (f"localhost:{server.port}", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert server.request("GET", "/health", host=host)[0] == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost:80:90", "evil.example:80", "[::1"):
        status, body = server.request("GET", "/health", host=host)
        assert (status, body["error"]["code"]) == (403, "host_not_allowed"), host


def test_a_client_that_disconnects_frees_its_places(server):
    for stream in (False, True):
        fields = {"prompt": ["abc"] * 8, "max_tokens": 90, "n": 8, "temperature": 2.0, "stream": stream}
        content = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
            limit = time.monotonic() + 60
            while server.request("GET", "/health")[1]["texts"] < 10:
                assert time.monotonic() < limit
        server.wait_for_texts(0)
    assert text_of(server, "abc")
    assert "Traceback" not in server.log.read_text()


def test_a_server_with_a_key_a_limit_and_a_name(folder, tmp_path):
    settings = {
        "serve.api_key_file": "key",
        "serve.max_waiting": 0,
        "serve.max_body_bytes": 400,
        "serve.max_tokens": 90,
        "serve.allowed_hosts": "[model.example]",
    }
    arguments = [part for item in settings.items() for part in ("--set", "{}={}".format(*item))]
    with serving(folder, *arguments) as server:
        openai = pytest.importorskip("openai")
        assert client(server, KEY).models.list().data[0].id == "runs"
        for wrong in ("none", KEY + "0", KEY[:-1]):
            with pytest.raises(openai.AuthenticationError):
                client(server, wrong).models.list()
        headers = {"Authorization": f"Bearer {KEY}"}
        for case in ({}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
            assert server.request("GET", "/v1/models", headers=case)[0] == 401
        assert server.request("GET", "/v1/models", headers=headers, host="Model.Example:80")[0] == 200
        assert server.request("GET", "/health")[0] == 200
        status, page = server.request("GET", "/")
        assert (status, "Text to continue" in page) == (200, True)
        path = "/v1/completions"
        assert server.request("POST", path, {"prompt": "a" * 400}, headers)[0] == 413
        refused = server.request("POST", path, {"prompt": "a", "max_tokens": 91}, headers)
        assert (refused[0], "at most 90" in refused[1]["error"]["message"]) == (400, True)
        chat = server.request(
            "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, headers
        )
        assert (chat[0], chat[1]["error"]["code"]) == (404, "no_chat_template")
        # Four places, none to wait in.
        with ThreadPoolExecutor(8) as pool:
            body = {"prompt": "abc", "max_tokens": 90, "n": 3, "temperature": 0}
            answers = list(pool.map(lambda _: server.request("POST", path, body, headers), range(8)))
        statuses = [status for status, _ in answers]
        assert {200, 429} == set(statuses)
        assert all(body["error"]["type"] == "rate_limit_error" for status, body in answers if status == 429)
        assert server.stop(signal.SIGTERM) == 0
        assert KEY not in server.log.read_text()


def test_a_stop_completes_what_runs_and_accepts_nothing_new(folder):
    with serving(folder, environment={"NEOX_API_KEY": KEY}) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"prompt": ["abc", "mno"] * 20, "max_tokens": 90, "temperature": 0}
        found = []
        running = threading.Thread(
            target=lambda: found.append(server.request("POST", "/v1/completions", body, headers))
        )
        running.start()
        server.wait_for_texts(40)
        server.process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + 30
        while (status := server.request("GET", "/health")[0]) == 200:
            assert time.monotonic() < limit
        assert status == 503
        late = server.request("POST", "/v1/completions", {"prompt": "a"}, headers)
        assert late[0] == 503
        running.join(120)
        assert found[0][0] == 200
        assert len(found[0][1]["choices"]) == 40
        assert server.process.wait(60) == 0


def worker_of(server: Server, rank: int) -> int:
    """Return the process id of a worker."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()[1:]]
    family = {server.process.pid}
    while added := {pid for pid, parent in pairs if parent in family} - family:
        family |= added
    for pid in family - {server.process.pid}:
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return pid
    raise AssertionError(f"no worker has rank {rank}: {listed}")


def lost_request(server: Server, body: dict) -> None:
    """Send a request whose server ends before it answers."""
    with suppress(OSError, HTTPException):
        server.request("POST", "/v1/completions", body)


def test_tensor_parallel_stages_answer_as_one_process_and_the_death_of_a_rank_ends_the_server(folder, server):
    expected = server.complete(prompt=PROMPTS, max_tokens=20, logprobs=1, echo=True)[1]["choices"]
    values = ("model-parallel-size=2", "pipe-parallel-size=2", "num-gpus=4")
    sizes = [part for value in values for part in ("--set", value)]
    with serving(folder, *sizes) as parallel:
        found = parallel.complete(prompt=PROMPTS, max_tokens=20, logprobs=1, echo=True)[1]["choices"]
        for one, other in zip(found, expected, strict=True):
            assert one["text"] == other["text"]
            values = one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"]
            assert values[0][1:] == pytest.approx(values[1][1:], abs=1e-3)
        body = {"prompt": ["abc"] * 100, "max_tokens": 90}
        killed = threading.Thread(target=lost_request, args=(parallel, body))
        killed.start()
        parallel.wait_for_texts(100)
        os.kill(worker_of(parallel, 3), signal.SIGKILL)
        assert parallel.process.wait(60) not in (0, None)
        assert "worker 3 on" in parallel.log.read_text()
        killed.join(60)


def test_a_port_in_use_and_a_missing_key_are_reported(folder, server):
    done = launch(folder, "serve", "job.yml", "--set", f"serve.port={server.port}", seconds=120)
    assert done.returncode == 2
    assert "serve.port to another" in done.stderr
    done = launch(folder, "serve", "job.yml", "--set", "serve.api_key_file=nothing", seconds=120)
    assert done.returncode == 2
    assert "serve.api_key_file: nothing" in done.stderr


def test_a_browser_shows_the_page_and_generates(server, tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    settled = "document.getElementById('state').textContent.startsWith('Complete')"
    with showing_page(chromium, f"http://127.0.0.1:{server.port}/", tmp_path / "profile") as page:
        page.wait_for("document.getElementById('state')?.textContent.startsWith('Ready')")
        assert page.run("document.getElementById('model').textContent") == "runs"
        fields = {"prompt": "abc<b>", "temperature": "0", "tokens": "20"}
        for name, value in fields.items():
            page.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")
        page.run("document.getElementById('start').click()")
        page.wait_for(settled)
        # The prompt is shown as it is, not as markup.
        expected = "abc<b>" + text_of(server, "abc<b>")
        assert page.run("document.getElementById('result').textContent") == expected
        page.run("document.getElementById('prompt').value = 'a'.repeat(200)")
        page.run("document.getElementById('start').click()")
        page.wait_for("document.getElementById('state').textContent.includes('maximum length is 96')")
        loaded = page.run("performance.getEntriesByType('resource').map((one) => new URL(one.name).host)")
        assert set(loaded) == {f"127.0.0.1:{server.port}"}
