"""What a training reads, as plain values: the datasets of each part, and which batch an item belongs to.

A configuration becomes this by a function that another package registers under the entry point group
`neox_data.configurations`; neox-model does. So the commands here take `--config`, and nothing is imported
that knows configurations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from neox_data.blend import SampleDataset
from neox_data.errors import DataError
from neox_data.tokenizers.base import Tokenizer

__all__ = ["BatchPlace", "TrainingData", "load_training_data"]

_GROUP = "neox_data.configurations"


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Where an item is read.

    Attributes:
        iteration: from 0.
        data_parallel_rank: which copy of the model reads it.
        micro_step: which of its micro-batches of the iteration.
        row: place in the micro-batch.
    """

    iteration: int
    data_parallel_rank: int
    micro_step: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """What a configuration reads on a number of devices.

    Attributes:
        datasets: by part (`train`, `valid`, `test`), those that have documents.
        num_samples: items that a whole training reads of each part.
        train_iters: iterations of the whole training.
        seq_length: tokens that a sample predicts.
        micro_batch: items of one forward pass of one copy of the model.
        accumulation: micro-batches of one iteration.
        data_parallel_size: copies of the model.
        data_parallel_ranks: of each process, the copy that it belongs to.
        build_tokenizer: makes the configured tokenizer.
        length_at: how many tokens of its samples an iteration predicts.
    """

    datasets: Mapping[str, SampleDataset]
    num_samples: Mapping[str, int]
    train_iters: int
    seq_length: int
    micro_batch: int
    accumulation: int
    data_parallel_size: int
    data_parallel_ranks: Sequence[int]
    build_tokenizer: Callable[[], Tokenizer]
    length_at: Callable[[int], int]

    def place_of(self, item: int) -> BatchPlace:
        """Where an item of the training part is read, if the training is long enough."""
        batch, within = divmod(item, self.micro_batch * self.data_parallel_size)
        iteration, micro_step = divmod(batch, self.accumulation)
        rank, row = divmod(within, self.micro_batch)
        return BatchPlace(iteration, rank, micro_step, row)


def load_training_data(
    paths: Sequence[Path], *, overrides: Sequence[str] = (), devices: int | None = None
) -> TrainingData:
    """What a training of these configuration files reads.

    Args:
        paths: the files, merged.
        overrides: `name=value`, stronger than the files.
        devices: of the whole job; None: as few as hold one copy of the model.

    Raises:
        DataError: no installed package reads configurations; or the configuration or its data is wrong.
    """
    readers = list(entry_points(group=_GROUP))
    if not readers:
        raise DataError(
            "no installed package reads configuration files; pip install neox-model beside neox-data"
        )
    describe: Callable[..., TrainingData] = readers[0].load()
    return describe(paths, overrides=overrides, devices=devices)
