"""The data of a run as plain values: the datasets of each part, and the batch of each item.

Another package converts configurations to this form, with a function registered under the entry point group
`neox_data.configurations` (neox-model does). The commands of this package can therefore take `--config`
without importing code that reads configurations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from neox_data.batch_sizes import BatchSizes
from neox_data.blend import SampleDataset
from neox_data.errors import DataError
from neox_data.tokenizers.base import Tokenizer

__all__ = ["BatchPlace", "TrainingData", "load_training_data"]

_GROUP = "neox_data.configurations"


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The place of an item in the batches.

    Attributes:
        iteration: iteration, from 0.
        data_parallel_rank: data-parallel rank that reads it; None if unknown.
        micro_step: index of the micro-batch in the iteration; None if unknown.
        row: index in the micro-batch, or in the iteration if the micro-batch is unknown.
    """

    iteration: int
    data_parallel_rank: int | None
    micro_step: int | None
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The data that a configuration reads on a number of devices.

    Attributes:
        datasets: datasets by part (`train`, `valid`, `test`), if they have documents.
        num_samples: items that the whole run reads from each part.
        train_iters: iterations of the whole run.
        seq_length: tokens that a sample predicts.
        batch_sizes: items of each iteration.
        micro_batch: items of one forward pass of one data-parallel rank.
        accumulation: micro-batches per iteration.
        data_parallel_size: number of data-parallel ranks.
        data_parallel_ranks: data-parallel rank of each process.
        build_tokenizer: builds the configured tokenizer.
        length_at: function of the iteration that returns the number of tokens of its samples.
        left_out: ranges of items of the training part, the first of each and the one after its last, whose
            iterations read them but do not train on them.
    """

    datasets: Mapping[str, SampleDataset]
    num_samples: Mapping[str, int]
    train_iters: int
    seq_length: int
    batch_sizes: BatchSizes
    micro_batch: int
    accumulation: int
    data_parallel_size: int
    data_parallel_ranks: Sequence[int]
    build_tokenizer: Callable[[], Tokenizer]
    length_at: Callable[[int], int]
    left_out: Sequence[tuple[int, int]] = ()

    def leaves_out(self, iteration: int) -> bool:
        """Return True if an iteration does not train on its items, because one of them is left out."""
        begin = self.batch_sizes.first_item(iteration)
        end = begin + self.batch_sizes.at(iteration)
        return any(first < end and begin < stop for first, stop in self.left_out)

    def knows_ranks(self, iteration: int) -> bool:
        """Return True if the ranks that read an iteration are known, which requires the same batch size."""
        items = self.micro_batch * self.accumulation * self.data_parallel_size
        return self.batch_sizes.at(iteration) == items

    def place_of(self, item: int) -> BatchPlace:
        """Return the place of an item of the training part, if the run is long enough."""
        iteration = self.batch_sizes.iteration_of(item)
        within = item - self.batch_sizes.first_item(iteration)
        if not self.knows_ranks(iteration):
            return BatchPlace(iteration, None, None, within)
        micro_step, within = divmod(within, self.micro_batch * self.data_parallel_size)
        rank, row = divmod(within, self.micro_batch)
        return BatchPlace(iteration, rank, micro_step, row)


def load_training_data(
    paths: Sequence[Path],
    *,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    checkpoint: str | None = None,
) -> TrainingData:
    """Return the data that a run with these configuration files reads.

    Args:
        paths: configuration files, which are merged.
        overrides: `name=value` pairs that override the files.
        devices: number of devices of the job; None: the fewest that hold the model.
        checkpoint: folder, name or iteration of the checkpoint whose recorded batch sizes to use; None: the
            configuration's batch size in every iteration.

    Raises:
        DataError: no installed package reads configurations; or the configuration, its data or the checkpoint
            is invalid.
    """
    readers = list(entry_points(group=_GROUP))
    if not readers:
        raise DataError("no installed package reads configuration files; pip install neox-model")
    describe: Callable[..., TrainingData] = readers[0].load()
    return describe(paths, overrides=overrides, devices=devices, checkpoint=checkpoint)
