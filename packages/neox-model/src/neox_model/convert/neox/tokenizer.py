"""The tokenizer that a configuration of GPT-NeoX names."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox_config.derive.tokenizer import tokenizer_files
from neox_config.facts.checkpoints import LATEST, iteration_of
from neox_config.facts.vocabulary import pad_vocabulary
from neox_config.schema.sections.tokenizer import TokenizerSection
from neox_data.errors import TokenizerError
from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_model.convert.errors import ConversionError
from neox_model.convert.neox.files import NeoXFiles
from neox_model.convert.yaml_file import CONFIGURATION

__all__ = ["NamedTokenizer", "check_padding", "find_named_tokenizer"]

# Ranks that a changed number is looked for among.
_MOST_RANKS = 1024
# Names in the written folder that a file of the tokenizer would replace.
_RESERVED = (CONFIGURATION, LATEST, "verification.json")


@dataclass(frozen=True, slots=True)
class NamedTokenizer:
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
        """Copy the files into a folder."""
        for path in self.files.values():
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


def find_named_tokenizer(
    section: TokenizerSection, folder: Path, *, vocab_file: Path | None, merge_file: Path | None
) -> NamedTokenizer:
    """Return the tokenizer of a configuration.

    Args:
        section: its parameters.
        folder: the checkpoint; files that are not where the parameters say are searched here and next to it.
        vocab_file: replaces that of the configuration.
        merge_file: likewise.

    Raises:
        ConversionError: its files are not found, or are not valid.
    """
    given = {"vocab_file": vocab_file, "merge_file": merge_file}
    named = tokenizer_files(section)
    found = {name: given[name] or _found(named.get(name), folder) for name in given}
    files = {name: path for name, path in found.items() if path is not None}
    _require_different_names(files)
    try:
        tokenizer = build_tokenizer(section.tokenizer_type, **files)
    except TokenizerError as error:
        raise ConversionError(
            f"the tokenizer of {folder} ({section.tokenizer_type}) cannot be loaded: {error}; pass its files "
            "as --vocab-file (and --merge-file), because the model cannot be trained or evaluated without it"
        ) from error
    return NamedTokenizer(section.tokenizer_type, files, tokenizer)


def _require_different_names(files: Mapping[str, Path]) -> None:
    """Refuse files that would replace each other, or another file, in the written folder."""
    names = [path.name for path in files.values()]
    for parameter, path in files.items():
        is_checkpoint = iteration_of(path.name) is not None
        if is_checkpoint or names.count(path.name) > 1 or path.name in _RESERVED:
            others = "; ".join(str(each) for each in files.values())
            what = "a checkpoint" if is_checkpoint else "two files"
            raise ConversionError(
                f"the tokenizer's files ({others}) are copied into one folder, where {path.name} is the name "
                f"of {what}; copy {path} to another name, and pass it as --{parameter.replace('_', '-')}"
            )


def check_padding(files: NeoXFiles, tokenizer: NamedTokenizer, *, rows: int, multiple: int) -> None:
    """Compare the rows of the embedding with the tokenizer's entries, which GPT-NeoX pads.

    Raises:
        ConversionError: this tokenizer would have given another number of rows.
    """
    entries = tokenizer.tokenizer.vocab_size
    padded = pad_vocabulary(entries, multiple * files.ranks)
    if padded != rows:
        raise ConversionError(
            f"the tokenizer of {files.folder} has {entries:,} entries, which GPT-NeoX pads to {padded:,} "
            f"(make_vocab_size_divisible_by: {multiple}, {files.ranks} tensor-parallel ranks), but the token "
            f"embedding has {rows:,} rows; {_resharded(files, rows, entries, multiple)}pass the "
            "tokenizer that it was trained with as --vocab-file (and --merge-file), or its configuration as "
            "--config"
        )


def _resharded(files: NeoXFiles, rows: int, entries: int, multiple: int) -> str:
    """Return the remedy if the embedding was padded for another number of ranks; empty if it was not."""
    numbers = range(1, _MOST_RANKS + 1)
    ranks = next((ranks for ranks in numbers if pad_vocabulary(entries, multiple * ranks) == rows), None)
    if ranks is None or rows % files.ranks:
        return ""
    return (
        f"{rows:,} rows are the padding for {ranks} tensor-parallel ranks: if the checkpoint was divided for "
        "another number of ranks after the training, pass its configuration with "
        f"make_vocab_size_divisible_by: {rows // files.ranks} as --config; else "
    )


def _found(named: str | None, folder: Path) -> Path | None:
    """Return a file that a configuration names: there, in the checkpoint, or next to it."""
    if named is None:
        return None
    path = Path(named)
    places = (path, folder / path.name, folder.absolute().parent / path.name)
    return next((place for place in places if place.exists()), path)
