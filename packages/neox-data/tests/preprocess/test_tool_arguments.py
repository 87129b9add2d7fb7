"""Arguments of tool calls that are JSON text, as templates of different models take them."""

import json
from typing import Any

import pytest

from neox_data.preprocess.chat_template import ChatTemplate
from neox_data.preprocess.loss_mask import ChatMask
from neox_data.preprocess.tool_arguments import DECODED
from support.refusals import refused

TEXT = '{"city":"Rome", "days": 12345678901234567890123, "unit": null}'
OBJECT = '{"city": "Rome", "days": 12345678901234567890123, "unit": null}'
QUOTED = json.dumps(TEXT)
CALLS = (
    "{% for message in messages %}{{ message.role }}:{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{% set args = call.function.arguments %}<WRITTEN>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# How a template writes arguments, what it makes of TEXT, and what transformers makes of it; None: it fails.
WRITTEN = {
    "tojson": ("{{ args | tojson }}", OBJECT, QUOTED),
    "inside a call": ("{{ [args] | tojson }}", f"[{OBJECT}]", f"[{QUOTED}]"),
    "concatenated": ("{{ '' + args }}", TEXT, TEXT),
    "printed": ("{{ args }}", TEXT, TEXT),
    "tested": ("{% if args is string %}{{ args }}{% else %}{{ args | tojson }}{% endif %}", TEXT, TEXT),
    "tested, quoted": ("{{ args | tojson if args is string else 'object' }}", QUOTED, QUOTED),
    "tested as mapping": ("{{ args | tojson if args is mapping else args }}", TEXT, TEXT),
    "by item": (
        "{% for key, each in args | items %}{{ key }}={{ each }},{% endfor %}",
        "city=Rome,days=12345678901234567890123,unit=None,",
        None,
    ),
    "beginning": ("{{ args[:6] | tojson }}", json.dumps(TEXT[:6]), json.dumps(TEXT[:6])),
}


def conversation(arguments: Any, **others: Any) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": None, "tool_calls": calls, **others},
    ]


def template(written: str) -> ChatTemplate:
    return ChatTemplate(CALLS.replace("<WRITTEN>", written), name="chat.jinja", tokens={})


def counted(written: str, messages: list[dict[str, Any]]) -> tuple[str, set[str]]:
    """Return what the loss counts, and the notes."""
    mask = ChatMask("messages", template(written))
    parts = mask.segments([str(mask.text_of(messages, "it", {"messages": messages}))])
    return "".join(part.text for part in parts if part.counts), mask._notes


def rendered_by_transformers(written: str, messages: list[dict[str, Any]]) -> str:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    source = CALLS.replace("<WRITTEN>", written)
    (text,), _ = utilities.render_jinja_template(conversations=[messages], chat_template=source)
    return str(text)


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_template_gets_arguments_as_it_takes_them(kind: str) -> None:
    written, expected, theirs = WRITTEN[kind]
    messages = conversation(TEXT)
    assert counted(written, messages) == (f"{expected};", set() if expected == theirs else {DECODED})
    if theirs is None:
        with pytest.raises(TypeError):
            rendered_by_transformers(written, messages)
    else:
        assert rendered_by_transformers(written, messages) == f"user:w?;assistant:{theirs};"


@pytest.mark.parametrize("kind", WRITTEN)
def test_arguments_that_are_objects_stay_objects(kind: str) -> None:
    """Also those that a template cannot write, which is reported as it was."""
    written, _, _ = WRITTEN[kind]
    messages = conversation({"city": "Rome"})
    try:
        text = rendered_by_transformers(written, messages)
    # Slices are hashable since Python 3.12.
    except (TypeError, KeyError) as error:
        with refused(ValueError, type(error).__name__):
            counted(written, messages)
    else:
        assert counted(written, messages) == (text.removeprefix("user:w?;assistant:"), set())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{}"),
        (" ", "{}"),
        ("{}", "{}"),
        (' {"a": [{}, "é"]}', '{"a": [{}, "é"]}'),
        # No objects: the text of a tool that takes text.
        ("Rome", '"Rome"'),
        ("[1]", '"[1]"'),
        ("12", '"12"'),
    ],
)
def test_text_that_stands_for_an_object_is_decoded(text: str, expected: str) -> None:
    assert counted("{{ args | tojson }}", conversation(text))[0] == f"{expected};"


def test_calls_of_all_forms_are_decoded() -> None:
    call = {"name": "weather", "arguments": TEXT}
    source = (
        "{% for m in messages %}{{ (m.tool_calls or m.function_call or []) | tojson }}{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    written = ChatTemplate(source, name="", tokens={})
    for found, expected in [
        ({"tool_calls": [call, {"function": call}]}, f'[{{"name": "weather", "arguments": {OBJECT}}}, {{'
         f'"function": {{"name": "weather", "arguments": {OBJECT}}}}}]'),
        ({"function_call": call}, f'{{"name": "weather", "arguments": {OBJECT}}}'),
        ({"tool_calls": "none"}, '"none"'),
    ]:  # fmt: skip
        messages = [{"role": "assistant", "content": "", **found}]
        assert "".join(part.text for part in written.segments(messages)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"city": "Ro', "at column 10"),
        ('{"a": ' + "[" * 200_000, "nested too deeply"),
        ('{"a": ' + "9" * 6000 + "}", "4,300 digits"),
    ],
)
def test_broken_arguments_are_refused_where_objects_are_required(text: str, reason: str) -> None:
    with refused(ValueError, "arguments", reason):
        counted("{{ args | tojson }}", conversation(text))
    assert counted("{{ args }}", conversation(text))[0] == f"{text};"


def test_a_prompt_is_rendered_as_the_data_of_a_training() -> None:
    messages = [*conversation(TEXT), {"role": "tool", "content": "5"}]
    assert template("{{ args | tojson }}").prompt(messages) == f"user:w?;assistant:{OBJECT};tool:5;assistant:"
    assert template("{{ args }}").prompt(messages) == f"user:w?;assistant:{TEXT};tool:5;assistant:"


def test_marks_within_decoded_arguments_are_refused() -> None:
    with refused(ValueError, "contains the character"):
        counted("{{ args | tojson }}", conversation('{"city": "\\ufdd0"}'))
