"""One update in every precision on every layout: the cells of the sweep, and what a cell's engine does.

A cell trains from weights that every precision represents exactly. The learning rate of the SGD update is so
large that the master weights show the gradient itself, not its rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from neox_config import Resolved
from neox_model import initialization
from neox_model.checkpoint.logical import engine_fragments, optimizer_parts
from neox_model.engine.contract import Engine
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import Logical, named_logical_parameters
from neox_model.train.data.batch import Batch, as_batch
from support import layouts
from support.layouts import LAYOUTS, VOCAB, Layout
from support.settings import resolved_from
from support.worlds import forget_deepspeeds_world

__all__ = [
    "ADAM",
    "ALL_LAYOUTS",
    "PRECISIONS",
    "SCALES",
    "SGD",
    "Cell",
    "Observed",
    "Training",
    "batches_of",
    "observe",
    "rounded_start",
]

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Without a scale, small gradients vanish in fp16; the largest one is the configuration's initial scale.
SCALES = (1, 128, 65536)
# Windows of an update: divisible by every number of replicas times every accumulation.
SAMPLES = 12
CLIPPING = {"off": 0.0, "inactive": 1000.0, "active": 0.1}

ALL_LAYOUTS: dict[str, Layout] = {
    "one process": Layout(1, {}),
    # DeepSpeed's engine alone runs a single stage as a pipeline.
    "pipeline 1": Layout(1, {"engine": "deepspeed", "pipe_parallel_size": 1}),
    "pipeline 1 x data 2, ZeRO 1": Layout(
        2, {"engine": "deepspeed", "pipe_parallel_size": 1, "zero_optimization": {"stage": 1}}
    ),
    **LAYOUTS,
}


@dataclass(frozen=True)
class Training:
    """The updates of a cell.

    Args:
        optimizer: its class.
        params: its settings.
        updates: how many.
    """

    optimizer: str
    params: dict[str, float] = field(hash=False)
    updates: int

    @property
    def settings(self) -> dict[str, Any]:
        """The optimizer's block of the configuration."""
        return {"optimizer": {"type": self.optimizer, "params": self.params}}


SGD = Training("SGD", {"lr": 256.0}, 1)
# Small steps, and no power of two, half of a weight's last 16-bit digit: chance would round it up or down.
# With a small eps, a gradient that nearly cancels makes a whole step in the direction that rounding gives it:
# the next gradients of what gMLP multiplies by such weights, which start at zero, differ by a tenth.
ADAM = Training("Adam", {"lr": 1.7e-4, "eps": 1e-3}, 3)


@dataclass(frozen=True)
class Cell:
    """A point of the sweep.

    Args:
        architecture: a key of ARCHITECTURES.
        layout: a key of ALL_LAYOUTS.
        precision: a key of PRECISIONS.
        clipping: a key of CLIPPING.
        accumulation: micro-batches of each update on each replica.
        tied: whether the head uses the embedding's matrix.
        recomputes: whether activations are recomputed.
    """

    architecture: str
    layout: str
    precision: str
    clipping: str = "inactive"
    accumulation: int = 1
    tied: bool = False
    recomputes: bool = False

    @property
    def shape(self) -> Layout:
        """The layout's settings and number of ranks."""
        return ALL_LAYOUTS[self.layout]

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.shape.replicas

    @property
    def micro_batch(self) -> int:
        """Windows that a rank computes at once."""
        return SAMPLES // (self.replicas * self.accumulation)

    @property
    def max_norm(self) -> float:
        """The gradient norm that clipping allows; 0 for none."""
        return CLIPPING[self.clipping]

    @property
    def name(self) -> str:
        """All of it, for messages."""
        return " / ".join(
            (
                self.architecture,
                self.layout,
                self.precision,
                f"clipping {self.clipping}",
                f"accumulation {self.accumulation}",
                "tied" if self.tied else "untied",
                "recomputed" if self.recomputes else "kept",
            )
        )

    def resolved(self, training: Training, *, scale: int) -> Resolved:
        """Return the configuration of the cell."""
        wanted = {
            **layouts.settings_of(self.architecture, self.shape, recomputes=self.recomputes),
            **training.settings,
            "train_iters": training.updates,
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.max_norm,
            "weight_decay": 0.0,
            "no_weight_tying": not self.tied,
            "lr_decay_style": "constant",
            **_precision_settings(self.precision, scale),
        }
        return resolved_from(wanted, devices=self.shape.ranks)


def _precision_settings(precision: str, scale: int) -> dict[str, Any]:
    if precision == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": float(scale)}}
    return {"precision": {"fp32": "fp32", "bf16": "bfloat16"}[precision]}


