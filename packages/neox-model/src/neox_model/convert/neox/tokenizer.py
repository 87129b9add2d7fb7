"""The tokenizer that a configuration of GPT-NeoX names."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox_config.schema.sections.tokenizer import TokenizerSection
from neox_data.errors import TokenizerError
from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_model.convert.errors import ConversionError

__all__ = ["NamedTokenizer", "find_named_tokenizer"]


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
    named = {"vocab_file": section.vocab_file, "merge_file": section.merge_file}
    found = {name: given[name] or _found(named[name], folder) for name in given}
    files = {name: path for name, path in found.items() if path is not None}
    try:
        tokenizer = build_tokenizer(section.tokenizer_type, **files)
    except TokenizerError as error:
        raise ConversionError(
            f"the tokenizer of {folder} ({section.tokenizer_type}) cannot be loaded: {error}; pass its files "
            "as --vocab-file (and --merge-file), because the model cannot be trained or evaluated without it"
        ) from error
    return NamedTokenizer(section.tokenizer_type, files, tokenizer)


def _found(named: str | None, folder: Path) -> Path | None:
    """Return a file that a configuration names: there, in the checkpoint, or next to it."""
    if named is None:
        return None
    path = Path(named)
    places = (path, folder / path.name, folder.absolute().parent / path.name)
    return next((place for place in places if place.exists()), path)
