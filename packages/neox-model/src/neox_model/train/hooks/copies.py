"""Compare the copies of weights and optimizer states on different ranks, to detect silent data corruption."""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from neox_config.counted import counted
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


# Global ranks of the group that has copies, and the fingerprints: of all pieces in order, or by name.
_Whole = tuple[tuple[int, ...], tuple[int, ...]]
_Tied = tuple[tuple[int, ...], dict[str, int]]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank sends to the others of its replica.

    Args:
        whole: what tensor-parallel ranks do not split.
        tied: weights that several stages hold.
    """

    whole: _Whole
    tied: _Tied


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
        different, differ_anywhere = self._different()
        if differ_anywhere:
            reports = gather(self._groups.control, (socket.gethostname(), different))
            self._before_end()
            raise CopiesDifferError(_describe(reports, iteration))

    def _different(self) -> tuple[list[_Copy], bool]:
        """Return this rank's copies that differ, and whether any rank's do. Collective over all ranks."""
        pieces = list(_pieces(self._engine))
        prints = [fingerprint(piece.values).to(self._engine.device) for piece in pieces]
        compare = self._among_replicas if self._groups.data.size > 1 else self._within_replica
        return compare(pieces, prints)

    def _among_replicas(self, pieces: Sequence[_Piece], prints: Sequence[Tensor]) -> tuple[list[_Copy], bool]:
        """Compare all pieces of this rank with those of the other replicas."""
        group, control = self._groups.data, self._groups.control
        values = torch.stack(list(prints)) if prints else torch.empty(0, dtype=torch.int64)
        found = [
            _Copy(pieces[index].name, group.ranks, int(values[index])) for index in _differing(values, group)
        ]
        count = torch.tensor(len(found))
        distributed.all_reduce(count, distributed.ReduceOp.MAX, group=control.process_group)
        return found, bool(count)

    def _within_replica(self, pieces: Sequence[_Piece], prints: Sequence[Tensor]) -> tuple[list[_Copy], bool]:
        """Compare what tensor-parallel ranks do not split, and the tied weights of stages, in one gather."""
        values = torch.stack(list(prints)).tolist() if prints else []
        known = list(zip(pieces, values, strict=True))
        mine = _Held(
            whole=(self._groups.model.ranks, tuple(value for piece, value in known if not piece.is_split)),
            tied=(
                self._groups.pipe.ranks,
                {piece.name: value for piece, value in known if piece.is_used and piece.name in self._tied},
            ),
        )
        everywhere = gather(self._groups.control, mine)
        names = [piece.name for piece in pieces if not piece.is_split]
        found = _unequal(names, mine.whole, [held.whole for held in everywhere])
        found += _unequal_tied(mine.tied, [held.tied for held in everywhere])
        return found, _any_differ(everywhere)


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
    if not prints.numel():
        return []
    # One reduction gives the largest and the smallest.
    extremes = torch.stack([prints, -prints])
    distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=group.process_group)
    return (extremes[0] != -extremes[1]).nonzero().flatten().tolist()


def _unequal(names: Sequence[str], mine: _Whole, everywhere: Sequence[_Whole]) -> list[_Copy]:
    """Return the pieces whose fingerprints are not those of all ranks of this rank's group."""
    members, values = mine
    others = [found for ranks, found in everywhere if ranks == members]
    return [
        _Copy(name, members, value)
        for name, value, *copies in zip(names, values, *others, strict=True)
        if any(copy != value for copy in copies)
    ]


def _unequal_tied(mine: _Tied, everywhere: Sequence[_Tied]) -> list[_Copy]:
    """Return the tied weights whose fingerprints are not those of all stages that hold them."""
    members, values = mine
    others = [found for ranks, found in everywhere if ranks == members]
    return [
        _Copy(name, members, value)
        for name, value in values.items()
        if any(found.get(name, value) != value for found in others)
    ]


def _any_differ(everywhere: Sequence[_Held]) -> bool:
    """Return True if any copies of any two ranks differ."""
    seen: dict[tuple[object, ...], object] = {}
    for held in everywhere:
        ranks, values = held.whole
        if seen.setdefault(("whole", ranks), values) != values:
            return True
        stages, tied = held.tied
        for name, value in tied.items():
            if seen.setdefault(("tied", stages, name), value) != value:
                return True
    return False


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
    more = (
        f"; {counted(len(texts) - _SHOWN, 'more tensor differs', 'more tensors differ')}"
        if len(texts) > _SHOWN
        else ""
    )
    return f"after iteration {iteration:,} {'; '.join(texts[:_SHOWN])}{more}: {_ADVICE}"


def _difference(name: str, values: Mapping[int, int], hosts: Sequence[str]) -> str:
    """Describe the copies of one tensor: those that differ from the majority, or all."""
    [(most, count), *_] = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        ranks = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in values)
        return f"the copies of {name} on {ranks} differ"
    odd = " and ".join(f"rank {rank} ({hosts[rank]})" for rank, value in values.items() if value != most)
    return f"the copy of {name} on {odd} differs from {count:,} others"
