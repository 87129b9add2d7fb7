"""Samples in the order of a curriculum: at each iteration only what is easy enough, spread over all of it.

Samples that become easy enough at the same iteration are a cluster. An iteration draws from the clusters that
are open, in proportion to their sizes; a cluster gives its samples in a shuffled order, each once before any
comes again. Where every draw comes from is computed from its number, so resuming needs no state.

Source: the method of arXiv:2212.03597, whose implementation (DeepSpeed) draws at random and keeps its state.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from neox_data.blend import SampleDataset
from neox_data.curriculum.metric_index import MetricIndex, admissions
from neox_data.curriculum.pace import changes
from neox_data.errors import DataError
from neox_data.indexed.layout import bin_path, idx_path
from neox_data.lazy_blend import SpreadPoints
from neox_data.samples.permutation import KeyedPermutation
from neox_data.whole_files import exclusive_lock, written_aside

__all__ = ["Clusters", "CurriculumDataset", "load_or_build_clusters"]

_NEVER = np.iinfo(np.int64).max
# What each cluster gives in each stage is counted at the start, which takes seconds for a thousand of them.
_MOST_CLUSTERS = 1000


class Clusters:
    """Samples by the iteration from which on they are drawn.

    Args:
        admitted: int64 [samples], that iteration of each; the greatest number: never.
        origin: what says so, for messages.

    Attributes:
        samples: int64, cluster after cluster.
        ends: where each cluster ends in `samples`.
        begins: the iteration from which on each is drawn, the first one 0.

    Raises:
        DataError: no sample is easy enough for the first iteration, or there are too many clusters.
    """

    def __init__(self, admitted: np.ndarray, origin: str) -> None:
        order = np.argsort(admitted, kind="stable")
        begins, counts = np.unique(admitted[admitted < _NEVER], return_counts=True)
        if len(begins) > _MOST_CLUSTERS:
            raise DataError(
                f"the curriculum ({origin}) grows in {len(begins):,} steps, and at most {_MOST_CLUSTERS:,} "
                "are kept apart; use a larger difficulty_step"
            )
        if not len(begins) or begins[0]:
            raise DataError(
                f"no sample is easy enough for the first iteration by all of {origin}; raise a min_difficulty"
            )
        self.samples = order[: counts.sum()]
        self.ends: list[int] = np.cumsum(counts).tolist()
        self.begins: list[int] = begins.tolist()


def load_or_build_clusters(
    indices: dict[str, MetricIndex], *, num_samples: int, iterations: int, folder: Path | str
) -> Clusters:
    """The clusters by all measures together: a sample is drawn once it is easy enough by each of them.

    They are kept in a folder; one process makes them, others wait for it.

    Args:
        indices: the measures, by name.
        num_samples: samples of the dataset.
        iterations: of the whole training.
        folder: for the file; is made where it is missing.

    Raises:
        DataError: an analysis does not fit the dataset, or no sample is easy enough for the first iteration.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"clusters_{_digest(indices, num_samples, iterations)}.npy"
    with exclusive_lock(path.with_suffix(".lock"), purpose="it groups the samples by difficulty"):
        if not path.exists():
            admitted = np.zeros(num_samples, np.int64)
            for index in indices.values():
                each = admissions(index, num_samples=num_samples, iterations=iterations)
                np.maximum(admitted, each, out=admitted)
            with written_aside(path) as file:
                np.save(file, admitted, allow_pickle=False)
    return Clusters(np.load(path, mmap_mode="r", allow_pickle=False), ", ".join(indices))


def _digest(indices: dict[str, MetricIndex], num_samples: int, iterations: int) -> str:
    """A name for the clusters that changes with anything that they are made from."""
    digest = hashlib.sha256(f"{num_samples} {iterations}".encode())
    for index in indices.values():
        for prefix in (index.samples, index.difficulties):
            for path in (bin_path(prefix), idx_path(prefix)):
                if path.exists():
                    with path.open("rb") as file:
                        digest.update(hashlib.file_digest(file, "sha256").digest())
        digest.update(f"{index.kind} {changes(index.pace, iterations)}".encode())
    return digest.hexdigest()[:16]


