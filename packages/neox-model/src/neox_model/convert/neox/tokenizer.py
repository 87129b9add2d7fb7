"""The tokenizer that a configuration of GPT-NeoX names."""

from pathlib import Path

from neox_config.derive.tokenizer import tokenizer_files
from neox_config.facts.vocabulary import pad_vocabulary
from neox_config.schema.sections.tokenizer import TokenizerSection
from neox_data.errors import TokenizerError
from neox_data.tokenizers import build_tokenizer
from neox_model.convert.errors import ConversionError
from neox_model.convert.neox.files import NeoXFiles
from neox_model.convert.tokenizer_files import FoundTokenizer

__all__ = ["check_padding", "find_named_tokenizer"]


def find_named_tokenizer(
    section: TokenizerSection, folder: Path, *, vocab_file: Path | None, merge_file: Path | None
) -> FoundTokenizer:
    """Return the tokenizer of a configuration.

    Args:
        section: its parameters.
        folder: the checkpoint; files that are not where the parameters say are searched here and next to it.
        vocab_file: replaces that of the configuration.
        merge_file: likewise.
    """
    given = {"vocab_file": vocab_file, "merge_file": merge_file}
    files = {}
    for name, named in tokenizer_files(section).items():
        path = Path(named)
        places = (path, folder / path.name, folder.absolute().parent / path.name)
        files[name] = next((place for place in places if place.exists()), path)
    files |= {name: path for name, path in given.items() if path is not None}
    try:
        tokenizer = build_tokenizer(section.tokenizer_type, **files)
    except TokenizerError as error:
        raise ConversionError(
            f"the tokenizer of {folder} ({section.tokenizer_type}) cannot be loaded: {error}; pass its files "
            "as --vocab-file (and --merge-file), because the model cannot be trained or evaluated without it"
        ) from error
    return FoundTokenizer(section.tokenizer_type, files, tokenizer)


def check_padding(files: NeoXFiles, tokenizer: FoundTokenizer, *, rows: int, multiple: int) -> None:
    """Compare the rows of the embedding with the tokenizer's entries, which GPT-NeoX pads."""
    entries = tokenizer.tokenizer.vocab_size
    padded = pad_vocabulary(entries, multiple * files.ranks)
    if padded != rows:
        raise ConversionError(
            f"the tokenizer of {files.folder} has {entries:,} entries, which GPT-NeoX pads to {padded:,} "
            f"(make_vocab_size_divisible_by: {multiple}, {files.ranks} tensor-parallel ranks), but the token "
            f"embedding has {rows:,} rows; pass the "
            "tokenizer that it was trained with as --vocab-file (and --merge-file), or its configuration as "
            "--config, with a make_vocab_size_divisible_by that gives these rows if the checkpoint was "
            "divided for another number of ranks"
        )
