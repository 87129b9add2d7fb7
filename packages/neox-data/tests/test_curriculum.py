import json
from pathlib import Path

import numpy as np
import pytest

from neox_data.curriculum.analyze import num_documents, vocabulary_rarity
from neox_data.curriculum.dataset import Clusters, CurriculumDataset, load_or_build_clusters
from neox_data.curriculum.metric_index import MetricIndex, admissions, write_metric_index
from neox_data.curriculum.pace import changes, fixed_discrete, fixed_linear, fixed_root
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import open_indexed

NEVER = np.iinfo(np.int64).max


def test_a_linear_pace_by_hand() -> None:
    # After t of 10 iterations 8 + t / 10 * 24, down to a multiple of 8.
    pace = fixed_linear(smallest=8, largest=32, iterations=10, multiple=8)
    assert [pace(iteration) for iteration in range(12)] == [8, 8, 8, 16, 16, 16, 24, 24, 24, 32, 32, 32]


def test_a_root_pace_by_hand() -> None:
    # The square root of t / 16 at t = 1, 4, 9, 16 is 1/4, 1/2, 3/4, 1 of the way from 10 to 50.
    pace = fixed_root(smallest=10, largest=50, iterations=16, multiple=10, degree=2)
    assert [pace(t - 1) for t in (1, 3, 4, 8, 9, 15, 16, 100)] == [20, 20, 30, 30, 40, 40, 50, 50]


def test_the_first_difficulty_is_a_multiple_at_or_above_the_smallest() -> None:
    pace = fixed_linear(smallest=8, largest=64, iterations=100, multiple=16)
    assert pace(0) == 16
    assert fixed_linear(smallest=3, largest=5, iterations=9, multiple=16)(0) == 5


def test_a_discrete_pace_by_hand() -> None:
    pace = fixed_discrete(difficulties=[1, 2, 3], last_iterations=[5, 10])
    assert [pace(t - 1) for t in (1, 5, 6, 10, 11, 99)] == [1, 1, 2, 2, 3, 3]
    assert changes(pace, 12) == [(0, 1), (5, 2), (10, 3)]
    assert changes(pace, 8) == [(0, 1), (5, 2)]


def index_of(tmp_path: Path, values: list[int], kind="value", merged=False, **pace: object) -> MetricIndex:
    prefixes = write_metric_index(tmp_path, "m", np.array(values))
    samples = prefixes["index_to_sample_percentile_merged" if merged else "index_to_sample"]
    steps = {"difficulties": [2, 5, 9], "last_iterations": [4, 8]} | pace
    return MetricIndex(
        samples=str(samples), difficulties=str(prefixes["index_to_metric"]), kind=kind,
        pace=fixed_discrete(**steps),
    )  # fmt: skip


def test_samples_are_admitted_by_value(tmp_path: Path) -> None:
    index = index_of(tmp_path, [5, 1, 10, 2, 6, 1])
    assert admissions(index, num_samples=6, iterations=20).tolist() == [4, 0, NEVER, 0, 8, 0]
    # The training ends before the last difficulty; a sample that was not analyzed is never drawn.
    assert admissions(index, num_samples=7, iterations=8).tolist() == [4, 0, NEVER, 0, NEVER, 0, NEVER]


@pytest.mark.parametrize("merged", [False, True])
def test_samples_are_admitted_by_percentile(tmp_path: Path, merged: bool) -> None:
    values = [30, 10, 20, 40, 50, 60, 70, 80]
    index = index_of(tmp_path, values, "percentile", merged, difficulties=[25, 50, 100])
    assert admissions(index, num_samples=8, iterations=20).tolist() == [4, 0, 0, 4, 8, 8, 8, 8]


def test_a_merged_index_is_no_index_by_value(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not hold one difficulty for each of the 100 rows"):
        admissions(index_of(tmp_path, [1, 2, 3], "value", merged=True), num_samples=3, iterations=5)


def test_an_analysis_of_other_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not list samples of this data \(2 of them\)"):
        admissions(index_of(tmp_path, [1, 2, 3]), num_samples=2, iterations=5)


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> np.ndarray:
        return np.array([item])


def curriculum(admitted: list[int], *, per_iteration=4, num_samples=80, num_epochs=50, seed=1):
    clusters = Clusters(np.array(admitted), "m")
    return CurriculumDataset(
        Numbers(len(admitted)), clusters, items_per_iteration=per_iteration, num_samples=num_samples,
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


def test_what_cannot_be_drawn_is_told() -> None:
    with pytest.raises(DataError, match=r"80 samples are asked of a curriculum of 11, more than 7 passes"):
        curriculum(ADMITTED, num_epochs=7)
    with pytest.raises(DataError, match="no sample is easy enough for the first iteration by all of m"):
        curriculum([3, 4, NEVER])
    with pytest.raises(DataError, match="grows in 1,001 steps, and at most 1,000 are kept apart"):
        curriculum(list(range(1001)))
    with pytest.raises(IndexError, match="item 80 of a curriculum of 80"):
        curriculum(ADMITTED)[80]


def test_measures_are_combined_and_their_clusters_kept(tmp_path: Path) -> None:
    one = index_of(tmp_path / "one", [1, 1, 5, 5, 9, 1])
    two = index_of(tmp_path / "two", [1, 5, 1, 9, 1, 1])
    folder = tmp_path / "clusters"
    for _ in range(2):
        clusters = load_or_build_clusters(
            {"one": one, "two": two}, num_samples=6, iterations=20, folder=folder
        )
        assert (clusters.begins, clusters.ends) == ([0, 4, 8], [2, 4, 6])
        assert clusters.samples.tolist() == [0, 5, 1, 2, 3, 4]
        assert len(list(folder.iterdir())) == 1
    load_or_build_clusters({"one": one}, num_samples=6, iterations=20, folder=folder)
    assert len(list(folder.iterdir())) == 2


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


def test_paces_are_deepspeeds() -> None:
    scheduler = pytest.importorskip(
        "deepspeed.runtime.data_pipeline.curriculum_scheduler", reason="DeepSpeed is not installed"
    )
    for kind, build, config in (
        ("fixed_linear", fixed_linear, {}),
        ("fixed_root", fixed_root, {"degree": 2}),
        ("fixed_root", fixed_root, {"degree": 3}),
    ):
        for smallest, largest, iterations, multiple in ((8, 128, 37, 8), (5, 100, 90, 7), (3, 60, 11, 16)):
            pace = build(
                smallest=smallest, largest=largest, iterations=iterations, multiple=multiple, **config
            )
            settings = {"total_curriculum_step": iterations, "difficulty_step": multiple}
            theirs = scheduler.CurriculumScheduler(
                json.loads(json.dumps({
                    "min_difficulty": smallest, "max_difficulty": largest, "schedule_type": kind,
                    "schedule_config": settings | ({"root_degree": config["degree"]} if config else {}),
                }))
            )  # fmt: skip
            assert [pace(iteration) for iteration in range(150)] == [
                theirs.update_difficulty(iteration + 1) for iteration in range(150)
            ]
