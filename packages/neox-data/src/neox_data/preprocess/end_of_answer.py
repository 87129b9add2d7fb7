"""The special token with which a chat template ends an answer of the assistant."""

from typing import NamedTuple

from neox_data.preprocess.chat_template import ChatTemplate
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer

__all__ = ["EndOfAnswer", "end_of_answer"]


class EndOfAnswer(NamedTuple):
    """A special token.

    Attributes:
        id: its id.
        text: its text.
    """

    id: int
    text: str

    def __str__(self) -> str:
        """Return text and id, for messages."""
        return f"{self.text!r} ({self.id})"


def end_of_answer(template: ChatTemplate, tokenizer: Tokenizer) -> EndOfAnswer | None:
    """Return the first special token that the template writes after an answer; None if there is none."""
    after = template.written_after_answer
    if not after:
        return None
    if isinstance(tokenizer, LibraryBackedTokenizer):
        ids = [int(token) for token in tokenizer.encode_parts([after])[0]]
    else:
        ids = tokenizer.encode(after)
    found = next((token for token in ids if token in tokenizer.special_ids), None)
    return None if found is None else EndOfAnswer(found, tokenizer.decode([found]))
