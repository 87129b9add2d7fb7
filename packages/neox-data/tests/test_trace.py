import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from neox_data import training_data
from neox_data.batch_sizes import BatchSizes
from neox_data.blend import SampleDataset, build_blend
from neox_data.cli import main
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import open_indexed
from neox_data.lazy_blend import LazyBlendedDataset
from neox_data.lazy_dataset import LazyGPTDataset
from neox_data.sampler import BatchSampler
from neox_data.tokenizers import build_tokenizer
from neox_data.trace import items_with, passages, readings_at
from neox_data.training_data import BatchPlace, TrainingData, load_training_data
from support.refusals import refused, shows

SEQ_LENGTH, ITERATIONS = 8, 5
TEXTS = ["one fish two fish", "", "red fish blue fish", "x", "this one has a little star", "say what a lot"]


def gpt_neox(prefix: Path, name: str, count: int) -> GPTDataset:
    indexed = open_indexed(prefix)
    return GPTDataset(
        indexed, name=name, documents=np.arange(len(indexed)), num_samples=count, seq_length=SEQ_LENGTH,
        seed=3, prefix=prefix,
    )  # fmt: skip


def lazy(prefix: Path, name: str, count: int) -> LazyGPTDataset:
    indexed = open_indexed(prefix)
    return LazyGPTDataset(
        indexed, name=name, documents=range(len(indexed)), num_samples=count, seq_length=SEQ_LENGTH, seed=3
    )


def data_of(
    datasets: dict[str, SampleDataset],
    *,
    replicas: int = 2,
    micro_batch: int = 2,
    accumulation: int = 2,
    before: tuple[tuple[int, int], ...] = (),
    since: int = 0,
) -> TrainingData:
    return TrainingData(
        datasets=datasets,
        num_samples=dict.fromkeys(datasets, 40),
        train_iters=ITERATIONS,
        seq_length=SEQ_LENGTH,
        batch_sizes=BatchSizes(before).then(since, replicas * micro_batch * accumulation),
        micro_batch=micro_batch,
        accumulation=accumulation,
        data_parallel_size=replicas,
        data_parallel_ranks=[rank // 2 for rank in range(2 * replicas)],
        build_tokenizer=lambda: build_tokenizer("CharLevelTokenizer"),
        length_at=lambda iteration: SEQ_LENGTH + 1,
    )


@pytest.fixture
def prefixes(write_dataset) -> list[Path]:
    return [
        write_dataset([list(text.encode()) for text in texts], name=name)
        for name, texts in (("a", TEXTS), ("b", ["zz top and more", "the end"]))
    ]


def orders(prefixes: list[Path]) -> dict[str, SampleDataset]:
    return {
        "plain": gpt_neox(prefixes[0], "train", 40),
        "lazy": lazy(prefixes[0], "train", 40),
        "blend": build_blend(lambda k, n: gpt_neox(prefixes[k], f"train_{k}", n), [2, 1], 40),
        "lazy blend": LazyBlendedDataset(lambda k, n: lazy(prefixes[k], f"train_{k}", n), [2, 1], 40),
    }


ORDERS = ["plain", "lazy", "blend", "lazy blend"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (4, 1, 2)])
def test_trace_equals_the_samples_of_the_ranks(
    prefixes: list[Path], order: str, shape: tuple[int, int, int]
) -> None:
    replicas, micro_batch, accumulation = shape
    dataset = orders(prefixes)[order]
    data = data_of({"train": dataset}, replicas=replicas, micro_batch=micro_batch, accumulation=accumulation)
    for iteration in range(ITERATIONS):
        for rank in range(2 * replicas):
            sampler = BatchSampler(
                len(dataset), micro_batch=micro_batch, data_parallel_rank=rank // 2,
                data_parallel_size=replicas, accumulation=accumulation,
            )  # fmt: skip
            read = [dataset[k] for step in range(accumulation) for k in sampler.items(iteration, step)]
            traced = list(readings_at(data, iteration, rank))
            assert [
                np.concatenate([passage.tokens for passage in reading.passages]).tolist()
                for reading in traced
            ] == [tokens.tolist() for tokens in read]
            assert [data.place_of(reading.item) for reading in traced] == [
                reading.place for reading in traced
            ]


@pytest.mark.parametrize("order", ORDERS)
def test_a_document_is_read_at_exactly_the_items_that_hold_it(prefixes: list[Path], order: str) -> None:
    dataset = orders(prefixes)[order]
    data = data_of({"train": dataset})
    for prefix in prefixes:
        indexed = open_indexed(prefix)
        for document in range(len(indexed)):
            holding = [
                item
                for item in range(40)
                if any(
                    (passage.indexed.prefix, passage.document) == (prefix, document)
                    for passage in passages(dataset, item)
                )
            ]
            assert items_with(data, "train", indexed, document) == holding


