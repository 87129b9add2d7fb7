"""Build a model of two towers, which embed queries and blocks of text."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from neox_config.spec.model import Retrieval
from neox_config.spec.run import RunSpec
from neox_kernels.precision import widen
from neox_model.assembly.as_sequential import LayerPlan, SequentialModel
from neox_model.extras.retrieval.head import RetrievalHead, RetrievalLoss
from neox_model.parallel.groups import Groups

__all__ = ["BLOCK", "QUERY", "SHARED", "TowerModel", "assemble", "plan_head"]

QUERY, BLOCK, SHARED = "query", "block", "shared"


class TowerModel(nn.Module):
    """A model of a tower for queries and one for blocks, or of one for both.

    Args:
        towers: models that return embeddings, by name: QUERY and BLOCK, or SHARED.
        loss_fn: function of (query_BE, block_BE).

    Attributes:
        plan_names: logical name of each path in this module; those of a shared tower are the names of a model
            of one tower.
    """

    def __init__(self, towers: Mapping[str, SequentialModel], *, loss_fn: RetrievalLoss) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(towers)
        self.loss_fn = loss_fn
        first = next(iter(towers.values()))
        self.autocast, self.recomputation = first.autocast, first.recomputation
        self.plan_names = {
            f"towers.{tower}.{path}": name if tower == SHARED else f"{tower}.{name}"
            for tower, model in towers.items()
            for path, name in model.plan_names.items()
        }

    def forward(
        self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, or, without targets, (query_BE, block_BE).

        Args:
            inputs: (tokens, document ids, positions) of all queries and then of all their blocks.
            targets: the sum of their mask is the weight of the mean loss of the queries; the block of each
                query has its place.
        """
        half = len(inputs[0]) // 2
        if SHARED in self.towers:
            query_BE, block_BE = self.towers[SHARED](inputs).split(half)
        else:
            query_BE = self.towers[QUERY](tuple(each[:half] for each in inputs))
            block_BE = self.towers[BLOCK](tuple(each[half:] for each in inputs))
        if targets is None:
            return query_BE, block_BE
        return self.loss_fn(query_BE, block_BE) * targets[1].sum()

    def embed(self, tower: str, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return embeddings_BE of texts, float32.

        Args:
            tower: QUERY or BLOCK.
            inputs: (tokens, document ids, positions) of the texts.
        """
        embeddings_BE: Tensor = self.towers[SHARED if SHARED in self.towers else tower](inputs)
        return widen(embeddings_BE)


def plan_head(head: Retrieval, **arguments: Any) -> LayerPlan:
    """Return the last layer of a tower (see `RetrievalHead`)."""
    return LayerPlan(name="retrieval_head", cls=RetrievalHead, kwargs={"size": head.size, **arguments})


def assemble(
    plan: Sequence[LayerPlan], head: Retrieval, run: RunSpec, groups: Groups, **parts: Any
) -> TowerModel:
    """Return the model whose towers have these layers.

    Args:
        plan: the layers of a tower.
        head: the head of the model.
        run: how it runs.
        groups: this job's process groups.
        parts: other arguments of `SequentialModel`.
    """
    loss = RetrievalLoss(groups.data, best=run.targets.report_topk_accuracies)
    names = (SHARED,) if head.shared else (QUERY, BLOCK)
    return TowerModel({name: SequentialModel(plan, loss_fn=loss, **parts) for name in names}, loss_fn=loss)
