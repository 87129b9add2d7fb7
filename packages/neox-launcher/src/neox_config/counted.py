"""Numbers with their nouns: 1 document, 2,000 documents."""

__all__ = ["counted"]


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with what it counts.

    Args:
        number: the number.
        one: noun, possibly with its verb, for 1: "file was read".
        many: the same for other numbers: "files were read"; None: `one` with an s.
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
