"""Documents of which the loss counts only parts: responses to prompts, or an assistant's messages.

Parts are encoded separately, as generation encodes a prompt separately from what follows it. There is one
label per token: the token, or -100 where the loss does not count it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from neox_data.errors import TokenizerError
from neox_data.preprocess.chat_template import ChatTemplate, Segment
from neox_data.preprocess.encode import Column, EncodedBatch
from neox_data.preprocess.read import Document
from neox_data.preprocess.texts import text_of
from neox_data.samples.whole_documents import IGNORED
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer

__all__ = ["LABEL_DTYPE", "ChatMask", "LossMask", "MaskedEncoder", "PromptMask"]

# GPT-NeoX stores masked datasets as int32, tokens and labels.
LABEL_DTYPE = np.dtype(np.int32)
_PROBE = ("ab", "cd")


class LossMask(Protocol):
    """Finds the parts of a document that the loss counts."""

    @property
    def read_keys(self) -> tuple[str, ...]:
        """Return the keys that are read from the corpus."""

    @property
    def key_options(self) -> str:
        """Return the options with which other keys are read, in words."""

    @property
    def written_keys(self) -> tuple[str, str]:
        """Return the names of the datasets: tokens, labels."""

    @property
    def adds_special(self) -> bool:
        """Return True if documents begin with the ids that the tokenizer adds to the beginning of a text."""

    def described(self) -> str:
        """Return a text that identifies the mask, for manifests."""

    def in_words(self) -> str:
        """Return a description of the mask, for the summary."""

    def text_of(self, value: Any, name: str) -> str | None:
        """Return the value of a key as text; raise ValueError with the reason if it has another form."""

    def segments(self, texts: Sequence[str]) -> list[Segment]:
        """Return the parts of a document, given the texts of its keys."""


@dataclass(frozen=True, slots=True)
class PromptMask:
    """Counts responses, and not the prompts before them.

    Args:
        prompt_key: key of the prompts.
        response_key: key of the responses.
    """

    prompt_key: str
    response_key: str

    @property
    def read_keys(self) -> tuple[str, ...]:
        """Keys of the corpus."""
        return self.prompt_key, self.response_key

    @property
    def key_options(self) -> str:
        """Options of the keys."""
        return "--prompt-key or --response-key"

    @property
    def written_keys(self) -> tuple[str, str]:
        """Names of the datasets, those of GPT-NeoX's preprocess_data_with_mask."""
        return "text", "label"

    @property
    def adds_special(self) -> bool:
        """True, because generation encodes a prompt with these ids."""
        return True

    def described(self) -> str:
        """Return a text that identifies the mask."""
        return f"prompts {self.prompt_key!r}, responses {self.response_key!r}"

    def in_words(self) -> str:
        """Return what is counted, for the summary."""
        return self.described()

    def text_of(self, value: Any, name: str) -> str | None:
        """Return a value as text."""
        return text_of(value, name)

    def segments(self, texts: Sequence[str]) -> list[Segment]:
        """Return the prompt and the response."""
        prompt, response = texts
        return [Segment(prompt, False), Segment(response, True)]


@dataclass(frozen=True, slots=True)
class ChatMask:
    """Counts an assistant's messages in conversations.

    Args:
        key: key of the lists of messages.
        template: renders them.
    """

    key: str
    template: ChatTemplate

    @property
    def read_keys(self) -> tuple[str, ...]:
        """Keys of the corpus."""
        return (self.key,)

    @property
    def key_options(self) -> str:
        """Option of the key."""
        return "--messages-key"

    @property
    def written_keys(self) -> tuple[str, str]:
        """Names of the datasets, those of GPT-NeoX's preprocess_data_with_chat_template."""
        return self.key, f"{self.key}_label"

    @property
    def adds_special(self) -> bool:
        """False, because the template writes them."""
        return False

    def described(self) -> str:
        """Return a text that identifies the mask."""
        return f"messages {self.key!r}, chat template {self.template.fingerprint}"

    def in_words(self) -> str:
        """Return what is counted, for the summary."""
        return f"messages {self.key!r}, chat template {self.template.name}"

    def text_of(self, value: Any, name: str) -> str | None:
        """Render a list of messages; the parts are written as JSON."""
        if value is None:
            return None
        _check_messages(value, name)
        rendered = json.dumps(self.template.segments(value), ensure_ascii=False, allow_nan=False)
        return text_of(rendered, name)

    def segments(self, texts: Sequence[str]) -> list[Segment]:
        """Return the parts of a conversation; none for an empty text, which is a null."""
        return [Segment(*part) for part in json.loads(texts[0])] if texts[0] else []


