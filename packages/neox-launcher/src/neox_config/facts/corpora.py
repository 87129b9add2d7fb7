"""Files of texts by their names, and tokenizers that are trained on them, as in neox_data."""

__all__ = ["ENDINGS", "FEWEST_ENTRIES", "MOST_ENTRIES"]

_READABLE = (".jsonl", ".json", ".txt", ".md", ".markdown", ".dat", ".parquet", ".tar", ".zip")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
ENDINGS = f"{', '.join(_READABLE)}, optionally followed by {', '.join(_PACKED[:-1])} or {_PACKED[-1]}"
"""The endings of files that are read, for messages."""
FEWEST_ENTRIES = 258
"""Size of the smallest vocabulary of a tokenizer that is trained."""
MOST_ENTRIES = 2**24
"""Size of the largest one."""
