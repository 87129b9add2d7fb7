from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from neox_data.batch_sizes import BatchSizes
from neox_data.curriculum.analyze import num_documents, vocabulary_rarity
from neox_data.curriculum.dataset import Clusters, CurriculumDataset, load_or_build_clusters
from neox_data.curriculum.metric_index import MetricIndex, admissions, write_metric_index
from neox_data.curriculum.sample_order import check_order, fingerprint_order, order_path
from neox_data.curriculum.schedule import changes
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import open_indexed
from support.refusals import refused

NEVER = np.iinfo(np.int64).max


def in_steps(*, difficulties: list[int], last_iterations: list[int]) -> Callable[[int], int]:
    """Return given difficulties, each until its last iteration (from 1), the last forever."""
    return lambda iteration: difficulties[bisect_left(last_iterations, iteration + 1)]


def test_changes_of_a_difficulty_are_found() -> None:
    schedule = in_steps(difficulties=[1, 2, 3], last_iterations=[5, 10])
    assert changes(schedule, 12) == [(0, 1), (5, 2), (10, 3)]
    assert changes(schedule, 8) == [(0, 1), (5, 2)]


def index_of(
    tmp_path: Path, values: list[int], kind="value", merged=False, largest=4, **schedule: object
) -> MetricIndex:
    order = fingerprint_order(Numbers(len(values)))
    prefixes = write_metric_index(tmp_path, "m", np.array(values), order)
    samples = prefixes["index_to_sample_percentile_merged" if merged else "index_to_sample"]
    steps = {"difficulties": [2, 5, 9], "last_iterations": [4, 8]} | schedule
    return MetricIndex(
        samples=str(samples), difficulties=str(prefixes["index_to_metric"]), kind=kind,
        largest=largest, schedule=in_steps(**steps),
    )  # fmt: skip


def test_samples_are_admitted_by_value(tmp_path: Path) -> None:
    index = index_of(tmp_path, [5, 1, 10, 2, 6, 1])
    assert admissions(index, num_samples=6, iterations=20).tolist() == [4, 0, NEVER, 0, 8, 0]
    # The run ends before the last difficulty; a sample that was not analyzed is never drawn.
    assert admissions(index, num_samples=7, iterations=8).tolist() == [4, 0, NEVER, 0, NEVER, 0, NEVER]


@pytest.mark.parametrize("merged", [False, True])
def test_samples_are_admitted_by_percentile(tmp_path: Path, merged: bool) -> None:
    values = [30, 10, 20, 40, 50, 60, 70, 80]
    index = index_of(tmp_path, values, "percentile", merged, difficulties=[1, 2, 4])
    assert admissions(index, num_samples=8, iterations=20).tolist() == [4, 0, 0, 4, 8, 8, 8, 8]


def shares_of_deepspeed(num_samples: int, largest: int, difficulties: list[int]) -> list[int]:
    """Count the samples open at each difficulty as DeepSpeed's sampler documents it, one share at a time."""
    share = num_samples // largest
    return [num_samples if difficulty == largest else share * difficulty for difficulty in difficulties]


@pytest.mark.parametrize("num_samples", [8, 199, 1000])
@pytest.mark.parametrize(
    ("largest", "difficulties"),
    [(100, [10, 50, 100]), (50, [10, 25, 50]), (250, [50, 249, 250]), (8, [1, 2, 7])],
)
def test_percentiles_are_shares_of_the_largest_difficulty(
    tmp_path: Path, num_samples: int, largest: int, difficulties: list[int]
) -> None:
    values = np.random.default_rng(5).permutation(num_samples).tolist()
    index = index_of(tmp_path, values, "percentile", largest=largest, difficulties=difficulties)
    admitted = admissions(index, num_samples=num_samples, iterations=20)
    opened = [int((admitted <= begin).sum()) for begin in (0, 4, 8)]
    assert opened == shares_of_deepspeed(num_samples, largest, difficulties)
    order = np.argsort(values)
    assert (np.diff(admitted[order]) >= 0).all()


def test_merged_index_is_not_an_index_by_value(tmp_path: Path) -> None:
    with refused(DataError, "100 rows"):
        admissions(index_of(tmp_path, [1, 2, 3], "value", merged=True), num_samples=3, iterations=5)


def test_an_analysis_of_other_data_is_refused(tmp_path: Path) -> None:
    with refused(DataError, "2 samples"):
        admissions(index_of(tmp_path, [1, 2, 3]), num_samples=2, iterations=5)


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> np.ndarray:
        return np.array([item])


def curriculum(admitted: list[int], *, batch_sizes=((0, 4),), num_samples=80, num_epochs=50, seed=1):
    clusters = Clusters(np.array(admitted), "m")
    return CurriculumDataset(
        Numbers(len(admitted)), clusters, batch_sizes=BatchSizes(batch_sizes), num_samples=num_samples,
        num_epochs=num_epochs, seed=seed,
    )  # fmt: skip


ADMITTED = [0, 0, 3, NEVER, 0, 3, 3, 3, 10, 0, 0, 10]


def test_only_easy_samples_are_drawn_and_each_comes_once_before_any_comes_again() -> None:
    dataset = curriculum(ADMITTED)
    drawn = [dataset[item].item() for item in range(80)]
    for item, sample in enumerate(drawn):
        assert ADMITTED[sample] <= item // 4
    for cluster in (0, 3, 10):
        members = {sample for sample, begin in enumerate(ADMITTED) if begin == cluster}
        own = [sample for sample in drawn if sample in members]
        for first in range(0, len(own) - len(members) + 1, len(members)):
            assert set(own[first : first + len(members)]) == members


