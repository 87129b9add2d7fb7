"""The analysis of one measure: the samples by difficulty, in two token files.

Row r of `index_to_metric` contains one difficulty, which increases with r; row r of `index_to_sample`
contains the samples with this difficulty. In the merged form the rows of `index_to_sample` are a hundred
percentiles instead. These are the files of DeepSpeed's data analyzer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from neox_data.curriculum.sample_order import record_order
from neox_data.curriculum.schedule import DifficultySchedule, changes
from neox_data.errors import DataError
from neox_data.indexed import IndexedDataset, IndexedDatasetWriter, open_indexed
from neox_data.pluralize import pluralize

__all__ = ["MetricIndex", "admissions", "write_metric_index"]

_NEVER = np.iinfo(np.int64).max
_PERCENTILES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricIndex:
    """One measure of difficulty, and its schedule.

    Attributes:
        samples: prefix of the file of samples by difficulty.
        difficulties: prefix of the file of difficulties.
        kind: unit of the schedule: difficulties, or shares of the samples, from the easiest.
        largest: the share that is all samples, such as 100; used for shares only.
        schedule: maximum difficulty by iteration.
    """

    samples: str
    difficulties: str
    kind: Literal["value", "percentile"]
    largest: int
    schedule: DifficultySchedule


def admissions(index: MetricIndex, *, num_samples: int, iterations: int) -> np.ndarray:
    """Return the first iteration at which each sample is easy enough; int64, its maximum if never.

    Args:
        index: the measure.
        num_samples: samples of the dataset; those that the analysis does not list are never easy enough.
        iterations: iterations of the whole run.

    Raises:
        DataError: the files do not match, or list samples that the dataset does not have.
    """
    rows = open_indexed(index.samples)
    order = _listed(rows, num_samples)
    levels = changes(index.schedule, iterations)
    begins = np.array([iteration for iteration, _ in levels] + [_NEVER])
    allowed = np.array([difficulty for _, difficulty in levels])
    if index.kind == "value":
        values = np.repeat(_difficulties(index, rows), rows.sizes)
        level = np.searchsorted(allowed, values)
    else:
        # The number of easiest samples allowed at each level, rounded as by DeepSpeed.
        counts = len(order) // index.largest * allowed
        counts[allowed >= index.largest] = len(order)
        level = np.searchsorted(np.minimum(counts, len(order)), np.arange(len(order)), side="right")
    admitted = np.full(num_samples, _NEVER, np.int64)
    admitted[order] = begins[level]
    return admitted


def _listed(rows: IndexedDataset, num_samples: int) -> np.ndarray:
    order = rows.get_tokens(0, rows.num_tokens).astype(np.int64)
    counts = np.bincount(order[(order >= 0) & (order < num_samples)], minlength=num_samples)
    if len(order) == 0 or counts.sum() != len(order) or counts.max() > 1:
        raise DataError(
            f"{rows.prefix} does not list the {num_samples:,} samples of this data once each; run "
            "neox-data analyze again, with the same data, seq_length, seed and sample_order"
        )
    return order


def _difficulties(index: MetricIndex, rows: IndexedDataset) -> np.ndarray:
    values = open_indexed(index.difficulties)
    found = values.get_tokens(0, values.num_tokens).astype(np.int64)
    if len(found) != len(rows) or (values.sizes != 1).any() or (np.diff(found) < 0).any():
        raise DataError(
            f"{index.difficulties} does not contain one increasing difficulty per row of {index.samples} "
            f"({pluralize(len(rows), 'row')}); use the files of one analysis (a merged one has percentiles "
            "only)"
        )
    return found


def write_metric_index(folder: Path, name: str, values: np.ndarray, order: str) -> dict[str, Path]:
    """Write the index of a measure: `FOLDER/NAME_index_to_sample`, `..._index_to_metric`, and a merged one.

    Args:
        folder: created if missing.
        name: name of the measure.
        values: int64 [samples], the difficulty of each sample.
        order: fingerprint of the samples' order; see `sample_order`.

    Returns:
        The prefixes of the three files, by the suffix of their name.
    """
    samples = np.argsort(values, kind="stable")
    levels, counts = np.unique(values, return_counts=True)
    shares = np.diff(len(samples) * np.arange(_PERCENTILES + 1) // _PERCENTILES)
    contents = {
        "index_to_sample": (samples, counts),
        "index_to_metric": (levels, np.ones(len(levels), np.int64)),
        "index_to_sample_percentile_merged": (samples, shares),
    }
    prefixes = {kind: folder / f"{name}_{kind}" for kind in contents}
    for kind, (tokens, sizes) in contents.items():
        with IndexedDatasetWriter(prefixes[kind], dtype=np.int64) as writer:
            writer.append_all(tokens, sizes)
        record_order(prefixes[kind], order)
    return prefixes
