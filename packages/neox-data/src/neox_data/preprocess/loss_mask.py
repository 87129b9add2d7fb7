"""Documents of which the loss counts only parts: responses to prompts, or an assistant's messages.

Parts are encoded separately, as generation encodes a prompt separately from what follows it. A tokenizer that
adds something to every part, such as Llama 2's, which adds a space, encodes the whole text; tokens belong to
the part of their characters. There is one label per token: the token, or -100 where the loss does not count
it.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from neox_data.errors import TokenizerError
from neox_data.preprocess.chat_template import ChatTemplate, Segment
from neox_data.preprocess.conversations import is_empty, messages_in, objects_in
from neox_data.preprocess.encode import Column, EncodedBatch
from neox_data.preprocess.read import Document
from neox_data.preprocess.texts import text_of
from neox_data.samples.whole_documents import IGNORED
from neox_data.tokenizers.base import Tokenizer, flattened
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer

__all__ = ["LABEL_DTYPE", "ChatMask", "LossMask", "MaskedEncoder", "PromptMask"]

# GPT-NeoX stores masked datasets as int32, tokens and labels.
LABEL_DTYPE = np.dtype(np.int32)
_PROBE = ("ab", "cd")


class LossMask(ABC):
    """Finds the parts of a document that the loss counts.

    Attributes:
        read_keys: keys that are read from the corpus.
        optional_keys: more keys that are read, which documents need not have.
        key_options: the options with which other keys are read, in words.
        written_keys: names of the datasets: tokens, labels; those of GPT-NeoX's programs.
        adds_special: whether documents begin with the ids that the tokenizer adds to the beginning of a text.
        described: identifies the mask, for manifests.
        in_words: describes it, for the summary.
    """

    read_keys: tuple[str, ...]
    optional_keys: tuple[str, ...] = ()
    key_options: str
    written_keys: tuple[str, str]
    adds_special: bool
    described: str
    in_words: str

    @abstractmethod
    def text_of(self, value: Any, name: str, document: Mapping[str, Any]) -> str | None:
        """Return the value of a key as text; raise ValueError with the reason if it has another form."""

    @abstractmethod
    def segments(self, texts: Sequence[str]) -> list[Segment]:
        """Return the parts of a document, given the texts of its keys."""


class PromptMask(LossMask):
    """Counts responses, and not the prompts before them."""

    key_options = "--prompt-key or --response-key"
    written_keys = ("text", "label")
    # Generation encodes a prompt with these ids.
    adds_special = True

    def __init__(self, prompt_key: str, response_key: str) -> None:
        self.read_keys = (prompt_key, response_key)
        self.described = self.in_words = f"prompts {prompt_key!r}, responses {response_key!r}"

    def text_of(self, value: Any, name: str, document: Mapping[str, Any]) -> str | None:
        """Return a value as text."""
        return text_of(value, name)

    def segments(self, texts: Sequence[str]) -> list[Segment]:
        """Return the prompt and the response."""
        prompt, response = texts
        return [Segment(prompt, False), Segment(response, True)]


class ChatMask(LossMask):
    """Counts an assistant's messages in conversations.

    Attributes:
        template: the template.
    """

    # What a template may show besides messages, as transformers passes it to templates.
    optional_keys = ("tools", "documents")
    key_options = "--messages-key"
    # The template writes them.
    adds_special = False

    def __init__(self, key: str, template: ChatTemplate) -> None:
        self.read_keys = (key,)
        self.written_keys = (key, f"{key}_label")
        self.template = template
        self.described = f"messages {key!r}, chat template {template.fingerprint}"
        self.in_words = f"messages {key!r}, chat template {template.name}"
        # Keys of documents that this template does not show, and what was changed before it saw them.
        self._left_out: set[str] = set()
        self._notes: set[str] = set()

    def text_of(self, value: Any, name: str, document: Mapping[str, Any]) -> str | None:
        """Render a list of messages, with the document's tools; the parts are written as JSON."""
        if value is None:
            return None
        shown = {}
        for key in self.optional_keys:
            if key in self.template.variables:
                shown[key] = objects_in(document.get(key), f"the value of {key!r}", self._notes)
            elif not is_empty(document.get(key)):
                self._left_out.add(key)
        messages = messages_in(value, name, self._notes)
        parts = self.template.segments(messages, **shown, notes=self._notes)
        return text_of(json.dumps(parts, ensure_ascii=False, allow_nan=False), name)

    def described_changes(self) -> list[str]:
        """Return the notes on documents that were read."""
        keys = " and ".join(map(repr, sorted(self._left_out)))
        unseen = f"documents have {keys}, which the chat template {self.template.name} does not show"
        return [*sorted(self._notes), *([unseen] if keys else [])]

    def segments(self, texts: Sequence[str]) -> list[Segment]:
        """Return the parts of a conversation; none for an empty text, which is a null."""
        return [Segment(*part) for part in json.loads(texts[0])] if texts[0] else []