def test_shorter_iteration_shows_only_its_targets(prefixes: list[Path]) -> None:
    data = replace(data_of({"train": orders(prefixes)["plain"]}), length_at=lambda iteration: 3 + iteration)
    for iteration in (0, 3):
        for reading in readings_at(data, iteration):
            assert sum(passage.length for passage in reading.passages) == 3 + iteration


@pytest.mark.parametrize(("iteration", "rank"), [(5, None), (0, 4)])
def test_iteration_or_rank_out_of_range_is_refused(
    prefixes: list[Path], iteration: int, rank: int | None
) -> None:
    with refused(DataError, "0"):
        list(readings_at(data_of({"train": orders(prefixes)["plain"]}), iteration, rank))


def test_a_trace_follows_the_batch_sizes_of_a_resumed_training(prefixes: list[Path]) -> None:
    dataset = orders(prefixes)["lazy"]
    data = data_of({"train": dataset}, before=((0, 4), (1, 6)), since=3)
    items = [[reading.item for reading in readings_at(data, iteration)] for iteration in range(ITERATIONS)]
    assert items[:3] == [[*range(4)], [*range(4, 10)], [*range(10, 16)]]
    assert [sorted(found) for found in items[3:]] == [[*range(16, 24)], [*range(24, 32)]]
    places = [data.place_of(item) for item in (9, 16, 31)]
    assert places == [BatchPlace(1, None, None, 5), BatchPlace(3, 0, 0, 0), BatchPlace(4, 1, 1, 1)]
    assert [reading.item for reading in readings_at(data, 3, rank=3)] == [18, 19, 22, 23]
    with refused(DataError, "1 read", "6 samples"):
        list(readings_at(data, 1, rank=0))


@pytest.fixture
def run(prefixes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = data_of({"train": orders(prefixes)["blend"], "valid": gpt_neox(prefixes[1], "valid", 40)})
    monkeypatch.setattr("neox_data.trace_cli.load_training_data", lambda *args, **kwargs: data)
    monkeypatch.setattr("neox_data.blend_report_cli.load_training_data", lambda *args, **kwargs: data)
    config = tmp_path / "x.yml"
    config.touch()

    def invoke(*words: object) -> Result:
        return CliRunner().invoke(main, [str(word) for word in (words[0], "--config", config, *words[1:])])

    return invoke


def test_help_explains_how_iterations_are_counted(run) -> None:
    shown = " ".join(run("trace", "--help").stdout.split())
    assert "- 1 here" in shown


def test_the_command_lists_an_iteration(run, prefixes: list[Path]) -> None:
    result = run("trace", "--iteration", 1, "--rank", 3)
    assert result.exit_code == 0, result.output
    heads = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    places = ((1, 1, 0, 0, 10), (1, 1, 0, 1, 11), (1, 1, 1, 0, 14), (1, 1, 1, 1, 15))
    assert [tuple(map(int, re.findall(r"\d+", head))) for head in heads] == list(places)
    assert f"  {prefixes[0]} document 4: tokens " in run("trace", "--iteration", 1).stdout


def test_command_prints_when_a_document_is_read(run, prefixes: list[Path]) -> None:
    result = run("trace", "--document", f"{prefixes[1]}:1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{prefixes[1]} document 1"
    assert all(line.startswith("  iteration ") and line.endswith(" of 7") for line in lines[1:-1])
    assert "not used for" in lines[-1]


def test_the_command_finds_a_passage(run) -> None:
    result = run("trace", "--text", "top and")
    assert "b document 0\n" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 document ")
    assert result.exit_code == 0


def test_a_passage_that_no_document_contains_is_an_error(run) -> None:
    result = run("trace", "--text", "never written")
    assert result.stdout.splitlines()[-1].startswith("0 documents ")
    assert "no document contains" in result.stderr
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "and one of --iteration, --document, --text"),
        (["--iteration", 1, "--text", "x"], "and one of"),
        (["--text", "x", "--rank", 1], "--rank is valid only with --iteration"),
        (["--text", ""], "--text is empty"),
        (["--text", "a\udcff"], "surrogates not allowed"),
        (["--document", "seven"], "is not a number"),
        (["--document", 1], "pass --document as one of "),
        (["--document", "c:1"], "c is not a dataset of this configuration; pass one of "),
        (["--iteration", 9], "there is no iteration 9; pass one from 0 to 4"),
    ],
)
def test_invalid_arguments_are_reported(run, words: list[object], message: str) -> None:
    result = run("trace", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_blend_is_reported_for_a_configuration(run) -> None:
    result = run("blend-report")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert shows(lines[0], "train: 40 samples", "8 tokens")
    assert [line.split()[3] for line in lines[2:4]] == ["27", "13"]
    assert [line.split()[1] for line in lines[2:4]] == [str(sum(map(len, TEXTS))), "22"]
    assert shows(lines[4], "valid: 40 samples", "8 tokens")


def test_missing_model_package_is_reported_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_data, "entry_points", lambda group: [])
    with refused(DataError, "neox-model"):
        load_training_data([Path("x.yml")])
