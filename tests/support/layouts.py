"""Architectures and layouts that must train one model, and the run that both sides run."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from neox_config import ConfigError, Resolved
from neox_config.derive.learning_rate import learning_rate_curve
from neox_config.facts.pipeline_schedules import SCHEDULES
from neox_data.masking import MaskedDataset, Masking
from neox_model.assembly.model import build_model
from neox_model.assembly.optimizer import build_optimizer
from neox_model.assembly.zero_sharding import whole_parameter
from neox_model.engine.build import build_engine, prepare_engine
from neox_model.engine.contract import Engine
from neox_model.layers.experts import Router
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.logical import model_states, named_logical_parameters
from neox_model.parallel.topology import create_groups
from neox_model.train.callbacks.experts import ExpertBalance
from neox_model.train.data.batch import Batch, DocumentEnds, as_batch, as_masked_batch
from neox_model.train.data.streams import choose_weighting
from neox_model.train.step import EngineStep, TrainStep
from support.architectures import ARCHITECTURES as DENSE
from support.architectures import EXPERTS, SMALL, WIDE
from support.settings import resolved_from

__all__ = [
    "ARCHITECTURES",
    "CAUSAL_ARCHITECTURES",
    "LAYOUTS",
    "VOCAB",
    "Layout",
    "Run",
    "batches_of",
    "differences",
    "micro_batch_of_reference",
    "reference",
    "settings_of",
    "start",
    "train",
    "trains",
    "whole_weight",
]

# Eleven tokens need a padding row on two tensor-parallel ranks and on four; batches of eight samples.
VOCAB, ITERATIONS, SAMPLES = 11, 20, 8
# Plain momentum: unlike Adam, it lets a wrong scale of a gradient show.
SETTINGS: dict[str, Any] = {
    "num_layers": 5,
    "train_iters": ITERATIONS,
    "train_batch_size": SAMPLES,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": None,
    "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
    "zero_allow_untested_optimizer": True,
    "weight_decay": 0.1,
    "gradient_clipping": 0.4,
    "init_method_std": 0.1,
}
ARCHITECTURES = DENSE | EXPERTS
# Dense ones that generate texts, and whose losses have no weights.
CAUSAL_ARCHITECTURES = tuple(
    name for name, settings in DENSE.items() if settings.get("objective") != "masked"
)


@dataclass(frozen=True)
class Layout:
    """Settings of a layout, how many ranks it takes, and whether it needs the sizes of WIDE."""

    ranks: int
    settings: dict[str, Any]
    is_wide: bool = False

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        given = self.settings
        return self.ranks // (
            given.get("model_parallel_size", 1) * max(1, given.get("pipe_parallel_size", 1))
        )


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "zero_optimization": {"stage": stage, **more}}


def _torch(stage: int, **more: Any) -> dict[str, Any]:
    return {"engine": "torch", "zero_optimization": {"stage": stage, **more}}


def _pipeline(stages: int, **more: Any) -> dict[str, Any]:
    return {"engine": "torch", "pipe_parallel_size": stages, **more}


def _deepspeeds_pipeline(stages: int, **more: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "pipe_parallel_size": stages, **more}


_HOST = {"device": "cpu"}
LAYOUTS: dict[str, Layout] = {
    "tensor 2": Layout(2, {"model_parallel_size": 2}),
    "tensor 4": Layout(4, {"model_parallel_size": 4}, is_wide=True),
    "pipeline 2": Layout(2, _deepspeeds_pipeline(2, pipe_partition_method="parameters")),
    "pipeline 4": Layout(4, _deepspeeds_pipeline(4, pipe_partition_method="uniform")),
    "pipeline 2 x data 2, ZeRO 1": Layout(4, {"pipe_parallel_size": 2, **_zero(1)}),
    "torch, pipeline 2": Layout(2, _pipeline(2)),
    "torch, pipeline 4": Layout(4, _pipeline(4)),
    "torch, pipeline 2, interleaved": Layout(2, _pipeline(2, pipeline_schedule="interleaved")),
    "torch, pipeline 4, zero bubble": Layout(4, _pipeline(4, pipeline_schedule="zero_bubble")),
    "torch, pipeline 2, ZBV": Layout(2, _pipeline(2, pipeline_schedule="zbv")),
    "torch, pipeline 2 x data 2": Layout(4, _pipeline(2)),
    "torch, pipeline 2 x data 2, zero bubble": Layout(
        4, _pipeline(2, pipeline_schedule="zero_bubble", virtual_pipeline_stages=2)
    ),
    "torch, pipeline 2 x data 2, ZeRO 1": Layout(4, _pipeline(2, zero_optimization={"stage": 1})),
    "torch, pipeline 2 x data 2, ZeRO 2, zero bubble": Layout(
        4, _pipeline(2, pipeline_schedule="zero_bubble", zero_optimization={"stage": 2})
    ),
    "torch, pipeline 2 x data 2, ZeRO 3, interleaved": Layout(
        4, _pipeline(2, pipeline_schedule="interleaved", zero_optimization={"stage": 3})
    ),
    "torch, pipeline 2 x tensor 2, interleaved": Layout(
        4, _pipeline(2, pipeline_schedule="interleaved", model_parallel_size=2)
    ),
    "torch, pipeline 2 x sequence 2, ZBV": Layout(
        4,
        _pipeline(2, pipeline_schedule="zbv", model_parallel_size=2, sequence_parallel=True),
        is_wide=True,
    ),
    "data 2": Layout(2, {"zero_optimization": {"stage": 0, "overlap_comm": True}}),
    "tensor 2 x pipeline 2": Layout(4, _deepspeeds_pipeline(2, model_parallel_size=2)),
    "tensor 2 x data 2": Layout(4, {"model_parallel_size": 2}),
    "ZeRO 1": Layout(2, _zero(1)),
    "ZeRO 2": Layout(2, _zero(2)),
    "ZeRO 3": Layout(2, _zero(3)),
    "ZeRO 3, second partition": Layout(
        4, {"train_micro_batch_size_per_gpu": 2, **_zero(3, zero_hpz_partition_size=2)}
    ),
    "ZeRO 3 x tensor 2": Layout(4, {"model_parallel_size": 2, **_zero(3)}),
    "ZeRO 1, states on the host": Layout(2, _zero(1, offload_optimizer=_HOST)),
    "ZeRO 2, states on the host": Layout(2, _zero(2, offload_optimizer=_HOST)),
    "ZeRO 3, all on the host": Layout(2, _zero(3, offload_optimizer=_HOST, offload_param=_HOST)),
    "sequence 2": Layout(2, {"model_parallel_size": 2, "sequence_parallel": True}, is_wide=True),
    "sequence 4": Layout(4, {"model_parallel_size": 4, "sequence_parallel": True}, is_wide=True),
    "sequence 2 x pipeline 2": Layout(
        4, _deepspeeds_pipeline(2, model_parallel_size=2, sequence_parallel=True), is_wide=True
    ),
    "sequence 2 x ZeRO 3": Layout(
        4, {"model_parallel_size": 2, "sequence_parallel": True, **_zero(3)}, is_wide=True
    ),
    "torch, ZeRO 1": Layout(2, _torch(1)),
    "torch, ZeRO 2": Layout(2, _torch(2)),
    "torch, ZeRO 3": Layout(2, _torch(3)),
    "torch, ZeRO 3, second partition": Layout(
        4, {"train_micro_batch_size_per_gpu": 2, **_torch(3, zero_hpz_partition_size=2)}
    ),
    "torch, ZeRO 1 x tensor 2": Layout(4, {"model_parallel_size": 2, **_torch(1)}),
    "torch, sequence 2 x ZeRO 3": Layout(
        4, {"model_parallel_size": 2, "sequence_parallel": True, **_torch(3)}, is_wide=True
    ),
}


@dataclass(frozen=True)
class Run:
    """What a run showed: the loss of every iteration, and weights and the model's states by logical name."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]


