"""Count and time collective operations, by operation and process group."""

import inspect
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from neox_config.facts.collectives import BUS_SHARE
from neox_model.parallel.groups import Group

__all__ = ["CollectiveTimes", "Total"]

# Modules between the code that requests an operation and its process group.
_BETWEEN = (
    "torch.",
    "deepspeed.comm.",
    "deepspeed.utils.",
    "typing_extensions.",
    "neox_model.torch_compat.",
    f"{__name__}.",
)
_HEADER = ("operation", "group", "calls", "bytes", "ms in all", "ms per call", "GB/s", "bus GB/s")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Total:
    """The sum over calls of one operation in one group.

    Args:
        size: ranks in the group.
        count: calls.
        bytes: of the messages: whole tensors, of all_gather the outputs, of reduce_scatter the inputs, of
            scatter and gather the part of one rank.
        seconds: including the time in which this rank waited for others.
    """

    size: int
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CollectiveTimes:
    """Waits for each operation to finish, and sums its bytes and time.

    Args:
        groups: by name. Of two that are the same process group, the later one counts, and so do operations
            in process groups of the engine with the same ranks.
        operations: names of the operations to time; None: all.
        synchronize: waits for the device.
        is_verbose: log each operation when it finishes.
        names_callers: count the operations of each calling function separately.
        clock: returns seconds since a fixed time.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        *,
        operations: Collection[str] | None = None,
        synchronize: Callable[[], None] = lambda: None,
        is_verbose: bool = False,
        names_callers: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # By operation, with the caller if requested, and name of the group.
        self.totals: dict[tuple[str, str], Total] = {}
        self._groups = {
            group.process_group.group_name: name
            for name, group in groups.items()
            if group.process_group is not None
        }
        self._ranks = {group.ranks: name for name, group in groups.items()}
        self._operations = operations
        self._synchronize = synchronize
        self._is_verbose = is_verbose
        self._names_callers = names_callers
        self._clock = clock

    def watch(
        self,
        operation: str,
        group: ProcessGroup,
        message: Sequence[Tensor],
        call: Callable[[], Any],
        peer: int | None = None,
    ) -> Any:
        """Start an operation, wait for it unless it is between two ranks, and return its handle.

        Args:
            operation: a name in BUS_SHARE.
            group: where it runs.
            message: the tensors whose bytes count.
            call: starts it.
            peer: the other rank of the group in a send or a receive, if it is known.
        """
        if self._operations is not None and operation not in self._operations:
            return call()
        self._synchronize()
        key, total = self._total(operation, group, peer)
        total.count += 1
        size = sum(tensor.numel() * tensor.element_size() for tensor in message)
        total.bytes += size
        started = self._clock()

        def finish() -> None:
            self._synchronize()
            seconds = self._clock() - started
            total.seconds += seconds
            if self._is_verbose:
                rates = _rates(operation, Total(total.size, 1, size, seconds))
                logger.info(
                    "%s over %s: %s bytes in %.3f ms, %s GB/s", *key, f"{size:,}", 1e3 * seconds, rates[0]
                )

        work = call()
        if operation in ("send", "recv"):
            # Waiting for it here would block the other rank, which may not receive or send yet.
            return _Timed(work, finish)
        if work is not None:
            work.wait()
        finish()
        return work

    def table(self) -> str:
        """Return one row for each operation and group, the slowest first; then listed ones without calls."""
        rows = [
            (
                what,
                f"{group} ({total.size})",
                f"{total.count:,}",
                f"{total.bytes:,}",
                f"{1e3 * total.seconds:,.1f}",
                f"{1e3 * total.seconds / total.count:,.3f}",
                *_rates(what.partition(" ")[0], total),
            )
            for (what, group), total in sorted(self.totals.items(), key=lambda item: -item[1].seconds)
        ]
        lines = [_HEADER, *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [
            " ".join(
                text.ljust(width) if column < 2 else text.rjust(width)
                for column, (text, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        called = {what.partition(" ")[0] for what, _ in self.totals}
        missing = sorted(set(self._operations or ()) - called)
        return "\n".join([*aligned, *([f"0 calls: {', '.join(missing)}"] if missing else [])])

    def _total(self, operation: str, group: ProcessGroup, peer: int | None) -> tuple[tuple[str, str], Total]:
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        name = self._groups.get(group.group_name)
        if peer is not None and name != "control":
            # DeepSpeed's pipeline sends in the group of all ranks.
            known = [each for each in (*self._ranks, ranks) if ranks[peer] in each]
            # The smallest known group with that rank: this rank's groups have no other one in common.
            ranks = min(known, key=len)
            name = self._ranks.get(ranks)
        name = name or self._ranks.get(ranks) or f"ranks {', '.join(map(str, ranks))}"
        what = f"{operation} in {_caller()}" if self._names_callers else operation
        return (what, name), self.totals.setdefault((what, name), Total(len(ranks)))


class _Timed:
    """The handle of an operation between two ranks, which is finished when its starter waits for it.

    Args:
        work: torch's handle.
        finish: called after the first wait.
    """

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Wait like torch's handle."""
        done = self._work.wait(*arguments, **named)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _rates(operation: str, total: Total) -> tuple[str, str]:
    """Return the bytes of the messages per second, and those on the busiest link."""
    if not total.bytes or not total.seconds:
        return "-", "-"
    rate = total.bytes / total.seconds / 1e9
    return f"{rate:.3f}", f"{rate * BUS_SHARE[operation](total.size):.3f}"


def _caller() -> str:
    """Return the module and the function that requested the operation."""
    frame = inspect.currentframe()
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_BETWEEN):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
