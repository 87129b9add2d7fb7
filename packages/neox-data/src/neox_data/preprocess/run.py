"""Implement `preprocess_data`: write one indexed dataset per key, either all of them or none."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neox_data.amount_progress import Counts, Reporter
from neox_data.errors import TokenizerError
from neox_data.indexed.layout import token_dtype
from neox_data.manifest import describe_tokenizer
from neox_data.preprocess.encode import EncodedBatch, encode_batch, encode_batches
from neox_data.preprocess.inputs import CorpusPart
from neox_data.preprocess.loss_mask import LABEL_DTYPE, MaskedEncoder
from neox_data.preprocess.options import Options, no_text_in, output_prefix_of
from neox_data.preprocess.output import DatasetOutput
from neox_data.preprocess.part_hashes import hashed_parts
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.read import CorpusReader, Document, sample_texts
from neox_data.preprocess.summary import Summary, end_by_tokenizer
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.fast import fast_encoder
from neox_data.tokenizers.ranked_files import RankedFileTokenizer

__all__ = ["preprocess"]


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
        paths: the corpus; see `inputs.find_inputs`. Manifests name the beginnings of parts.
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
    mask = options.loss_mask
    reader = CorpusReader(
        paths,
        options.keys if mask is None else mask.read_keys,
        skip_bad_lines=options.skip_bad_lines,
        max_document_bytes=options.max_document_bytes,
        split_long=options.split_long,
        mend_text=options.mend_text,
        passed_over=passed_over,
        text_from=None if mask is None else mask.text_of,
        optional_keys=() if mask is None else mask.optional_keys,
        remedies=options.remedies,
    )
    dtype = token_dtype(tokenizer.vocab_size) if mask is None else LABEL_DTYPE
    parts = [path if isinstance(path, CorpusPart) else CorpusPart(path) for path in paths]
    encoding = _choose_encoding(tokenizer, [part.path for part in parts], options, dtype)
    prefixes = tuple(output_prefix_of(output_prefix, key) for key in options.keys)
    counts = Counts()
    with ExitStack() as files, hashed_parts(parts) as hashes:
        outputs = [
            files.enter_context(DatasetOutput.open(prefix, dtype=dtype, num_files=len(paths)))
            for prefix in prefixes
        ]
        for batch in encode_batches(
            reader, encoding.encode, workers=encoding.workers, batch_bytes=encoding.batch_bytes
        ):
            for output, column, characters in zip(outputs, batch.columns, batch.characters, strict=True):
                output.add(column, characters)
            counts.documents += batch.num_documents
            counts.tokens += batch.num_tokens
            counts.num_bytes += batch.num_bytes
            counts.seconds = time.monotonic() - started
            if options.num_documents:
                fraction = counts.documents / options.num_documents
            else:
                fraction = reader.bytes_done / max(reader.total_bytes, 1)
            counts.fraction = min(1.0, fraction)
            if report:
                report(counts)
        for output, key in zip(outputs, options.keys, strict=True):
            if not (output.characters or options.may_be_empty):
                names = [str(path) for path in paths]
                raise no_text_in(names, key, options, reader.passed_over, reader.first_skipped)
        sources = [
            {**hashes.of_part(part), **({"first": part.first} if part is path else {})}
            for part, path in zip(parts, paths, strict=True)
        ]
    described = [
        output.describe(
            sources,
            tokenizer=describe_tokenizer(tokenizer),
            options={**options.described(key), "encoder": encoding.name},
            counts={
                "bytes": counts.num_bytes,
                "empty": counts.documents - output.writer.num_documents,
                "skipped": reader.num_skipped,
                "too_long": reader.num_too_long,
                "null": reader.num_null,
                "passed_over": reader.passed_over.count,
                **({"masked": output.masked, "wholly_masked": output.wholly_masked} if mask else {}),
            },
        )
        for output, key in zip(outputs, options.keys, strict=True)
    ]
    return Summary(
        prefixes=prefixes,
        options=options,
        tokenizer=tokenizer,
        encoder=encoding.name,
        counts=[each for each, _ in described],
        first_skipped=reader.first_skipped,
        passed_over=reader.passed_over,
        without_text=described[-1][1],
        seconds=time.monotonic() - started,
    )


class _Encoding(NamedTuple):
    """The encoder, its name for the summary, and the size of its batches.

    Batches of the tokenizers library are small, because even an interrupted run must finish those in
    progress. gigatoken encodes a large batch quickly and distributes it over the cores itself.
    """

    encode: Callable[[Sequence[Document]], EncodedBatch]
    name: str
    workers: int = 1
    batch_bytes: int = 1 << 23


def _choose_encoding(
    tokenizer: Tokenizer,
    paths: Sequence[Path],
    options: Options,
    dtype: np.dtype[np.generic],
) -> _Encoding:
    """Choose gigatoken if it gives the tokenizer's ids, else the tokenizer."""
    name, mask = type(tokenizer).__name__, options.loss_mask
    is_ended = options.append_end and end_by_tokenizer(tokenizer, options) is None
    end = tokenizer.end_of_document if is_ended else None
    if mask is not None:
        masked = MaskedEncoder(tokenizer, mask)
        words = f"{name}, {masked.way} ({mask.in_words})"
        return _Encoding(partial(masked, end_of_document=end), words, options.workers, 1 << 20)
    own = partial(encode_batch, encoder=tokenizer.encode_flat, dtype=dtype, end_of_document=end)
    if isinstance(tokenizer, RankedFileTokenizer):
        return _Encoding(own, f"{name}, run by {tokenizer.engine}")
    why = " (--exact)"
    if not options.exact:
        try:
            fast = fast_encoder(tokenizer, partial(sample_texts, paths, options.keys, options.remedies))
            return _Encoding(partial(own, encoder=fast), "gigatoken")
        except TokenizerError as reason:
            why = f"; gigatoken, the faster encoder, is not used: {reason}"
    return _Encoding(own, f"{name}{why}", options.workers, 1 << 20)
