"""Every optimizer on a layout of each kind in every precision: a run that is resumed, and what differs.

A cell trains two updates (three if replicas then have different weights), saves, and trains two more. A
fresh engine with other weights loads what was saved and trains the same two. Both save once more: the two
checkpoints hold the same weights, states and counts, to the last bit.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, cycle, product
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from neox_config import Resolved
from neox_config.errors import ConfigError
from neox_config.spec.resume import IN_EFFECT, in_effect
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.load import load_checkpoint
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.save import save_checkpoint
from neox_model.checkpoint.shards import ShardReader
from neox_model.parallel.groups import Groups
from neox_model.train.data.batch import Batch, as_batch
from neox_model.train.state import TrainState
from support.layouts import SETTINGS, SMALL, VOCAB, Layout, start
from support.settings import resolved_from

__all__ = [
    "LAYOUTS",
    "LAYOUTS_OF_FOUR",
    "OPTIMIZERS",
    "OVERFLOWING",
    "PRECISIONS",
    "Cell",
    "Contents",
    "all_cells",
    "moved",
    "resumed",
    "sample",
    "updates_apart",
]

SAMPLES, SKIPPED = 8, 2
# Relative difference of the losses of the same weights in bf16 on two layouts; and, where replicas have their
# own weights, of these to their mean.
_SAME_LOSS, _MEAN_LOSS = 2e-3, 1e-2

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "Adam, L2": {"adam_w_mode": False},
    "Adam, uncorrected": {"bias_correction": False},
    "Adam, bf16 states": {"state_dtype": "bf16"},
    "AdamW": {"betas": [0.8, 0.9]},
    "CPU_Adam": {},
    "CPU_torch_adam": {},
    "Lamb": {"max_coeff": 3.0, "min_coeff": 0.02},
    "OneBitAdam": {"freeze_step": 9, "cuda_aware": False, "comm_backend_name": "gloo"},
    # A variance of one update is close to zero in places: eps limits what rounding changes there.
    "OneBitAdam, compressed": {"freeze_step": 1, "eps": 1e-3},
    "OneBitAdam, compressed, uncorrected": {"freeze_step": 1, "eps": 1e-3, "bias_correction": False},
    "OneBitLamb, compressed": {"freeze_step": 1, "eps": 1e-3},
    "ZeroOneAdam": {},
    # The variance changes in updates 1 and 3.
    "ZeroOneAdam, compressed": {"var_freeze_step": 3, "var_update_scaler": 1, "eps": 1e-3},
    # Updates 3 and 5 are local steps.
    "ZeroOneAdam, compressed, local": {
        "var_freeze_step": 1,
        "var_update_scaler": 1,
        "local_step_scaler": 1,
        "local_step_clipper": 4,
        "eps": 1e-3,
    },
    "SM3": {},
    "SM3, momentum": {"momentum": 0.9, "beta": 0.9},
    "Lion": {"betas": [0.8, 0.95]},
    "Muon": {"adam_lr": 0.005},
    "Muon, momentum": {"momentum": 0.8, "nesterov": False, "ns_steps": 3},
    "Muon, as before": {"coefficients": "quintic", "qkv": "together"},
    "Muon, rows": {
        "qkv": "per_head",
        "scale": "match_rms_adamw",
        "row_beta": 0.9,
        "cautious_decay": True,
        "adam_lr": 0.005,
    },
    "Muon, rows, experts": {"scale": "match_rms_adamw", "row_beta": 0.9, "cautious_decay": True},
    "Lamb, experts": {},
    "madgrad_wd": {"momentum": 0.8},
    "Adadelta": {"rho": 0.8},
    "Adafactor": {},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Adagrad, fused": {"fused": True},
    "Adamax": {},
    "ASGD": {"t0": 1, "lambd": 0.1},
    "NAdam": {},
    "NAdam, decoupled": {"decoupled_weight_decay": True, "foreach": True},
    "RAdam": {},
    "RMSprop": {},
    "RMSprop, centered": {"momentum": 0.9, "centered": True, "foreach": True},
    "Rprop": {},
    "SGD": {},
    "SGD, momentum": {"momentum": 0.9, "nesterov": True},
    "SGD, fused": {"momentum": 0.9, "dampening": 0.5, "fused": True},
}
"""A label, and arguments besides the learning rate.

