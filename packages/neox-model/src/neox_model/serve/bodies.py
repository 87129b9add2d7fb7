"""The bodies of requests: fields of OpenAI's API, and what this server cannot do, refused by name."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from neox_config.pluralize import first_few
from neox_data.preprocess.conversations import without_nulls
from neox_model.serve.errors import ApiError, shown

__all__ = [
    "MOST_TOP_TOKENS",
    "ChatBody",
    "CompletionBody",
    "Message",
    "SharedBody",
    "StreamOptions",
    "parsed",
]

MOST_TOP_TOKENS = 20
_MOST_STOP_STRINGS = 16
_MOST_CHOICES = 128
# Every new token is compared with all beginnings of a stop string.
_LONGEST_STOP_STRING = 256
# More than any object of the API has.
_MOST_FIELDS = 100
_SEED_LIMIT = 2**63

# Lists end at their first wrong item: the errors of all items of a body of 4 MB take minutes and gigabytes.
_LIST = Field(min_length=1, fail_fast=True)
Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP_STRING)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], _LIST]
# What to send in fields with several forms, of which a validation reports what is wrong in each form.
_FORMS: Mapping[str, str] = {
    "prompt": "a text, a list of texts, a list of token ids or a list of such lists, none of them empty",
    "stop": f"a text of 1 to {_LONGEST_STOP_STRING} characters, or a list of at most {_MOST_STOP_STRINGS}",
    "content": "a text, or a list of parts of the type text",
    "arguments": "a text of JSON, or an object",
}
_LONGEST_NAME = 60
# Longer requests with many errors have them for one reason.
_MOST_SHOWN = 10


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Fields that are not implemented, and their values that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        """Leave out what changes nothing, and refuse very many fields, each of which would be an error."""
        if not isinstance(body, dict):
            return body
        if len(body) > _MOST_FIELDS:
            raise ApiError(400, f"an object has {len(body):,} fields; correct the request")
        return {name: value for name, value in body.items() if value not in cls.neutral.get(name, ())}


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SharedBody(_Body):
    """Fields of completions and chats. `top_k` and `repetition_penalty` are not OpenAI's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-_SEED_LIMIT, le=_SEED_LIMIT - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOP_STRINGS, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    # These say who asks and why, and how the answer is computed or kept; they do not change it.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    neutral = {
        "frequency_penalty": [0],
        "presence_penalty": [0],
        "logit_bias": [{}],
        "service_tier": ["auto", "default"],
        "store": [False],
    }

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield (place, message) about fields that are right by themselves, but not together."""
        if self.stream_options is not None and not self.stream:
            yield "stream_options", "stream_options requires stream: true; add it"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def count(self) -> int:
        """Return the number of texts that are requested."""
        return self.n or 1


class CompletionBody(SharedBody):
    """Body of /v1/completions."""

    neutral = SharedBody.neutral | {"suffix": [""], "best_of": [1]}
    prompt: str | Annotated[list[str], _LIST] | Tokens | Annotated[list[Tokens], _LIST] = ""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_TOKENS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: texts, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]

    @property
    def count(self) -> int:
        """Return the number of texts that are requested."""
        return len(self.prompts) * (self.n or 1)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield (place, message) about fields that are right by themselves, but not together."""
        yield from super().contradictions()
        if self.max_tokens == 0 and not self.echo:
            yield "max_tokens", "max_tokens is 0, which requires echo; set max_tokens: 16"


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(_Body):
    """What the assistant calls."""

    name: str
    arguments: str | dict[str, Any]
    # What OpenAI's client adds when it reads the arguments.
    parsed_arguments: Annotated[Any, Field(exclude=True)] = None


class ToolCall(_Body):
    """A call in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    # Its place in a stream.
    index: Annotated[int | None, Field(exclude=True)] = None


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # What OpenAI's client adds when it reads the content.
    parsed: Annotated[Any, Field(exclude=True)] = None

    neutral = {"annotations": [[]], "refusal": [""]}

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content
        fields = self.model_dump(exclude={"content"}, exclude_none=True)
        return {"role": self.role, "content": text} | {name: each for name, each in fields.items() if each}


class Function(_Body):
    """A function that the assistant may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    # About calls that a server reads from the answer; here the answer is a text.
    strict: Annotated[bool | None, Field(exclude=True)] = None


class Tool(_Body):
    """A tool that the assistant may call."""

    type: Literal["function"]
    function: Function


class ChatBody(SharedBody):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], _LIST]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_TOKENS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None

    neutral = SharedBody.neutral | {
        "functions": [[]],
        "function_call": ["auto", "none"],
        "modalities": [["text"]],
        "reasoning_effort": ["none"],
        "response_format": [{"type": "text"}],
        "verbosity": ["medium"],
    }

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """Return the tools that the model may call, as templates expect them."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield (place, message) about fields that are right by themselves, but not together."""
        yield from super().contradictions()
        for number, message in enumerate(self.messages):
            if message.content is None and not message.tool_calls:
                place = f"messages[{number}].content"
                yield place, f"{place} is missing; send {_FORMS['content']}"
        if self.top_logprobs is not None and not self.logprobs:
            yield "top_logprobs", "top_logprobs requires logprobs: true; add it"
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            text = f"max_tokens is {both[0]}, but max_completion_tokens is {both[1]}; send one of them"
            yield "max_tokens", text


Body = TypeVar("Body", bound=SharedBody)


def parsed(kind: type[Body], content: bytes) -> Body:
    """Return the body of a request. A field with null is no field, at any depth.

    Raises:
        ApiError: it is not JSON, or fields are unknown or wrong; all of them are named.
    """
    try:
        found = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}; correct it") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {shown(found)}; send an object of JSON with the fields")
    fields = without_nulls(found, set())
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(_wrong_fields(error, fields)) from error
    if wrong := dict(body.contradictions()):
        raise _refusal(wrong)
    return body


def _wrong_fields(error: ValidationError, body: Any) -> dict[str, str]:
    """Return what is wrong with each field, by its place, such as `messages[2].role`."""
    found: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        # Behind a field with several forms, pydantic names the form.
        ends = (depth for depth, name in enumerate(detail["loc"], 1) if name in _FORMS)
        parts = detail["loc"][: next(ends, None)]
        names = (f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}" for part in parts)
        place = "".join(names).removeprefix(".")
        if place in found:
            continue
        kind = detail["type"] if parts == detail["loc"] else "several forms"
        if kind == "missing":
            found[place] = f"{place} is missing; add it"
            continue
        value, form = shown(reduce(getitem, parts, body)), _FORMS.get(str(parts[-1]))
        message = f"{place} is {value}; send {form}" if form else f"{place} is {value}: {detail['msg']}"
        if kind == "extra_forbidden":
            message = f"{place}: {value} is not supported by this server; remove it"
        found[place] = message
    return found


def _refusal(wrong: Mapping[str, str]) -> ApiError:
    """Return the error about wrong fields, given what is wrong with each."""
    messages = list(wrong.values())
    if len(messages) > 1:
        numbered = [f"({number}) {text}" for number, text in enumerate(messages, 1)]
        messages = [f"{len(numbered)} errors in the request: {first_few(numbered, _MOST_SHOWN)}"]
    return ApiError(400, messages[0], param=next(iter(wrong)))
