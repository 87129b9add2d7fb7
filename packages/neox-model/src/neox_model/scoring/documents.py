"""Read the documents of an indexed dataset, or of text files."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from neox_data.errors import DataError
from neox_data.indexed import IndexedDataset, open_indexed
from neox_data.indexed.layout import idx_path
from neox_data.preprocess.inputs import find_inputs
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.read import MAX_DOCUMENT_BYTES, CorpusReader, Remedies
from neox_data.tokenizers import Tokenizer
from neox_model.scoring.texts import TextEncoder

__all__ = ["ScoredDocument", "read_documents"]

logger = logging.getLogger(__name__)

_KEYS = ("text",)
_MOST_BYTES = MAX_DOCUMENT_BYTES
# An evaluation leaves out no document.
_UNDER_TEXT = f"write the texts under {_KEYS[0]!r}"
_REMEDIES = Remedies("correct it, or leave it out of the file", _UNDER_TEXT, _UNDER_TEXT)


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """A document and its size.

    Args:
        tokens: its ids, without end-of-document and other ids that the tokenizer adds to texts.
        num_bytes: of its text in UTF-8.
        num_characters: of its text.
        share_read: of the source up to the end of this document, from 0 to 1; 0 if that is not known.
    """

    tokens: Sequence[int]
    num_bytes: int
    num_characters: int
    share_read: float


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
        DataError: a file is missing or damaged, a document cannot be read, or it has a token that the
            tokenizer does not have.
    """
    if idx_path(source).exists():
        dataset = open_indexed(source)
        count = len(dataset.document_starts) - 1
        yield from _indexed(
            dataset, tokenizer, range(first, count if limit is None else min(limit, count), every)
        )
        return
    encoder = TextEncoder(tokenizer)
    for number, (text, of_files) in islice(enumerate(_texts(source)), first, limit, every):
        share = of_files if limit is None else max(of_files, (number + 1) / limit)
        yield number, ScoredDocument(encoder.inner(text), len(text.encode()), len(text), share)


def _texts(source: str) -> Iterator[tuple[str, float]]:
    """Yield the texts of files with the share of the files' bytes that has been read.

    All, or until it is closed. Logs which files of folders are not read.
    """
    passed_over = PassedOver()
    try:
        reader = CorpusReader(
            find_inputs([source], passed_over),
            _KEYS,
            passed_over=passed_over,
            max_document_bytes=_MOST_BYTES,
            remedies=_REMEDIES,
        )
        for document in reader:
            if reader.num_too_long:
                break
            yield document.texts[0], reader.bytes_done / max(1, reader.total_bytes)
    except OSError as error:
        raise DataError(f"eval-data {source} cannot be read: {error}; check its files") from error
    if reader.num_too_long:
        raise DataError(
            f"eval-data {source} has a document of more than {_MOST_BYTES:,} bytes; divide it, or "
            "convert it with preprocess_data --split-long-documents"
        )
    for line in passed_over.lines():
        logger.warning("eval-data %s: %s", source, line)


def _indexed(
    dataset: IndexedDataset, tokenizer: Tokenizer, numbers: range
) -> Iterator[tuple[int, ScoredDocument]]:
    starts, encoder = dataset.document_starts, TextEncoder(tokenizer)
    for number in numbers:
        sequences = range(int(starts[number]), int(starts[number + 1]))
        stored = [token for one in sequences for token in dataset.get(one).tolist()]
        # An embedding that is split over ranks would return zeros for such a token.
        wrong = next((token for token in stored if not 0 <= token < tokenizer.vocab_size), None)
        if wrong is not None:
            raise DataError(
                f"document {number:,} of {dataset.prefix} contains token {wrong:,}, but the tokenizer has "
                f"{tokenizer.vocab_size:,} entries; configure the tokenizer with which the data was tokenized"
            )
        tokens = encoder.without_added(stored)
        text = tokenizer.decode(tokens)
        share = (number + 1) / numbers.stop
        yield number, ScoredDocument(tokens, len(text.encode()), len(text), share)
