"""Render conversations with a chat template, and find the parts that the assistant wrote.

A template is Jinja, in the form of Hugging Face's tokenizers. It marks the assistant's parts by
`{% generation %}` blocks. In a template without them, an assistant's message is what the template adds to the
conversation before it, rendered with `add_generation_prompt`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neox_data.errors import CorpusError
from neox_data.preprocess.texts import of_json
from neox_data.preprocess.tool_arguments import decoded_arguments, is_string

__all__ = ["ChatTemplate", "Segment", "find_chat_template", "load_chat_template"]

# Noncharacters of Unicode, which no text uses: they mark the assistant's parts while rendering.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# What a template's own expressions raise, such as 1 / 0, a missing key, or a loop that is too long.
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
_NULL = str(None)
# A text in place of messages, to see what the template writes around them.
_PROBE = "0text0"
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Segment(NamedTuple):
    """A part of a text.

    Attributes:
        text: the part.
        counts: True if the loss counts its tokens.
    """

    text: str
    counts: bool


class _Generation(Extension):
    """The block `{% generation %}` ... `{% endgeneration %}`, whose output is marked."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a call of `_marked`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """Renders conversations.

    Args:
        source: the template.
        name: its file, for messages.
        tokens: texts of special tokens by name, such as `bos_token`.

    Attributes:
        name: its file.
        variables: names of the variables that it uses, such as `messages` and `tools`.

    Raises:
        CorpusError: it is not a valid template.
    """

    def __init__(self, source: str, *, name: str, tokens: dict[str, str]) -> None:
        # Without access to Python's objects, because a template is a program of somebody else.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.tests["string"] = is_string
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        self.name = name
        self._source = source
        self._tokens = tokens
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (TemplateError, RecursionError) as error:
            raise CorpusError(f"{name} is not a valid chat template: {error}; correct it") from error

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that affects the text."""
        return hashlib.sha256(
            json.dumps([self._source, self._tokens], sort_keys=True, allow_nan=False).encode()
        ).hexdigest()

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the texts of special tokens that end what the assistant writes."""
        end = self._tokens.get("eos_token")
        return (end,) if end else ()

    @cached_property
    def written_after_answer(self) -> str:
        """What the template writes after the text of an answer at the end of a conversation."""
        messages = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        try:
            _, answer, after = self._render(messages).replace(_BEGIN, "").replace(_END, "").rpartition(_PROBE)
        except ValueError:
            return ""  # A template that requires other messages.
        return after if answer else ""

    def prompt(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None
    ) -> str:
        """Return the text of a conversation up to where the assistant's next message begins.

        Null contents are empty texts where the template cannot write them.

        Args:
            messages: the conversation.
            tools: descriptions of the functions that the assistant may call.

        Raises:
            ValueError: the template does not accept the messages.
        """
        render = partial(self._render, add_generation_prompt=True, tools=tools)
        _refuse_marks(tools or ())
        try:
            _, text = _rendered(messages, render, set())
        except ValueError:
            if not _has_null_content(messages):
                raise
            _, text = _rendered(_with_empty_content(messages), render, set())
        return text.replace(_BEGIN, "").replace(_END, "")

    def segments(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        notes: set[str] | None = None,
    ) -> list[Segment]:
        """Return the text of a conversation in parts, of which those by the assistant count.

        Args:
            messages: the conversation.
            tools: descriptions of the functions that the assistant may call.
            documents: texts that the assistant may use.
            notes: where a note on arguments of tool calls is added if it applies.

        Raises:
            ValueError: the template does not accept the messages, or does not show what the assistant wrote.
        """
        render = partial(self._render, tools=tools, documents=documents)
        _refuse_marks([*(tools or ()), *(documents or ())])
        messages, whole = _rendered(messages, render, set() if notes is None else notes)
        if _BEGIN in whole:
            first, *parts = whole.split(_BEGIN)
            marked = [Segment(first, False)]
            for part in parts:
                inside, _, outside = part.partition(_END)
                marked += [Segment(inside, True), Segment(outside, False)]
            return _joined(marked)
        spans, end = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = render(messages[:number], add_generation_prompt=True)
            after = render(messages[: number + 1]) if number + 1 < len(messages) else whole
            if not (after.startswith(before) and whole.startswith(after) and len(before) >= end):
                raise ValueError(
                    f"the template changes earlier text with message {number + 1}, so that the assistant's "
                    "part is unknown; mark it by {% generation %} in the template"
                )
            spans += [Segment(whole[end : len(before)], False), Segment(after[len(before) :], True)]
            end = len(after)
        return _joined([*spans, Segment(whole[end:], False)])

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=documents,
                **self._tokens,
            )
        except _FAILURES as error:
            raise ValueError(f"the chat template rejects it: {type(error).__name__}: {error}") from None


def _rendered(
    messages: Sequence[dict[str, Any]], render: Callable[[Sequence[dict[str, Any]]], str], notes: set[str]
) -> tuple[Sequence[dict[str, Any]], str]:
    """Return messages with arguments as the template takes them, and their text.

    Raises:
        ValueError: the template does not accept them, or writes the word None where a content is null.
    """
    messages = decoded_arguments(messages, render, notes)
    _refuse_marks(messages)
    whole = render(messages)
    if _has_null_content(messages):
        empty = render(_with_empty_content(messages))
        if whole.count(_NULL) > empty.count(_NULL):
            raise ValueError(
                "the template writes None for a message with null as content, or without content"
            )
    return messages, whole


def _has_null_content(messages: Sequence[dict[str, Any]]) -> bool:
    return any(message.get("content", "") is None for message in messages)


def _with_empty_content(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": message.get("content") or ""} for message in messages]


def _refuse_marks(messages: Sequence[dict[str, Any]]) -> None:
    if any(mark in text for text in _texts(messages) for mark in (_BEGIN, _END)):
        raise ValueError("a message contains the character U+FDD0 or U+FDD1, which no text uses")


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value of JSON, names included, however deeply it is nested."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, Sequence):
            left += one


def _joined(segments: list[Segment]) -> list[Segment]:
    """Return the segments without empty ones, and consecutive ones of one kind as one."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].counts == segment.counts:
            joined[-1] = Segment(joined[-1].text + segment.text, segment.counts)
        elif segment.text:
            joined.append(segment)
    return joined


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; Jinja's filter of this name also escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        allow_nan=False,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def load_chat_template(path: Path) -> ChatTemplate:
    """Load a chat template.

    Args:
        path: a folder of a tokenizer (with chat_template.jinja or tokenizer_config.json), or a file with the
            template itself.

    Raises:
        CorpusError: there is no template, or it is invalid.
    """
    # Not so the text of a template, which may be too long for a path.
    template = find_chat_template(path) if os.path.exists(path) else None
    if template is None:
        raise CorpusError(
            f"{path} contains no chat template; name a folder that has chat_template.jinja or a "
            "tokenizer_config.json with chat_template, or a file of Jinja",
            code="no-template",
        )
    return template


def find_chat_template(path: Path) -> ChatTemplate | None:
    """Load a chat template like `load_chat_template`. Returns None if there is none.

    Raises:
        CorpusError: it is invalid.
    """
    folder = path if path.is_dir() else path.parent
    described = folder / "tokenizer_config.json"
    settings: Any = {}
    if described.is_file():
        try:
            settings = of_json(_read(described))
        except ValueError as error:
            raise CorpusError(f"{described}: {error}; copy it again") from error
        if not isinstance(settings, dict):
            raise CorpusError(f"{described} is not a JSON object; copy it again")
    tokens = {}
    for name in filter(settings.get, _TOKENS):
        token = settings[name]
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise CorpusError(
                f"{described} has {name}: {token!r}, which is not a text and has no text as content; copy "
                "the file again"
            )
        tokens[name] = text
    file = path if path.is_file() else folder / "chat_template.jinja"
    if file.is_file() and file != described:
        return ChatTemplate(_read(file), name=str(file), tokens=tokens)
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = [one for one in source if isinstance(one, dict)]
        source = next((one.get("template") for one in named if one.get("name") == "default"), None)
    return ChatTemplate(source, name=str(described), tokens=tokens) if isinstance(source, str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read ({error}); copy it again") from error
