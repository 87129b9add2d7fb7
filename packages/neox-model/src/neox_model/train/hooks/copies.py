"""Compare the copies of weights and optimizer states on different ranks, to detect silent data corruption."""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from neox_config.errors import NeoXError
from neox_model.checkpoint.logical import computing_fragments, engine_fragments
from neox_model.checkpoint.outcome import gather
from neox_model.checkpoint.replica_states import is_replica_state, replicas_differ, shared_weight
from neox_model.engine.contract import Engine
from neox_model.parallel.fingerprint import fingerprint
from neox_model.parallel.groups import Group, Groups
from neox_model.parallel.logical import is_stage_copy
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["CopiesDifferError", "CopiesHook"]

logger = logging.getLogger(__name__)

_SHOWN = 5
_ABSENT = torch.iinfo(torch.int64).min
_ADVICE = (
    "a device or the memory of that host may be faulty, or an operation is not deterministic; check the "
    "hosts with neox-launch doctor, leave out a faulty one (exclude), and resume from the latest checkpoint, "
    "if there is one"
)


class CopiesDifferError(NeoXError):
    """Copies of the same tensor on different ranks differ."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of this rank.

    Args:
        name: what it is, for messages.
        values: the tensor.
        is_split: True if tensor-parallel ranks hold different parts of it.
        is_used: True for a weight that the model computes with.
    """

    name: str
    values: Tensor
    is_split: bool
    is_used: bool


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that differs from others.

    Args:
        name: name of its piece.
        members: global ranks of the group in which it differs.
        value: its fingerprint.
    """

    name: str
    members: tuple[int, ...]
    value: int


class CopiesHook(Hook):
    """Compares copies at the end of each interval, and when `compare` is called before a save.

    Copies are what data-parallel ranks hold whole. With one data-parallel rank, they are what tensor-parallel
    ranks do not split, and the tied weights of pipeline stages: these may differ in the last bit where
    several groups of replicas average gradients. States that replicas hold each for itself, such as
    compression errors, are not compared. While replicas have different weights (local steps of ZeroOneAdam),
    the shared weights from which each computes its own are compared instead. Under ZeRO, data-parallel ranks
    hold different master weights and optimizer states, and DeepSpeed does not keep tied weights equal to the
    last bit; these are not compared.

    Args:
        engine: the engine.
        groups: this rank's process groups.
        interval: iterations between two comparisons.
        before_end: called on all ranks before the training is ended, to write pending logs and to complete
            the save under way.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Groups,
        *,
        interval: int,
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._interval = interval
        self._before_end = before_end
        self._compared: int | None = None
        copies = [] if engine.update.splits_over_data else _names_of_stage_copies(engine)
        self._tied = sorted({name for names in gather(groups.control, copies) for name in names})
        has_copies = groups.data.size > 1 or groups.model.size > 1 or bool(self._tied)
        if not has_copies and groups.world.rank == 0:
            logger.warning("sdc-check-interval has no effect: no rank holds a copy of another's weights")

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Compare at the end of each interval.

        Raises:
            CopiesDifferError: copies differ; raised on all ranks.
        """
        if state.iteration % self._interval == 0:
            self.compare(state.iteration)

    def compare(self, iteration: int) -> None:
        """Compare all copies, unless those of this iteration have been compared. Collective over all ranks.

        Raises:
            CopiesDifferError: copies differ; raised on all ranks.
        """
        if self._compared == iteration:
            return
        self._compared = iteration
        different = self._different()
        count, control = torch.tensor(len(different)), self._groups.control
        if control.size > 1:
            distributed.all_reduce(count, distributed.ReduceOp.MAX, group=control.process_group)
        if count.item():
            reports = gather(control, (socket.gethostname(), different))
            self._before_end()
            raise CopiesDifferError(_describe(reports, iteration))

    def _different(self) -> list[_Copy]:
        """Return this rank's copies that differ from those of other ranks. Collective over all ranks."""
        pieces = list(_pieces(self._engine))
        prints = [fingerprint(piece.values).to(self._engine.device) for piece in pieces]
        # A last row for tensors that this rank does not hold.
        rows = torch.stack([*prints, torch.tensor(_ABSENT, device=self._engine.device)])
        found = []
        for group, indices in self._copies(pieces):
            places = [len(pieces) if index is None else index for index in indices]
            mine = [places[place] for place in _differing(rows[places], group) if indices[place] is not None]
            found += [_Copy(pieces[index].name, group.ranks, int(rows[index])) for index in mine]
        return found

    def _copies(self, pieces: Sequence[_Piece]) -> Iterator[tuple[Group, list[int | None]]]:
        """Yield each group with the indices of its common pieces, in the same order on all its ranks.

        None stands for a piece that other ranks of the group hold and this one does not.
        """
        indices = range(len(pieces))
        used = {piece.name: index for index, piece in enumerate(pieces) if piece.is_used}
        if self._groups.data.size > 1:
            yield self._groups.data, list(indices)
            return
        yield self._groups.model, [index for index in indices if not pieces[index].is_split]
        yield self._groups.pipe, [used.get(name) for name in self._tied]