The first word is the optimizer's name; if the last is `experts`, the model has some.
"""

# Three experts: two ranks that divide them have two and one.
_EXPERTS: dict[str, Any] = {
    "moe_num_experts": 3,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_layers": [1],
    "activation": "swiglu",
    "moe_expert_width": 12,
}

LAYOUTS: dict[str, Layout] = {
    "one process": Layout(1, {}),
    "tensor 2": Layout(2, {"model_parallel_size": 2}),
    "pipeline 2": Layout(2, {"engine": "deepspeed", "pipe_parallel_size": 2}),
    "torch, pipeline 2": Layout(2, {"engine": "torch", "pipe_parallel_size": 2}),
    "data 2": Layout(2, {}),
    **{
        f"{prefix}ZeRO {stage}": Layout(2, {"engine": engine, "zero_optimization": {"stage": stage}})
        for engine, prefix in (("deepspeed", ""), ("torch", "torch, "))
        for stage in (1, 2, 3)
    },
}

# Data-parallel ranks divide the rows of what tensor-parallel ranks and pipeline stages have.
LAYOUTS_OF_FOUR: dict[str, Layout] = {
    f"torch, ZeRO {stage}, {name}": Layout(
        4, {"engine": "torch", "zero_optimization": {"stage": stage, **zero}, **settings}
    )
    for name, stage, settings, zero in (
        ("tensor 2", 1, {"model_parallel_size": 2}, {}),
        ("tensor 2", 3, {"model_parallel_size": 2}, {}),
        ("pipeline 2", 2, {"pipe_parallel_size": 2}, {}),
        ("second partition", 3, {}, {"zero_hpz_partition_size": 2}),
    )
}

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bfloat16"},
    # A dynamic scale that changes within the four updates, and never overflows.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}},
}


OVERFLOWING = "fp16 that overflows first"


def _precision_settings(precision: str, layout: str) -> dict[str, Any]:
    if precision != OVERFLOWING:
        return PRECISIONS[precision]
    # Gradients times 2^19 are infinite and times 2^18 are not: the first two updates are skipped. Replicas
    # without ZeRO add their gradients before they divide by their number, here two.
    power = 19 if layout == "data 2" else 20
    scale = {"initial_scale_power": power, "loss_scale_window": 2, "hysteresis": 1}
    return {"fp16": {"enabled": True, **scale}}


@dataclass(frozen=True)
class Cell:
    """A point of the matrix: keys of OPTIMIZERS, LAYOUTS (or those of four ranks) and PRECISIONS.

    The precision may also be OVERFLOWING.
    """

    optimizer: str
    layout: str
    precision: str

    @property
    def name(self) -> str:
        """All of it, for messages."""
        return " / ".join((self.optimizer, self.layout, self.precision))

    @property
    def saved_after(self) -> int:
        """Updates before the checkpoint that is resumed from."""
        return 3 if "local" in self.optimizer else 2

    @property
    def updates(self) -> int:
        """Updates of the whole run."""
        return self.saved_after + 2

    @property
    def applied(self) -> int:
        """Updates that are not skipped."""
        return self.updates - SKIPPED if self.precision == OVERFLOWING else self.updates

    @property
    def folder(self) -> str:
        """A name for its files."""
        return re.sub(r"\W+", "-", self.name)

    @property
    def type(self) -> str:
        """The optimizer's name in the configuration."""
        return self.optimizer.split(",")[0]

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self._layout.ranks

    @property
    def _layout(self) -> Layout:
        return (LAYOUTS | LAYOUTS_OF_FOUR)[self.layout]

    def resolved(self, *, seed: int = 7) -> Resolved:
        """Return the configuration.

        Raises:
            ConfigError: a rule refuses it, or a part of it is not built.
        """
        params = {"lr": 0.01, **OPTIMIZERS[self.optimizer]}
        wanted = {
            **SETTINGS,
            **SMALL,
            "num_layers": 2,
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": self.type, "params": params},
            # As large as to be seen in the weights after four updates.
            "weight_decay": 0.5,
            "save": "checkpoints",
            "save_interval": 100,
            "seed": seed,
            **(_EXPERTS if self.optimizer.endswith("experts") else {}),
            **self._layout.settings,
            **_precision_settings(self.precision, self.layout),
        }
        return resolved_from(wanted, devices=self.ranks)

    @property
    def refusal(self) -> str | None:
        """What a rule says against the cell; None where it trains."""
        return _refusal_of(self)


