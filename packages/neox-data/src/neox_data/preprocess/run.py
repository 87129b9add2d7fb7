"""Implement `preprocess_data`: write one indexed dataset per key, either all of them or none."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neox_data.counted import counted, first_few
from neox_data.errors import CorpusError, TokenizerError
from neox_data.indexed.index import read_index
from neox_data.indexed.layout import token_dtype
from neox_data.manifest import describe_tokenizer, hashed_ahead
from neox_data.preprocess.encode import EncodedBatch, Encoder, encode_all, encode_batches
from neox_data.preprocess.inputs import CorpusPart
from neox_data.preprocess.loss_mask import LABEL_DTYPE, LossMask, MaskedEncoder
from neox_data.preprocess.output import DatasetOutput
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.progress import Counts, Reporter
from neox_data.preprocess.read import MAX_DOCUMENT_BYTES, CorpusReader, Remedies, sample_texts
from neox_data.preprocess.summary import Summary
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.fast import fast_encoder
from neox_data.tokenizers.ranked_files import RankedFileTokenizer

__all__ = ["Options", "end_by_tokenizer", "longest_document", "no_text_in", "output_prefix_of", "preprocess"]


# Number of files to name in an error message about all files.
_MOST_NAMED = 3


def output_prefix_of(output_prefix: Path | str, key: str) -> Path:
    """Return the prefix of the dataset with the texts of a key."""
    return Path(f"{output_prefix}_{key}_document")


def longest_document(prefix: Path) -> int:
    """Return the number of tokens of the longest document of a dataset that was written."""
    return int(read_index(prefix).sizes.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the conversion of a corpus to datasets.

    Attributes:
        keys: keys of the JSON lines; each becomes a dataset.
        append_end: append the end-of-document token to each document.
        workers: number of batches encoded in parallel; the output does not depend on it.
        num_documents: number of documents, for the progress; None: estimate progress by bytes.
        skip_bad_lines: skip and count documents that cannot be read.
        exact: encode with the tokenizers library even if gigatoken gives the same ids.
        max_document_bytes: maximum document size; larger documents are skipped and counted.
        split_long: split larger documents instead of skipping them.
        mend_text: repair wrongly decoded characters with ftfy.
        may_be_empty: allow a corpus without text.
        loss_mask: write tokens and labels of these documents, instead of a dataset per key.
    """

    keys: tuple[str, ...] = ("text",)
    append_end: bool = False
    workers: int = 1
    num_documents: int | None = None
    skip_bad_lines: bool = False
    exact: bool = False
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    split_long: bool = False
    mend_text: bool = False
    may_be_empty: bool = False
    loss_mask: LossMask | None = None

    @property
    def read_keys(self) -> tuple[str, ...]:
        """Return the keys that are read from the corpus."""
        return self.keys if self.loss_mask is None else self.loss_mask.read_keys

    @property
    def key_options(self) -> str:
        """Return the options of preprocess_data with which other keys are read, in words."""
        return "--jsonl-keys" if self.loss_mask is None else self.loss_mask.key_options

    @property
    def remedies(self) -> Remedies:
        """Return what errors of reading ask the user to do."""
        for_chats = "--loss-mask chat" if self.loss_mask is None else None
        return Remedies.with_options(self.key_options, for_chats=for_chats)

    @property
    def long_ones(self) -> str:
        """Return how documents above the maximum size are handled."""
        return "split" if self.split_long else "skipped"

    def described(self, key: str) -> dict[str, Any]:
        """Return the options to record in a manifest: all that affect the contents of a dataset."""
        return {
            **({} if self.loss_mask is None else {"loss_mask": self.loss_mask.described()}),
            "key": key,
            "append_eod": self.append_end,
            "max_document_bytes": self.max_document_bytes,
            "split_long_documents": self.split_long,
            "ftfy": self.mend_text,
            "skip_bad_lines": self.skip_bad_lines,
        }


