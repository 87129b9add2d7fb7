import numpy as np
import pytest
from click.testing import CliRunner

from neox_data.blend_report import report_blend
from neox_data.cli import main
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import open_indexed
from support.refusals import refused


@pytest.fixture
def prefixes(write_dataset):
    return [write_dataset([[1] * 50, [2] * 51], name="a"), write_dataset([[3] * 401], name="b")]


def test_report_equals_the_samples_that_training_reads(prefixes) -> None:
    datasets = [open_indexed(prefix) for prefix in prefixes]
    one, two = report_blend(datasets, [3, 1], num_samples=100, seq_length=10)
    assert (one.documents, one.tokens, one.weight, one.samples, one.share) == (2, 101, 0.75, 75, 0.75)
    # 101 tokens are 10 samples, so 75 samples see them 7.5 times; 76 samples are built.
    assert (one.epochs, one.built_epochs) == (7.5, 8)
    assert (two.tokens, two.weight, two.samples, two.epochs, two.built_epochs) == (401, 0.25, 25, 0.625, 1)
    built = GPTDataset(
        datasets[0],
        name="a",
        documents=np.arange(2),
        num_samples=76,
        seq_length=10,
        seed=1,
        prefix=prefixes[0],
    )
    assert len(built.index.documents) == 2 * one.built_epochs


def test_equal_weights_are_the_default_and_lists_must_fit(prefixes) -> None:
    datasets = [open_indexed(prefix) for prefix in prefixes]
    assert [source.weight for source in report_blend(datasets, None, num_samples=3, seq_length=10)] == [
        0.5,
        0.5,
    ]
    with refused(DataError, "3 weights", "2 datasets"):
        report_blend(datasets, [1, 2, 3], num_samples=3, seq_length=10)


def run(*words: object):
    return CliRunner().invoke(main, ["blend-report", *map(str, words)])


def test_the_command_prints_a_line_for_each_source(prefixes) -> None:
    result = run(*prefixes, "--weights", "3, 1", "--num-samples", 100, "--seq-length", 10)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines == [
        ["documents", "tokens", "weight", "samples", "share", "epochs", "built", "source"],
        ["2", "101", "75.00%", "75", "75.00%", "7.500", "8", str(prefixes[0])],
        ["1", "401", "25.00%", "25", "25.00%", "0.625", "1", str(prefixes[1])],
    ]


def test_non_numeric_weights_are_refused(prefixes) -> None:
    result = run(*prefixes, "--weights", "a,b", "--num-samples", 100, "--seq-length", 10)
    assert result.exit_code == 2
    assert "'a,b' is not" in result.stderr


def test_no_more_samples_than_a_blend_can_have(prefixes) -> None:
    result = run(*prefixes, "--num-samples", 10**18, "--seq-length", 10)
    assert (result.exit_code, "not in the" in result.stderr) == (2, True)


def test_weights_may_follow_the_documents(prefixes) -> None:
    result = run(*prefixes, "--alpha", 1, "--num-samples", 90, "--seq-length", 10)
    assert [line.split()[2] for line in result.stdout.splitlines()[1:]] == ["66.67%", "33.33%"]
    assert (
        run(*prefixes, "--alpha", 1, "--weights", "1,1", "--num-samples", 9, "--seq-length", 9).exit_code == 2
    )
