"""The runs that `make gpu-check` compares: one model on two devices, and on layouts and one rank.

Weights start from the CPU's generator (`use_cpu_initialization`) and batches are made on the CPU, so both
sides train the same model on the same tokens; what differs is the device, or the layout.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config import Resolved
from neox_model.checkpoint.logical import engine_fragments
from neox_model.engine.contract import Engine
from neox_model.parallel.logical import named_logical_parameters
from neox_model.train.data.batch import Batch, as_batch
from support import layouts
from support.layouts import LAYOUTS, Layout
from support.settings import resolved_from

__all__ = [
    "COMPARED",
    "LAYOUT_LIMIT",
    "LIMITS",
    "ONE_RANK",
    "PRECISIONS",
    "Difference",
    "Limits",
    "add_ranks",
    "compare_layout",
    "compare_runs",
    "find_waits",
    "layouts_for",
    "run_path",
    "train_architectures",
    "train_layout",
    "train_reference",
]

ITERATIONS = 20
_WARM_UP, _WATCHED = 3, 5
# The five that share least: where positions enter, which norm and activation, whether scores exist, whether
# attention sees all earlier tokens, whether the head is the embedding.
COMPARED = (
    "learned positions, layernorm, tied",
    "half rotary, parallel residual, untied",
    "grouped queries, rmsnorm, swiglu, no biases",
    "relative positions, local attention, relu",
    "layer scaling with scores, swish",
)
# A fixed scale: where a scale searches, one skipped update more makes another run.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128.0}},
}
_ON_CPU_FIRST = {"use_cpu_initialization": True}
# Layouts of one rank: the same communication calls as larger ones, in groups of one. The torch engine
# partitions nothing there.
ONE_RANK: dict[str, Layout] = {
    "pipeline 1": Layout(1, {"engine": "deepspeed", "pipe_parallel_size": 1}),
    "ZeRO 1, one rank": Layout(1, {"engine": "deepspeed", "zero_optimization": {"stage": 1}}),
    "ZeRO 2, one rank": Layout(1, {"engine": "deepspeed", "zero_optimization": {"stage": 2}}),
    "ZeRO 3, one rank": Layout(1, {"engine": "deepspeed", "zero_optimization": {"stage": 3}}),
}
# Below this share of the largest tensor's change, a change is mostly rounding.
_SMALL = 1e-2


@dataclass(frozen=True)
class Difference:
    """How far two runs of one model are apart after all iterations.

    Args:
        loss: largest difference of a loss.
        ratio: over the tensors that changed much, largest distance from 1 of the second run's change,
            projected on the first's and divided by its length.
        angle: over the same tensors, the largest 1 - cosine between the changes.
        small: over the others, the largest length of a difference, as a share of the largest tensor's change.
        worst: the tensor with the largest `ratio`.
    """

    loss: float
    ratio: float
    angle: float
    small: float
    worst: str


@dataclass(frozen=True)
class Limits:
    """The differences that rounding alone may make; see `Difference`."""

    loss: float
    ratio: float
    angle: float
    small: float

    def exceeded_by(self, found: Difference) -> list[str]:
        """Return the values that are too large or not a number."""
        names = ("loss", "ratio", "angle", "small")
        return [name for name in names if not getattr(found, name) <= getattr(self, name)]


# Measured on a CPU, 20 iterations, largest over COMPARED: other sums (without oneDNN) move float32's losses
# by 2e-7 and its ratio by 3e-7; bfloat16 is 0.005, 0.024 and an angle of 0.0026 from float32, float16 0.007,
# 0.018 and 0.0015. Two devices round independently, so 16 bit gets two to four times that; float32 gets room
# for other exponentials, and for a ReLU that rounding switches. A gradient that is missing, unscaled or
# counted twice moves the ratio by tenths.
LIMITS = {
    "fp32": Limits(loss=1e-4, ratio=1e-3, angle=1e-4, small=1e-4),
    "bf16": Limits(loss=2e-2, ratio=6e-2, angle=1e-2, small=3e-3),
    "fp16": Limits(loss=2e-2, ratio=4e-2, angle=5e-3, small=2e-3),
}
# On layouts, in float32: as tests/integration/test_layouts.py on gloo, with room for a GPU's sums.
LAYOUT_LIMIT = 1e-4


def train_architectures(
    architectures: list[str], precisions: list[str], folder: str, side: str, is_varied: bool
) -> dict[str, str | None]:
    """Train each architecture in each precision on one rank; leave the runs in the folder.

    Args:
        architectures: keys of ARCHITECTURES.
        precisions: keys of PRECISIONS.
        folder: gets a file for each run.
        side: distinguishes the runs of one device from the other's.
        is_varied: compute without oneDNN, whose sums have another order: for want of another device.

    Returns:
        For each run, why it failed, or None.
    """
    _compute_exactly(is_varied)
    errors: dict[str, str | None] = {}
    for architecture in architectures:
        for precision in precisions:
            name = f"{architecture} / {precision}"
            path = run_path(Path(folder), architecture, precision, side)
            errors[name] = _error_of(lambda a=architecture, p=precision, to=path: _train_one(a, p, to))
    return errors


def run_path(folder: Path, architecture: str, precision: str, side: str) -> Path:
    """Where `train_architectures` leaves a run."""
    return folder / f"{list(layouts.ARCHITECTURES).index(architecture)}-{precision}-{side}.pt"


def _compute_exactly(is_varied: bool) -> None:
    # The GPU's float32 products in float32, as the CPU's are.
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    if is_varied:
        torch.backends.mkldnn.set_flags(_enabled=False)


def _error_of(run: Callable[[], None]) -> str | None:
    """Run one case; the next one must not depend on it."""
    try:
        run()
    except Exception:
        return traceback.format_exc()
    return None


def _train_one(architecture: str, precision: str, path: Path) -> None:
    settings = layouts.settings_of(architecture, Layout(1, {}), recomputes=False)
    resolved = resolved_from(settings | PRECISIONS[precision] | _ON_CPU_FIRST)
    engine, step, *_ = layouts.start(resolved)
    before = _masters(engine)
    batches = _batches(resolved)
    losses = [float(step(batches).loss) for _ in range(ITERATIONS)]
    after = _masters(engine)
    changes = {name: after[name] - before[name] for name in after}
    torch.save({"losses": losses, "changes": changes}, path)


def _batches(resolved: Resolved) -> Iterator[Batch]:
    """Micro-batches of sequences that mostly increase by one, which a model can learn."""
    generator = torch.Generator().manual_seed(1)
    shape = (resolved.run.batch.micro, resolved.config.model.seq_length + 1)
    for _ in range(ITERATIONS * resolved.run.batch.accumulation):
        steps = 1 + 4 * (torch.rand(shape, generator=generator) < 0.2).long()
        yield as_batch(steps.cumsum(dim=1) % layouts.VOCAB)


def _masters(engine: Engine) -> dict[str, Tensor]:
    """Return the weights that the optimizer updates, whatever the model computes in; whole on one rank."""
    fragments = engine_fragments(engine)
    return {
        fragment.name: fragment.weight.detach().to("cpu", torch.float32, copy=True) for fragment in fragments
    }


def find_waits(architectures: list[str], precisions: list[str]) -> dict[str, list[str]]:
    """Train each architecture for some iterations, and find where the host waits for the device.

    Returns:
        For each run, the places, as file:line.
    """
    waits = {}
    for architecture in architectures:
        for precision in precisions:
            settings = layouts.settings_of(architecture, Layout(1, {}), recomputes=False)
            resolved = resolved_from(settings | PRECISIONS[precision])
            _, step, *_ = layouts.start(resolved)
            batches = _batches(resolved)
            # The first iterations compile and fill caches.
            for _ in range(_WARM_UP):
                step(batches)
            waits[f"{architecture} / {precision}"] = _waits(lambda s=step, b=batches: s(b))
    return waits


def _waits(run: Callable[[], object]) -> list[str]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(_WATCHED):
                run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    told = [warning for warning in caught if "synchronizing" in str(warning.message)]
    return sorted({f"{Path(warning.filename).name}:{warning.lineno}" for warning in told})


def compare_runs(first: Path, second: Path) -> Difference:
    """How far two runs that `train_architectures` has left are apart."""
    one, other = (torch.load(path, map_location="cpu", weights_only=True) for path in (first, second))
    of_losses = [abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)]
    if set(one["changes"]) != set(other["changes"]):
        raise ValueError(
            f"the runs have other weights: {sorted(set(one['changes']) ^ set(other['changes']))}"
        )
    largest = max(float(change.norm()) for change in one["changes"].values())
    ratios, angles, small = {}, [], [0.0]
    for name, change in one["changes"].items():
        length, theirs = float(change.norm()), other["changes"][name]
        if length < _SMALL * largest:
            small.append(float((theirs - change).norm()) / largest)
            continue
        product = float((change.double() * theirs.double()).sum())
        ratios[name] = abs(product / length**2 - 1.0)
        angles.append(1.0 - product / (length * max(float(theirs.norm()), 1e-30)))
    # Comparisons with NaN are false: a NaN must be found, not passed over.
    worst = max(ratios, key=lambda name: (ratios[name] != ratios[name], ratios[name]))
    return Difference(_largest(of_losses), ratios[worst], _largest(angles), _largest(small), worst)


def _largest(values: list[float]) -> float:
    return max(values, key=lambda value: (value != value, value))


def layouts_for(devices: int) -> dict[str, Layout]:
    """Return the layouts for a number of devices."""
    return ONE_RANK | {name: layout for name, layout in LAYOUTS.items() if layout.ranks <= devices}


def _layout_settings(architecture: str, layout: Layout) -> dict[str, Any]:
    return layouts.settings_of(architecture, layout, recomputes=False) | _ON_CPU_FIRST


def train_reference(architecture: str, is_wide: bool, path: str) -> list[float]:
    """Train on one rank in float32 and leave the weights; gives the losses."""
    _compute_exactly(is_varied=False)
    settings = _layout_settings(architecture, Layout(1, {}, is_wide=is_wide))
    run, _ = layouts.train(resolved_from(settings))
    torch.save({name: weight.cpu() for name, weight in run.weights.items()}, path)
    return run.losses


def train_layout(architecture: str, layout: str, path: str) -> dict[str, Any]:
    """Train on the present world in float32; gives the losses and the largest difference of a weight.

    Args:
        architecture: a key of ARCHITECTURES.
        layout: a key of `layouts_for`.
        path: the weights that `train_reference` has left.
    """
    _compute_exactly(is_varied=False)
    shape = (ONE_RANK | LAYOUTS)[layout]
    run, model = layouts.train(
        resolved_from(_layout_settings(architecture, shape), devices=torch.distributed.get_world_size())
    )
    expected = torch.load(path, map_location="cpu", weights_only=True)
    differences = [float((held - block).abs().max()) for held, block in _blocks(model, run.weights, expected)]
    return {"losses": run.losses, "weight": _largest(differences or [0.0])}


def add_ranks() -> float:
    """Return the sum of 1 + rank over the ranks of the present world, from an all-reduce on their devices."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    value = torch.full((1024,), 1.0 + torch.distributed.get_rank(), device=device)
    torch.distributed.all_reduce(value)
    return float(value.mean())


