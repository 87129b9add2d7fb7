"""Bodies of requests: limits that protect the server, and what is counted."""

import json
from typing import Any

import pytest

from neox_model.serve.bodies import ChatBody, CompletionBody, parsed
from neox_model.serve.errors import ApiError, shown
from support.refusals import shows

USER = {"role": "user", "content": "a"}
PROMPT = "send a text, a list of texts, a list of token ids or a list of such lists, none of them empty"
ROLES = "Input should be 'system', 'developer', 'user', 'assistant' or 'tool'"


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
            'stop is ["x", "x", "x", "x", "x", "x", "x", "x", "x", "x", "x", "...; send a text of 1 to 256 '
            "characters, or a list of at most 16",
        ),
        (CompletionBody, {"prompt": [1.5]}, f"prompt is [1.5]; {PROMPT}"),
        (CompletionBody, {"prompt": [[]]}, f"prompt is [[]]; {PROMPT}"),
        (CompletionBody, {"prompt": [None]}, f"prompt is [null]; {PROMPT}"),
        (
            CompletionBody,
            {"temperature": -1},
            "temperature is -1: Input should be greater than or equal to 0",
        ),
        (
            CompletionBody,
            {"repetition_penalty": 0},
            "repetition_penalty is 0: Input should be greater than 0",
        ),
        (CompletionBody, {"n": 1000}, "n is 1000: Input should be less than or equal to 128"),
        (CompletionBody, {"max_tokens": "5"}, 'max_tokens is "5": Input should be a valid integer'),
        (
            CompletionBody,
            {"stream_options": {"include_usage": 1}},
            "stream_options.include_usage is 1: Input should be a valid boolean",
        ),
        (
            ChatBody,
            {"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]},
            'messages[1].content is [{"type": "image_url"}]; send a text, or a list of parts of the type '
            "text",
        ),
        (ChatBody, {"messages": [USER, USER, {"content": "a"}]}, "messages[2].role is missing; add it"),
        (
            ChatBody,
            {"messages": [{"role": "robot", "content": ""}]},
            f'messages[0].role is "robot": {ROLES}',
        ),
        (
            ChatBody,
            {"messages": ["Hi"]},
            'messages[0] is "Hi": Input should be a valid dictionary or instance of Message',
        ),
        (ChatBody, {"messages": "Hi"}, 'messages is "Hi": Input should be a valid list'),
        (
            ChatBody,
            {"messages": []},
            "messages is []: List should have at least 1 item after validation, not 0",
        ),
        (ChatBody, {}, "messages is missing; add it"),
        (CompletionBody, {"qqqq": 1}, "qqqq: 1 is not supported by this server; remove it"),
        (
            ChatBody,
            {"messages": [USER], "web_search_options": {}},
            "web_search_options: {} is not supported by this server; remove it",
        ),
        (
            ChatBody,
            {"messages": [USER], "functions": [1]},
            "functions: [1] is not supported by this server; remove it",
        ),
        (
            ChatBody,
            {"messages": [USER], "tool_choice": "required"},
            "tool_choice is \"required\": Input should be 'auto' or 'none'",
        ),
        (
            ChatBody,
            {"messages": [USER], "tools": [{"type": "custom", "function": {"name": "f"}}]},
            "tools[0].type is \"custom\": Input should be 'function'",
        ),
        (
            ChatBody,
            {"messages": [USER, {"role": "assistant", "refusal": "no"}]},
            'messages[1].refusal: "no" is not supported by this server; remove it',
        ),
        (
            ChatBody,
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
            "messages[1].content is missing; send a text, or a list of parts of the type text",
        ),
        (ChatBody, {"messages": None}, "messages is missing; add it"),
        (
            CompletionBody,
            {"presence_penalty": 0.5},
            "presence_penalty: 0.5 is not supported by this server; remove it",
        ),
        (CompletionBody, [1], "the body is [1]; send an object of JSON with the fields"),
    ],
)
def test_a_wrong_value_is_shown_with_what_to_send(kind, body, message):
    assert refused(kind, body).message == message


