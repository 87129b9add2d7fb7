from pathlib import Path

import numpy as np

from neox_data.blend import build_blend
from neox_data.blend_report import report_datasets, share_lines
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import open_indexed


def test_report_equals_the_samples_that_training_reads(write_dataset) -> None:
    prefixes: list[Path] = [
        write_dataset([[1] * 50, [2] * 51], name="a"),
        write_dataset([[3] * 401], name="b"),
    ]

    def build(number: int, count: int) -> GPTDataset:
        indexed = open_indexed(prefixes[number])
        return GPTDataset(
            indexed,
            name="train",
            documents=np.arange(len(indexed)),
            num_samples=count,
            seq_length=10,
            seed=1,
            prefix=prefixes[number],
        )

    sources = report_datasets(build_blend(build, [3, 1], 100), 100)
    one, two = sources
    assert (one.documents, one.tokens, one.weight, one.samples, one.share) == (2, 101, 0.75, 75, 0.75)
    # 101 tokens are 10 samples, so 75 samples see them 7.5 times; 76 samples are built.
    assert (one.epochs, one.built_epochs) == (7.5, 8)
    assert (two.tokens, two.weight, two.samples, two.epochs, two.built_epochs) == (401, 0.25, 25, 0.625, 1)
    assert [line.split() for line in share_lines(sources)] == [
        ["documents", "tokens", "weight", "samples", "share", "epochs", "built", "source"],
        ["2", "101", "75.00%", "75", "75.00%", "7.500", "8", str(prefixes[0])],
        ["1", "401", "25.00%", "25", "25.00%", "0.625", "1", str(prefixes[1])],
    ]
