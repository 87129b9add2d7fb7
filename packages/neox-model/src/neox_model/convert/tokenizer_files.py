"""The tokenizer's files of both formats."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox_data.errors import TokenizerError
from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer
from neox_model.convert.errors import ConversionError

__all__ = [
    "TOKENIZER",
    "FoundTokenizer",
    "copy_tokenizer",
    "find_tokenizer",
    "padding_multiple",
    "read_json",
    "rows_to_keep",
    "stop_tokens",
    "tokenizer_names",
    "write_json",
    "write_tokenizer",
]

TOKENIZER = "tokenizer.json"
"""File of a tokenizer of the tokenizers library."""
_SETTINGS = "tokenizer_config.json"
_GENERATION = "generation_config.json"
# Files that transformers reads with a tokenizer; they are copied both ways.
_COMPANIONS = (
    *(_SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    _GENERATION,
)
_MOST_MULTIPLE = 1_000_000


@dataclass(frozen=True, slots=True)
class FoundTokenizer:
    """A tokenizer and its files.

    Args:
        kind: our `tokenizer_type`.
        files: parameter -> file or folder.
        tokenizer: the tokenizer.
    """

    kind: str
    files: Mapping[str, Path]
    tokenizer: Tokenizer

    def copy(self, target: Path) -> None:
        """Copy the files into a folder.

        Raises:
            ConversionError: one would replace another.
        """
        for path in self.files.values():
            if (target / path.name).exists():
                raise ConversionError(f"two files are called {path.name}; give {path} another name")
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, target / path.name)

    @property
    def read(self) -> list[Path]:
        """Return the files that were read, also those in a folder."""
        inside = [path.rglob("*") if path.is_dir() else [path] for path in self.files.values()]
        return sorted({path for paths in inside for path in paths if path.is_file()})

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return our parameters, with the files in a folder."""
        paths = {name.replace("_", "-"): str(folder / path.name) for name, path in self.files.items()}
        return {"tokenizer-type": self.kind, **paths}


_KINDS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("HFTokenizer", {"vocab_file": TOKENIZER}),
    ("GPT2BPETokenizer", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
    ("SentencePieceTokenizer", {"vocab_file": "tokenizer.model"}),
)


def find_tokenizer(folder: Path) -> FoundTokenizer:
    """Return the tokenizer in a folder.

    Raises:
        ConversionError: there is none, or it is not valid.
    """
    kind, files = tokenizer_names(folder)
    try:
        paths = {name: folder / file for name, file in files.items()}
        return FoundTokenizer(kind, paths, build_tokenizer(kind, **paths))
    except TokenizerError as error:
        raise ConversionError(f"the tokenizer in {folder} cannot be used: {error}") from error


def tokenizer_names(folder: Path) -> tuple[str, Mapping[str, str]]:
    """Return the kind of the tokenizer in a folder, and the names of its files by our parameters.

    Raises:
        ConversionError: there is none.
    """
    for kind, files in _KINDS:
        if all((folder / name).is_file() for name in files.values()):
            return kind, files
    raise ConversionError(
        f"{folder} contains no tokenizer ({TOKENIZER}, vocab.json with merges.txt, or tokenizer.model), "
        "without which the model cannot be trained or evaluated; copy its files into the folder"
    )


def copy_tokenizer(source: Path, target: Path, *, with_generation: bool = False) -> None:
    """Copy the files of the tokenizer of transformers in a folder, and those that are read with them.

    Args:
        source: the folder.
        target: the folder to write to.
        with_generation: copy its settings of generation, too.

    Raises:
        ConversionError: there is no tokenizer.
    """
    _, files = tokenizer_names(source)
    for name in (*files.values(), *_COMPANIONS):
        if (source / name).is_file() and (with_generation or name != _GENERATION):
            shutil.copyfile(source / name, target / name)


def rows_to_keep(tokenizer: Tokenizer, rows: int, *, trim_vocab: bool) -> int:
    """Return how many rows of an embedding are converted: all, or those with an entry in the tokenizer.

    Raises:
        ConversionError: the tokenizer has more entries than the embedding has rows.
    """
    entries = tokenizer.vocab_size
    if entries > rows:
        raise ConversionError(
            f"the tokenizer has {entries:,} entries, but the token embedding only {rows:,} rows; pass the "
            "model with its own tokenizer"
        )
    return entries if trim_vocab else rows


