"""The answers of /v1/completions and /v1/chat/completions, whole and as streams of server-sent events.

A stream and a whole answer are made of the same updates, so their contents are equal.
"""

import json
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from neox_data.preprocess.chat_tokens import ends_of_answers
from neox_model.generate.batch import Request
from neox_model.generate.engine import FinishReason, Update, not_finite
from neox_model.serve.bodies import ChatBody, CompletionBody, SharedBody
from neox_model.serve.calls import Call
from neox_model.serve.errors import ApiError
from neox_model.serve.logprobs import ShownToken, ShownTokens, chat_logprobs, completion_logprobs, of_prompt
from neox_model.serve.model import ServedModel

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer"]

_FINISH_REASONS: dict[FinishReason, str] = {
    "end-of-document": "stop",
    "stop-string": "stop",
    "maximum-tokens": "length",
    "seq-length": "length",
}
_END_OF_STREAM = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a choice: text, tokens with their log-probabilities, and at the end the finish reason."""

    text: str
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None

    @classmethod
    def joined(cls, parts: Sequence["Part"]) -> "Part":
        """Return consecutive parts as one."""
        return cls(
            "".join(part.text for part in parts),
            [token for part in parts for token in part.tokens],
            parts[-1].finish_reason,
        )


class Answer(ABC):
    """The answer to one request of a client.

    Args:
        model: the model.
        body: what the client sent.
    """

    prefix = ""
    kinds = ("", "")

    def __init__(self, model: ServedModel, body: SharedBody) -> None:
        self.model, self.body = model, body
        self.requests: list[Request] = []
        """What the engine generates: the choices of the first prompt, then those of the next."""
        self._prompt_tokens = self._new_tokens = 0
        self._shows_tokens = False
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model.name,
        }

    async def whole(self, call: Call) -> dict[str, Any]:
        """Return the whole answer."""
        parts: list[list[Part]] = [[] for _ in self.requests]
        async for place, part in self._parts(call):
            parts[place].append(part)
        choices = [self._choice(place, Part.joined(several)) for place, several in enumerate(parts)]
        return {**self._head, "object": self.kinds[0], "choices": choices, "usage": self._usage()}

    async def events(self, call: Call) -> AsyncIterator[str]:
        """Yield server-sent events."""
        head = {**self._head, "object": self.kinds[1]}
        options = self.body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        begun: set[int] = set()
        try:
            async for place, part in self._parts(call):
                if not (part.text or part.tokens or part.finish_reason):
                    continue
                choice = self._chunk(place, part, is_first=place not in begun)
                begun.add(place)
                yield _event({**head, "choices": [choice], **usage})
            if usage:
                yield _event({**head, "choices": [], "usage": self._usage()})
        except ApiError as error:
            yield _event(error.body())
            return
        yield _END_OF_STREAM

    async def _parts(self, call: Call) -> AsyncIterator[tuple[int, Part]]:
        """Yield the parts of the choices with their place, as they arrive."""
        shown = [
            ShownTokens(self.model.tokenizer, self.model.names, request.prompt, self._start(place))
            for place, request in enumerate(self.requests)
        ]
        begun: set[int] = set()
        async for place, update in call.updates():
            # Also minus infinity: an overflow of one logit makes all other tokens of a prompt impossible.
            scores = () if update.new.prompt is None else update.new.prompt.log_probabilities
            if not all(map(math.isfinite, (*update.new.log_probabilities, *scores))):
                raise ApiError(500, not_finite())
            if place not in begun:
                begun.add(place)
                yield place, self._beginning(place, update)
            yield place, self._part(update, shown[place])

    def _start(self, place: int) -> int:
        """Return where the generated text of a choice begins, in characters."""
        return 0

    def _beginning(self, place: int, update: Update) -> Part:
        """Return what precedes the generated text of a choice."""
        return Part("")

    def _part(self, update: Update, shown: ShownTokens) -> Part:
        new, reply = update.new, update.reply
        if reply is not None:
            if reply.finish_reason not in _FINISH_REASONS:
                raise ApiError(500, f"the text was not generated: {reply.message}")
            self._new_tokens += len(reply.tokens)
        reason = None if reply is None else _FINISH_REASONS[reply.finish_reason]
        if not self._shows_tokens:
            return Part(update.text, finish_reason=reason)
        rows = list(zip(new.tokens, new.log_probabilities, new.top, strict=True))
        last = [rows.pop()] if reply is not None and reply.finish_reason == "end-of-document" else []
        for row in rows:
            shown.add(*row)
        tokens = shown.show(update.text)
        if reply is not None:
            tokens += shown.finish(is_cut=reply.finish_reason == "stop-string")
            tokens += [shown.behind(*row) for row in last]
        return Part(update.text, tokens, reason)

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._new_tokens,
            "total_tokens": self._prompt_tokens + self._new_tokens,
        }

    @abstractmethod
    def _choice(self, place: int, part: Part) -> dict[str, Any]:
        """Return a whole choice."""

    def _chunk(self, place: int, part: Part, *, is_first: bool) -> dict[str, Any]:
        """Return a part of a choice."""
        return self._choice(place, part)


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def __init__(self, model: ServedModel, body: CompletionBody) -> None:
        super().__init__(model, body)
        self._shows_tokens = body.logprobs is not None
        self._echoes = bool(body.echo)
        self._prompts: list[tuple[str, list[int]]] = []
        for number, prompt in enumerate(body.prompts):
            tokens = model.encode(prompt)
            text = prompt if isinstance(prompt, str) else model.tokenizer.decode(tokens)
            self._prompts.append((text, tokens))
            self._prompt_tokens += len(tokens)
            self.requests += model.requests(
                body,
                tokens,
                number=number,
                top_count=body.logprobs or 0,
                maximum_tokens=body.max_tokens,
                scores_prompt=body.max_tokens == 0 or (self._echoes and self._shows_tokens),
            )

    def _start(self, place: int) -> int:
        return len(self._prompt(place)[0])

    def _prompt(self, place: int) -> tuple[str, list[int]]:
        """Return the prompt of a choice, and its ids."""
        return self._prompts[place // (self.body.n or 1)]

    def _beginning(self, place: int, update: Update) -> Part:
        if not self._echoes:
            return Part("")
        text, tokens = self._prompt(place)
        if not self._shows_tokens or not tokens:
            return Part(text)
        assert update.new.prompt is not None, "scores were requested"
        values, top = [None, *update.new.prompt.log_probabilities], [None, *update.new.prompt.top]
        return Part(text, of_prompt(self.model.tokenizer, self.model.names, text, tokens, values, top))

    def _choice(self, place: int, part: Part) -> dict[str, Any]:
        return {
            "index": place,
            "text": part.text,
            "logprobs": completion_logprobs(self.model.names, part.tokens) if self._shows_tokens else None,
            "finish_reason": part.finish_reason,
        }


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, model: ServedModel, body: ChatBody) -> None:
        super().__init__(model, body)
        if model.template is None:
            raise ApiError(
                404,
                "this model has no chat template; use /v1/completions, or start the server with "
                "serve.chat-template",
                code="no_chat_template",
            )
        self._shows_tokens = bool(body.logprobs)
        tools = body.tools_for_template
        if tools and "tools" not in model.template.variables:
            raise ApiError(
                400,
                "tools: the chat template does not write them, so that the model would not see them; remove "
                "them, or set serve.chat-template to a template that uses tools",
                param="tools",
            )
        try:
            text = model.template.prompt([message.for_template() for message in body.messages], tools=tools)
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        tokens = model.encode_rendered(text)
        self._prompt_tokens = len(tokens)
        self.requests = model.requests(
            body,
            tokens,
            number=0,
            top_count=body.top_logprobs or 0,
            maximum_tokens=body.max_completion_tokens or body.max_tokens,
            stop_strings=ends_of_answers(model.template, model.end_of_answer),
        )

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        return chat_logprobs(self.model.names, part.tokens) if self._shows_tokens else None

    def _choice(self, place: int, part: Part) -> dict[str, Any]:
        return {
            "index": place,
            "message": {"role": "assistant", "content": part.text, "refusal": None},
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
        }

    def _chunk(self, place: int, part: Part, *, is_first: bool) -> dict[str, Any]:
        return {
            "index": place,
            "delta": ({"role": "assistant"} if is_first else {}) | {"content": part.text},
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
        }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"