def test_open_clusters_are_drawn_from_by_their_sizes() -> None:
    dataset = curriculum(ADMITTED, num_samples=800, num_epochs=99)
    drawn = [dataset[item].item() for item in range(40, 800)]
    counts = np.bincount(drawn, minlength=12)
    assert counts[3] == 0
    assert all(abs(count - 760 / 11) < 8 for sample, count in enumerate(counts) if sample != 3)


def test_items_lead_back_and_depend_on_the_seed_alone() -> None:
    dataset = curriculum(ADMITTED)
    places = [dataset.locate(item)[1] for item in range(80)]
    for sample in range(12):
        assert dataset.items_of(0, sample) == [item for item, place in enumerate(places) if place == sample]
    assert [curriculum(ADMITTED).locate(item)[1] for item in range(79, -1, -1)] == places[::-1]
    assert [curriculum(ADMITTED, seed=2).locate(item)[1] for item in range(80)] != places


def test_new_batch_size_keeps_earlier_draws_and_the_schedule() -> None:
    """Batches of 4, 6 from iteration 2 on, 5 from iteration 5 on, 8 from iteration 9 on."""
    changes = ((0, 4), (2, 6), (5, 5), (9, 8))
    for count, (iteration, _) in enumerate(changes[1:], start=1):
        earlier, later = (curriculum(ADMITTED, batch_sizes=changes[:end]) for end in (count, count + 1))
        read = BatchSizes(changes).first_item(iteration)
        assert [earlier.locate(item) for item in range(read)] == [later.locate(item) for item in range(read)]
    dataset, sizes = curriculum(ADMITTED, batch_sizes=changes), BatchSizes(changes)
    drawn = [dataset[item].item() for item in range(80)]
    assert all(ADMITTED[sample] <= sizes.iteration_of(item) for item, sample in enumerate(drawn))
    for begin in (0, 3, 10):
        members = {sample for sample, admitted in enumerate(ADMITTED) if admitted == begin}
        own = [sample for sample in drawn if sample in members]
        assert sizes.iteration_of(drawn.index(own[0])) <= begin + 1
        for first in range(0, len(own) - len(members) + 1, len(members)):
            assert set(own[first : first + len(members)]) == members


def test_invalid_curricula_are_reported() -> None:
    with refused(DataError, "80 samples", "11", "7 passes"):
        curriculum(ADMITTED, num_epochs=7)
    with refused(DataError, code="nothing-easy-enough"):
        curriculum([3, 4, NEVER])
    with refused(DataError, "1,001 steps", "most 1,000"):
        curriculum(list(range(1001)))
    with refused(IndexError, "item 80", "80"):
        curriculum(ADMITTED)[80]


def test_measures_are_combined_and_their_clusters_kept(tmp_path: Path) -> None:
    one = index_of(tmp_path / "one", [1, 1, 5, 5, 9, 1])
    two = index_of(tmp_path / "two", [1, 5, 1, 9, 1, 1])
    folder = tmp_path / "clusters"
    for _ in range(2):
        clusters = load_or_build_clusters({"one": one, "two": two}, Numbers(6), iterations=20, folder=folder)
        assert (clusters.begins, clusters.ends) == ([0, 4, 8], [2, 4, 6])
        assert clusters.samples.tolist() == [0, 5, 1, 2, 3, 4]
        assert len(list(folder.iterdir())) == 1
    load_or_build_clusters({"one": one}, Numbers(6), iterations=20, folder=folder)
    assert len(list(folder.iterdir())) == 2


class Shifted(Numbers):
    def __getitem__(self, item: int) -> np.ndarray:
        return np.array([(item + 1) % self.length])


def test_an_analysis_of_another_order_is_refused_even_if_clusters_exist(tmp_path: Path) -> None:
    index = index_of(tmp_path, [1, 1, 5, 5, 9, 1])
    settings = {"iterations": 20, "folder": tmp_path / "clusters"}
    load_or_build_clusters({"m": index}, Numbers(6), **settings)
    for _ in range(2):
        with refused(DataError, "m_index_to_sample", code="other-order"):
            load_or_build_clusters({"m": index}, Shifted(6), **settings)


def test_an_analysis_without_a_fingerprint_is_used_with_a_warning(tmp_path: Path, caplog) -> None:
    index = index_of(tmp_path, [1, 1, 5, 5, 9, 1])
    order_path(index.samples).unlink()
    load_or_build_clusters({"m": index}, Numbers(6), iterations=20, folder=tmp_path / "clusters")
    assert "m_index_to_sample.order.json does not" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", "nonsense"])
def test_a_damaged_fingerprint_is_named(tmp_path: Path, content: str) -> None:
    index = index_of(tmp_path, [1, 1])
    order_path(index.samples).write_text(content)
    with refused(DataError, "m_index_to_sample.order.json", "neox-data"):
        check_order(index.samples, "x")


def test_measures_by_hand(write_dataset) -> None:
    prefix = write_dataset([[1, 1, 1], [1, 2], [2, 1, 1, 1]])
    dataset = GPTDataset(
        open_indexed(prefix), name="train", documents=np.arange(3), num_samples=2, seq_length=4, seed=0,
        prefix=prefix,
    )  # fmt: skip
    assert len(dataset) == 2
    inputs = [dataset[item][:-1].tolist() for item in range(2)]
    share = {token: sum(row.count(token) for row in inputs) / 8 for token in (1, 2)}
    expected = [round(float(np.mean([-np.log2(share[token]) for token in row])) * 1000) for row in inputs]
    assert vocabulary_rarity(dataset, 2).tolist() == expected
    pieces = [sum(1 for _, _, length in dataset.pieces(item) if length) for item in range(2)]
    assert num_documents(dataset, 2).tolist() == pieces