def preprocess(
    paths: Sequence[Path | CorpusPart],
    *,
    output_prefix: Path | str,
    tokenizer: Tokenizer,
    options: Options,
    report: Reporter | None = None,
    passed_over: PassedOver | None = None,
) -> Summary:
    """Convert text files to one indexed dataset per key, with documents in the order of the input.

    Args:
        paths: the corpus; see `inputs.find_inputs`.
        output_prefix: each dataset is named `OUTPUT_PREFIX_KEY_document`.
        tokenizer: encodes the texts; its vocabulary size determines the dtype of the tokens.
        options: all other options.
        report: called with the counts after each batch.
        passed_over: files of the corpus that are not read.

    Raises:
        CorpusError: a file or a line cannot be read, or no document has a token.
        TokenizerError: the tokenizer cannot encode a document.
        OSError: the output cannot be written.
    """
    started = time.monotonic()
    reader = _open_corpus(paths, options, passed_over)
    encoding = _choose_encoding(tokenizer, paths, options)
    prefixes = tuple(output_prefix_of(output_prefix, key) for key in options.keys)
    dtype = token_dtype(tokenizer.vocab_size) if options.loss_mask is None else LABEL_DTYPE
    counts = Counts()
    with ExitStack() as files, _described(paths) as inputs:
        outputs = [
            files.enter_context(DatasetOutput.open(prefix, key, dtype=dtype, num_files=len(paths)))
            for prefix, key in zip(prefixes, options.keys, strict=True)
        ]
        is_appended = options.append_end and end_by_tokenizer(tokenizer, options) is None
        end = tokenizer.end_of_document if is_appended else None
        for batch in _encoded(reader, encoding, dtype=dtype, end_of_document=end):
            for output, column, characters in zip(outputs, batch.columns, batch.characters, strict=True):
                output.add(column, characters)
            _count(batch, counts)
            counts.seconds = time.monotonic() - started
            counts.fraction = _fraction(counts, reader, options.num_documents)
            if report:
                report(counts)
        if not options.may_be_empty:
            _require_text(outputs, paths, reader, options)
        sources = inputs()
    without_text: list[str] = []
    for output in outputs:
        without_text = output.describe(
            sources,
            tokenizer=describe_tokenizer(tokenizer),
            options={**options.described(output.key), "encoder": encoding.name},
            counts=_counts_of(output, counts, reader, options),
        )
    counts.seconds = time.monotonic() - started
    return _summary(
        prefixes,
        outputs,
        counts,
        reader,
        options,
        without_text=without_text,
        encoder=encoding.name,
        end_by_tokenizer=end_by_tokenizer(tokenizer, options),
    )


def end_by_tokenizer(tokenizer: Tokenizer, options: Options) -> str | None:
    """Return the token that is not appended, because the tokenizer appends it itself; None otherwise.

    With a loss mask, texts are encoded without the tokens that the tokenizer adds to them.
    """
    is_doubled = options.append_end and options.loss_mask is None and tokenizer.ends_texts
    return tokenizer.decode([tokenizer.end_of_document]) if is_doubled else None


def _open_corpus(
    paths: Sequence[Path | CorpusPart], options: Options, passed_over: PassedOver | None
) -> CorpusReader:
    return CorpusReader(
        paths,
        options.read_keys,
        skip_bad_lines=options.skip_bad_lines,
        max_document_bytes=options.max_document_bytes,
        split_long=options.split_long,
        mend_text=options.mend_text,
        passed_over=passed_over,
        text_from=None if options.loss_mask is None else options.loss_mask.text_of,
        optional_keys=() if options.loss_mask is None else options.loss_mask.optional_keys,
        remedies=options.remedies,
    )


def _require_text(
    outputs: Sequence[DatasetOutput],
    paths: Sequence[Path | CorpusPart],
    reader: CorpusReader,
    options: Options,
) -> None:
    for output in outputs:
        if not output.characters:
            names = [str(path) for path in paths]
            raise no_text_in(names, output.key, options, reader.passed_over, reader.first_skipped)


def _counts_of(
    output: DatasetOutput, counts: Counts, reader: CorpusReader, options: Options
) -> dict[str, int]:
    """Return the counts to record in the manifest of one dataset."""
    return {
        "bytes": counts.num_bytes,
        "empty": counts.documents - output.num_documents,
        "skipped": reader.num_skipped,
        "too_long": reader.num_too_long,
        "null": reader.num_null,
        "passed_over": reader.passed_over.count,
        **_masked(output, options),
    }


def _summary(
    prefixes: tuple[Path, ...],
    outputs: Sequence[DatasetOutput],
    counts: Counts,
    reader: CorpusReader,
    options: Options,
    *,
    without_text: list[str],
    encoder: str,
    end_by_tokenizer: str | None,
) -> Summary:
    return Summary(
        prefixes=prefixes,
        documents=counts.documents,
        tokens=counts.tokens,
        num_bytes=counts.num_bytes,
        characters=sum(output.characters for output in outputs),
        empty=counts.documents * len(outputs) - sum(output.num_documents for output in outputs),
        skipped=reader.num_skipped,
        first_skipped=reader.first_skipped,
        null=reader.num_null,
        passed_over=reader.passed_over,
        without_text=without_text,
        too_long=reader.num_too_long,
        long_ones=options.long_ones,
        encoder=encoder,
        end_by_tokenizer=end_by_tokenizer,
        labels=None if options.loss_mask is None else _masked(outputs[1], options),
        longest=0 if options.loss_mask is None else longest_document(prefixes[0]),
        seconds=counts.seconds,
    )