def settings_of(architecture: str, layout: Layout, *, recomputes: bool) -> dict[str, Any]:
    """Return the whole configuration of a case."""
    sizes = WIDE if layout.is_wide else SMALL
    settings = SETTINGS | sizes | ARCHITECTURES[architecture] | layout.settings
    if settings.get("num_kv_heads") == "half":
        settings["num_kv_heads"] = 4 if layout.is_wide else 2
    if "lora_rank" in settings:
        # Another method can leave a stage without adapters, which is refused.
        settings.pop("pipe_partition_method", None)
    if "pipe_parallel_size" in settings:
        settings["train_micro_batch_size_per_gpu"] = 2
    schedule = SCHEDULES[settings.get("pipeline_schedule", "1f1b")]
    # Refused with the others.
    if recomputes and not schedule.splits_backward:
        settings |= {"checkpoint_activations": True, "checkpoint_num_layers": 2}
        settings["partition_activations"] = layout.settings.get("model_parallel_size", 1) > 1
    return settings


def batches_of(resolved: Resolved, groups: Groups) -> Iterator[Batch]:
    """Return this replica's micro-batches: of each update's eight samples, replicas take some in turn."""
    generator = torch.Generator().manual_seed(1)
    is_masked = resolved.config.model.objective == "masked"
    shape = (SAMPLES, resolved.config.model.seq_length + (0 if is_masked else 1))
    for iteration in range(ITERATIONS):
        # Sequences that mostly increase by one, which a model can learn.
        steps = 1 + 4 * (torch.rand(shape, generator=generator) < 0.2).long()
        windows = steps.cumsum(dim=1) % VOCAB
        rows = masked_rows(resolved, windows, iteration) if is_masked else windows
        for part in rows.split(resolved.run.batch.micro)[groups.data.rank :: groups.data.size]:
            yield masked_batch(resolved, part) if is_masked else as_batch(part)


