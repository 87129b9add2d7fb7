"""The size of the logical vocabulary."""

__all__ = ["pad_vocabulary"]


def pad_vocabulary(entries: int, multiple: int) -> int:
    """Return the number of entries of the tokenizer, rounded up to a multiple; the same for every layout."""
    return -(-entries // multiple) * multiple
