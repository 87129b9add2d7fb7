"""Which documents hold a passage of text, found in their tokens: texts are decoded only where it is.

A token adds its bytes to the text. How much of the passage a text ends in after a token follows from how much
it ended in before, so one table over both is an automaton that reads tokens. Nearly every token leaves it at
nothing, which one look into the table's first row tells of a million tokens at once: a search runs at the
speed of that look, or of the disk.

Source: D. Knuth, J. Morris, V. Pratt, Fast Pattern Matching in Strings (1977), for the automaton of bytes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from neox_data.indexed.base import IndexedDataset
from neox_data.tokenizers.base import Tokenizer

__all__ = ["TokenMatcher", "documents_with", "token_matcher"]

logger = logging.getLogger(__name__)

# Documents are looked at in blocks of about so many tokens, and of at most so many documents.
_BLOCK_TOKENS, _BLOCK_DOCUMENTS = 1 << 20, 1 << 16
# Of a longer passage its beginning is looked for; whether the rest follows is seen in the text.
_MOST_BYTES = 64
_REPLACEMENT = "\ufffd"


class TokenMatcher:
    """Finds where a passage ends in a row of tokens.

    Args:
        passage: at least one byte; of more than 64, the first 64 are what is found.
        vocabulary: what each id adds to a text.
    """

    def __init__(self, passage: bytes, vocabulary: Sequence[bytes]) -> None:
        automaton = _byte_automaton(passage[:_MOST_BYTES])
        self._complete = len(automaton) - 1
        self._next = _token_automaton(automaton, vocabulary)
        self._last_column = len(vocabulary)
        self._begins = self._next[0] > 0

    def ends(self, tokens: np.ndarray) -> np.ndarray:
        """Places of the tokens that complete the passage, int64, rising; ids of no token match nothing."""
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
    """The documents that hold a passage of text, in rising order.

    Args:
        indexed: the documents.
        text: the passage; it lies within one document.
        tokenizer: made the tokens.
        report: is told a number of tokens each time that so many more have been looked at.

    Raises:
        IndexedDatasetError: the documents do not lie one after another in their file.
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
    """What finds all tokens that could spell a text; None where every document has to be decoded.

    That is so where a text is more than the bytes of its tokens one after another, as with SentencePiece, and
    for a passage of nothing but replacement characters, which stand for any broken bytes.
    """
    passage = max(text.split(_REPLACEMENT), key=len).encode()
    vocabulary = tokenizer.token_bytes() if passage else None
    if vocabulary is None or not _spells(vocabulary, tokenizer):
        logger.info(
            "every document is decoded: %s does not spell texts byte by byte", type(tokenizer).__name__
        )
        return None
    return TokenMatcher(passage, vocabulary)


def _spells(vocabulary: Sequence[bytes], tokenizer: Tokenizer) -> bool:
    """Whether texts are the bytes of their tokens one after another: each entry alone, and all in a row."""
    ids = range(len(vocabulary))
    rows = [*([number] for number in ids), list(ids)]
    return all(
        tokenizer.decode(row) == b"".join(vocabulary[number] for number in row).decode(errors="replace")
        for row in rows
    )


def _blocks(sizes: np.ndarray) -> Iterator[range]:
    """Consecutive documents of about a million tokens; a longer document is a block of its own."""
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
    """How much of a passage is matched after a byte, from how much was before it; uint8 [length + 1, 256].

    The whole passage stays matched whatever follows.
    """
    table = np.zeros((len(passage) + 1, 256), np.uint8)
    shorter = 0
    for matched, byte in enumerate(passage):
        # What does not continue the passage may continue the longest shorter beginning that is matched, too.
        table[matched] = table[shorter]
        shorter = int(table[shorter, byte])
        table[matched, byte] = matched + 1
    table[-1] = len(passage)
    return table


def _token_automaton(automaton: np.ndarray, vocabulary: Sequence[bytes]) -> np.ndarray:
    """The same for whole tokens, uint8 [length + 1, entries + 1]; the last column matches nothing."""
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
