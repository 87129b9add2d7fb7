"""Files of texts by their names, and tokenizers that are trained on them, as in neox_data."""

from pathlib import PurePath

__all__ = ["ENDINGS", "FEWEST_ENTRIES", "MOST_ENTRIES", "is_corpus_file"]

_READABLE = (".jsonl", ".json", ".txt", ".md", ".markdown", ".dat", ".parquet", ".tar", ".zip")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
# They cannot be read while they are compressed.
_NEVER_PACKED = (".parquet", ".zip")
# Names of compressed archives: of tar, and of lm_dataformat.
_PACKED_ARCHIVES = (".tgz", "_data.xz")
ENDINGS = f"{', '.join(_READABLE)}, optionally followed by {', '.join(_PACKED[:-1])} or {_PACKED[-1]}"
"""The endings of files that are read, for messages."""
FEWEST_ENTRIES = 258
"""Size of the smallest vocabulary of a tokenizer that is trained."""
MOST_ENTRIES = 2**24
"""Size of the largest one."""


def is_corpus_file(path: PurePath) -> bool:
    """Return whether the name of a file, in upper or lower case, is that of a file of texts."""
    path = PurePath(path.name.lower())
    if path.name.endswith(_PACKED_ARCHIVES):
        return True
    if path.suffix not in _PACKED:
        return path.suffix in _READABLE
    inner = path.with_suffix("").suffix
    return inner in _READABLE and inner not in _NEVER_PACKED
