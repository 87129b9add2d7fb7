"""Samples in the order of a curriculum: each iteration draws only from samples that are easy enough.

Samples that become easy enough at the same iteration form a cluster. An iteration draws from the open
clusters in proportion to their sizes; a cluster yields its samples in a shuffled order, each once before any
is repeated. The source of each draw is computed from its number, so resuming requires no state.

Source: the method of arXiv:2212.03597, whose implementation (DeepSpeed) draws at random and keeps its state.
"""

import hashlib
from bisect import bisect_right
from pathlib import Path

import numpy as np

from neox_data.batch_sizes import BatchSizes
from neox_data.blend import Mixture, SampleDataset
from neox_data.curriculum.metric_index import MetricIndex, admissions
from neox_data.curriculum.sample_order import check_order, fingerprint_order
from neox_data.curriculum.schedule import changes
from neox_data.errors import DataError
from neox_data.indexed.layout import bin_path, idx_path
from neox_data.lazy_blend import SpreadPoints
from neox_data.pluralize import pluralize
from neox_data.samples.permutation import KeyedPermutation
from neox_data.whole_files import exclusive_lock, written_aside

__all__ = ["Clusters", "CurriculumDataset", "load_or_build_clusters"]

_NEVER = np.iinfo(np.int64).max
# What each cluster gives in each stage is counted at the start, which takes seconds for a thousand of them.
_MOST_CLUSTERS = 1000


class Clusters:
    """Samples grouped by the first iteration that may draw them.

    Args:
        admitted: int64 [samples], the first iteration of each sample; the maximum of int64: never.
        origin: source of these values, for messages.

    Attributes:
        samples: int64, the samples of all clusters in order.
        ends: end of each cluster in `samples`.
        begins: first iteration of each cluster; 0 for the first cluster.

    Raises:
        DataError: no sample is easy enough for the first iteration, or there are too many clusters.
    """

    def __init__(self, admitted: np.ndarray, origin: str) -> None:
        order = np.argsort(admitted, kind="stable")
        begins, counts = np.unique(admitted[admitted < _NEVER], return_counts=True)
        if len(begins) > _MOST_CLUSTERS:
            raise DataError(
                f"the curriculum ({origin}) has {len(begins):,} steps, but at most {_MOST_CLUSTERS:,} "
                "are supported; use a larger difficulty_step"
            )
        if not len(begins) or begins[0]:
            raise DataError(
                f"no sample is easy enough for the first iteration by all measures of {origin}; increase a "
                "min_difficulty",
                code="nothing-easy-enough",
            )
        self.samples = order[: counts.sum()]
        self.ends: list[int] = np.cumsum(counts).tolist()
        self.begins: list[int] = begins.tolist()


def load_or_build_clusters(
    indices: dict[str, MetricIndex], dataset: SampleDataset, *, iterations: int, folder: Path | str
) -> Clusters:
    """Load or build the clusters for all measures: a sample may be drawn if it is easy enough by each.

    They are stored in a folder; one process builds them, others wait.

    Args:
        indices: the measures, by name.
        dataset: the dataset whose samples were analyzed.
        iterations: iterations of the whole run.
        folder: folder of the file, created if missing.

    Raises:
        DataError: an analysis is of other samples or another order, or no sample is easy enough for
            iteration 0.
    """
    num_samples, order = len(dataset), fingerprint_order(dataset)
    for index in indices.values():
        check_order(index.samples, order)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"clusters_{_digest(indices, num_samples, iterations)}.npy"
    with exclusive_lock(path.with_suffix(".lock"), purpose="grouping the samples by difficulty"):
        if not path.exists():
            admitted = np.zeros(num_samples, np.int64)
            for index in indices.values():
                each = admissions(index, num_samples=num_samples, iterations=iterations)
                np.maximum(admitted, each, out=admitted)
            with written_aside(path) as file:
                np.save(file, admitted, allow_pickle=False)
    return Clusters(np.load(path, mmap_mode="r", allow_pickle=False), ", ".join(indices))


def _digest(indices: dict[str, MetricIndex], num_samples: int, iterations: int) -> str:
    """Return a hash of everything that determines the clusters."""
    digest = hashlib.sha256(f"{num_samples} {iterations}".encode())
    for index in indices.values():
        for prefix in (index.samples, index.difficulties):
            for path in (bin_path(prefix), idx_path(prefix)):
                if path.exists():
                    with path.open("rb") as file:
                        digest.update(hashlib.file_digest(file, "sha256").digest())
        digest.update(f"{index.kind} {index.largest} {changes(index.schedule, iterations)}".encode())
    return digest.hexdigest()[:16]


class CurriculumDataset(Mixture):
    """The items of a dataset, drawn in the order of a curriculum.

    Args:
        dataset: dataset whose items were analyzed.
        clusters: clusters of the items.
        batch_sizes: number of items that each iteration reads.
        num_samples: number of items that will be read.
        num_epochs: maximum number of passes over the samples.
        seed: random seed of the order within the clusters.

    Raises:
        DataError: more items are required than `num_epochs` allows.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        clusters: Clusters,
        *,
        batch_sizes: BatchSizes,
        num_samples: int,
        num_epochs: int,
        seed: int,
    ) -> None:
        if num_samples > num_epochs * len(clusters.samples):
            raise DataError(
                f"the run requires {pluralize(num_samples, 'sample')}, but the curriculum has "
                f"{len(clusters.samples):,}, too few for {pluralize(num_epochs, 'pass', 'passes')}; increase "
                "data_sampling.num_epochs or use more data"
            )
        self.datasets = [dataset]
        self._clusters = clusters
        self._length = num_samples
        self._seed = seed
        self._sizes = np.diff([0, *clusters.ends]).tolist()
        # Stage s, with clusters 0 to s open, begins at item `_firsts[s]`.
        self._firsts = [batch_sizes.first_item(begin) for begin in clusters.begins]
        self._points = [SpreadPoints(self._sizes[: stage + 1]) for stage in range(len(self._sizes))]
        self._taken = self._taken_before_stages()

    def _locate(self, item: int) -> tuple[int, int]:
        stage = bisect_right(self._firsts, item) - 1
        points, place = self._points[stage], item - self._firsts[stage]
        cluster = points.owner(place)
        draw = self._taken[stage][cluster] + points.taken(place, cluster)
        number, within = divmod(draw, self._sizes[cluster])
        first = self._clusters.ends[cluster] - self._sizes[cluster]
        return 0, int(self._clusters.samples[first + self._order(cluster, number)[within]])

    def items_of(self, dataset: int, place: int) -> list[int]:
        """Return the items that map to item `place` of the underlying dataset."""
        found = np.flatnonzero(self._clusters.samples == place)
        if not len(found):
            return []
        cluster = bisect_right(self._clusters.ends, found.item(0))
        within = found.item(0) - (self._clusters.ends[cluster] - self._sizes[cluster])
        items, draws, size = [], self._taken[-1][cluster], self._sizes[cluster]
        for number in range(-(-draws // size)):
            draw = number * size + self._order(cluster, number).index(within)
            if draw < draws:
                stage = bisect_right(self._taken, draw, key=lambda taken: taken[cluster]) - 1
                drawn = self._points[stage].item_of(cluster, draw - self._taken[stage][cluster])
                items.append(self._firsts[stage] + drawn)
        return items

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