def masked_rows(resolved: Resolved, windows: Tensor, iteration: int) -> Tensor:
    """Return samples as a dataset masks them, [samples, 3, tokens]: 0 ends documents, 10 is the mask."""
    section = resolved.config.objective
    masking = Masking(
        mask=VOCAB - 1,
        text_ids=np.arange(1, VOCAB - 1),
        probability=section.mask_prob,
        short_probability=section.short_seq_prob,
        padding=0,
    )
    dataset = MaskedDataset(windows.numpy(), masking, length=windows.shape[1], key=f"{iteration}")
    return torch.from_numpy(np.stack([dataset[item] for item in range(len(windows))]))


def masked_batch(resolved: Resolved, rows: Tensor) -> Batch:
    """Return a micro-batch of masked samples."""
    ends = DocumentEnds(token=0, hides_others=resolved.config.data.reset_attention_mask)
    return as_masked_batch(rows, ends=ends, hides_padding=resolved.config.objective.short_seq_prob > 0)


class Started(NamedTuple):
    """The parts of a run."""

    engine: Engine
    step: TrainStep
    groups: Groups
    schedule: LearningRateSchedule


def start(resolved: Resolved) -> Started:
    """Build the model of the present world, its engine and its step, as the training program does.

    The position of a token decides its experts.
    """
    layout = resolved.run.layout
    groups = create_groups(layout.tensor, layout.stages, layout.experts)
    prepare_engine(resolved.run)
    model = build_model(resolved.model, resolved.run, groups, vocab_size=VOCAB)
    optimizer = build_optimizer(
        resolved.update.optimizer, resolved.run, model, model_group=groups.model, data_group=groups.data
    )
    schedule = LearningRateSchedule(
        optimizer, learning_rate_curve(resolved.config, decay_iterations=ITERATIONS)
    )
    engine = build_engine(resolved.run, resolved.update, model, optimizer, schedule, groups=groups)
    weighting = choose_weighting(resolved.update.normalization, groups)
    step: TrainStep = EngineStep(engine, accumulation=resolved.run.batch.accumulation, weighting=weighting)
    if resolved.run.experts.moe_num_experts > 1:
        routers = [module for module in model.modules() if isinstance(module, Router)]
        for router in routers:
            # Rounding decides between like scores, and one token of a layer's 180 with another expert changes
            # gradients of these small models by 2 to 8 %. tests/integration/test_verified_experts.py compares
            # in float64 how experts are chosen.
            router.by_position = True
        balance = ExpertBalance(routers, groups, rate=resolved.run.experts.moe_expert_bias_rate)
        balance.run = SimpleNamespace(engine=engine)
        step = partial(balance.around_step, step)
    return Started(engine, step, groups, schedule)


