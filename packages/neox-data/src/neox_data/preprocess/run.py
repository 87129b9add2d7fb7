"""The work of `preprocess_data`: one indexed dataset per key, all of them complete or none there."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from neox_data.errors import CorpusError, TokenizerError
from neox_data.indexed.layout import token_dtype
from neox_data.manifest import describe_tokenizer, hashed_ahead
from neox_data.preprocess.encode import EncodedBatch, Encoder, encode_all
from neox_data.preprocess.inputs import CorpusPart
from neox_data.preprocess.output import DatasetOutput
from neox_data.preprocess.progress import Counts, Reporter
from neox_data.preprocess.read import MAX_DOCUMENT_BYTES, CorpusReader, sample_texts
from neox_data.preprocess.summary import Summary
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.fast import fast_encoder
from neox_data.tokenizers.ranked_files import RankedFileTokenizer

__all__ = ["Options", "no_text_in", "output_prefix_of", "preprocess"]


# Files to name in a message about all of them.
_MOST_NAMED = 3


def output_prefix_of(output_prefix: Path | str, key: str) -> Path:
    """The dataset that holds the texts of a key."""
    return Path(f"{output_prefix}_{key}_document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a corpus is turned into datasets.

    Attributes:
        keys: of the JSON lines; each becomes a dataset.
        append_end: end each document with the end-of-document token.
        workers: batches that are encoded at the same time; the output does not depend on it.
        num_documents: how many documents there are, for the progress; None: judged by bytes.
        skip_bad_lines: count documents that cannot be read and go on.
        exact: encode with the tokenizers library even where gigatoken gives the same.
        max_document_bytes: larger documents are counted and left out.
        split_long: cut them into such as are small enough instead.
        mend_text: repair wrongly decoded characters with ftfy.
        may_be_empty: a corpus without any text is no error.
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

    @property
    def long_ones(self) -> str:
        """What happens to documents above the size allowed."""
        return "cut" if self.split_long else "left out"

    def described(self, key: str) -> dict[str, Any]:
        """What a manifest says of them: all that decides what a dataset holds."""
        return {
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
) -> Summary:
    """Turn text files into one indexed dataset per key, documents in the order of the input.

    Args:
        paths: the corpus; see `inputs.find_inputs`. The manifest has hashes of files, but not of parts.
        output_prefix: each dataset is called `OUTPUT_PREFIX_KEY_document`.
        tokenizer: makes the tokens, and by its vocabulary decides their dtype.
        options: everything else.
        report: is told the counts after each batch.

    Raises:
        CorpusError: a file or a line cannot be read, or no document has a token.
        TokenizerError: the tokenizer cannot encode a document.
        OSError: the output cannot be written.
    """
    started = time.monotonic()
    reader = CorpusReader(
        paths,
        options.keys,
        skip_bad_lines=options.skip_bad_lines,
        max_document_bytes=options.max_document_bytes,
        split_long=options.split_long,
        mend_text=options.mend_text,
    )
    encoding = _choose_encoding(tokenizer, paths, options)
    prefixes = tuple(output_prefix_of(output_prefix, key) for key in options.keys)
    dtype = token_dtype(tokenizer.vocab_size)
    counts = Counts()
    with ExitStack() as files, _described(paths) as inputs:
        outputs = [
            files.enter_context(DatasetOutput.open(prefix, key, dtype=dtype, num_files=len(paths)))
            for prefix, key in zip(prefixes, options.keys, strict=True)
        ]
        batches = encode_all(
            reader,
            encoding.encoder,
            dtype=dtype,
            end_of_document=tokenizer.end_of_document if options.append_end else None,
            workers=encoding.workers,
            batch_bytes=encoding.batch_bytes,
        )
        for batch in batches:
            for output, column, characters in zip(outputs, batch.columns, batch.characters, strict=True):
                output.add(column, characters)
            _count(batch, counts)
            counts.seconds = time.monotonic() - started
            counts.fraction = _fraction(counts, reader, options.num_documents)
            if report:
                report(counts)
        for output in outputs:
            if not (output.num_documents or options.may_be_empty):
                raise no_text_in([str(path) for path in paths], output.key)
        sources = inputs()
    for output in outputs:
        output.describe(
            sources,
            tokenizer=describe_tokenizer(tokenizer),
            options={**options.described(output.key), "encoder": encoding.name},
            counts={
                "bytes": counts.num_bytes,
                "empty": counts.documents - output.num_documents,
                "skipped": reader.num_skipped,
                "too_long": reader.num_too_long,
            },
        )
    return Summary(
        prefixes=prefixes,
        documents=counts.documents,
        tokens=counts.tokens,
        num_bytes=counts.num_bytes,
        characters=sum(output.characters for output in outputs),
        empty=counts.documents * len(outputs) - sum(output.num_documents for output in outputs),
        skipped=reader.num_skipped,
        first_skipped=reader.first_skipped,
        too_long=reader.num_too_long,
        long_ones=options.long_ones,
        encoder=encoding.name,
        seconds=time.monotonic() - started,
    )


def no_text_in(names: Sequence[str], key: str) -> CorpusError:
    """What is wrong with a corpus whose documents give no token."""
    more = f" and {len(names) - _MOST_NAMED:,} more files" if len(names) > _MOST_NAMED else ""
    return CorpusError(
        f"no document of {', '.join(names[:_MOST_NAMED])}{more} has text under {key!r}; nothing to write"
    )


@contextmanager
def _described(paths: Sequence[Path | CorpusPart]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What a manifest says of the sources; files are hashed while the block runs."""
    parts = [
        {"path": str(part.path), "bytes": part.num_bytes, "first": part.first}
        for part in paths
        if isinstance(part, CorpusPart)
    ]
    with hashed_ahead([path for path in paths if not isinstance(path, CorpusPart)]) as hashed:
        yield lambda: [*parts, *hashed()]


class _Encoding(NamedTuple):
    """What makes the tokens, what a reader is told of it, and the batches that it is given.

    A batch of a library's is small, as nothing ends before those that are under way, a run that is stopped
    included. gigatoken takes a large one in no time, and divides it among the cores itself.
    """

    encoder: Encoder
    name: str
    workers: int = 1
    batch_bytes: int = 1 << 23


def _choose_encoding(tokenizer: Tokenizer, paths: Sequence[Path | CorpusPart], options: Options) -> _Encoding:
    """Gigatoken where it gives the tokenizer's ids."""
    name = type(tokenizer).__name__
    if isinstance(tokenizer, RankedFileTokenizer):
        return _Encoding(tokenizer.encode_flat, f"{name}, which gigatoken runs")
    why = ", as --exact asks"
    if not options.exact:
        files = [part.path if isinstance(part, CorpusPart) else part for part in paths]
        try:
            return _Encoding(fast_encoder(tokenizer, sample_texts(files, options.keys)), "gigatoken")
        except TokenizerError as reason:
            why = f", not gigatoken ({reason})"
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
