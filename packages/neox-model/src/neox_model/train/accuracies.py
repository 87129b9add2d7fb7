"""Top-k accuracies of retrieval in evaluations."""

from collections.abc import Mapping

from torch import distributed, nn

from neox_model.assembly.towers import TowerModel

__all__ = ["Accuracies", "retrieval_accuracies"]


class Accuracies:
    """Counts, in an evaluation, the queries whose block is among the best blocks of its micro-batch.

    Args:
        model: the model, whose loss counts.
    """

    def __init__(self, model: TowerModel) -> None:
        self._loss = model.loss_fn

    def begin(self) -> None:
        """Delete the counts of earlier evaluations."""
        self._loss.hits.clear()

    def of_all_ranks(self) -> Mapping[int, float]:
        """Return the share of the queries since `begin`, for each k. Collective over the data group."""
        counts, group = sum(self._loss.hits[1:], self._loss.hits[0]), self._loss.group
        if group.size > 1:
            distributed.all_reduce(counts, group=group.process_group)
        *hits, queries = counts.tolist()
        return {k: hit / queries for k, hit in zip(self._loss.best, hits, strict=True)}


def retrieval_accuracies(model: nn.Module) -> Accuracies | None:
    """Return what counts the accuracies of a model; None if none are reported."""
    if not isinstance(model, TowerModel) or not model.loss_fn.best:
        return None
    return Accuracies(model)