def test_all_errors_of_a_request_are_reported_together():
    body = {"temprature": 1, "max_tokens": "5", "suffix": "b", "stop": [""], "top_p": 3}
    error = refused(CompletionBody, body)
    assert (error.param, error.message) == (
        "max_tokens",
        '5 errors in the request: (1) max_tokens is "5": Input should be a valid integer, (2) stop is [""]; '
        "send a text of 1 to 256 characters, or a list of at most 16, (3) top_p is 3: Input should be less "
        "than or equal to 1, (4) temprature: 1 is not supported by this server; remove it, "
        '(5) suffix: "b" is not supported by this server; remove it',
    )
    body = {"messages": [USER], "top_logprobs": 3, "max_tokens": 3, "max_completion_tokens": 4}
    assert shows(
        refused(ChatBody, body).message,
        "2 errors",
        "(1) top_logprobs",
        "(2) max_tokens",
        "3",
        "max_completion_tokens",
    )
    many = refused(CompletionBody, {f"field {number}": 1 for number in range(50)}).message
    assert many.startswith("50 errors ")
    assert many.endswith(" (10) field 9: 1 is not supported by this server; remove it and 40 more")


@pytest.mark.parametrize("place", ["name", "value"])
def test_a_long_name_or_value_is_shown_in_part(place):
    body = {"x" * 5000: 1} if place == "name" else {"max_tokens": [["x" * 5000] * 100]}
    assert 60 < len(refused(CompletionBody, body).message) < 120
    # No more is encoded than is shown.
    assert shown([*range(100), object()]).endswith(", 15, 16...")


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 3), (["a", "b"], 6), ([1, 2], 3), ([[1], [2, 3], [4]], 9), ("", 3)]
)
def test_the_texts_of_a_request_are_its_prompts_times_n(prompt, count):
    assert parsed(CompletionBody, json.dumps({"prompt": prompt, "n": 3}).encode()).count == count
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 3}
    assert parsed(ChatBody, json.dumps(chat).encode()).count == 3


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
# Requests that mean the same as `{"messages": [USER, ANSWER]}`, or with a call: what programs write.
ANSWER = {"role": "assistant", "content": "b"}
FUNCTION = {"name": "f", "parameters": SCHEMA}


@pytest.mark.parametrize(
    "fields",
    [
        {"refusal": None},
        {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        {"tool_calls": [], "parsed": None, "name": None, "reasoning_content": None, "unknown": None},
        {"content": [{"type": "text", "text": "b", "annotations": None, "cache_control": None}]},
    ],
)
def test_fields_of_a_message_that_change_nothing_are_left_out(fields):
    body = parsed(ChatBody, json.dumps({"messages": [USER, ANSWER | fields]}).encode())
    assert [message.for_template() for message in body.messages] == [USER, ANSWER]


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": None, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s"},
        {
            "audio": None,
            "functions": [],
            "function_call": "none",
            "web_search_options": None,
            "metadata": None,
        },
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": None, "x": None}},
        {"response_format": {"type": "text", "json_schema": None}, "logit_bias": {"5": None}, "stop": None},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": False, "reasoning_effort": "none"},
    ],
)
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_null_and_neutral_fields_of_a_request_are_left_out(kind, fields):
    base: dict[str, Any] = {"messages": [USER]}
    if kind is CompletionBody:
        base = {"prompt": "a"}
        fields = {name: value for name, value in fields.items() if value is None or name in kind.neutral}
    body = parsed(kind, json.dumps(base | fields).encode())
    plain = parsed(kind, json.dumps(base).encode())
    without = {"stream", "stream_options", "prompt_cache_key", "safety_identifier", "parallel_tool_calls"}
    assert body.model_dump(exclude=without) == plain.model_dump(exclude=without)


def test_calls_and_their_answers_reach_the_template_in_one_order_without_what_clients_add():
    read = {"arguments": CALL["function"]["arguments"], "name": "f", "parsed_arguments": {"a": 1}}
    asked = {
        "tool_calls": [{"index": 0, "function": read, "type": "function", "id": "c"}],
        "parsed": {"x": 1},
    }
    answer = {"role": "tool", "tool_call_id": "c", "content": "3"}
    body = parsed(
        ChatBody,
        json.dumps(
            {
                "messages": [USER, {"content": None, "role": "assistant", **asked}, answer],
                "tools": [
                    {"function": {"strict": True, **FUNCTION, "description": None}, "type": "function"}
                ],
            }
        ).encode(),
    )
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    shown = [message.for_template() for message in body.messages]
    assert json.dumps(shown[:2]) == json.dumps([USER, call])
    assert shown[2] == answer
    assert json.dumps(body.tools_for_template) == json.dumps([{"type": "function", "function": FUNCTION}])
    assert body.model_copy(update={"tool_choice": "none"}).tools_for_template is None
