"""The web application without a web server."""

import asyncio
import json
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, processors

from neox_config.errors import NeoXError
from neox_data.errors import TokenizerError
from neox_data.preprocess.chat_template import ChatTemplate
from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer
from neox_model.generate.batch import NewTokens, Scores
from neox_model.generate.engine import Reply, Update
from neox_model.serve.answers import ChatAnswer
from neox_model.serve.app import build_app
from neox_model.serve.bodies import ChatBody, parsed
from neox_model.serve.calls import Calls
from neox_model.serve.errors import ApiError
from neox_model.serve.model import ServedModel
from neox_model.serve.run import _key, _template
from neox_model.serve.web import listening_socket
from support.refusals import refused, shows

LETTERS = build_tokenizer("CharLevelTokenizer")


def served(tokenizer: Tokenizer, template: ChatTemplate | None = None) -> ServedModel:
    return ServedModel(
        name="m", tokenizer=tokenizer, seq_length=64, default_tokens=8, max_tokens=64, template=template
    )


async def request(
    model: ServedModel,
    calls: Calls,
    body: dict[str, Any],
    *,
    leaves: bool,
    host: bytes = b"127.0.0.1",
    parts: int = 1,
    path: str = "/v1/completions",
    method: str = "POST",
    headers: dict[bytes, bytes] | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body of the response; a client that leaves closes its connection at once.

    The request arrives in parts. The status is that of no response if the client left before.
    """
    app = build_app(model, calls, allowed_hosts=(), key=None, max_body=10**6)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": list(({b"host": host, b"content-type": b"application/json"} | (headers or {})).items()),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    arriving = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    arriving += [{"type": "http.request", "body": b" ", "more_body": True} for _ in range(parts - 1)]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if arriving:
            return arriving.pop()
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert not arriving, "a response before the request is complete may be lost"
        sent.append(message)

    await app(scope, receive, send)
    status = sent[0]["status"] if sent else 0
    return status, b"".join(message.get("body", b"") for message in sent)


class Unused(type(LETTERS)):  # type: ignore[misc]
    """A tokenizer that must not be used."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError("a request that is refused is not prepared")


def test_a_request_for_too_many_texts_is_refused_before_it_is_prepared():
    calls = Calls(slots=2, max_waiting=2)
    body = {"prompt": ["a", "b"], "n": 3}
    status, content = asyncio.run(request(served(Unused()), calls, body, leaves=False))
    assert status == 400
    assert b"6 texts were requested; request at most 4" in content


class Refusing(type(LETTERS)):  # type: ignore[misc]
    """A tokenizer that cannot encode."""

    def encode(self, text: str) -> list[int]:
        raise TokenizerError("there is no token for it")


def test_a_text_that_the_tokenizer_cannot_encode_is_the_request_s_error():
    calls = Calls(slots=2, max_waiting=2)
    status, content = asyncio.run(request(served(Refusing()), calls, {"prompt": "a"}, leaves=False))
    assert status == 400
    assert shows(json.loads(content)["error"]["message"], "prompt", "no token")
    with refused(ApiError, "messages", "no token"):
        served(Refusing()).encode_rendered("a")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_no_error_of_the_server_and_cancels_its_texts(stream):
    calls = Calls(slots=2, max_waiting=2)
    # An error would be raised here, as uvicorn logs it with its traceback.
    asyncio.run(request(served(LETTERS), calls, {"prompt": "a", "stream": stream}, leaves=True))
    assert calls.count == 0
    assert [command.action for command in calls.take(timeout=0)] == ["submit", "cancel"]


@pytest.mark.parametrize(
    ("host", "body", "status"),
    [
        (b"evil.example", {}, 403),
        (b"127.0.0.1", {"prompt": 5}, 400),
        (b"127.0.0.1", {"prompt": "a" * 10**6}, 413),
    ],
)
def test_a_refusal_waits_for_the_rest_of_the_request(host, body, status):
    calls = Calls(slots=2, max_waiting=2)
    found, content = asyncio.run(request(served(LETTERS), calls, body, leaves=False, host=host, parts=5))
    assert (found, b"error" in content) == (status, True)


def test_the_rest_of_a_refused_request_has_a_limit(monkeypatch):
    monkeypatch.setattr("neox_model.serve.guard._DISCARDED_BYTES", 2)
    calls = Calls(slots=2, max_waiting=2)
    with refused(AssertionError, "may be lost"):
        asyncio.run(request(served(LETTERS), calls, {}, leaves=False, host=b"evil.example", parts=9))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_scores_that_are_not_finite_are_an_error_with_the_reason(value):
    calls = Calls(slots=2, max_waiting=2)

    async def client() -> tuple[int, bytes]:
        body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}
        asked = asyncio.create_task(request(served(LETTERS), calls, body, leaves=False))
        while not calls.count:
            await asyncio.sleep(0.01)
        reply = Reply(finish_reason="maximum-tokens", message=None)
        scores = Scores([value], [[(1, value)]])
        calls.deliver(0, Update(ticket=0, text="", new=NewTokens([], [], prompt=scores), reply=reply))
        return await asked

    status, content = asyncio.run(client())
    assert (status, b"output is not finite" in content) == (500, True)


