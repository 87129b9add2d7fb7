"""Log-probabilities in the forms of OpenAI's two APIs."""

from collections.abc import Sequence
from typing import Any

from neox_data.tokenizers import Tokenizer
from neox_model.generate.text import ReplyText

__all__ = ["Offsets", "TokenNames", "Top", "chat_logprobs", "completion_logprobs"]

# What OpenAI's API shows instead of minus infinity, which JSON does not have.
_IMPOSSIBLE = -9999.0
_REPLACEMENT = "\ufffd"

Top = Sequence[tuple[int, float]]


class TokenNames:
    """The texts of single tokens. A token that is only a part of a character is shown by its bytes.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes()

    def text(self, token: int) -> str:
        """Return the text of a token."""
        text = self._tokenizer.decode([token])
        if _REPLACEMENT not in text or self._bytes is None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes[token])

    def as_bytes(self, token: int) -> list[int]:
        """Return the bytes of a token."""
        if self._bytes is not None:
            return list(self._bytes[token])
        return list(self._tokenizer.decode([token]).encode())


class Offsets:
    """Where each token begins in the text, in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = ReplyText(tokenizer.decode)
        self._place = 0

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._place)
            self._text.add(token)
            self._place += len(self._text.take())
        return found


def finite(value: float) -> float:
    """Return a log-probability as JSON can hold it."""
    return max(value, _IMPOSSIBLE)


def completion_logprobs(
    names: TokenNames,
    tokens: Sequence[int],
    values: Sequence[float | None],
    top: Sequence[Top | None],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """Return the field `logprobs` of a choice of /v1/completions.

    Args:
        names: texts of the tokens.
        tokens: ids of consecutive tokens.
        values: their log-probabilities; None for the first token of a text, which nothing precedes.
        top: the most likely tokens at each place. Of several with the same text, the most likely one is used.
        offsets: places of the tokens in the text.
    """
    tops: list[dict[str, float] | None] = []
    for row in top:
        by_text: dict[str, float] = {}
        for token, value in row or ():
            by_text.setdefault(names.text(token), finite(value))
        tops.append(by_text or None)
    return {
        "tokens": [names.text(token) for token in tokens],
        "token_logprobs": [None if value is None else finite(value) for value in values],
        "top_logprobs": tops if any(row is not None for row in tops) else None,
        "text_offset": list(offsets),
    }


def chat_logprobs(
    names: TokenNames, tokens: Sequence[int], values: Sequence[float], top: Sequence[Top]
) -> dict[str, Any]:
    """Return the field `logprobs` of a choice of /v1/chat/completions."""

    def shown(token: int, value: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": finite(value), "bytes": names.as_bytes(token)}

    content = [
        {**shown(token, value), "top_logprobs": [shown(*one) for one in row]}
        for token, value, row in zip(tokens, values, top, strict=True)
    ]
    return {"content": content, "refusal": None}
