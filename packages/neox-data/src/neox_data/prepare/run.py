"""Corpus, tokenizer and dataset from files of texts; a step that an earlier run completed is not repeated."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from neox_data.amounts import bytes_in_words
from neox_data.counted import counted, first_few
from neox_data.errors import CorpusError, DataError, OtherResultError
from neox_data.indexed import open_indexed
from neox_data.manifest import check_tokenizer, read_manifest
from neox_data.prepare.corpus import write_corpus
from neox_data.prepare.texts import Skips, find_texts, texts_of
from neox_data.preprocess.inputs import RECORD, format_of
from neox_data.preprocess.progress import report_progress
from neox_data.preprocess.read import CorpusReader
from neox_data.preprocess.run import Options, output_prefix_of, preprocess
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
# Files that cannot be read, as far as they are named.
_MOST_PROBLEMS = 10

# Names that the first line repeats.
_MOST_NAMED = 3

# Formats in which a text has a key, and archives, which may contain these.
_WITH_KEYS = (".jsonl", ".json", ".parquet", ".tar", ".zip")

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
    """Write a corpus, a tokenizer and a dataset to a folder, and return what a training must know of them.

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
    with (
        _folder_made(output),
        exclusive_lock(output / ".lock", purpose=f"preparing texts in {output}"),
    ):
        corpus = _corpus(names, output, key, vocab_file, vocab_size, say)
        entries = vocab_size or _entries_for(corpus["num_bytes"])
        tokenizer_file = vocab_file or _tokenizer(output, entries, say)
        dataset = _dataset(output, tokenizer_file, log_interval, say)
        result = {**corpus, **dataset, "tokenizer_type": _TYPE, "vocab_file": str(tokenizer_file.resolve())}
        _write_json(output / RESULT, result)
    return result


@contextmanager
def _folder_made(folder: Path) -> Iterator[None]:
    """Make a folder for the block; if the block raises, delete what was made of it and is still empty.

    Raises:
        DataError: the folder cannot be made, or no file in it.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise DataError(
                f"the folder {folder} cannot be written to ({error.strerror}); give another --output"
            ) from error
        yield
    except BaseException:
        for each in filter(Path.exists, made):
            if any(each.iterdir()):
                break  # The results of complete steps stay.
            each.rmdir()
        raise


def _corpus(
    names: Sequence[Path], output: Path, key: str, vocab_file: Path | None, vocab_size: int | None, say: Say
) -> dict[str, Any]:
    path, record, skips = output / _CORPUS, output / RECORD, Skips()
    files = find_texts(names, skips, without=output)
    inputs = files if vocab_file is None else [vocab_file, *files]
    made_of = "\0".join([key, str(vocab_size), *map(_state, inputs)])
    identity = hashlib.sha256(made_of.encode(errors="surrogateescape")).hexdigest()
    if record.exists():
        known = _read_json(record)
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
        _refuse_files_of_others(output, vocab_file)
    say(f"reading {counted(len(files), 'file')}: {first_few(names, _MOST_NAMED)}")
    counts = write_corpus(_texts(files, key, skips, say), path, remedy=lambda: _remedy(files, skips))
    found = {"files": len(files), **asdict(counts), "skipped": skips.counts}
    _write_json(record, {"identity": identity, **found})
    say(
        f"read {counted(len(files), 'file')}: {counted(counts.documents, 'document')}, "
        f"{bytes_in_words(counts.num_bytes)} of text"
    )
    for file in files:
        if format_of(file).kind == ".txt.gz":
            say(f"note: each line of {file} is a document; decompress it if the whole file is one")
    for line in skips.lines():
        say(line)
    if counts.cut:
        say(
            f"{counted(counts.cut, 'document was', 'documents were')} larger than a hundredth of all texts "
            f"and cut at line ends or spaces: there are now {counts.written:,} documents"
        )
    say(f"wrote {path}: documents in a fixed pseudo-random order")
    return found


def _refuse_files_of_others(output: Path, vocab_file: Path | None) -> None:
    """Refuse a folder with files that have the names of those to write.

    Raises:
        DataError: there is such a file.
    """
    for left in (output / _CORPUS, output / _TOKENIZER, Path(f"{_prefix_in(output)}.idx")):
        if left.exists() and not (vocab_file and left.samefile(vocab_file)):
            raise DataError(
                f"{left} exists, but not {RECORD}, which names the texts that it was made of; delete it, or "
                "choose another output folder"
            )


def _texts(files: Sequence[Path], key: str, skips: Skips, say: Say) -> Iterator[str]:
    """Yield the texts of files up to the first file that cannot be read; then read on to find all of these.

    Raises:
        CorpusError: files cannot be read; it names them all, or the first few of many.
    """
    problems: list[str] = []
    for number, file in enumerate(files, 1):
        try:
            for text in texts_of(file, key, skips):
                if not problems:
                    yield text
        except CorpusError as error:
            problems.append(str(error))
            if len(problems) == 1 and number < len(files):
                say(f"{file} cannot be read; checking the other files before stopping")
    if len(problems) == 1:
        raise CorpusError(problems[0])
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        listed = [*problems[:_MOST_PROBLEMS], *([f"and {counted(more, 'more file')}"] if more > 0 else [])]
        raise CorpusError("\n  ".join([f"{counted(len(problems), 'file')} cannot be read:", *listed]))


def _remedy(files: Sequence[Path], skips: Skips) -> str:
    """Return what to do if the files contain no text, and what was left out of them."""
    has_keys = any(format_of(file).kind in _WITH_KEYS for file in files)
    key = ", or the key of the text with --jsonl-key; for conversations use preprocess_data --loss-mask chat"
    return f"pass other files{key if has_keys else ''}{skips.indented()}"


def _prefix_in(output: Path) -> Path:
    return output_prefix_of(output / _DATASET, "text")


def _state(path: Path) -> str:
    """Return the name of a file with what changes when it is written."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def _entries_for(num_bytes: int) -> int:
    """Return a vocabulary size, a power of two, for a corpus."""
    wanted = max(1, num_bytes // _BYTES_PER_ENTRY)
    return min(_MOST_CHOSEN, max(_FEWEST_CHOSEN, 1 << (wanted.bit_length() - 1)))


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
    split = _split(len(dataset))
    parts = split_documents(split, len(dataset))
    tokens = {part: int(dataset.sizes[rows.start : rows.stop].sum()) for part, rows in parts.items()}
    for part in ("train", "valid"):
        say(f"{part}: {counted(len(parts[part]), 'document')}, {tokens[part]:,} tokens")
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


def _split(num_documents: int) -> str:
    """Return a split in numbers of documents: a twentieth, at least one, for validation."""
    few = num_documents < _FEWEST_TO_SPLIT
    validation = 0 if few else max(1, num_documents // _PER_VALIDATION_DOCUMENT)
    return f"{num_documents - validation},{validation},0"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); give another --output") from error


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with written_aside(path) as file:
        file.write(json.dumps(values, indent=2, allow_nan=False).encode() + b"\n")
