"""Open streams of batches from datasets: this rank's samples, from a given sample on."""

import logging
from collections.abc import Callable, Generator, Mapping
from functools import partial

from torch import Tensor

from neox_config.extras.data_efficiency.curricula import NO_DIFFICULTIES, enabled_sampling, length_schedule
from neox_config.extras.data_efficiency.difficulty import DifficultySchedule
from neox_config.spec.run import RunSpec
from neox_config.spec.update import DataSpec
from neox_data.blend import SampleDataset
from neox_data.errors import DataError
from neox_data.loader import PrefetchLoader
from neox_data.sampler import BatchSampler
from neox_model.assembly.choices import computing_device
from neox_model.parallel.groups import Groups
from neox_model.train.data.batch import (
    Batch,
    DocumentEnds,
    TokenWeighting,
    as_batch,
    as_masked_batch,
    as_retrieval_batch,
    weighted_by_micro_batch,
    weighted_globally,
)
from neox_model.train.data.datasets import Datasets, build_datasets, num_samples

__all__ = ["Stream", "build_datasets", "choose_weighting", "num_samples", "open_streams"]

logger = logging.getLogger(__name__)


Stream = PrefetchLoader[Batch] | Generator[Batch]
"""Iterates over the micro-batches of one rank, from a given sample on; must be closed."""


def _no_batches() -> Generator[Batch]:
    """Yield nothing, on ranks without tokens."""
    yield from ()


def _as_checked_batch(
    rows: Tensor, *, check: "_TokenCheck", make: Callable[[Tensor], Batch], gpu: int | None
) -> Batch:
    """Return the micro-batch of loaded items.

    Args:
        rows: int64 [batch, length], [batch, 2 or 3, length] with labels in the second row, or [batch, 2, 2,
            length] with the queries and blocks of retrieval.
        check: checks the tokens and labels.
        make: makes a batch of the rows.
        gpu: copy it to page-locked memory for this GPU; None: leave it where it is.

    Raises:
        DataError: a token or label is outside the vocabulary.
    """
    tokens = rows if rows.ndim == 2 else rows[..., 0, :]
    if rows.ndim == 3:
        check(0, int(rows[:, 1].max()), "label")
    # An embedding split over ranks would silently return zeros for such a token.
    lowest, highest = (int(found) for found in tokens.aminmax())
    check(lowest, highest, "token")
    batch = make(rows)
    return batch if gpu is None else batch.pinned(gpu)


def _causal_batch(rows: Tensor, *, ends: DocumentEnds) -> Batch:
    """Return the batch of windows of tokens, or of tokens and labels."""
    windows, labels = (rows, None) if rows.ndim == 2 else rows.unbind(dim=1)
    return as_batch(windows, ends=ends, labels=labels)


class _TokenCheck:
    """Checks token ids, and warns once of those that no text has.

    Args:
        vocab_size: size of the model's vocabulary, with its padding.
        largest_id: the largest id of the tokenizer.
    """

    def __init__(self, vocab_size: int, largest_id: int) -> None:
        self._vocab_size = vocab_size
        self._largest_id = largest_id
        self._has_warned = False

    def __call__(self, lowest: int, highest: int, what: str) -> None:
        """Check the range of ids.

        Raises:
            DataError: one is outside the model's vocabulary.
        """
        remedy = (
            "configure the tokenizer with which the data was tokenized, or check the data with "
            "neox-data verify"
        )
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"the data contains {what} {wrong:,}, but the model's vocabulary has {self._vocab_size:,} "
                f"entries; {remedy}"
            )
        if highest > self._largest_id and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the data contains %s %s, but the tokenizer's largest id is %s: the model learns tokens that "
                "no text has; %s",
                *(what, f"{highest:,}", f"{self._largest_id:,}", remedy),
            )


def open_streams(
    data: DataSpec,
    run: RunSpec,
    datasets: Datasets,
    groups: Groups,
    *,
    vocab_size: int,
    end_of_document: int,
    largest_id: int | None = None,
    difficulties: Mapping[str, DifficultySchedule] = NO_DIFFICULTIES,
) -> dict[str, Callable[..., Stream]]:
    """Return, for each part, the function that opens its stream at a sample.

    The function takes the number of samples read before and, for the lengths of a curriculum, the iteration.

    Args:
        data: how samples are read.
        run: its batch.
        datasets: the datasets by part, with samples of the objective (see `samples_of_objective`).
        groups: this rank's process groups; stages between the first and the last need no tokens.
        vocab_size: size of the model's vocabulary.
        end_of_document: the end-of-document token.
        largest_id: the tokenizer's largest id, above which a token is a warning; None: no warning.
        difficulties: the schedules of custom curricula, by the name of their block.
    """
    needs_tokens = groups.pipe.rank in (0, groups.pipe.size - 1)
    batch = run.batch
    ends = DocumentEnds(
        token=end_of_document,
        masks_loss=data.files.eod_mask_loss,
        hides_others=batch.resets_attention,
        restarts_positions=batch.resets_positions,
    )

    schedule, sampling = length_schedule(data.efficiency, difficulties), enabled_sampling(data.efficiency)
    gpu = computing_device().index
    makers: dict[str, Callable[[Tensor], Batch]] = {
        "causal": partial(_causal_batch, ends=ends),
        "masked": partial(as_masked_batch, ends=ends, hides_padding=batch.has_padding),
        "ict": as_retrieval_batch,
    }
    make = makers[data.objective]
    check = _TokenCheck(vocab_size, vocab_size if largest_id is None else largest_id)
    prepare = partial(_as_checked_batch, check=check, make=make, gpu=gpu)
    # The loader adds a token behind the input.
    added = 1 - data.behind_input

    def open_stream(part: str, dataset: SampleDataset, samples: int, iteration: int = 0) -> Stream:
        if not needs_tokens:
            return _no_batches()
        sampler = BatchSampler(
            len(dataset),
            micro_batch=batch.micro,
            data_parallel_rank=groups.data.rank,
            data_parallel_size=groups.data.size,
            accumulation=batch.accumulation,
            start=samples,
        )
        return PrefetchLoader(
            dataset,
            sampler,
            num_threads=(data.files if sampling is None or part != "train" else sampling).num_workers,
            length_at=None
            if schedule is None or part != "train"
            else lambda since: schedule(iteration + since) - added,
            prepare=prepare,
        )

    return {part: partial(open_stream, part, dataset) for part, dataset in datasets.items()}


def choose_weighting(normalization: str, groups: Groups) -> TokenWeighting:
    """Return the weighting of tokens in the loss of a run, according to `loss_normalization`."""
    weightings: dict[str, TokenWeighting] = {
        "micro_batch": weighted_by_micro_batch,
        "global": partial(weighted_globally, data=groups.data),
    }
    return weightings[normalization]