@cache
def _refusal_of(cell: Cell) -> str | None:
    try:
        cell.resolved()
    except ConfigError as error:
        return str(error)
    return None


def all_cells() -> list[Cell]:
    """Return the whole matrix."""
    return [Cell(*values) for values in product(OPTIMIZERS, LAYOUTS, PRECISIONS)]


def sample() -> list[Cell]:
    """Every optimizer once and every layout in every precision: those of the matrix that train, in turn."""
    places = [(layout, precision) for precision, layout in product(PRECISIONS, LAYOUTS)]
    turns, chosen = cycle(places), []
    for optimizer in OPTIMIZERS:
        cells = (Cell(optimizer, *next(turns)) for _ in places)
        chosen.append(next((cell for cell in cells if cell.refusal is None), None))
    return [cell for cell in chosen if cell is not None]


@dataclass
class Contents:
    """What a checkpoint holds, whole: tensors and numbers by name."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def states(self) -> set[str]:
        """Names of the optimizer's states."""
        return {name.rpartition("/")[2] for name in (*self.tensors, *self.numbers) if "/" in name}

    def differences(self, other: "Contents") -> list[str]:
        """Return what another one lacks, has in addition, or has with another value."""
        found = [f"{name} is missing" for name in sorted(self.tensors.keys() - other.tensors.keys())]
        found += [f"{name} is new" for name in sorted(other.tensors.keys() - self.tensors.keys())]
        found += [
            f"{name} differs by {float((one - other.tensors[name]).abs().max()):.3g}"
            for name, one in sorted(self.tensors.items())
            if name in other.tensors and not torch.equal(one, other.tensors[name])
        ]
        names = sorted(self.numbers.keys() | other.numbers.keys())
        found += [
            f"{name} is {self.numbers.get(name)} and {other.numbers.get(name)}"
            for name in names
            if self.numbers.get(name) != other.numbers.get(name)
        ]
        return found


def contents_of(folder: Path) -> Contents:
    """Read a checkpoint; random streams are left out."""
    manifest = Manifest.read(folder)
    reader = ShardReader(folder, manifest)
    tensors = {}
    for name, record in manifest.tensors.items():
        if name.startswith("rng/"):
            continue
        tensors[name] = torch.empty(record.shape, dtype=DTYPES[record.dtype])
        block = tuple((0, length) for length in record.shape)
        reader.fill(tensors[name].view(-1), name, (block, 0, tensors[name].numel()))
    numbers = {
        f"{weight}/{state}": number["value"]
        for weight, states in manifest.optimizer_scalars.items()
        for state, number in states.items()
    }
    for part in (manifest.engine, manifest.schedule, manifest.training):
        numbers |= dict(part)
    return Contents(tensors, numbers)


@dataclass
class Resumed:
    """A run without and with a restart.

    Args:
        applied: updates that must have been applied.
        saved: the checkpoint that was resumed from.
        through: the checkpoint of the uninterrupted run.
        again: the checkpoint of the one that was resumed.
        losses: of the last updates, of both.
    """

    applied: int
    saved: Contents
    through: Contents
    again: Contents
    losses: tuple[list[float], list[float]]

    @property
    def findings(self) -> list[str]:
        """What differs; empty where the resumed run is the same."""
        found = self.through.differences(self.again)
        if self.losses[0] != self.losses[1]:
            found.append(f"losses are {self.losses[0]} and {self.losses[1]}")
        found += [
            f"{name} is {self.again.numbers[name]} after {self.applied} updates"
            for name in sorted(self.again.numbers)
            if name.endswith("/step") and self.again.numbers[name] != self.applied
        ]
        applied = self.through.numbers["applied_updates"]
        if applied != self.applied:
            found.append(f"{applied} updates were applied, not {self.applied}")
        return found


def resumed(cell: Cell, folder: Path) -> Resumed:
    """Train the cell in the present world, with and without a restart. Collective."""
    resolved = cell.resolved()
    run = _Run(resolved, folder / "through")
    run.train(0, cell.saved_after)
    saved = run.save()
    losses = run.train(cell.saved_after, cell.updates)
    through = run.save()
    # What the checkpoint does not restore is seen: everything else begins with other weights.
    other = _Run(cell.resolved(seed=8), folder / "again", recorded=resolved)
    other.load(saved.parent, iteration=cell.saved_after)
    again_losses = other.train(cell.saved_after, cell.updates)
    again = other.save()
    found = [contents_of(path) for path in (saved, through, again)]
    return Resumed(cell.applied, found[0], found[1], found[2], (losses, again_losses))