class CurriculumDataset:
    """The items of a dataset, drawn cluster by cluster.

    Args:
        dataset: its items are the samples that were analyzed.
        clusters: which of them are drawn when.
        items_per_iteration: how many items an iteration reads.
        num_samples: items that will be asked for.
        num_epochs: at most so many times as many draws as there are samples.
        seed: for the order within the clusters.

    Raises:
        DataError: more draws are needed than `num_epochs` allows.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        clusters: Clusters,
        *,
        items_per_iteration: int,
        num_samples: int,
        num_epochs: int,
        seed: int,
    ) -> None:
        if num_samples > num_epochs * len(clusters.samples):
            raise DataError(
                f"{num_samples:,} samples are asked of a curriculum of {len(clusters.samples):,}, more than "
                f"{num_epochs:,} passes give; raise data_sampling.num_epochs or use more data"
            )
        self.datasets: Sequence[SampleDataset] = [dataset]
        self._clusters = clusters
        self._length = num_samples
        self._seed = seed
        self._sizes = np.diff([0, *clusters.ends]).tolist()
        # Stage s, with clusters 0 to s open, begins at item `_firsts[s]`.
        self._firsts = [begin * items_per_iteration for begin in clusters.begins]
        self._points = [SpreadPoints(self._sizes[: stage + 1]) for stage in range(len(self._sizes))]
        self._taken = self._taken_before_stages()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> np.ndarray:
        """The tokens of an item, int64 [seq_length + 1]."""
        _, place = self.locate(item)
        return self.datasets[0][place]

    def locate(self, item: int) -> tuple[int, int]:
        """0, and the item of the dataset below that an item is.

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < self._length:
            raise IndexError(f"item {item} of a curriculum of {self._length:,}")
        stage = bisect_right(self._firsts, item) - 1
        points, place = self._points[stage], item - self._firsts[stage]
        cluster = points.owner(place)
        return 0, self._sample(cluster, self._taken[stage][cluster] + points.taken(place, cluster))

    def items_of(self, dataset: int, place: int) -> list[int]:
        """The items that are item `place` of the dataset below."""
        found = np.flatnonzero(self._clusters.samples == place)
        if not len(found):
            return []
        cluster = bisect_right(self._clusters.ends, found.item(0))
        within = found.item(0) - (self._clusters.ends[cluster] - self._sizes[cluster])
        items, draws, size = [], self._taken[-1][cluster], self._sizes[cluster]
        for number in range(-(-draws // size)):
            draw = number * size + self._order(cluster, number).index(within)
            if draw < draws:
                items.append(self._item_of(cluster, draw))
        return items

    def _item_of(self, cluster: int, draw: int) -> int:
        stage = bisect_right(self._taken, draw, key=lambda taken: taken[cluster]) - 1
        place = self._points[stage].item_of(cluster, draw - self._taken[stage][cluster])
        return self._firsts[stage] + place

    def _sample(self, cluster: int, draw: int) -> int:
        number, within = divmod(draw, self._sizes[cluster])
        first: int = self._clusters.ends[cluster] - self._sizes[cluster]
        samples = self._clusters.samples
        return int(samples[first + self._order(cluster, number)[within]])

    def _order(self, cluster: int, epoch: int) -> KeyedPermutation:
        return KeyedPermutation(self._sizes[cluster], f"{self._seed} {cluster} {epoch}")

    def _taken_before_stages(self) -> list[list[int]]:
        """For each stage and for the end, how many samples each cluster has given before it."""
        taken = [[0] * len(self._sizes)]
        ends = [*self._firsts[1:], self._length]
        for stage, (first, end) in enumerate(zip(self._firsts, ends, strict=True)):
            count = max(min(end, self._length) - first, 0)
            new = [self._points[stage].taken(count, cluster) for cluster in range(stage + 1)]
            new += [0] * (len(self._sizes) - len(new))
            taken.append([before + more for before, more in zip(taken[-1], new, strict=True)])
        return taken
