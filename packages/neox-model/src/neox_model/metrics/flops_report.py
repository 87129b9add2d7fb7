"""Write what `metrics.flops` counted as text."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from neox_model.metrics.flops import FlopProfile, ModuleProfile

__all__ = ["profile_report"]

_COLUMNS = ("parameters", "calls", "forward FLOPs", "recomputed", "% of forward", "forward ms", "TFLOP/s")
# What the largest classes of a depth are ranked by.
_RANKED = {
    "parameters": lambda module: module.parameters,
    "forward FLOPs": lambda module: module.flops,
    "forward ms": lambda module: 1e3 * module.seconds,
}


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
            names = ", ".join(f"{kind} {_number(number)}" for kind, number in largest)
            yield f"    depth {depth}, {quantity}: {names}"


def _table(modules: Sequence[ModuleProfile], forward: int) -> Iterator[str]:
    names = ["  " * (2 + module.depth) + _name(module) for module in modules]
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


def _name(module: ModuleProfile) -> str:
    return f"{module.path.rpartition('.')[2]} {module.kind}".strip()


def _number(value: float) -> str:
    return f"{value:,.3f}" if value % 1 else f"{value:,.0f}"


def _speed(flops: int, seconds: float) -> str:
    return f"{flops / seconds / 1e12:.3f}" if seconds else "-"
