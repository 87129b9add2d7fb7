"""Count the floating-point operations of a model by operator and by module, and report them as text.

PyTorch counts those of matrix products, convolutions and attention: two per multiply-add, a causal mask
counted as if it hid nothing. Element-wise operations are not counted.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from neox_model.parallel.logical import Logical
from neox_model.parallel.partitioned import class_name

__all__ = ["FlopProfile", "ModuleProfile", "count_flops", "profile_report"]

_COLUMNS = ("parameters", "calls", "forward FLOPs", "recomputed", "% of forward", "forward ms", "TFLOP/s")
# What the largest classes of a depth are ranked by.
_RANKED = {
    "parameters": lambda module: module.parameters,
    "forward FLOPs": lambda module: module.flops,
    "forward ms": lambda module: 1e3 * module.seconds,
}


def _accumulated_product(into: Sequence[int], left: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of a matrix product that is added to a tensor in place."""
    return 2 * prod(into) * left[-1]


def _added_product(
    added: Sequence[int], left: Sequence[int], right: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the operations of a matrix product with something added."""
    return 2 * prod(left) * right[-1]


# Operators that PyTorch's counter lacks, or has without the type of the result; the functions receive shapes.
_PRODUCTS = {
    torch.ops.aten.addmm: _added_product,
    torch.ops.aten.addmm_: _accumulated_product,
    torch.ops.aten.baddbmm_: _accumulated_product,
}


@dataclass(slots=True)
class ModuleProfile:
    """What the forward passes of a module and of the modules inside it took.

    Attributes:
        path: of the module; empty for the whole.
        kind: name of its class.
        parameters: numbers in this rank's parameters.
        calls: forward passes.
        flops: operations of the forward passes.
        recomputed: operations of those that ran again in the backward pass; `flops` includes them.
        seconds: of the forward passes.
    """

    path: str
    kind: str
    parameters: int
    calls: int = 0
    flops: int = 0
    recomputed: int = 0
    seconds: float = 0.0

    @property
    def depth(self) -> int:
        """Number of modules that contain it."""
        return len(self.path.split(".")) if self.path else 0


@dataclass(slots=True)
class FlopProfile:
    """What one rank computed.

    Attributes:
        modules: each after the module that contains it; the first is the whole.
        flops: all operations.
        forward: those of the modules' forward passes.
        recomputed: those of forward passes that ran again in the backward pass.
        seconds: from the start to the end.
        operators: operations by operator.
    """

    modules: list[ModuleProfile]
    flops: int = 0
    forward: int = 0
    recomputed: int = 0
    seconds: float = 0.0
    operators: dict[str, int] = field(default_factory=dict)


@contextmanager
def count_flops(
    model: nn.Module,
    *,
    synchronize: Callable[[], None],
    operators: Mapping[Any, Callable[..., int]] = MappingProxyType({}),
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[FlopProfile]:
    """Provide a profile that is complete after the block; compiled functions run uncompiled within it.

    A compiled function hides its operators from PyTorch's counter.

    Args:
        model: whose modules are measured.
        synchronize: waits for the device.
        operators: further operators that PyTorch's counter lacks, with functions of their arguments' shapes.
        clock: returns seconds.
    """
    profile = FlopProfile([])
    counter = FlopCounterMode(display=False, custom_mapping=_PRODUCTS | dict(operators))
    watch = _Watch(profile, counter, synchronize, clock)
    hooks = []
    for path, module in model.named_modules():
        numbers = sum(_numbers(parameter) for parameter in module.parameters())
        profile.modules.append(ModuleProfile(path, class_name(module), numbers))
        hooks += watch.attach(module, profile.modules[-1])
    try:
        with torch.compiler.set_stance("force_eager"), counter:
            synchronize()
            started = clock()
            yield profile
            synchronize()
            profile.seconds = clock() - started
    finally:
        for hook in hooks:
            hook.remove()
    profile.flops = counter.get_total_flops()
    counts = counter.get_flop_counts().get("Global", {})
    profile.operators = {str(operator): count for operator, count in counts.items()}


class _Watch:
    """Adds the operations and the time between the start and the end of each forward pass to its module."""

    def __init__(
        self,
        profile: FlopProfile,
        counter: FlopCounterMode,
        synchronize: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._profile = profile
        self._counter = counter
        self._synchronize = synchronize
        self._clock = clock
        self._running: list[tuple[int, bool, float]] = []

    def attach(self, module: nn.Module, found: ModuleProfile) -> list[Any]:
        """Measure a module from now on, and return the hooks to remove."""

        def finish(*_: Any) -> None:
            flops, is_recomputed, started = self._running.pop()
            self._synchronize()
            added = self._counter.get_total_flops() - flops
            found.calls += 1
            found.flops += added
            found.recomputed += added if is_recomputed else 0
            found.seconds += self._clock() - started
            if not self._running:
                self._profile.forward += 0 if is_recomputed else added
                self._profile.recomputed += added if is_recomputed else 0

        # Also after an exception: PyTorch stops recomputing a module with one when it has what it needs.
        return [
            module.register_forward_pre_hook(self._start),
            module.register_forward_hook(finish, always_call=True),
        ]

    def _start(self, *_: Any) -> None:
        self._synchronize()
        is_recomputed = self._counter.mod_tracker.is_bw
        self._running.append((self._counter.get_total_flops(), is_recomputed, self._clock()))


def _numbers(parameter: nn.Parameter) -> int:
    """Return the numbers in a parameter, also where ZeRO has partitioned it, without padding."""
    logical: Logical | None = getattr(parameter, "logical", None)
    if logical is None:
        return parameter.numel()
    return prod(stop - start for start, stop in logical.slices)


def profile_report(profile: FlopProfile, *, depth: int, top: int, is_detailed: bool) -> str:
    """Return a rank's totals, the largest classes of modules at each depth, and its modules if requested.

    Args:
        profile: what the rank computed.
        depth: modules within more others are left out; -1: none are.
        top: number of classes at each depth.
        is_detailed: add a row for each module.
    """
    whole = profile.modules[0]
    modules = [module for module in profile.modules if depth < 0 or module.depth <= depth]
    forward = profile.forward + profile.recomputed
    lines = [
        f"  {profile.flops:,} FLOPs in {1e3 * profile.seconds:,.1f} ms "
        f"({_speed(profile.flops, profile.seconds)} TFLOP/s), {whole.parameters:,} parameters",
        f"  in the modules' forward passes {profile.forward:,}, in those recomputed {profile.recomputed:,}, "
        f"else {profile.flops - forward:,}",
        "  by operator: " + ", ".join(f"{name} {count:,}" for name, count in profile.operators.items()),
        *_largest(modules, top),
    ]
    if is_detailed:
        lines += _table(modules, forward)
    return "\n".join(lines)


def _largest(modules: Sequence[ModuleProfile], top: int) -> Iterator[str]:
    """Yield a line for each depth and quantity: the classes with the largest sums."""
    by_depth: defaultdict[int, list[ModuleProfile]] = defaultdict(list)
    for module in modules:
        by_depth[module.depth].append(module)
    yield f"  largest classes of modules at each depth (at most {top}):"
    for depth, members in sorted(by_depth.items()):
        for quantity, value_of in _RANKED.items():
            sums: defaultdict[str, float] = defaultdict(float)
            for module in members:
                sums[module.kind] += value_of(module)
            largest = sorted(sums.items(), key=lambda item: -item[1])[:top]
            names = ", ".join(
                f"{kind} {number:,.3f}" if number % 1 else f"{kind} {number:,.0f}" for kind, number in largest
            )
            yield f"    depth {depth}, {quantity}: {names}"


def _table(modules: Sequence[ModuleProfile], forward: int) -> Iterator[str]:
    names = [
        "  " * (2 + module.depth) + f"{module.path.rpartition('.')[2]} {module.kind}".strip()
        for module in modules
    ]
    width = max(len(name) for name in names)
    yield f"{'  module':{width}}" + "".join(f"{column:>17}" for column in _COLUMNS)
    for name, module in zip(names, modules, strict=True):
        cells = (
            f"{module.parameters:,}",
            f"{module.calls:,}",
            f"{module.flops:,}",
            f"{module.recomputed:,}",
            f"{100 * module.flops / forward:.1f}" if forward else "-",
            f"{1e3 * module.seconds:,.3f}",
            _speed(module.flops, module.seconds),
        )
        yield f"{name:{width}}" + "".join(f"{cell:>17}" for cell in cells)


def _speed(flops: int, seconds: float) -> str:
    return f"{flops / seconds / 1e12:.3f}" if seconds else "-"
