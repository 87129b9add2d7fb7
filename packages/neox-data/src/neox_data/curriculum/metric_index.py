"""What an analysis knows of one measure: the samples by difficulty, in two token files.

Row r of `index_to_metric` holds one number, a difficulty, rising with r; row r of `index_to_sample` holds the
numbers of the samples that have it. In the merged form the rows of `index_to_sample` are a hundred
percentiles instead. These are the files of DeepSpeed's data analyzer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from neox_data.curriculum.pace import Pace, changes
from neox_data.errors import DataError
from neox_data.indexed import IndexedDataset, IndexedDatasetWriter, open_indexed

__all__ = ["MetricIndex", "admissions", "write_metric_index"]

_NEVER = np.iinfo(np.int64).max
_PERCENTILES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricIndex:
    """One measure of difficulty, and how far it is allowed when.

    Attributes:
        samples: prefix of the file of samples by difficulty.
        difficulties: prefix of the file of difficulties.
        kind: whether the pace speaks of difficulties or of percentiles of the samples.
        pace: the largest difficulty by iteration.
    """

    samples: str
    difficulties: str
    kind: Literal["value", "percentile"]
    pace: Pace


def admissions(index: MetricIndex, *, num_samples: int, iterations: int) -> np.ndarray:
    """The first iteration at which each sample is easy enough; int64, the greatest number where none is.

    Args:
        index: the measure.
        num_samples: samples of the dataset; those that the analysis does not list never are.
        iterations: of the whole training.

    Raises:
        DataError: the files do not fit each other, or list samples that the dataset does not have.
    """
    rows = open_indexed(index.samples)
    order = _listed(rows, num_samples)
    levels = changes(index.pace, iterations)
    begins = np.array([iteration for iteration, _ in levels] + [_NEVER])
    allowed = np.array([difficulty for _, difficulty in levels])
    if index.kind == "value":
        values = np.repeat(_difficulties(index, rows), rows.sizes)
        level = np.searchsorted(allowed, values)
    else:
        # So many of the easiest samples are allowed at each level.
        level = np.searchsorted(len(order) * allowed // _PERCENTILES, np.arange(len(order)), side="right")
    admitted = np.full(num_samples, _NEVER, np.int64)
    admitted[order] = begins[level]
    return admitted


def _listed(rows: IndexedDataset, num_samples: int) -> np.ndarray:
    order = rows.get_tokens(0, rows.num_tokens).astype(np.int64)
    counts = np.bincount(order[(order >= 0) & (order < num_samples)], minlength=num_samples)
    if len(order) == 0 or counts.sum() != len(order) or counts.max() > 1:
        raise DataError(
            f"{rows.prefix} does not list samples of this data ({num_samples:,} of them), each once; "
            "analyze again with neox-data analyze, with the same data, seq_length, seed and sample_order"
        )
    return order


def _difficulties(index: MetricIndex, rows: IndexedDataset) -> np.ndarray:
    values = open_indexed(index.difficulties)
    found = values.get_tokens(0, values.num_tokens).astype(np.int64)
    if len(found) != len(rows) or (values.sizes != 1).any() or (np.diff(found) < 0).any():
        raise DataError(
            f"{index.difficulties} does not hold one difficulty for each of the {len(rows):,} rows of "
            f"{index.samples}, rising; give the files of one analysis (a merged one knows percentiles only)"
        )
    return found


def write_metric_index(folder: Path, name: str, values: np.ndarray) -> dict[str, Path]:
    """Write the index of a measure: `FOLDER/NAME_index_to_sample`, `..._index_to_metric`, and a merged one.

    Args:
        folder: is made where it is missing.
        name: of the measure.
        values: int64 [samples], the difficulty of each.

    Returns:
        The prefixes of the three, by what follows the name.
    """
    order = np.argsort(values, kind="stable")
    levels, counts = np.unique(values, return_counts=True)
    shares = np.diff(len(order) * np.arange(_PERCENTILES + 1) // _PERCENTILES)
    contents = {
        "index_to_sample": (order, counts),
        "index_to_metric": (levels, np.ones(len(levels), np.int64)),
        "index_to_sample_percentile_merged": (order, shares),
    }
    prefixes = {kind: folder / f"{name}_{kind}" for kind in contents}
    for kind, (tokens, sizes) in contents.items():
        with IndexedDatasetWriter(prefixes[kind], dtype=np.int64) as writer:
            writer.append_all(tokens, sizes)
    return prefixes
