"""Histogram of document lengths as a PNG. Requires matplotlib: pip install "neox-data[plot]"."""

from pathlib import Path

import numpy as np

from neox_data.errors import DataError
from neox_data.indexed.lengths import length_counts
from neox_data.whole_files import written_aside

__all__ = ["draw_lengths"]


def draw_lengths(sizes: np.ndarray, title: str, output: Path) -> None:
    """Write a PNG with the number of documents by length, in ranges that double in width.

    Raises:
        DataError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError(
            f'--png requires matplotlib ({error}); pip install "neox-data[plot]", or remove --png'
        ) from error
    counts = length_counts(sizes)
    used = np.flatnonzero(counts)
    first, last = (used[0], used[-1]) if used.size else (0, 0)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.bar(range(first, last + 1), counts[first : last + 1], width=0.9)
    axes.set_xticks(
        range(first, last + 1), [f"{(1 << number) >> 1:,}" for number in range(first, last + 1)], rotation=45
    )
    axes.set_xlabel("tokens per document, from")
    axes.set_ylabel("documents")
    axes.set_title(title)
    with written_aside(output) as file:
        figure.savefig(file, format="png")
