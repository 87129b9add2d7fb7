"""The ids of conversations, and what ends an answer of the assistant, by a chat template."""

from typing import NamedTuple

from neox_data.preprocess.chat_template import ChatTemplate
from neox_data.tokenizers.base import Tokenizer

__all__ = ["EndOfAnswer", "encode_conversation", "end_of_answer", "ends_of_answers"]


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
    ids = encode_conversation(after, tokenizer)
    found = next((token for token in ids if token in tokenizer.special_ids), None)
    return None if found is None else EndOfAnswer(found, tokenizer.decode([found]))


def ends_of_answers(template: ChatTemplate, end: EndOfAnswer | None) -> tuple[str, ...]:
    """Return the texts that end an answer, each once.

    Args:
        template: the template.
        end: the token with which it ends an answer, of `end_of_answer`.
    """
    return tuple(dict.fromkeys([*template.ends, *([] if end is None else [end.text])]))


def encode_conversation(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a rendered conversation, without those that the tokenizer adds to every text.

    The template writes them itself, as in the data of a run (`loss_mask.py`).

    Raises:
        TokenizerError: the tokenizer cannot encode the text.
    """
    ids: list[int] = tokenizer.encode_rendered([text])[0].tolist()
    return ids
