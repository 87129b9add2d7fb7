"""Read the documents of an indexed dataset, or of text files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from neox_data.indexed import IndexedDataset, open_indexed
from neox_data.indexed.layout import idx_path
from neox_data.preprocess.inputs import find_inputs
from neox_data.preprocess.read import CorpusReader
from neox_data.tokenizers import Tokenizer

__all__ = ["ScoredDocument", "read_documents"]

_KEYS = ("text",)


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """A document and its size.

    Args:
        tokens: its ids, without end-of-document.
        num_bytes: of its text in UTF-8.
        num_characters: of its text.
    """

    tokens: Sequence[int]
    num_bytes: int
    num_characters: int


def read_documents(
    source: str, tokenizer: Tokenizer, *, limit: int | None = None, first: int = 0, every: int = 1
) -> Iterator[tuple[int, ScoredDocument]]:
    """Yield (number, document) for every n-th document.

    Args:
        source: prefix of an indexed dataset, or a file, folder or pattern that preprocess_data reads; JSON
            lines have the key `text`.
        tokenizer: encodes texts, and decodes the tokens of an indexed dataset.
        limit: number of documents to read; None: all.
        first: number of the first document.
        every: distance to the next one.

    Raises:
        DataError: a file is missing or damaged, or a document cannot be read.
    """
    if idx_path(source).exists():
        dataset = open_indexed(source)
        count = len(dataset.document_starts) - 1
        yield from _indexed(
            dataset, tokenizer, range(first, count if limit is None else min(limit, count), every)
        )
        return
    reader = CorpusReader(find_inputs([source]), _KEYS)
    for number, document in islice(enumerate(reader), first, limit, every):
        (text,) = document.texts
        yield number, ScoredDocument(tokenizer.encode(text), len(text.encode()), len(text))


def _indexed(
    dataset: IndexedDataset, tokenizer: Tokenizer, numbers: range
) -> Iterator[tuple[int, ScoredDocument]]:
    starts = dataset.document_starts
    for number in numbers:
        sequences = range(int(starts[number]), int(starts[number + 1]))
        tokens = [token for one in sequences for token in dataset.get(one).tolist()]
        if tokens and tokens[-1] == tokenizer.end_of_document:
            tokens.pop()
        text = tokenizer.decode(tokens)
        yield number, ScoredDocument(tokens, len(text.encode()), len(text))