def updates_apart(cell: Cell, other: Cell, folder: Path) -> dict[str, float]:
    """How far two cells' last weights are apart, relative to what the updates changed, by weight.

    Args:
        cell: trained in its folder by `resumed`.
        other: the same.
        folder: holds both folders.
    """
    before, after = (
        contents_of(folder / cell.folder / f"through/global_step{update}").tensors
        for update in (cell.saved_after, cell.updates)
    )
    others = contents_of(folder / other.folder / f"through/global_step{other.updates}").tensors
    # A bias of keys changes no attention: its gradient is zero but for rounding.
    names = [name for name in after if "/" not in name and not name.endswith("qkv.bias")]
    return {
        name: float((after[name] - others[name]).norm() / (after[name] - before[name]).norm())
        for name in names
    }


def moved(cell: Cell, source: Path, folder: Path, *, losses: Sequence[float]) -> list[str]:
    """Load a checkpoint of another layout, save it and train; what differs. Collective.

    Args:
        cell: the layout that it is loaded into.
        source: folder of the checkpoint.
        folder: for the new checkpoint.
        losses: of the next updates on the first layout.
    """
    run = _Run(cell.resolved(seed=8), folder, recorded=cell.resolved())
    run.load(source, iteration=cell.saved_after)
    expected, found = contents_of(source / f"global_step{cell.saved_after}"), contents_of(run.save())
    for contents in (expected, found):
        # DeepSpeed's ZeRO has a loss scale of 1 in bf16, too; no other engine has one.
        contents.numbers.pop("cur_scale", None)
        # As many rows as replicas, each the mean of those before.
        for name in (name for name in contents.tensors if "/local_" in name):
            contents.tensors[name] = contents.tensors[name].mean(dim=0)
    if run.groups.data.size == 1:
        # One replica compresses nothing.
        for name in [name for name in expected.tensors if name.endswith("_error")]:
            del expected.tensors[name]
    differing = expected.differences(found)
    trained = run.train(cell.saved_after, cell.updates)
    tolerance = _MEAN_LOSS if "local" in cell.optimizer else _SAME_LOSS
    if not isclose(trained[0], losses[0], rel_tol=tolerance):
        differing.append(f"the loss is {trained[0]} instead of {losses[0]}")
    steps = {value for name, value in contents_of(run.save()).numbers.items() if name.endswith("/step")}
    return differing + [f"step is {step}" for step in sorted(steps - {cell.updates})]


class _Run:
    """An engine, with the objects that the training program keeps."""

    def __init__(self, resolved: Resolved, folder: Path, *, recorded: Resolved | None = None) -> None:
        self.resolved = resolved
        self.folder = folder
        self.config = {IN_EFFECT: in_effect(recorded or resolved)}
        engine, self.step, self.groups, schedule = start(resolved)
        self.state = TrainState(last_iteration=100, samples_per_iteration=SAMPLES)
        self._parts = RunParts(engine=engine, groups=self.groups, schedule=schedule, state=self.state)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        batches = _batches(self.resolved, self.groups, first)
        for _ in range(first, last):
            report = self.step(batches)
            self.state.advance(report)
            losses.append(float(report.loss))
        return losses

    def save(self) -> Path:
        distributed.barrier()
        path = save_checkpoint(self.folder, self._parts, iteration=self.state.iteration, config=self.config)
        distributed.barrier()
        return path

    def load(self, folder: Path, *, iteration: int) -> None:
        (folder / "latest").write_text(f"global_step{iteration}\n")
        distributed.barrier()
        found = load_checkpoint(folder, self._parts, config=self.config, seed=8)
        assert found == iteration


def _batches(resolved: Resolved, groups: Groups, first: int) -> Iterator[Batch]:
    """Return this replica's micro-batches, starting at an update."""
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, resolved.config.model.seq_length + 1)
    mine = SAMPLES // groups.data.size
    for update in count():
        windows = torch.randint(VOCAB, shape, generator=generator)
        if update >= first:
            for part in windows.split(mine)[groups.data.rank].split(resolved.run.batch.micro):
                yield as_batch(part)