def _check_messages(value: Any, name: str) -> None:
    """Raise ValueError unless a value is a list of messages."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {type(value).__name__}, not a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            keys = f" (its keys are {', '.join(map(repr, message))})" if isinstance(message, dict) else ""
            raise ValueError(f"message {number} of {name} is not an object with role and content{keys}")
        # Null is the content of messages that only call tools.
        if not isinstance(message.get("content"), str | None):
            raise ValueError(f"the content of message {number} of {name} is not text")


class MaskedEncoder:
    """Encodes documents in parts; called from several threads.

    Args:
        tokenizer: encodes the parts.
        mask: finds the parts.

    Raises:
        TokenizerError: the tokenizer changes texts at their ends, so that parts cannot be encoded separately.
    """

    def __init__(self, tokenizer: Tokenizer, mask: LossMask) -> None:
        self._tokenizer = tokenizer
        self._mask = mask
        ids, _ = self._encode(_PROBE)
        if tokenizer.decode(ids.tolist()) != "".join(_PROBE):
            raise TokenizerError(
                f"{type(tokenizer).__name__} adds something to the beginning or end of each text "
                f"({tokenizer.decode(ids.tolist())!r} instead of {''.join(_PROBE)!r}), so that prompts and "
                "responses cannot be encoded separately; use a byte-level tokenizer"
            )
        self._begin = self._added_to_beginning() if mask.adds_special else []

    def __call__(self, batch: Sequence[Document], end_of_document: int | None) -> EncodedBatch:
        """Return the tokens and the labels of a batch as two columns."""
        parts = [self._mask.segments(document.texts) for document in batch]
        counts = np.fromiter((part.counts for part in chain(*parts)), bool)
        ids, sizes = self._encode([part.text for part in chain(*parts)])
        labels = np.where(np.repeat(counts, sizes), ids, IGNORED)
        rows = _per_document(sizes, [len(each) for each in parts])
        kept = rows > 0
        if self._begin:
            places = np.repeat((np.cumsum(rows) - rows)[kept], len(self._begin))
            ids = np.insert(ids, places, np.tile(self._begin, int(kept.sum())))
            labels = np.insert(labels, places, IGNORED)
            rows = rows + len(self._begin) * kept
        if end_of_document is not None:
            # It ends what was last: an end that follows a response is part of it.
            last = np.array([bool(each) and each[-1].counts for each in parts])[kept]
            places = np.cumsum(rows[kept])
            ids = np.insert(ids, places, end_of_document)
            labels = np.insert(labels, places, np.where(last, end_of_document, IGNORED))
            rows = rows + kept
        files = np.fromiter((document.file for document in batch), np.int64, len(batch))[kept]
        offsets = np.fromiter((document.offset for document in batch), np.int64, len(batch))[kept]
        columns = [Column(values.astype(LABEL_DTYPE), rows[kept], files, offsets) for values in (ids, labels)]
        characters = sum(len(part.text) for part in chain(*parts))
        num_bytes = sum(document.num_bytes for document in batch)
        return EncodedBatch(columns, [characters] * 2, len(batch), num_bytes)

    def _added_to_beginning(self) -> list[int]:
        """Return the ids that the tokenizer adds to the beginning of each text, such as a BOS token."""
        if not isinstance(self._tokenizer, LibraryBackedTokenizer):
            return []
        begin, end = self._tokenizer.added_ids(_PROBE[0])
        if end:
            raise TokenizerError(
                f"{type(self._tokenizer).__name__} adds {self._tokenizer.decode(end)!r} to the end of each "
                "text, so that a response would follow the end of its prompt; use a tokenizer that adds "
                "nothing there, and --append-eod"
            )
        return begin

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(self._tokenizer, LibraryBackedTokenizer):
            return self._tokenizer.encode_flat(texts)
        return self._tokenizer.encode_parts(texts)


def _per_document(sizes: np.ndarray, counts: list[int]) -> np.ndarray:
    """Return the number of tokens of each document from those of its parts."""
    ends = np.concatenate([[0], np.cumsum(sizes)])
    return np.diff(ends[np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])])
