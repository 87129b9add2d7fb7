"""Write amounts of data as text."""

__all__ = ["bytes_in_words"]


def bytes_in_words(num_bytes: int) -> str:
    """Write a number of bytes with the largest unit that it reaches: `713 bytes`, `4.2 kB`, `1,234.5 MB`."""
    if num_bytes < 1_000:
        return f"{num_bytes:,} bytes"
    if num_bytes < 1_000_000:
        return f"{num_bytes / 1e3:,.1f} kB"
    return f"{num_bytes / 1e6:,.1f} MB"