@dataclass
class Observed:
    """What updates did, by logical name; tensors are whole and float32.

    Args:
        losses: of every update.
        norms: the gradient norm before clipping that every update reported; None where it did not.
        updates: master weights at the end less those at the start.
        masters: master weights at the end.
        states: the optimizer's tensors, by weight and state.
        steps: the numbers of updates that the optimizer counted, each once.
        spread: largest difference between two ranks' copies of an element, relative to the tensor's largest.
        stale: the weights that, in the model, are not their masters rounded to its precision.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    updates: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    spread: float = 0.0
    stale: list[str] = field(default_factory=list)


def observe(cell: Cell, training: Training, *, scale: int = 128) -> Observed:
    """Train the cell in the present world; its first rank gets the result. Collective."""
    with _torchs_linear():
        return _observe(cell, training, cell.resolved(training, scale=scale))


def _observe(cell: Cell, training: Training, resolved: Resolved) -> Observed:
    forget_deepspeeds_world()
    with rounded_start():
        engine, step, groups, _ = layouts.start(resolved)
    observed = Observed()
    before = _masters(engine, observed)
    batches = _share(cell, resolved, groups.data, updates=training.updates)
    for _ in range(training.updates):
        report = step(batches)
        observed.losses.append(float(report.loss))
        observed.norms.append(None if report.grad_norm is None else float(report.grad_norm))
    observed.masters = _masters(engine, observed)
    observed.updates = {name: after - before[name] for name, after in observed.masters.items()}
    weights = _weights(engine.model, observed, PRECISIONS[cell.precision])
    observed.stale = [
        name
        for name, master in observed.masters.items()
        if not torch.equal(weights[name], master.to(PRECISIONS[cell.precision]).float())
    ]
    _read_states(engine, observed)
    return observed


@contextmanager
def _torchs_linear() -> Iterator[None]:
    """Undo, at the end, that ZeRO 3 replaces torch's function by one that rounds before it adds the bias."""
    linear = functional.linear
    try:
        yield
    finally:
        functional.linear = linear


@contextmanager
def rounded_start() -> Iterator[None]:
    """Within, new weights are numbers that float32, bfloat16 and float16 all represent."""
    fill = initialization._fill

    def fill_rounded(parameter: Tensor, logical: Logical, generator: torch.Generator) -> None:
        fill(parameter, replace(logical, init=partial(_init_rounded, logical.init)), generator)

    initialization._fill = fill_rounded
    try:
        yield
    finally:
        initialization._fill = fill


def _init_rounded(init: Any, tensor: Tensor, generator: torch.Generator) -> None:
    init(tensor, generator)
    tensor.copy_(tensor.bfloat16().half())


def batches_of(resolved: Resolved, *, updates: int, micro_batch: int) -> Iterator[list[Batch]]:
    """Return the micro-batches of each update, over all replicas."""
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, resolved.config.model.seq_length + 1)
    for _ in range(updates):
        steps = 1 + 4 * (torch.rand(shape, generator=generator) < 0.2).long()
        windows = steps.cumsum(dim=1) % VOCAB
        yield [as_batch(part) for part in windows.split(micro_batch)]


def _share(cell: Cell, resolved: Resolved, data: Group, *, updates: int) -> Iterator[Batch]:
    for batches in batches_of(resolved, updates=updates, micro_batch=cell.micro_batch):
        yield from batches[data.rank * cell.accumulation : (data.rank + 1) * cell.accumulation]


Piece = tuple[str, Logical, int, Tensor]


def _masters(engine: Engine, observed: Observed) -> dict[str, Tensor]:
    fragments = engine_fragments(engine)
    return _whole([(f.name, f.logical, f.held.start, f.weight) for f in fragments], observed)


def _weights(model: nn.Module, observed: Observed, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights that the model computes with."""
    logicals = {name: parameter.logical for name, parameter in named_logical_parameters(model)}  # type: ignore[attr-defined]
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
    pieces: list[Piece] = []
    for name, parameter in named_logical_parameters(model):
        held, logical = layouts.whole_weight(parameter), logicals[name]
        assert held.dtype == dtype, f"{name} is {held.dtype}, must be {dtype}"
        block = tuple(slice(0, stop - start) for start, stop in logical.slices)
        pieces.append((name, logical, 0, held[block].reshape(-1)))
    for part in parts:
        part.reshard()
    return _whole(pieces, observed)


def _read_states(engine: Engine, observed: Observed) -> None:
    optimizer, pieces, steps = engine.update.optimizer, [], set()
    for fragment in engine_fragments(engine):
        parts, scalars = optimizer_parts(fragment, optimizer)
        pieces += [(part.name, fragment.logical, part.start, part.values) for part in parts]
        steps |= {int(number["value"]) for name, number in scalars.items() if name == "step"}
    observed.states = _whole(pieces, observed)
    observed.steps = sorted({number for found in _gathered(sorted(steps)) for number in found})


def _whole(pieces: list[Piece], observed: Observed) -> dict[str, Tensor]:
    """Join, on the first rank, what all ranks hold; note how far copies of one element differ. Collective."""
    mine = [
        (name, logical.shape, logical.slices, start, values.detach().float().numpy().copy())
        for name, logical, start, values in pieces
    ]
    joined: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for name, shape, slices, start, values in (piece for found in _gathered(mine) for piece in found):
        block, run = tuple(slice(*limits) for limits in slices), slice(start, start + len(values))
        whole = joined.setdefault(name, np.zeros(shape, np.float32))
        known = seen.setdefault(name, np.zeros(shape, bool))
        held, is_known = whole[block].flatten(), known[block].flatten()
        apart = np.abs(held[run] - values)[is_known[run]].max(initial=0.0)
        observed.spread = max(observed.spread, float(apart / (np.abs(values).max(initial=0.0) or 1.0)))
        held[run], is_known[run] = values, True
        whole[block], known[block] = held.reshape(whole[block].shape), is_known.reshape(whole[block].shape)
    missing = [name for name, known in seen.items() if not known.all()]
    assert not missing, f"no rank holds all of {', '.join(missing)}"
    return {name: torch.from_numpy(whole) for name, whole in joined.items()}


def _gathered(mine: Any) -> list[Any]:
    """Return every rank's value on the first rank; nothing on the others."""
    is_first = distributed.get_rank() == 0
    everything: list[Any] = [None] * distributed.get_world_size()
    distributed.gather_object(mine, everything if is_first else None, dst=0)
    return everything if is_first else []
