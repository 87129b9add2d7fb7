"""Compare the copies of weights and optimizer states on different ranks, to detect silent data corruption."""

import logging
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from neox_config.errors import NeoXError
from neox_config.pluralize import pluralize
from neox_model.checkpoint.logical import Fragment, computing_fragments, engine_fragments
from neox_model.checkpoint.replica_states import is_replica_state, replicas_differ, shared_weight
from neox_model.engine.contract import Engine
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.fingerprint import fingerprint
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import is_stage_copy
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["CopiesDifferError", "ReplicaCheck"]

logger = logging.getLogger(__name__)

_SHOWN = 5
# The least number, which is its own negative.
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
        is_expert: True if it belongs to experts that data-parallel ranks divide.
        is_used: True for a weight that the model computes with.
    """

    name: str
    values: Tensor
    is_split: bool
    is_expert: bool
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


class ReplicaCheck(Callback):
    """Compares copies at the end of each interval, and before each save.

    Copies are what data-parallel ranks hold whole. With one data-parallel rank, they are what tensor-parallel
    ranks do not split, and the tied weights of pipeline stages: these may differ in the last bit where
    several groups of replicas average gradients. States that replicas hold each for itself, such as
    compression errors, are not compared. While replicas have different weights (local steps of ZeroOneAdam),
    the shared weights from which each computes its own are compared instead. Under ZeRO, data-parallel ranks
    hold different master weights and optimizer states, and DeepSpeed does not keep tied weights equal to the
    last bit; these are not compared.

    Args:
        interval: iterations between two comparisons.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._compared: int | None = None

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `sdc_check_interval` is set."""
        interval = run.config.training.sdc_check_interval
        return None if interval is None else cls(interval)

    def on_load(self) -> None:
        """Find the copies of tied weights. Collective over all ranks."""
        engine, groups = self.run.engine, self.run.groups
        fragments = [] if engine.update.splits_over_data else computing_fragments(engine)
        copies = [fragment.name for fragment in fragments if is_stage_copy(fragment.held.param)]
        self._tied = sorted({name for names in all_gather_object(groups.control, copies) for name in names})
        has_copies = groups.data.size > 1 or groups.model.size > 1 or bool(self._tied)
        if not has_copies and groups.world.rank == 0:
            logger.warning("sdc-check-interval has no effect: no rank holds a copy of another's weights")

    def on_step(self, report: StepReport) -> None:
        """Compare at the end of each interval.

        Raises:
            CopiesDifferError: copies differ; raised on all ranks.
        """
        if self.run.state.iteration % self._interval == 0:
            self.before_save()

    def before_save(self) -> None:
        """Compare all copies, unless those of this iteration have been compared. Collective over all ranks.

        Raises:
            CopiesDifferError: copies differ; raised on all ranks.
        """
        iteration = self.run.state.iteration
        if self._compared == iteration:
            return
        self._compared = iteration
        different, control = self._different(), self.run.groups.control
        if all_reduce(torch.tensor(len(different)), control, ReduceOp.MAX):
            reports = all_gather_object(control, (socket.gethostname(), different))
            self.run.settle()
            raise CopiesDifferError(_describe(reports, iteration))

    def _different(self) -> list[_Copy]:
        """Return this rank's copies that differ from those of another rank. Collective over all ranks."""
        groups, device = self.run.groups, self.run.engine.device
        known = [(piece, fingerprint(piece.values).to(device)) for piece in _pieces(self.run.engine)]
        if groups.data.size > 1:
            return [
                copy
                for is_expert in (False, True)
                for copy in _differing(
                    [(piece.name, value) for piece, value in known if piece.is_expert == is_expert],
                    groups.copies_of(is_expert=is_expert),
                )
            ]
        found = _differing(
            [(piece.name, value) for piece, value in known if not piece.is_split], groups.model
        )
        used = {piece.name: value for piece, value in known if piece.is_used}
        absent = torch.full((), _ABSENT, dtype=torch.int64, device=device)
        return found + _differing([(name, used.get(name, absent)) for name in self._tied], groups.pipe)


def _pieces(engine: Engine) -> Iterator[_Piece]:
    """Yield the tensors of this rank that have copies, in the same order on the ranks that hold them."""
    optimizer = engine.update.optimizer
    differ = replicas_differ(optimizer)

    def piece(fragment: Fragment, name: str, values: Tensor, *, is_used: bool = False) -> _Piece:
        logical = fragment.logical
        return _Piece(name, values, logical.model_parallel, logical.is_expert, is_used)

    for fragment in computing_fragments(engine) if not differ else ():
        yield piece(fragment, fragment.name, fragment.weight, is_used=True)
    if engine.update.splits_over_data:
        return
    for fragment in engine_fragments(engine):
        holder = fragment.held.holder
        if differ:
            values = shared_weight(fragment, optimizer)
            yield piece(fragment, f"{fragment.name} (shared weight)", values)
        elif holder is not fragment.held.param:
            yield piece(fragment, f"{fragment.name} (master weight)", fragment.weight)
        for key, value in optimizer.state.get(holder, {}).items():
            if isinstance(value, Tensor) and not is_replica_state(optimizer, key):
                yield piece(fragment, f"{fragment.name}/{key}", value)


def _differing(prints: Sequence[tuple[str, Tensor]], group: Group) -> list[_Copy]:
    """Return the pieces of which other ranks of a group have other fingerprints. Collective over the group.

    Args:
        prints: name of each piece, the same on all ranks, and its fingerprint, _ABSENT if it is not held
            here.
        group: the ranks.
    """
    if not prints or group.size == 1:
        return []
    values = torch.stack([value for _, value in prints])
    # One reduction gives the largest and the smallest.
    extremes = all_reduce(torch.stack([values, -values]), group, ReduceOp.MAX)
    differ = (extremes[0] != -extremes[1]) & (values != _ABSENT)
    places = differ.nonzero().flatten().tolist()
    return [_Copy(prints[place][0], group.ranks, int(values[place])) for place in places]


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
        f"; {pluralize(len(texts) - _SHOWN, 'more tensor differs', 'more tensors differ')}"
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
