"""Bodies of requests: limits that protect the server, and what is counted."""

import json
from typing import Any

import pytest

from neox_model.serve.bodies import ChatBody, CompletionBody, parsed
from neox_model.serve.errors import ApiError

USER = {"role": "user", "content": "a"}
MESSAGES = "messages: must be a list of objects with role and content"


def refused(kind: type, body: Any) -> ApiError:
    with pytest.raises(ApiError) as found:
        parsed(kind, json.dumps(body).encode())
    assert found.value.status == 400
    return found.value


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [-1] * 5000}),
        (CompletionBody, {"prompt": [[1], [-1] * 5000]}),
        (CompletionBody, {"prompt": [["a"]] * 5000}),
        (CompletionBody, {"prompt": "a", "stop": [""] * 5000}),
        (ChatBody, {"messages": [{}] * 5000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
    ],
)
def test_a_body_with_very_many_errors_reports_a_few(kind, body):
    # Each error takes memory and time of all clients.
    assert refused(kind, body).__cause__.error_count() < 10


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}], **{f"field {number}": 1 for number in range(5000)}},
        {"messages": [{f"field {number}": 1 for number in range(5000)}]},
    ],
)
def test_an_object_with_very_many_fields_is_refused(body):
    error = refused(ChatBody, body)
    assert error.__cause__ is None or error.__cause__.error_count() < 10


def test_options_of_a_stream_require_one():
    body = {"messages": [{"role": "user", "content": "a"}], "stream_options": {"include_usage": True}}
    assert parsed(ChatBody, json.dumps(body | {"stream": True}).encode()).stream_options.include_usage
    for stream in ({}, {"stream": False}, {"stream": None}):
        assert refused(ChatBody, body | stream).param == "stream_options"


def test_stop_strings_have_a_largest_length():
    assert parsed(CompletionBody, json.dumps({"stop": "x" * 256}).encode()).stop_strings == ("x" * 256,)
    for stop in ("x" * 257, ["a", "x" * 257]):
        assert refused(CompletionBody, {"prompt": "a", "stop": stop}).param == "stop"


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (
            CompletionBody,
            {"stop": ["x"] * 17},
            "stop: must be a text of 1 to 256 characters, or a list of at",
        ),
        (CompletionBody, {"prompt": [1.5]}, "prompt: must be a text, a list of texts, a list of token ids"),
        (CompletionBody, {"prompt": [[]]}, "prompt: must be a text, a list of texts, a list of token ids"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content: must be a text, or a list of parts of the type text",
        ),
        *((ChatBody, {"messages": each}, MESSAGES) for each in ([{"role": "user"}], "Hi", ["Hi"], {})),
        (ChatBody, {}, MESSAGES),
        (
            ChatBody,
            {"messages": [USER], "max_new_tokens": 5},
            "max_new_tokens is not a field of this request; use max_tokens",
        ),
        (CompletionBody, {"temprature": 1}, "temprature is not a field of this request; use temperature"),
        (CompletionBody, {"qqqq": 1}, "qqqq is not a field of this request; remove it"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": ""}], "prompt": ""},
            "prompt is not a field of this request; use messages, or /v1/completions",
        ),
    ],
)
def test_the_forms_of_a_field_are_stated(kind, body, message):
    assert refused(kind, body).message.startswith(message)


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 3), (["a", "b"], 6), ([1, 2], 3), ([[1], [2, 3], [4]], 9), ("", 3)]
)
def test_the_texts_of_a_request_are_its_prompts_times_n(prompt, count):
    assert parsed(CompletionBody, json.dumps({"prompt": prompt, "n": 3}).encode()).count == count
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 3}
    assert parsed(ChatBody, json.dumps(chat).encode()).count == 3