# The concatenated ids of documents, whether the loss counts each, and the number of ids of each document.
_Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]


class MaskedEncoder:
    """Encodes documents that have parts; called from several threads.

    Args:
        tokenizer: encodes the parts, or whole texts if it changes texts at their ends.
        mask: finds the parts.

    Attributes:
        way: how documents are encoded, for the summary.

    Raises:
        TokenizerError: the tokenizer changes texts at their ends, and does not report where tokens are.
    """

    def __init__(self, tokenizer: Tokenizer, mask: LossMask) -> None:
        self._tokenizer = tokenizer
        self._mask = mask
        ids, _ = self._encode(_PROBE)
        changed, self._split, self.way = tokenizer.decode(ids.tolist()), self._in_parts, "in parts"
        if changed != "".join(_PROBE):
            if not isinstance(tokenizer, LibraryBackedTokenizer):
                raise TokenizerError(
                    f"{type(tokenizer).__name__} adds something to the beginning or end of each text "
                    f"({changed!r} instead of {''.join(_PROBE)!r}), so that prompts and responses cannot be "
                    "encoded separately; use the model's tokenizer.json with HFTokenizer"
                )
            self._split, self.way = partial(_as_wholes, tokenizer), "as whole texts"
        self._begin, added_end = tokenizer.added_ids(_PROBE[0]) if mask.adds_special else ([], [])
        if added_end:
            raise TokenizerError(
                f"{type(tokenizer).__name__} adds {tokenizer.decode(added_end)!r} to the end of each text, "
                "so that a response would follow the end of its prompt; use a tokenizer that adds nothing "
                "there, and --append-eod"
            )

    def __call__(self, batch: Sequence[Document], end_of_document: int | None) -> EncodedBatch:
        """Return the tokens and the labels of a batch as two columns."""
        parts = [self._mask.segments(document.texts) for document in batch]
        ids, counts, rows = self._split(parts)
        labels = np.where(counts, ids, IGNORED)
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

    def _in_parts(self, documents: Sequence[Sequence[Segment]]) -> _Encoded:
        parts = [*chain(*documents)]
        ids, sizes = self._encode([part.text for part in parts])
        counts = np.fromiter((part.counts for part in parts), bool, len(parts))
        begins = np.cumsum([0, *map(len, documents)])
        rows = np.diff(np.concatenate([[0], np.cumsum(sizes)])[begins])
        return ids, np.repeat(counts, sizes), rows

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._mask.adds_special:
            return self._tokenizer.encode_parts(texts)
        return self._tokenizer.encode_rendered(texts)


def _as_wholes(tokenizer: LibraryBackedTokenizer, documents: Sequence[Sequence[Segment]]) -> _Encoded:
    """Encode the whole text of each document; a token counts if one of its characters does.

    So do tokens without characters of their own between tokens that count, as in transformers' masks of the
    assistant's tokens.
    """
    encoded = tokenizer.encode_placed(["".join(part.text for part in parts) for parts in documents])
    counts = [
        _counted(np.array(places, np.int64).reshape(-1, 2), parts)
        for (_, places), parts in zip(encoded, documents, strict=True)
    ]
    ids, rows = flattened([ids for ids, _ in encoded])
    return ids, np.concatenate([np.empty(0, bool), *counts]), rows


def _counted(places: np.ndarray, parts: Sequence[Segment]) -> np.ndarray:
    """Return which tokens the loss counts, bool [tokens].

    Args:
        places: first character of each token and the one behind its last, int64 [tokens, 2], in order.
        parts: the parts of the text.
    """
    found = np.zeros(len(places), bool)
    begin = 0
    for part in parts:
        end = begin + len(part.text)
        if part.counts:
            first, stop = np.searchsorted(places[:, 1], begin, "right"), np.searchsorted(places[:, 0], end)
            found[first:stop] = True
        begin = end
    return found
