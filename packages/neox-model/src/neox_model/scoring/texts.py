"""Encode texts that are scored, with or without the ids that the tokenizer adds at their ends."""

from collections.abc import Sequence

from neox_data.tokenizers import Tokenizer

__all__ = ["TextEncoder"]

_PROBE = "a"


class TextEncoder:
    """Encodes texts.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        prefix: id of the token before a text: the last one that the tokenizer adds to the beginning of each
            text (BOS), or end-of-document if it adds none.
        added: what the tokenizer adds to each text, such as "<s>"; empty if it adds nothing.

    Raises:
        TokenizerError: what the tokenizer adds to a text cannot be separated from it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin, self._end = tokenizer.added_ids(_PROBE)
        self.prefix = self._begin[-1] if self._begin else tokenizer.end_of_document
        self.added = "".join(tokenizer.decode([token]) for token in (*self._begin, *self._end))

    def inner(self, text: str) -> list[int]:
        """Return the ids of a text alone."""
        ids: list[int] = self._tokenizer.encode_parts([text])[0].tolist()
        return ids

    def without_added(self, tokens: Sequence[int]) -> list[int]:
        """Return the ids of a stored document without added ones and its end-of-document."""
        found = list(tokens)
        if found and found[-1] == self._tokenizer.end_of_document:
            found.pop()
        if self._begin and found[: len(self._begin)] == self._begin:
            del found[: len(self._begin)]
        if self._end and found[-len(self._end) :] == self._end:
            del found[-len(self._end) :]
        return found
