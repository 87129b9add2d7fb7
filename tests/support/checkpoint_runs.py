"""As much of a run as a checkpoint uses, without DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from neox_config.facts.deepspeed_schedules import OneCycle
from neox_config.facts.learning_rate import Curve, WarmupThenDecay
from neox_model.checkpoint.load import load_checkpoint
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.save import save_checkpoint
from neox_model.checkpoint.storage import Storage
from neox_model.engine.updater import Updater
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.logical import logical_parameter

__all__ = ["COUNTS", "CURVE", "CYCLE", "STATE", "Engine", "Model", "Remembers", "Run"]

# How much data a new run has used.
COUNTS = {"tokens": 64, "skipped_iterations": 1}
STATE = {"iteration": 0, "samples": 0, "validation_samples": 0, "batch_sizes": [], **COUNTS}


CURVE = WarmupThenDecay(style="constant", peak=0.1, floor=0.0, warmup=0.01, decay_iterations=9)
CYCLE = OneCycle(
    cycle_min_lr=0.01,
    cycle_max_lr=0.1,
    decay_lr_rate=0.0,
    cycle_first_step_size=5,
    cycle_second_step_size=5,
    cycle_first_stair_count=0,
    cycle_second_stair_count=0,
    decay_step_size=0,
    cycle_momentum=True,
    cycle_min_mom=0.8,
    cycle_max_mom=0.95,
    decay_mom_rate=0.0,
)


class Remembers:
    """A run state, or a schedule, that is its dictionary."""

    def __init__(self, **state: int) -> None:
        self.state, self.curve = state, CURVE

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state

    def accepts(self, curve: Curve) -> bool:
        return not curve.changes_momentum


class Model(nn.Module):
    def __init__(self, width: int, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            logical_parameter((width, 3), init=lambda tensor, generator: None) for _ in range(layers)
        )
        for param in self.layers:
            nn.init.normal_(param)


class Engine:
    """As much of an engine as a checkpoint uses, at ZeRO stage 0 in float32."""

    def __init__(self, model: nn.Module, optimizer: type[torch.optim.Optimizer]) -> None:
        inner = optimizer(model.parameters(), lr=0.1)
        curve = WarmupThenDecay(style="constant", peak=0.1, floor=0.0, warmup=0.0, decay_iterations=9)
        mixed = MixedPrecisionOptimizer(
            inner,
            LearningRateSchedule(inner, curve),
            dtype=torch.float32,
            accumulation_dtype=torch.float32,
            max_norm=0.0,
            reduce=lambda gradients: None,
            groups=SINGLE_PROCESS,
        )
        self.model, self.steps = model, 0
        self.update = Updater(mixed, model, SINGLE_PROCESS)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def missing_counters(self, state: dict[str, int]) -> set[str]:
        return {"steps"} - {name for name, value in state.items() if value is not None}

    def load_state_dict(self, state: dict[str, int], *, loss_scale: bool) -> None:
        self.steps = state["steps"]


class Run:
    def __init__(
        self,
        *,
        width: int = 4,
        layers: int = 1,
        optimizer: Any = torch.optim.AdamW,
        groups: Groups = SINGLE_PROCESS,
        storage: Storage | None = None,
    ):
        self.model = Model(width, layers)
        self.engine = Engine(self.model, optimizer)
        self.state, self.schedule = Remembers(**STATE), Remembers(applied_updates=0)
        self.groups, self.storage = groups, storage
        self.config = {
            "in_effect": {
                "model": {"hidden_size": width, "num_layers": layers, "activation": "gelu"},
                "training": {"train_batch_size": 16, "optimizer.params.adam_w_mode": True},
            }
        }
        self.iteration: int | None = 0

    def train(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.engine.update.mixed.step()
        self.iteration += 1
        self.engine.steps += 1
        self.state.state = {**STATE, "iteration": self.iteration, "samples": 16 * self.iteration}
        self.schedule.state = {"applied_updates": self.iteration}

    def save(self, directory: Path, **options: Any) -> Path:
        return save_checkpoint(
            directory, self._parts(), iteration=self.iteration, config=self.config, **options
        )

    def load(self, directory: Path, **options: Any) -> None:
        self.iteration = load_checkpoint(directory, self._parts(), config=self.config, seed=1, **options)

    def _parts(self) -> RunParts:
        return RunParts(
            engine=self.engine,
            groups=self.groups,
            schedule=self.schedule,
            state=self.state,
            storage=self.storage,
        )

    @property
    def weights(self) -> list[Any]:
        return [param.tolist() for param in self.model.parameters()]

    @property
    def states(self) -> dict[str, Any]:
        first = self.engine.update.optimizer.state[self.model.layers[0]]
        return {key: value.tolist() for key, value in first.items()}