def padding_multiple(entries: int, rows: int) -> int:
    """Return a `make_vocab_size_divisible_by` that pads a number of entries to the rows of an embedding.

    Raises:
        ConversionError: there is none.
    """
    for multiple in range(rows - entries + 1, min(rows, _MOST_MULTIPLE) + 1):
        if rows % multiple == 0:
            return multiple
    raise ConversionError(
        f"the tokenizer has {entries:,} entries and the token embedding {rows:,} rows, which no "
        "make-vocab-size-divisible-by gives; pass --trim-vocab to leave out the rows without an entry"
    )


def write_tokenizer(
    tokenizer: Tokenizer, vocab_file: Path | None, folder: Path, *, max_positions: int
) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the files that lie next to the vocabulary.

    Args:
        tokenizer: the tokenizer.
        vocab_file: its file; files with it that transformers reads, such as a chat template, are copied.
        folder: the folder to write to.
        max_positions: longest sequence of the model.

    Raises:
        ConversionError: transformers has no tokenizer of this kind.
    """
    library = refuse_others(tokenizer)
    (folder / TOKENIZER).write_text(library.description, encoding="utf-8")
    # The folder of a tokenizer that was trained here may contain anything.
    source = None if vocab_file is None else vocab_file if vocab_file.is_dir() else vocab_file.parent
    if source is not None and (source / _SETTINGS).is_file():
        for name in _COMPANIONS:
            if name != _GENERATION and (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    end = library.library_tokenizer.id_to_token(tokenizer.end_of_document)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    if tokenizer.padding is not None:
        settings["pad_token"] = library.library_tokenizer.id_to_token(tokenizer.padding)
    write_json(folder / _SETTINGS, settings)


def refuse_others(tokenizer: Tokenizer) -> LibraryBackedTokenizer:
    """Return the tokenizer if it can be written as a `tokenizer.json`.

    Raises:
        ConversionError: it cannot.
    """
    if isinstance(tokenizer, LibraryBackedTokenizer):
        return tokenizer
    raise ConversionError(
        f"a model with the tokenizer {type(tokenizer).__name__} cannot be used in transformers: it is not of "
        "the tokenizers library, and cannot be written as tokenizer.json; train with a tokenizer.json "
        "(HFTokenizer) or with vocab.json and merges.txt (GPT2BPETokenizer)"
    )


def generation_settings(
    tokenizer: Tokenizer, vocab_file: Path | None, stops: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the contents of `generation_config.json`: text ends at end-of-document and the stop tokens.

    Args:
        tokenizer: the model's.
        vocab_file: its file, next to which the settings of the model that was imported may be.
        stops: the model's `stop_tokens`.
    """
    found: dict[str, Any] = {}
    if vocab_file is not None and (vocab_file.parent / _GENERATION).is_file():
        found = read_json(vocab_file.parent / _GENERATION)
    ends = list(dict.fromkeys([*_ends(found), tokenizer.end_of_document, *stops]))
    found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if tokenizer.padding is not None:
        found.setdefault("pad_token_id", tokenizer.padding)
    return found


def stop_tokens(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens besides end-of-document at which transformers ends a text.

    Args:
        folder: of the model of transformers.
        config: the contents of `config.json`, which counts without `generation_config.json`.
        tokenizer: the model's; rows of the embedding without an entry in it are never generated.
    """
    path = folder / _GENERATION
    ends = _ends(read_json(path) if path.is_file() else config)
    return [end for end in ends if end != tokenizer.end_of_document and end < tokenizer.vocab_size]


def _ends(settings: Mapping[str, Any]) -> list[int]:
    given = settings.get("eos_token_id")
    return [end for end in (given if isinstance(given, list) else [given]) if type(end) is int]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConversionError: it cannot be read, or contains something else.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"cannot read {path}: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{path} does not contain a JSON object; copy it again")
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an object as a JSON file."""
    path.write_text(
        json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