def train(resolved: Resolved, *, iterations: int = ITERATIONS) -> tuple[Run, nn.Module]:
    """Train through the engine in the present world; the run has this rank's parameters, whole in ZeRO 3."""
    engine, step, groups, _ = start(resolved)
    model = engine.model
    batches = batches_of(resolved, groups)
    losses = [float(step(batches).loss) for _ in range(iterations)]
    weights = {name: whole_weight(parameter) for name, parameter in named_logical_parameters(model)}
    return Run(losses, weights, {state.name: state.values for state in model_states(model)}), model


def whole_weight(parameter: nn.Parameter) -> Tensor:
    """All that this rank's copy of a parameter has, in ZeRO 3 gathered; collective there."""
    return whole_parameter(parameter, SINGLE_PROCESS)


def trains(architecture: str, layout: Layout) -> bool:
    """Return False if rules refuse the architecture on the layout."""
    try:
        resolved_from(settings_of(architecture, layout, recomputes=False), devices=layout.ranks)
    except ConfigError:
        return False
    return True


def micro_batch_of_reference(architecture: str, layout: Layout) -> int:
    """Return the samples that one process must compute at once, so that experts are chosen as on the layout.

    Dense architectures train the same, whatever their micro-batches are.
    """
    if architecture not in EXPERTS:
        return int(SETTINGS["train_micro_batch_size_per_gpu"])
    settings = settings_of(architecture, layout, recomputes=False)
    counted_at_once = layout.replicas if settings.get("moe_balance_over") == "batch" else 1
    return int(settings["train_micro_batch_size_per_gpu"]) * counted_at_once


def reference(
    architecture: str, *, is_wide: bool, folder: Path, micro_batch: int = 4, iterations: int = ITERATIONS
) -> None:
    """Train on one rank, in such micro-batches, and leave the run in the folder."""
    layout = Layout(1, {}, is_wide=is_wide)
    settings = settings_of(architecture, layout, recomputes=False)
    settings["train_micro_batch_size_per_gpu"] = micro_batch
    run, _ = train(resolved_from(settings), iterations=iterations)
    assert iterations < 8 or run.losses[-1] < run.losses[0] - 0.02, (
        f"{architecture} learns nothing: {run.losses}"
    )
    torch.save(asdict(run), _path(architecture, is_wide, micro_batch, folder))


def differences(
    architecture: str, layout: Layout, *, recomputes: bool, folder: Path, iterations: int = ITERATIONS
) -> dict[str, float]:
    """Train on this layout: largest difference of a loss and of an element of a weight from one rank's.

    Elements of the model's states count as those of weights.
    """
    settings = settings_of(architecture, layout, recomputes=recomputes)
    run, model = train(resolved_from(settings, devices=layout.ranks), iterations=iterations)
    path = _path(architecture, layout.is_wide, micro_batch_of_reference(architecture, layout), folder)
    expected = torch.load(path, weights_only=True)
    of_losses = [abs(one - other) for one, other in zip(run.losses, expected["losses"], strict=True)]
    of_weights = [float((state - expected["states"][name]).abs().max()) for name, state in run.states.items()]
    for name, parameter in named_logical_parameters(model):
        block = expected["weights"][name][tuple(slice(*limits) for limits in parameter.logical.slices)]
        held = run.weights[name][tuple(slice(0, length) for length in block.shape)]
        of_weights.append(float((held - block).abs().max()))
        # Rows that pad the vocabulary stay zero.
        of_weights.append(float(run.weights[name].abs().sum() - held.abs().sum()) if block.numel() else 0.0)
    return {"loss": max(of_losses), "weight": max(of_weights, default=0.0)}


def _path(architecture: str, is_wide: bool, micro_batch: int, folder: Path) -> Path:
    return folder / f"{list(ARCHITECTURES).index(architecture)}-{is_wide}-{micro_batch}.pt"