def _masked(output: DatasetOutput, options: Options) -> dict[str, int]:
    """Return the counts of labels that the loss leaves out; none without a loss mask."""
    if options.loss_mask is None:
        return {}
    return {"masked": output.masked, "wholly_masked": output.wholly_masked}


def no_text_in(
    names: Sequence[str],
    key: str,
    options: Options,
    passed_over: PassedOver,
    first_skipped: Sequence[str],
) -> CorpusError:
    """Return the error for a corpus whose documents yield no tokens.

    Args:
        names: its files.
        key: of the dataset without tokens.
        options: of the conversion.
        passed_over: files and members that were not read.
        first_skipped: why the first documents that could not be read were skipped.
    """
    keys = [key] if options.loss_mask is None else options.read_keys
    left = counted(passed_over.count, "file or member was", "files or members were")
    unread = f" ({left} not read, such as {passed_over.first[0]})" if passed_over.first else ""
    under = " and ".join(map(repr, keys))
    what = f"no document of {first_few(names, _MOST_NAMED)} has text under {under}{unread}"
    if first_skipped:
        return CorpusError(
            f"{what}; documents were skipped, such as {first_skipped[0]}; correct them, pass the right key "
            f"with {options.key_options}, or pass another corpus"
        )
    return CorpusError(f"{what}; pass the right key with {options.key_options}, or another corpus")


@contextmanager
def _described(paths: Sequence[Path | CorpusPart]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Provide the manifest's description of the sources, which are hashed while the block runs."""
    parts = [path if isinstance(path, CorpusPart) else CorpusPart(path) for path in paths]
    with hashed_ahead(parts) as hashed:
        yield lambda: [
            {**source, "first": path.first} if isinstance(path, CorpusPart) else source
            for source, path in zip(hashed(), paths, strict=True)
        ]


def _encoded(
    reader: CorpusReader, encoding: "_Encoding", *, dtype: np.dtype[np.generic], end_of_document: int | None
) -> Iterator[EncodedBatch]:
    encoder = encoding.encoder
    sizes = {"workers": encoding.workers, "batch_bytes": encoding.batch_bytes}
    if isinstance(encoder, MaskedEncoder):
        return encode_batches(reader, lambda batch: encoder(batch, end_of_document), **sizes)
    return encode_all(reader, encoder, dtype=dtype, end_of_document=end_of_document, **sizes)


class _Encoding(NamedTuple):
    """The encoder, its name for the summary, and the size of its batches.

    Batches of the tokenizers library are small, because even an interrupted run must finish those in
    progress. gigatoken encodes a large batch quickly and distributes it over the cores itself.
    """

    encoder: Encoder | MaskedEncoder
    name: str
    workers: int = 1
    batch_bytes: int = 1 << 23


def _choose_encoding(tokenizer: Tokenizer, paths: Sequence[Path | CorpusPart], options: Options) -> _Encoding:
    """Choose gigatoken if it gives the tokenizer's ids, else the tokenizer."""
    name = type(tokenizer).__name__
    if options.loss_mask is not None:
        masked = MaskedEncoder(tokenizer, options.loss_mask)
        return _Encoding(
            masked, f"{name}, {masked.way} ({options.loss_mask.in_words()})", options.workers, 1 << 20
        )
    if isinstance(tokenizer, RankedFileTokenizer):
        return _Encoding(tokenizer.encode_flat, f"{name}, run by {tokenizer.engine}")
    why = " (--exact)"
    if not options.exact:
        files = [part.path if isinstance(part, CorpusPart) else part for part in paths]
        try:
            sample = partial(sample_texts, files, options.keys, options.remedies)
            return _Encoding(fast_encoder(tokenizer, sample), "gigatoken")
        except TokenizerError as reason:
            why = f"; gigatoken, the faster encoder, is not used: {reason}"
    return _Encoding(tokenizer.encode_flat, f"{name}{why}", options.workers, 1 << 20)


def _count(batch: EncodedBatch, counts: Counts) -> None:
    counts.documents += batch.num_documents
    counts.tokens += batch.num_tokens
    counts.num_bytes += batch.num_bytes


def _fraction(counts: Counts, reader: CorpusReader, num_documents: int | None) -> float:
    done, total = (
        (counts.documents, num_documents) if num_documents else (reader.bytes_done, reader.total_bytes)
    )
    return min(1.0, done / total) if total else 1.0
