"""Find the documents that contain a passage of text, by searching their tokens.

A token appends its bytes to the text. The length of the matched prefix of the passage after a token depends
only on the length before it, so a table over both is an automaton that reads tokens. Nearly every token
leaves it in the initial state, which one lookup in the table's first row determines for a million tokens at a
time: the speed of a search is that of this lookup, or of the disk.

Source: D. Knuth, J. Morris, V. Pratt, Fast Pattern Matching in Strings (1977), for the automaton of bytes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from neox_data.indexed.base import IndexedDataset
from neox_data.tokenizers.base import Tokenizer

__all__ = ["TokenMatcher", "documents_with", "token_matcher"]

logger = logging.getLogger(__name__)

# Documents are searched in blocks of about this many tokens, and at most this many documents.
_BLOCK_TOKENS, _BLOCK_DOCUMENTS = 1 << 20, 1 << 16
# Only the start of a longer passage is searched; the rest is compared in the decoded text.
_MOST_BYTES = 64
_REPLACEMENT = "\ufffd"


class TokenMatcher:
    """Finds the ends of a passage in an array of tokens.

    Args:
        passage: at least one byte; only the first 64 bytes are matched.
        vocabulary: bytes of each id.
    """

    def __init__(self, passage: bytes, vocabulary: Sequence[bytes]) -> None:
        automaton = _byte_automaton(passage[:_MOST_BYTES])
        self._complete = len(automaton) - 1
        self._next = _token_automaton(automaton, vocabulary)
        self._last_column = len(vocabulary)
        self._begins = self._next[0] > 0

    def ends(self, tokens: np.ndarray) -> np.ndarray:
        """Return the sorted indices of tokens that complete the passage, int64; unknown ids match nothing."""
        found = [np.empty(0, np.int64)]
        places = np.flatnonzero(np.take(self._begins, tokens, mode="clip"))
        matched = np.zeros(len(places), np.uint8)
        while len(places):
            matched = self._next[matched, np.clip(tokens[places], 0, self._last_column)]
            is_complete = matched == self._complete
            found.append(places[is_complete])
            goes_on = ~is_complete & (matched > 0) & (places + 1 < len(tokens))
            places, matched = places[goes_on] + 1, matched[goes_on]
        return np.unique(np.concatenate(found))


def documents_with(
    indexed: IndexedDataset,
    text: str,
    tokenizer: Tokenizer,
    *,
    report: Callable[[int], None] | None = None,
) -> Iterator[int]:
    """Yield the documents that contain a passage of text, in increasing order.

    Args:
        indexed: the documents.
        text: the passage, within one document.
        tokenizer: the tokenizer of the documents.
        report: called with the number of tokens searched since the last call.

    Raises:
        IndexedDatasetError: the documents are not consecutive in their file.
    """
    matcher = token_matcher(text, tokenizer)
    for documents in _blocks(indexed.sizes):
        tokens = _tokens_of(indexed, documents)
        candidates: Iterable[int] = documents
        if matcher is not None:
            ends = np.cumsum(indexed.sizes[documents.start : documents.stop], dtype=np.int64)
            holding = np.unique(np.searchsorted(ends, matcher.ends(tokens), side="right"))
            candidates = (documents.start + holding).tolist()
        for document in candidates:
            if text in tokenizer.decode(indexed[document].tolist()):
                yield document
        if report:
            report(len(tokens))


def token_matcher(text: str, tokenizer: Tokenizer) -> TokenMatcher | None:
    """Return a matcher for a text; None if every document has to be decoded.

    This is the case if texts are not the concatenated bytes of their tokens, as with SentencePiece, and for a
    passage of replacement characters only, which stand for any invalid bytes.
    """
    passage = max(text.split(_REPLACEMENT), key=len).encode()
    vocabulary = tokenizer.token_bytes() if passage else None
    if vocabulary is None or not _spells(vocabulary, tokenizer):
        logger.info(
            "decoding every document: texts of %s are not the bytes of their tokens", type(tokenizer).__name__
        )
        return None
    return TokenMatcher(passage, vocabulary)


def _spells(vocabulary: Sequence[bytes], tokenizer: Tokenizer) -> bool:
    """Return True if texts are the concatenated bytes of their tokens: each token, and all in sequence."""
    ids = range(len(vocabulary))
    rows = [*([number] for number in ids), list(ids)]
    return all(
        tokenizer.decode(row) == b"".join(vocabulary[number] for number in row).decode(errors="replace")
        for row in rows
    )


def _blocks(sizes: np.ndarray) -> Iterator[range]:
    """Yield ranges of documents of about a million tokens; a longer document is a separate block."""
    first = 0
    while first < len(sizes):
        ends = np.cumsum(sizes[first : first + _BLOCK_DOCUMENTS], dtype=np.int64)
        stop = first + max(1, int(np.searchsorted(ends, _BLOCK_TOKENS, side="right")))
        yield range(first, stop)
        first = stop


def _tokens_of(indexed: IndexedDataset, documents: range) -> np.ndarray:
    first, length = indexed.token_range(documents)
    if length == indexed.sizes[documents.start : documents.stop].sum(dtype=np.int64):
        return indexed.get_tokens(first, length)
    return np.concatenate([indexed[document] for document in documents])


def _byte_automaton(passage: bytes) -> np.ndarray:
    """Return the matched length after a byte, by the length before and the byte; uint8 [length + 1, 256].

    A complete match remains complete.
    """
    table = np.zeros((len(passage) + 1, 256), np.uint8)
    shorter = 0
    for matched, byte in enumerate(passage):
        # A byte that does not continue the passage may continue the longest shorter prefix that matches.
        table[matched] = table[shorter]
        shorter = int(table[shorter, byte])
        table[matched, byte] = matched + 1
    table[-1] = len(passage)
    return table


def _token_automaton(automaton: np.ndarray, vocabulary: Sequence[bytes]) -> np.ndarray:
    """Return the automaton over tokens, uint8 [length + 1, entries + 1]; the last column matches nothing."""
    lengths = np.fromiter(map(len, vocabulary), np.int64, len(vocabulary))
    begins = np.cumsum(lengths) - lengths
    joined = np.frombuffer(b"".join(vocabulary), np.uint8)
    table = np.repeat(np.arange(len(automaton), dtype=np.uint8)[:, None], len(vocabulary) + 1, axis=1)
    table[:, -1] = 0
    longest_first = np.argsort(-lengths, kind="stable")
    for place in range(lengths.max(initial=0)):
        ids = longest_first[: np.count_nonzero(lengths > place)]
        table[:, ids] = automaton[table[:, ids], joined[begins[ids] + place]]
    return table