def _pieces(engine: Engine) -> Iterator[_Piece]:
    """Yield the tensors of this rank that have copies, in the same order on the ranks that hold them."""
    optimizer = engine.update.optimizer
    differ = replicas_differ(optimizer)
    for fragment in computing_fragments(engine) if not differ else ():
        yield _Piece(fragment.name, fragment.weight, fragment.logical.model_parallel, is_used=True)
    if engine.update.splits_over_data:
        return
    for fragment in engine_fragments(engine):
        holder, is_split = fragment.held.holder, fragment.logical.model_parallel
        if differ:
            values = shared_weight(fragment, optimizer)
            yield _Piece(f"{fragment.name} (shared weight)", values, is_split, is_used=False)
        elif holder is not fragment.held.param:
            yield _Piece(f"{fragment.name} (master weight)", fragment.weight, is_split, is_used=False)
        for key, value in optimizer.state.get(holder, {}).items():
            if isinstance(value, Tensor) and not is_replica_state(optimizer, key):
                yield _Piece(f"{fragment.name}/{key}", value, is_split, is_used=False)


def _names_of_stage_copies(engine: Engine) -> list[str]:
    found = computing_fragments(engine)
    return [fragment.name for fragment in found if is_stage_copy(fragment.held.param)]


def _differing(prints: Tensor, group: Group) -> list[int]:
    """Return the indices at which the ranks of a group have different fingerprints. Collective over it."""
    if group.size == 1 or not prints.numel():
        return []
    # One reduction gives the largest and the smallest; a rank without the tensor has the least in both.
    extremes = torch.stack([prints, torch.where(prints == _ABSENT, prints, -prints)])
    distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=group.process_group)
    return (extremes[0] != -extremes[1]).nonzero().flatten().tolist()


def _describe(reports: Sequence[tuple[str, Sequence[_Copy]]], iteration: int) -> str:
    """Describe which ranks hold different copies of which tensors.

    Args:
        reports: host and differing copies of each rank.
        iteration: the last iteration.
    """
    hosts = [host for host, _ in reports]
    tensors: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, (_, copies) in enumerate(reports):
        for copy in copies:
            tensors.setdefault((copy.name, copy.members), {})[rank] = copy.value
    texts = [_difference(name, values, hosts) for (name, _), values in tensors.items()]
    more = f"; {len(texts) - _SHOWN:,} more tensors differ" if len(texts) > _SHOWN else ""
    return f"after iteration {iteration:,} {'; '.join(texts[:_SHOWN])}{more}: {_ADVICE}"


def _difference(name: str, values: Mapping[int, int], hosts: Sequence[str]) -> str:
    """Describe the copies of one tensor: those that differ from the majority, or all."""
    [(most, count), *_] = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        ranks = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in values)
        return f"the copies of {name} on {ranks} differ"
    odd = " and ".join(f"rank {rank} ({hosts[rank]})" for rank, value in values.items() if value != most)
    return f"the copy of {name} on {odd} differs from {count:,} others"
