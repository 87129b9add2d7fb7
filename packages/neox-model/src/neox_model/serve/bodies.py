"""The bodies of requests: fields of OpenAI's API, and what this server cannot do, refused by name."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from neox_model.serve.errors import ApiError

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
# Of a field with several forms, a validation reports what is wrong in each of them.
_FORMS: Mapping[str, str] = {
    "prompt": "a text, a list of texts, a list of token ids or a list of such lists, none of them empty",
    "stop": f"a text of 1 to {_LONGEST_STOP_STRING} characters, or a list of at most {_MOST_STOP_STRINGS}",
    "content": "a text, or a list of parts of the type text",
}
# Values that change nothing, of fields that this server does not implement.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "parallel_tool_calls": (None, True, False),
    "modalities": (None, ["text"]),
    # These say who asks and why, and do not change the answer.
    "store": (None, False),
}


# Fields of other servers -> ours.
_FIELDS_OF_OTHERS = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "inputs": "prompt of /v1/completions",
    "prompt": "messages, or /v1/completions",
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, body: Any) -> Any:
        """Refuse an object with very many fields, each of which would be an error."""
        if isinstance(body, dict) and len(body) > _MOST_FIELDS:
            raise ApiError(400, f"an object has {len(body):,} fields; correct the request")
        return body


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
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        """Remove fields that are not implemented and have no effect; refuse those that would have one."""
        if not isinstance(body, dict):
            return body
        for name, allowed in _NEUTRAL.items():
            if name in body and name not in cls.model_fields and body[name] not in allowed:
                raise ApiError(400, f"{name} is not supported by this server; remove it", param=name)
        return {name: value for name, value in body.items() if name not in _NEUTRAL}

    @model_validator(mode="after")
    def _streams_with_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream: true", param="stream_options")
        return self

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

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens is 0, which requires echo; set max_tokens: 16", param="max_tokens"
            )
        return self


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatBody(SharedBody):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], _LIST]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_TOKENS)] | None = None

    @model_validator(mode="after")
    def _has_no_contradiction(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs: true", param="top_logprobs")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens"
            )
        return self


Body = TypeVar("Body", bound=SharedBody)


def parsed(kind: type[Body], content: bytes) -> Body:
    """Return the body of a request.

    Raises:
        ApiError: it is not JSON, or a field is unknown or wrong; the first one is named.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in found["loc"][:1])
        if found["type"] == "extra_forbidden" and len(found["loc"]) == 1:
            raise ApiError(400, _unknown(place, kind), param=place) from error
        if place == "messages" and found["type"] in ("list_type", "model_type", "missing"):
            what = f"{place}: must be a list of objects with role and content"
            raise ApiError(400, what, param=place) from error
        what = _of_several_forms(found["loc"]) or (f"{place}: {found['msg']}" if place else found["msg"])
        raise ApiError(400, f"{what}; correct the request", param=place or None) from error


def _unknown(name: str, kind: type[SharedBody]) -> str:
    """Return the message about a field that a body does not have."""
    near = [_FIELDS_OF_OTHERS[name]] if name in _FIELDS_OF_OTHERS else []
    near = near or difflib.get_close_matches(name, kind.model_fields, n=1)
    return f"{name} is not a field of this request; {f'use {near[0]}' if near else 'remove it'}"


def _of_several_forms(place: tuple[int | str, ...]) -> str:
    """Return the message about a field with several forms; empty for other fields.

    Args:
        place: of an error: names and numbers, behind a field with several forms the form.
    """
    for depth, name in enumerate(place[:-1], start=1):
        if name in _FORMS:
            return f"{'.'.join(map(str, place[:depth]))}: must be {_FORMS[str(name)]}"
    return ""
