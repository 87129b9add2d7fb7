"""What the web server knows of the model: its name, its tokenizer, its limits and its chat template."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from neox_data.errors import TokenizerError
from neox_data.preprocess.chat_template import ChatTemplate
from neox_data.preprocess.chat_tokens import (
    encode_conversation,
    end_of_answer,
)
from neox_data.tokenizers import Tokenizer
from neox_model.generate.batch import Request
from neox_model.generate.sampling import Sampling
from neox_model.parallel.random import mixed_seed
from neox_model.serve.bodies import SharedBody
from neox_model.serve.errors import ApiError
from neox_model.serve.logprobs import TokenNames

__all__ = ["ServedModel"]

# top_p of 0 keeps the most likely token alone; Sampling disables the filter at 0.
_LEAST_TOP_P = 1e-30


@dataclass(kw_only=True)
class ServedModel:
    """The model as clients see it.

    Args:
        name: id of the model in the API.
        tokenizer: converts text to ids and back.
        seq_length: maximum number of tokens, prompt included.
        default_tokens: maximum number of new tokens of a request that does not state it.
        max_tokens: largest maximum number of new tokens that a request may state.
        template: chat template; None if there is none.
    """

    name: str
    tokenizer: Tokenizer
    seq_length: int
    default_tokens: int
    max_tokens: int
    template: ChatTemplate | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.names = TokenNames(self.tokenizer)
        self.end_of_answer = None if self.template is None else end_of_answer(self.template, self.tokenizer)
        """The special token with which the template ends an answer, which ends the texts of chats."""

    def check_name(self, name: str | None) -> None:
        """Refuse another model's name.

        Raises:
            ApiError: the model does not exist.
        """
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the ids of a prompt, which may be ids.

        Raises:
            ApiError: an id is not in the vocabulary, or the tokenizer cannot encode the text.
        """
        if isinstance(prompt, str):
            with _encoding("prompt"):
                return self.tokenizer.encode(prompt) if prompt else []
        wrong = next((token for token in prompt if token >= self.tokenizer.vocab_size), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"prompt contains the token id {wrong}; the vocabulary has {self.tokenizer.vocab_size:,}",
                param="prompt",
            )
        return list(prompt)

    def encode_rendered(self, conversation: str) -> list[int]:
        """Return the ids of a rendered conversation.

        Raises:
            ApiError: the tokenizer cannot encode the text.
        """
        with _encoding("messages"):
            return encode_conversation(conversation, self.tokenizer)

    def requests(
        self,
        body: SharedBody,
        prompt: Sequence[int],
        *,
        number: int,
        top_count: int,
        maximum_tokens: int | None,
        scores_prompt: bool = False,
        stop_strings: tuple[str, ...] = (),
    ) -> list[Request]:
        """Return a request for each choice of a prompt.

        Args:
            body: what the client sent.
            prompt: ids of the prompt.
            number: number of the prompt in the body.
            top_count: number of most likely tokens to report.
            maximum_tokens: as the client sent it.
            scores_prompt: report the log-probabilities of the prompt.
            stop_strings: more stop strings than those of the body.

        Raises:
            ApiError: prompt and new tokens do not fit.
        """
        room = self._room(prompt, maximum_tokens)
        seed = secrets.randbits(62) if body.seed is None else body.seed
        top_p = 1.0 if body.top_p is None else body.top_p
        return [
            Request(
                prompt=prompt,
                maximum_tokens=room,
                sampling=Sampling(
                    temperature=1.0 if body.temperature is None else body.temperature,
                    top_k=body.top_k or 0,
                    top_p=max(top_p, _LEAST_TOP_P),
                    repetition_penalty=body.repetition_penalty or 1.0,
                    seed=mixed_seed("served", seed, number, choice),
                ),
                stop_strings=(*body.stop_strings, *stop_strings),
                top_count=min(top_count, self.tokenizer.vocab_size),
                scores_prompt=scores_prompt,
            )
            for choice in range(body.n or 1)
        ]

    def _room(self, prompt: Sequence[int], maximum_tokens: int | None) -> int:
        """Return the maximum number of new tokens."""
        length = max(1, len(prompt))
        wanted = maximum_tokens
        if wanted is None:
            # A prompt that fills the model by itself has no room for a default.
            wanted = max(1, min(self.default_tokens, self.max_tokens, self.seq_length - length))
        if wanted > self.max_tokens:
            raise ApiError(
                400,
                f"max_tokens is {wanted:,}; this server allows at most {self.max_tokens:,}",
                param="max_tokens",
            )
        if length + wanted > self.seq_length:
            raise ApiError(
                400,
                f"the model's maximum length is {self.seq_length:,} tokens; the prompt has {length:,}, and "
                f"{wanted:,} new ones were requested; shorten the prompt, or set a smaller max_tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        return wanted


@contextmanager
def _encoding(param: str) -> Iterator[None]:
    """Answer a text that the tokenizer cannot encode with an error about this field of the request."""
    try:
        yield
    except TokenizerError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error
