"""Corpus, tokenizer and dataset from files of texts; a step that an earlier run completed is not repeated."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from neox_data.amount_progress import report_progress
from neox_data.amounts import bytes_in_words
from neox_data.errors import DataError, OtherResultError
from neox_data.indexed import open_indexed
from neox_data.manifest import check_tokenizer, read_manifest
from neox_data.pluralize import first_few, pluralize
from neox_data.prepare.corpus import write_corpus
from neox_data.prepare.texts import Skips, find_texts, texts_of
from neox_data.preprocess.inputs import RECORD
from neox_data.preprocess.options import Options, output_prefix_of
from neox_data.preprocess.read import CorpusReader
from neox_data.preprocess.run import preprocess
from neox_data.preprocess.threads import prepare_threads
from neox_data.splits import split_documents
from neox_data.tokenizers import build_tokenizer
from neox_data.tokenizers.train import train_byte_level_bpe
from neox_data.whole_files import exclusive_lock, written_aside

__all__ = ["RESULT", "prepare"]

RESULT = "prepared.json"
"""Name of the file with the result of all steps, which is written last."""

_CORPUS, _TOKENIZER = "corpus.jsonl", "tokenizer.json"
_DATASET = "data/corpus"
_TYPE = "HFTokenizer"
# The smallest and largest vocabulary that is chosen, and bytes of text per entry.
_FEWEST_CHOSEN, _MOST_CHOSEN, _BYTES_PER_ENTRY = 512, 32_768, 1_000
# Documents per document for validation, and the fewest with which there is a validation.
_PER_VALIDATION_DOCUMENT, _FEWEST_TO_SPLIT = 20, 5
# Names that the first line repeats.
_MOST_NAMED = 3

Say = Callable[[str], None]


def prepare(
    names: Sequence[Path],
    output: Path,
    *,
    key: str,
    vocab_file: Path | None,
    vocab_size: int | None,
    log_interval: int | None,
    say: Say,
) -> dict[str, Any]:
    """Write a corpus, a tokenizer and a dataset to a folder, and return what a run must know of them.

    Args:
        names: files and folders with texts.
        output: the folder.
        key: key of the text in JSON lines and tables.
        vocab_file: a tokenizer.json; None trains one.
        vocab_size: entries of a tokenizer that is trained; None: by the size of the corpus.
        log_interval: documents between progress lines if the output is not a terminal; None: no progress.
        say: called with a line for what begins and what is complete.

    Raises:
        DataError: the texts or the tokenizer cannot be used.
        OtherResultError: the folder contains the result of other texts or options.
    """
    if vocab_file is not None:
        build_tokenizer(_TYPE, vocab_file=vocab_file)  # Refused before texts are read, which takes long.
    output.mkdir(parents=True, exist_ok=True)
    # A folder that cannot be written to is refused before texts are read; a lock would be waited for.
    TemporaryFile(dir=output).close()
    with exclusive_lock(output / ".lock", purpose=f"preparing texts in {output}"):
        corpus = _corpus(names, output, key, vocab_file, vocab_size, say)
        # A power of two.
        chosen = 1 << (max(1, corpus["num_bytes"] // _BYTES_PER_ENTRY).bit_length() - 1)
        entries = vocab_size or min(_MOST_CHOSEN, max(_FEWEST_CHOSEN, chosen))
        tokenizer_file = vocab_file or _tokenizer(output, entries, say)
        dataset = _dataset(output, tokenizer_file, log_interval, say)
        result = {**corpus, **dataset, "tokenizer_type": _TYPE, "vocab_file": str(tokenizer_file.resolve())}
        _write_json(output / RESULT, result)
    return result


def _corpus(
    names: Sequence[Path], output: Path, key: str, vocab_file: Path | None, vocab_size: int | None, say: Say
) -> dict[str, Any]:
    path, record, skips = output / _CORPUS, output / RECORD, Skips()
    files = find_texts(names, skips, without=output)
    inputs = files if vocab_file is None else [vocab_file, *files]
    # Name, size and time change when a file is written.
    states = [(path.resolve(), path.stat()) for path in inputs]
    described = [f"{path} {status.st_size} {status.st_mtime_ns}" for path, status in states]
    made_of = "\0".join([key, str(vocab_size), *described])
    identity = hashlib.sha256(made_of.encode(errors="surrogateescape")).hexdigest()
    if record.exists():
        try:
            known: dict[str, Any] = dict(json.loads(record.read_bytes()))
        except (ValueError, TypeError) as error:
            raise DataError(f"{record} is damaged ({error}); give another --output") from error
        if known.pop("identity", None) != identity:
            raise OtherResultError(
                f"{output} contains the result of other texts (files were added, removed or changed) or of "
                "other options; give another --output"
            )
        if path.exists():
            say(f"{path}: complete since an earlier run")
            return known
        say(f"{path} is missing; writing it again")
    else:
        for left in (path, output / _TOKENIZER, Path(f"{_prefix_in(output)}.idx")):
            if left.exists() and not (vocab_file and left.samefile(vocab_file)):
                raise DataError(
                    f"{left} exists, but not {RECORD}, which names the texts that it was made of; delete it, "
                    "or choose another output folder"
                )
    say(f"reading {pluralize(len(files), 'file')}: {first_few(names, _MOST_NAMED)}")
    counts = write_corpus(
        (text for file in files for text in texts_of(file, key, skips)),
        path,
        remedy=lambda: f"pass other files, or the key of the text with --jsonl-key{skips.indented()}",
    )
    found = {"files": len(files), **asdict(counts), "skipped": skips.counts}
    _write_json(record, {"identity": identity, **found})
    say(
        f"read {pluralize(len(files), 'file')}: {pluralize(counts.documents, 'document')}, "
        f"{bytes_in_words(counts.num_bytes)} of text"
    )
    for line in skips.lines():
        say(line)
    if counts.cut:
        say(
            f"{pluralize(counts.cut, 'document was', 'documents were')} larger than a hundredth of all texts "
            f"and cut at line ends or spaces: there are now {counts.written:,} documents"
        )
    say(f"wrote {path}: documents in a fixed pseudo-random order")
    return found


def _prefix_in(output: Path) -> Path:
    return output_prefix_of(output / _DATASET, "text")


def _tokenizer(output: Path, entries: int, say: Say) -> Path:
    path = output / _TOKENIZER
    if path.exists():
        say(f"{path}: complete since an earlier run")
        return path
    say("training a tokenizer")
    reader = CorpusReader([output / _CORPUS], ("text",))
    found = train_byte_level_bpe((document.texts[0] for document in reader), vocab_size=entries, output=path)
    few = "" if found == entries else f", all that the texts give of {entries:,}"
    say(f"wrote {path}: {found:,} entries{few}")
    return path


def _dataset(output: Path, tokenizer_file: Path, log_interval: int | None, say: Say) -> dict[str, Any]:
    tokenizer = build_tokenizer(_TYPE, vocab_file=tokenizer_file)
    prefix = _prefix_in(output)
    prefix.parent.mkdir(exist_ok=True)
    if _is_complete(prefix):
        check_tokenizer(
            prefix,
            tokenizer,
            remedy=f"restore {tokenizer_file}, which models trained on this data require, or delete "
            f"{prefix.parent} to tokenize the texts again",
        )
        say(f"{prefix}.bin: complete since an earlier run")
    else:
        options = Options(append_end=True, workers=prepare_threads())
        with report_progress(log_interval=log_interval) as report:
            preprocess(
                [output / _CORPUS],
                output_prefix=output / _DATASET,
                tokenizer=tokenizer,
                options=options,
                report=report,
            )
    dataset = open_indexed(prefix)
    # A twentieth of the documents, at least one, is for validation.
    is_split = len(dataset) >= _FEWEST_TO_SPLIT
    validation = max(1, len(dataset) // _PER_VALIDATION_DOCUMENT) if is_split else 0
    split = f"{len(dataset) - validation},{validation},0"
    parts = split_documents(split, len(dataset))
    tokens = {part: int(dataset.sizes[rows.start : rows.stop].sum()) for part, rows in parts.items()}
    for part in ("train", "valid"):
        say(f"{part}: {pluralize(len(parts[part]), 'document')}, {tokens[part]:,} tokens")
    if not parts["valid"]:
        say(f"no validation: it requires at least {_FEWEST_TO_SPLIT} documents")
    return {
        "data_path": str(prefix.resolve()),
        "split": split,
        "tokens": tokens,
        "entries": tokenizer.vocab_size,
    }


def _is_complete(prefix: Path) -> bool:
    """Return whether a dataset has its manifest, and files of the sizes in it."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return False
    files = {Path(f"{prefix}{suffix}"): known["bytes"] for suffix, known in manifest["files"].items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in files.items())


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with written_aside(path) as file:
        file.write(json.dumps(values, indent=2, allow_nan=False).encode() + b"\n")
