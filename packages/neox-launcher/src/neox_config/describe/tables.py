"""Tables of text with aligned columns."""

from collections.abc import Collection, Sequence

__all__ = ["table"]


def table(rows: Sequence[Sequence[str]], *, left: Collection[int]) -> str:
    """Return rows as lines.

    Args:
        rows: one or more, of cells; headings are a row.
        left: numbers of the columns that are aligned at the left; the others are aligned at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
