"""From datasets to streams of batches: who reads which, from which sample on."""

from collections.abc import Callable, Iterator
from functools import partial

from neox_data.blend import SampleDataset
from neox_data.errors import DataError
from neox_data.loader import PrefetchLoader
from neox_data.sampler import BatchSampler
from neox_launcher.config import NeoXConfig, Resolved
from neox_model.parallel.groups import Groups
from neox_model.train.batch import Batch, DocumentEnds, Weigh, as_batch, as_they_are, weighted_globally
from neox_model.train.curriculum import length_pace, prefetch_threads
from neox_model.train.datasets import Datasets, build_datasets, num_samples

__all__ = ["Stream", "build_datasets", "choose_weights", "num_samples", "open_streams"]


class Stream:
    """The micro-batches of one rank, from a sample on.

    Args:
        loader: gives token windows; None on ranks that need no tokens, which get an empty stream.
        vocab_size: entries of the model's vocabulary.
        ends: what documents' ends change; None: nothing.
    """

    def __init__(
        self, loader: PrefetchLoader | None, *, vocab_size: int, ends: DocumentEnds | None = None
    ) -> None:
        self._loader = loader
        self._vocab_size = vocab_size
        self._ends = ends

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
        return as_batch(windows, ends=self._ends)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._loader is not None:
            self._loader.close()


def open_streams(
    resolved: Resolved, datasets: Datasets, groups: Groups, *, vocab_size: int, end_of_document: int
) -> dict[str, Callable[..., Stream]]:
    """For each part, the function that opens its stream at a sample.

    The function takes the number of samples read before and, for the lengths of a curriculum, the iteration.

    Args:
        resolved: says which micro-batches there are.
        datasets: by part.
        groups: this rank's place; stages between the first and the last need no tokens.
        vocab_size: entries of the model's vocabulary.
        end_of_document: the token that ends a document.
    """
    needs_tokens = groups.pipe.rank in (0, groups.pipe.size - 1)
    data = resolved.config.data
    ends = DocumentEnds(
        token=end_of_document,
        masks_loss=data.eod_mask_loss,
        hides_earlier=data.reset_attention_mask,
        # Sinusoidal and rotary positions are places in the window whatever it holds.
        restarts_positions=data.reset_position_ids and resolved.config.attention.pos_emb == "learned",
    )

    pace = length_pace(resolved.config)

    def open_stream(part: str, dataset: SampleDataset, samples: int, iteration: int = 0) -> Stream:
        if not needs_tokens:
            return Stream(None, vocab_size=vocab_size)
        sampler = BatchSampler(
            len(dataset),
            micro_batch=resolved.derived.micro_batch_size,
            data_parallel_rank=groups.data.rank,
            data_parallel_size=groups.data.size,
            accumulation=resolved.derived.accumulation,
            start=samples,
        )
        loader = PrefetchLoader(
            dataset,
            sampler,
            num_threads=prefetch_threads(resolved.config) if part == "train" else data.num_workers,
            length_at=None if pace is None or part != "train" else lambda since: pace(iteration + since),
        )
        return Stream(loader, vocab_size=vocab_size, ends=ends)

    return {part: partial(open_stream, part, dataset) for part, dataset in datasets.items()}


def choose_weights(config: NeoXConfig, groups: Groups) -> Weigh:
    """How much each token counts in the loss, by `loss_normalization`."""
    if config.training.loss_normalization == "global":
        return partial(weighted_globally, data=groups.data)
    return as_they_are
