"""From the data section to streams of batches: which documents, how many samples, and who reads which."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from neox_data.blend import BlendedDataset, SampleDataset
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import IndexedDataset, open_indexed
from neox_data.loader import PrefetchLoader
from neox_data.sampler import BatchSampler
from neox_data.splits import split_documents
from neox_data.weights import normalise_weights, samples_per_dataset, weights_by_num_documents
from neox_launcher.config import Resolved
from neox_model.parallel.groups import Groups
from neox_model.train.batch import Batch, as_batch

__all__ = ["Stream", "build_datasets", "num_samples", "open_streams"]

Datasets = dict[str, SampleDataset]


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


def num_samples(resolved: Resolved) -> dict[str, int]:
    """Samples that a whole training asks of each part.

    Source: GPT-NeoX, so that datasets are shuffled alike.
    """
    training, batch = resolved.config.training, resolved.derived.train_batch_size
    num_evaluations = training.train_iters // training.eval_interval + 1
    return {
        "train": training.train_iters * batch,
        "valid": num_evaluations * training.eval_iters * batch,
        "test": training.eval_iters * batch,
    }


def build_datasets(resolved: Resolved) -> Datasets:
    """The parts that have documents and are asked for samples.

    Raises:
        DataError: files are missing or damaged, or do not hold what is asked for.
    """
    wanted = {part: count for part, count in num_samples(resolved).items() if count}
    if resolved.config.data.data_path is not None:
        return _split_one(resolved, resolved.config.data.data_path, wanted)
    return {part: _blend(resolved, part, count) for part, count in wanted.items() if _paths(resolved, part)}


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


def _split_one(resolved: Resolved, prefix: str, wanted: dict[str, int]) -> Datasets:
    indexed = _open(resolved, prefix)
    parts = split_documents(resolved.config.data.split, len(indexed))
    return {
        part: _dataset(resolved, indexed, prefix, part, np.asarray(parts[part]), count)
        for part, count in wanted.items()
        if len(parts[part])
    }


def _blend(resolved: Resolved, part: str, count: int) -> SampleDataset:
    prefixes = _paths(resolved, part)
    sources = [_open(resolved, prefix) for prefix in prefixes]
    data = resolved.config.data
    if data.weight_by_num_documents:
        lengths = [len(source) for source in sources]
        weights = weights_by_num_documents(lengths, data.weighted_sampler_alpha)
    else:
        weights = normalise_weights(getattr(data, f"{part}_data_weights"), len(sources))
    counts = samples_per_dataset(count, weights)
    datasets = [
        _dataset(resolved, source, prefix, f"{part}_{number}", np.arange(len(source)), share)
        for number, (source, prefix, share) in enumerate(zip(sources, prefixes, counts, strict=True))
    ]
    return BlendedDataset(datasets, weights.tolist(), count)


def _dataset(
    resolved: Resolved, indexed: IndexedDataset, prefix: str, name: str, documents: np.ndarray, count: int
) -> GPTDataset:
    return GPTDataset(
        indexed,
        name=name,
        documents=documents,
        num_samples=count,
        seq_length=resolved.config.model.seq_length,
        seed=resolved.config.training.seed,
        prefix=prefix,
    )


def _open(resolved: Resolved, prefix: str) -> IndexedDataset:
    data = resolved.config.data
    return open_indexed(prefix, data.data_impl, warmup=data.mmap_warmup)


def _paths(resolved: Resolved, part: str) -> Sequence[str]:
    return getattr(resolved.config.data, f"{part}_data_paths") or ()