def compare_layout(
    architecture: str,
    layout: str,
    run: Callable[..., list[Any]],
    folder: Path,
    references: dict[tuple[str, bool], list[float]],
) -> tuple[float, float]:
    """Train on a layout and, unless it is known, on one rank.

    Args:
        architecture: a key of ARCHITECTURES.
        layout: a key of `layouts_for`.
        run: `run_ranks` with a backend and a time limit.
        folder: gets the weights of one rank.
        references: losses of one rank that are known; those of this call are added.

    Returns:
        The largest difference of a loss and of a weight.

    Raises:
        AssertionError: a rank failed.
    """
    shape = (ONE_RANK | LAYOUTS)[layout]
    key = (architecture, shape.is_wide)
    path = str(folder / f"reference-{list(layouts.ARCHITECTURES).index(architecture)}-{shape.is_wide}.pt")
    if key not in references:
        [references[key]] = run(
            train_reference, size=1, architecture=architecture, is_wide=shape.is_wide, path=path
        )
    ranks = run(train_layout, size=shape.ranks, architecture=architecture, layout=layout, path=path)
    losses = [
        abs(one - other) for rank in ranks for one, other in zip(rank["losses"], references[key], strict=True)
    ]
    return _largest(losses), _largest([rank["weight"] for rank in ranks])


def _blocks(
    model: Any, held: dict[str, Tensor], expected: dict[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's blocks, without padding rows, with the same blocks of the whole weights."""
    for name, parameter in named_logical_parameters(model):
        block = expected[name][tuple(slice(*limits) for limits in parameter.logical.slices)]
        if block.numel():
            yield held[name].cpu()[tuple(slice(0, length) for length in block.shape)], block
