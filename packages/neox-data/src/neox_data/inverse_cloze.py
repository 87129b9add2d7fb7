"""Samples of the inverse cloze task: a sentence as the query, and the block of sentences around it.

A document is divided into blocks of whole sentences that fit in a sample. A sentence of a block is the query,
and is usually taken out of the block, so that a model learns to find the block by what it means.

    query:  <end> sentence <end>
    block:  <end> sentences <end>,  with a title  <end> title <end> sentences <end>

`<end>` is the end-of-document token; it stands where BERT has [CLS] and [SEP].

A sentence ends with a token that ends with `.`, `!` or `?`, if the next one begins with a space, and with a
token that has a line break. Longer sentences than a block are divided.

Source: arXiv:1906.00300, section 4.1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from neox_data.errors import DataError
from neox_data.indexed.base import IndexedDataset
from neox_data.pluralize import pluralize
from neox_data.random_draws import RandomDraws
from neox_data.token_texts import token_texts
from neox_data.tokenizers.base import Tokenizer

__all__ = ["Block", "Blocks", "InverseClozeDataset", "SentenceEnds", "framed"]

_FINAL = (b".", b"!", b"?")
# Characters that may follow the final one, and that belong to the sentence.
_CLOSING = b"\"')]}*_"


class SentenceEnds:
    """The tokens at which sentences end.

    Attributes:
        end_of_document: its end-of-document token.

    Raises:
        TokenizerError: the texts are not the bytes of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = token_texts(
            tokenizer,
            required_by="objective: ict",
            otherwise="sentences are unknown; use another tokenizer",
        )
        self.end_of_document = tokenizer.end_of_document
        self._is_final = np.array(
            [text.rstrip(b" ").rstrip(_CLOSING).endswith(_FINAL) for text in texts], bool
        )
        self._has_line_break = np.array([b"\n" in text for text in texts], bool)
        self._begins_with_space = np.array([text[:1].isspace() for text in texts], bool)
        self._is_space = np.array([text.isspace() for text in texts], bool)

    def of(self, tokens: np.ndarray, longest: int) -> np.ndarray:
        """Return where the sentences of a document end: increasing places behind their last tokens, int64.

        Args:
            tokens: int64 [tokens], without the end of the document.
            longest: most tokens of a sentence; longer ones are divided.
        """
        if not len(tokens):
            return np.zeros(0, np.int64)
        known = tokens < len(self._is_final)
        safe = np.where(known, tokens, 0)
        is_followed = np.append(self._begins_with_space[safe[1:]], True)
        is_end = known & ((self._is_final[safe] & is_followed) | self._has_line_break[safe])
        is_end[-1] = True
        # Space behind an end belongs to the sentence before it, unless a word shares the token; space at the
        # beginning of the document belongs to the first sentence.
        ends = np.flatnonzero(is_end) + 1
        is_blank = known & self._is_space[safe]
        kept, begin = list[int](), 0
        for end in ends.tolist():
            if not is_blank[begin:end].all():
                kept.append(end)
            elif kept:
                kept[-1] = end
            begin = end
        found, begin = list[int](), 0
        for end in kept:
            found += [*range(begin + longest, end, longest), end]
            begin = end
        return np.array(found, np.int64)


@dataclass(frozen=True, slots=True)
class Block:
    """Sentences of a document that fit in a sample.

    Args:
        sequence: sequence number of the document.
        begin: its first token in the document.
        ends: places in the document behind the last token of each of its sentences.
    """

    sequence: int
    begin: int
    ends: tuple[int, ...]

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return self.ends[-1] - self.begin

    def sentence(self, number: int) -> tuple[int, int]:
        """Return (begin, end) of a sentence in the block."""
        begin = self.begin if number == 0 else self.ends[number - 1]
        return begin - self.begin, self.ends[number] - self.begin


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """The blocks of some documents, in their order.

    Every rank divides the documents when it starts; they are not stored.

    Args:
        indexed: the tokens; each sequence is a document.
        titles: the title of each sequence; None: no titles.
        documents: sequence numbers.
        seq_length: tokens of a sample.
        ends: where sentences end.
        has_single: also use blocks of one sentence.

    Raises:
        DataError: there are not as many titles as documents, or there is no block.
    """

    indexed: IndexedDataset
    titles: IndexedDataset | None
    documents: range
    seq_length: int
    ends: SentenceEnds
    has_single: bool = False
    _found: list[Block] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.titles is not None and len(self.titles) != len(self.indexed):
            raise DataError(
                f"titles-data-path: {self.titles.prefix} has {pluralize(len(self.titles), 'title')}, but "
                f"{self.indexed.prefix} has {pluralize(len(self.indexed), 'document')}; tokenize one title "
                "for each document, in the same order"
            )
        for sequence in self.documents:
            self._found.extend(
                block for block in self._divide(sequence) if len(block.ends) > 1 or self.has_single
            )
        if not self._found:
            need = "a sentence" if self.has_single else "two sentences"
            raise DataError(
                f"no document of {self.indexed.prefix} has a block of {need} within {self.seq_length:,} "
                "tokens; increase seq-length, set use-one-sent-docs: true, or use other texts"
            )

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, number: int) -> Block:
        return self._found[number]

    def tokens(self, block: Block) -> np.ndarray:
        """Return the tokens of a block without title, int64."""
        return np.asarray(self.indexed.get(block.sequence, block.begin, block.length), np.int64)

    def title(self, sequence: int) -> np.ndarray:
        """Return the tokens of a document's title, cut to a quarter of a sample; none without titles."""
        if self.titles is None:
            return np.zeros(0, np.int64)
        return _without_end(np.asarray(self.titles.get(sequence), np.int64), self.ends)[
            : self.seq_length // 4
        ]

    def framed(self, tokens: np.ndarray, sequence: int) -> np.ndarray:
        """Return the input of a block: int64 [2, seq_length], tokens, and 1 for these, 0 for padding."""
        return framed(tokens, self.seq_length, self.ends.end_of_document, title=self.title(sequence))

    def _divide(self, sequence: int) -> Iterator[Block]:
        tokens = _without_end(np.asarray(self.indexed.get(sequence), np.int64), self.ends)
        title = len(self.title(sequence))
        # The tokens around the block, and around the title.
        room = self.seq_length - 2 - (title + 1 if title else 0)
        begin, taken = 0, list[int]()
        for end in self.ends.of(tokens, room).tolist():
            if taken and end - begin > room:
                yield Block(sequence, begin, tuple(taken))
                begin, taken = taken[-1], []
            taken.append(end)
        if taken:
            yield Block(sequence, begin, tuple(taken))


