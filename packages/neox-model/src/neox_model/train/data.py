"""From datasets to streams of batches: who reads which, from which iteration on."""

from collections.abc import Callable, Iterator
from functools import partial

from neox_data.blend import SampleDataset
from neox_data.errors import DataError
from neox_data.loader import PrefetchLoader
from neox_data.sampler import BatchSampler
from neox_launcher.config import Resolved
from neox_model.parallel.groups import Groups
from neox_model.train.batch import Batch, as_batch
from neox_model.train.datasets import Datasets, build_datasets, num_samples

__all__ = ["Stream", "build_datasets", "num_samples", "open_streams"]


class Stream:
    """The micro-batches of one rank, from an iteration on.

    Args:
        loader: gives token windows; None on ranks that need no tokens, which get an empty stream.
        vocab_size: entries of the model's vocabulary.
        masked_out_token: predictions made from this input token do not count; None: all count.
    """

    def __init__(
        self, loader: PrefetchLoader | None, *, vocab_size: int, masked_out_token: int | None = None
    ) -> None:
        self._loader = loader
        self._vocab_size = vocab_size
        self._masked_out_token = masked_out_token

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch.

        Raises:
            DataError: it holds a token that the model does not know.
        """
        if self._loader is None:
            raise StopIteration
        windows = next(self._loader)
        # Split over ranks, an embedding would silently take such a token for zeros.
        highest = int(windows.max())
        if highest >= self._vocab_size:
            raise DataError(
                f"the data holds token {highest:,}, and the model's vocabulary has {self._vocab_size:,} "
                "entries; configure the tokenizer that the data was made with"
            )
        return as_batch(windows, masked_out_token=self._masked_out_token)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._loader is not None:
            self._loader.close()


def open_streams(
    resolved: Resolved, datasets: Datasets, groups: Groups, *, vocab_size: int, end_of_document: int
) -> dict[str, Callable[[int], Stream]]:
    """For each part, the function that opens its stream at an iteration.

    Args:
        resolved: says which micro-batches there are.
        datasets: by part.
        groups: this rank's place; stages between the first and the last need no tokens.
        vocab_size: entries of the model's vocabulary.
        end_of_document: whose predictions `eod_mask_loss` leaves out.
    """
    needs_tokens = groups.pipe.rank in (0, groups.pipe.size - 1)
    masked_out = end_of_document if resolved.config.data.eod_mask_loss else None

    def open_stream(dataset: SampleDataset, iteration: int) -> Stream:
        if not needs_tokens:
            return Stream(None, vocab_size=vocab_size)
        sampler = BatchSampler(
            len(dataset),
            micro_batch=resolved.derived.micro_batch_size,
            data_parallel_rank=groups.data.rank,
            data_parallel_size=groups.data.size,
            accumulation=resolved.derived.accumulation,
        )
        threads = resolved.config.data.num_workers
        loader = PrefetchLoader(dataset, sampler, start_iteration=iteration, num_threads=threads)
        return Stream(loader, vocab_size=vocab_size, masked_out_token=masked_out)

    return {part: partial(open_stream, dataset) for part, dataset in datasets.items()}