def test_an_update_after_the_end_of_the_web_server_is_no_error_of_its_own():
    calls = Calls(slots=1, max_waiting=1)

    async def client() -> None:
        calls.open(ServedModel.requests(served(LETTERS), BODY, [1], number=0, top_count=0, maximum_tokens=1))

    asyncio.run(client())
    calls.deliver(0, Update(ticket=0, text="a", new=NewTokens([], []), reply=None))
    assert calls.count == 1


BODY = parsed(ChatBody, b'{"messages": [{"role": "user", "content": "b"}]}')


def test_a_rendered_conversation_has_the_beginning_that_its_template_writes_and_no_second_one():
    library = LibraryTokenizer(
        models.WordLevel({"<s>": 0, "<|endoftext|>": 1, "a": 2, "b": 3}, unk_token="a")
    )
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    library.add_special_tokens(["<s>", "<|endoftext|>"])
    tokenizer = LibraryBackedTokenizer(library, source="words")
    assert tokenizer.encode("b") == [0, 3]
    source = "{{ bos_token }} {% for message in messages %}{{ message.content }}{% endfor %}"
    template = ChatTemplate(source, name="chat.jinja", tokens={"bos_token": "<s>"})
    answer = ChatAnswer(served(tokenizer, template), BODY)
    assert list(answer.requests[0].prompt) == [0, 3]
    assert answer.requests[0].stop_strings == ()
    ended = source.replace("{% endfor %}", " <|endoftext|> <s>{% endfor %}")
    model = served(tokenizer, ChatTemplate(ended, name="chat.jinja", tokens={"eos_token": "</s>"}))
    assert model.end_of_answer == (1, "<|endoftext|>")
    # An answer to a chat ends with the special token with which the template ends one.
    assert ChatAnswer(model, BODY).requests[0].stop_strings == ("</s>", "<|endoftext|>")


CALLING = b"""{
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}]
}"""


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("{{ m.content }}", "[f]a"),  # Would write None.
        ("{{ '' + m.content }}", "[f]a"),  # Would fail.
        ("{{ m.content if m.content is string else m.tool_calls[0].function.name }}", "[f]af"),
    ],
)
def test_tools_and_null_contents_are_what_the_template_can_write(answer, text):
    tools = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    source = "{% for m in messages %}" + answer + "{% endfor %}"
    body = parsed(ChatBody, CALLING)
    model = served(LETTERS, ChatTemplate(tools + source, name="chat.jinja", tokens={}))
    assert LETTERS.decode(list(ChatAnswer(model, body).requests[0].prompt)) == text
    with refused(ApiError, "tools", "template"):
        ChatAnswer(served(LETTERS, ChatTemplate(source, name="chat.jinja", tokens={})), body)


def test_an_address_has_one_server_also_while_it_loads_its_model():
    with listening_socket("127.0.0.1", 0) as first, refused(NeoXError, code="cannot-listen"):
        listening_socket("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "."])
def test_a_wrong_template_next_to_the_vocabulary_stops_no_server(vocabulary, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    assert _template(None, vocabulary) is None
    assert "chats are refused: " in caplog.text
    assert "chat_template.jinja is not" in caplog.text
    with refused(NeoXError, "serve.chat-template", code="invalid-template"):
        _template("chat_template.jinja", vocabulary)


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example", "a\0b"])
def test_a_host_that_no_name_server_can_have_is_reported(host):
    with refused(NeoXError, code="unknown-host"):
        listening_socket(host, 0)


@pytest.mark.parametrize("key", [" ", "sch\u00f6n", "two words"])
def test_a_key_that_no_client_can_send_is_refused_wherever_it_comes_from(key, tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_API_KEY", key)
    with refused(NeoXError, "NEOX_API_KEY", code="invalid-key"):
        _key(None)
    (tmp_path / "key").write_text(key)
    with refused(NeoXError, "api-key-file", code="invalid-key"):
        _key(str(tmp_path / "key"))
    monkeypatch.setenv("NEOX_API_KEY", "")
    assert _key(None) is None


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (
            {"path": "/v1/chat"},
            404,
            "there is no /v1/chat; the paths are /health, /v1/models, /v1/completions, /v1/chat/completions",
        ),
        ({"method": "GET"}, 405, "GET is not allowed for /v1/completions; use POST"),
        ({"path": "/health"}, 405, "POST is not allowed for /health; use GET"),
        (
            {"host": b"evil.example"},
            403,
            'the header Host is "evil.example", which does not name this server; use its address,',
        ),
        (
            {"headers": {b"origin": b"http://evil.example"}},
            403,
            'the header Origin is "http://evil.example", and web pages of',
        ),
        (
            {"headers": {b"content-type": b"text/plain; a=b"}},
            400,
            'the header Content-Type is "text/plain"; send the body as JSON',
        ),
        (
            {"headers": {b"content-type": b""}},
            400,
            "there is no header Content-Type; send the body as JSON",
        ),
    ],
)
def test_a_request_that_the_api_does_not_have_is_answered_with_what_it_has(sent, status, message):
    calls = Calls(slots=1, max_waiting=1)
    found, content = asyncio.run(request(served(LETTERS), calls, {}, leaves=False, **sent))
    assert found == status
    assert json.loads(content)["error"]["message"].startswith(message)