def _without_end(tokens: np.ndarray, ends: SentenceEnds) -> np.ndarray:
    return tokens[:-1] if len(tokens) and tokens[-1] == ends.end_of_document else tokens


def framed(
    tokens: np.ndarray, length: int, end_of_document: int, *, title: np.ndarray | None = None
) -> np.ndarray:
    """Return the input of a tower: int64 [2, length], tokens, and 1 for these, 0 for padding.

    Args:
        tokens: the text, which is cut if it does not fit.
        length: tokens of a sample.
        end_of_document: the token around the text.
        title: the title before it; None or empty: no title.
    """
    end = np.array([end_of_document])
    parts = [end] if title is None or not len(title) else [end, title, end]
    used = np.concatenate([*parts, tokens])[: length - 1]
    rows = np.zeros((2, length), np.int64)
    rows[0], rows[1, : len(used) + 1] = end_of_document, 1
    rows[0, : len(used)] = used
    return rows


class InverseClozeDataset:
    """Queries and their blocks. Item k depends only on the blocks, `name`, `seed` and the probability.

    Every pass over the blocks has another order, and other queries.

    Args:
        blocks: the blocks.
        name: name of this part, such as `train`.
        num_samples: number of samples that will be read; the dataset has at least as many.
        seed: random seed.
        query_in_block: probability that the query stays in its block.

    Attributes:
        indexed: the tokens.
        num_documents: documents of this part.
        num_tokens: tokens of these documents.
        epochs: passes over the blocks.
    """

    def __init__(
        self, blocks: Blocks, *, name: str, num_samples: int, seed: int, query_in_block: float
    ) -> None:
        self._blocks, self._name, self._seed = blocks, name, seed
        self._query_in_block = query_in_block
        self.epochs = max(1, -(-num_samples // len(blocks)))
        self.indexed = blocks.indexed
        self.num_documents = len(blocks.documents)
        sizes = blocks.indexed.sizes[blocks.documents.start : blocks.documents.stop]
        self.num_tokens = int(sizes.sum(dtype=np.int64))

    def __len__(self) -> int:
        return self.epochs * len(self._blocks)

    @cached_property
    def _order(self) -> np.ndarray:
        """Return the number of the block of each item, int64."""
        passes = [
            np.argsort(
                RandomDraws(f"{self._seed} {self._name} blocks {epoch}").uniform(len(self._blocks)),
                kind="stable",
            )
            for epoch in range(self.epochs)
        ]
        return np.concatenate(passes)

    def block_of(self, item: int) -> int:
        """Return the number of the block of an item.

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < len(self):
            raise IndexError(
                f"item {item} of the part {self._name!r} of {self.indexed.prefix}, which has {len(self):,}"
            )
        return int(self._order[item])

    def __getitem__(self, item: int) -> np.ndarray:
        """Return an item, int64 [2, 2, seq_length]: the query and the block, each as of `framed`."""
        block = self._blocks[self.block_of(item)]
        draws = RandomDraws(f"{self._seed} {self._name} queries {item}")
        choice, stays = draws.uniform(2).tolist()
        begin, end = block.sentence(int(choice * len(block.ends)))
        tokens = self._blocks.tokens(block)
        query = tokens[begin:end]
        if len(block.ends) > 1 and stays >= self._query_in_block:
            tokens = np.concatenate([tokens[:begin], tokens[end:]])
        ends = self._blocks.ends.end_of_document
        return np.stack(
            [framed(query, self._blocks.seq_length, ends), self._blocks.framed(tokens, block.sequence)]
        )

    def passes(self, num_samples: int) -> float:
        """Return how often the first items contain a block, on average."""
        return num_samples / len(self._blocks)

    def pieces(self, item: int) -> Iterator[tuple[int, int, int]]:
        """Yield the range of the document that an item is from: (sequence, first token, number of tokens)."""
        block = self._blocks[self.block_of(item)]
        yield block.sequence, block.begin, block.length

    def items_with(self, sequence: int) -> np.ndarray:
        """Return the sorted items with blocks of a sequence, int64."""
        numbers = [number for number in range(len(self._blocks)) if self._blocks[number].sequence == sequence]
        return np.flatnonzero(np.isin(self._order, numbers))
