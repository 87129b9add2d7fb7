"""Every engine writes what every other reads: real processes, a tiny split model, all precisions and stages.

The stored values are compared with what DeepSpeed itself says about its weights and states.
"""

import gc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_config.facts.learning_rate import WarmupThenDecay
from neox_config.spec.update import LossScaling
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.load import load_checkpoint, load_weights
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.save import save_checkpoint
from neox_model.checkpoint.shards import ShardReader
from neox_model.engine.deepspeed.build import model_parallel_unit, prepare
from neox_model.engine.deepspeed.compat import keep_gradients, mark_stage_copies
from neox_model.engine.deepspeed.engines import PlainEngine
from neox_model.engine.deepspeed.zero import ZeroUpdate
from neox_model.engine.updater import Updater
from neox_model.optim.loss_scale import LossScale
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.collectives import copy_to_group, reduce_from_group
from neox_model.parallel.gradient_reduction import GradientReduction
from neox_model.parallel.groups import SINGLE_RANK, Group, Groups
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.logical import logical_parameter, named_logical_parameters
from neox_model.parallel.topology import create_groups
from neox_model.parallel.vocab_embedding import VocabParallelEmbedding
from support.checkpoint_runs import Remembers
from support.distributed import run_ranks

pytestmark = pytest.mark.slow

# Odd on purpose: two tensor ranks need a padding row, and flat partitions are cut in the middle of rows.
VOCABULARY, WIDTH, INNER = 21, 6, 10
PIPELINE_NAMES = {"tied_modules.embedding": "embedding", "1": "layers.0", "2": "layers.1"}


def _init(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(std=0.3, generator=generator)


class Block(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, INNER, init=_init, group=group)
        self.down = RowParallelLinear(INNER, WIDTH, init=_init, group=group)
        self.scale = logical_parameter((1,), init=_init)

    def forward(self, hidden: Tensor) -> Tensor:
        inner, _ = self.up(hidden)
        outer, _ = self.down(functional.gelu(inner))
        return (hidden + outer) * self.scale


class Tiny(nn.Module):
    """Every kind of parameter: padded rows, columns, rows, copies, and one used twice."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH, init=_init, group=group)
        self.layers = nn.Sequential(Block(group), Block(group))

    def forward(self, tokens: Tensor) -> Tensor:
        return logits(self.embedding, self.layers(self.embedding(tokens)))


def logits(embedding: VocabParallelEmbedding, hidden: Tensor) -> Tensor:
    return functional.linear(copy_to_group(hidden, embedding.group), embedding.weight)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"fused": True},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "NAdam": {},
}


@dataclass(frozen=True)
class Setup:
    precision: str
    stage: int
    model: int = 1
    pipe: int = 0
    optimizer: str = "AdamW"

    @property
    def is_ours(self) -> bool:
        """Whether the update is not DeepSpeed's: without ZeRO."""
        return self.stage == 0

    @property
    def name(self) -> str:
        return f"{self.precision}-zero{self.stage}-tp{self.model}-pp{self.pipe}-{self.optimizer}"


class Run:
    """One engine around the tiny model."""

    def __init__(self, setup: Setup, seed: int) -> None:
        import deepspeed

        self.setup = setup
        self.groups = create_groups(setup.model, setup.pipe)
        self.model = _pipeline(self.groups) if setup.pipe else Tiny(self.groups.model)
        _fill(self.model, seed)
        options = OPTIMIZERS[setup.optimizer]
        optimizer = getattr(torch.optim, setup.optimizer)(self.model.parameters(), lr=0.01, **options)
        update = _own_update(setup, self.model, optimizer, self.groups) if setup.is_ours else None
        self.inner, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=optimizer if update is None else lambda parameters: update,
            mpu=None if setup.pipe else model_parallel_unit(self.groups),
            config=_settings(setup),
            dist_init_required=False,
        )
        if update is not None:
            keep_gradients(self.inner, is_pipeline=bool(setup.pipe))
        # As a plain engine in a pipeline, too: its loss is not scaled here.
        self.engine = PlainEngine(self.inner, self._update_of(update), SINGLE_RANK)
        self.iteration = 0
        self.state = Remembers()
        self.schedule = Remembers(applied_updates=0)

    def _update_of(self, update: MixedPrecisionOptimizer | None) -> Updater | ZeroUpdate:
        if update is not None:
            return Updater(update, self.model, self.groups)
        return ZeroUpdate(self.inner, min_loss_scale=1.0 if self.setup.precision == "fp16" else None)

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            tokens = torch.randint(
                VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(self._data_seed())
            )
            if self.setup.pipe:
                self.inner.train_batch(iter([(tokens, tokens)]))
            else:
                self.inner.backward(_loss(self.groups.model)(self.inner(tokens), tokens))
                self.inner.step()
            self.iteration += 1

    def save(self, directory: Path, **options: Any) -> Path:
        self.state.state = {
            "iteration": self.iteration,
            "samples": 2 * self.iteration,
            "validation_samples": 0,
            "tokens": 64,
            "skipped_iterations": 0,
        }
        self.schedule.state = {"applied_updates": self.iteration}
        return save_checkpoint(
            directory,
            self._parts(),
            iteration=self.iteration,
            config={"hidden_size": WIDTH},
            **options,
        )

    def load(self, directory: Path, **options: Any) -> None:
        self.iteration = load_checkpoint(
            directory,
            self._parts(),
            config={"hidden_size": WIDTH},
            seed=1,
            **options,
        )

    def _parts(self) -> RunParts:
        return RunParts(engine=self.engine, groups=self.groups, schedule=self.schedule, state=self.state)

    def values(self) -> dict[str, Tensor]:
        """Return this rank's master weights and optimizer states, from DeepSpeed's own functions."""
        values = {}
        if hasattr(self.inner.optimizer, "_lazy_init_hp_params_optimizer_state"):
            # What DeepSpeed does after its first update, for the functions that tell.
            self.inner.optimizer._lazy_init_hp_params_optimizer_state()
        for name, param in named_logical_parameters(self.model):
            values[name] = self._value(param, None)
            if self.setup.optimizer == "AdamW":
                values[f"{name}/exp_avg"] = self._value(param, "exp_avg")
                values[f"{name}/exp_avg_sq"] = self._value(param, "exp_avg_sq")
        return {name: value.detach().clone() for name, value in values.items()}

    def _value(self, param: nn.Parameter, key: str | None) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if hasattr(param, "_hp_mapping") or hasattr(param, "ds_id"):
            if key is None:
                return safe_get_full_fp32_param(param)
            return safe_get_full_optimizer_state(param, key)
        master = param
        optimizer = self.inner.optimizer
        if self.setup.is_ours:
            held = zip(optimizer.parameters, optimizer.masters, strict=True)
            master, optimizer = next(master for low, master in held if low is param), optimizer.optimizer
        return master if key is None else optimizer.state[master][key]

    def check_model_weights(self) -> None:
        """Assert that the model's weights are the master weights, rounded."""
        import deepspeed

        for name, param in named_logical_parameters(self.model):
            with deepspeed.zero.GatheredParameters([param]):
                master = self._value(param, None)
                assert torch.equal(param.detach(), master.to(param.dtype)), name

    def _data_seed(self) -> int:
        return self.iteration * 100 + self.groups.data.rank


def _settings(setup: Setup) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": setup.stage, "stage3_param_persistence_threshold": 12},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    if setup.is_ours:
        return settings | {"gradient_clipping": 0.0}
    if setup.precision != "fp32":
        settings[setup.precision] = {"enabled": True}
    if setup.precision == "fp16":
        settings["fp16"]["initial_scale_power"] = 4
    return settings


def _own_update(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, groups: Groups
) -> MixedPrecisionOptimizer:
    ties: list[Any] = []
    if setup.pipe:
        ties = model.get_tied_weights_and_groups()
        model.get_tied_weights_and_groups = list
    scale = None
    if setup.precision == "fp16":
        scale = LossScale(LossScaling(initial=16.0, is_dynamic=True), torch.device("cpu"))
    curve = WarmupThenDecay(style="constant", peak=0.01, floor=0.0, warmup=0.0, decay_iterations=9)
    return MixedPrecisionOptimizer(
        optimizer,
        LearningRateSchedule(optimizer, curve),
        dtype=DTYPES[{"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[setup.precision]],
        accumulation_dtype=torch.float32,
        max_norm=1.0,
        reduce=GradientReduction(group=groups.data),
        groups=groups,
        loss_scale=scale,
        ties=ties,
    )


def _loss(group: Group) -> Any:
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return reduce_from_group(output.float().square().sum() / (labels.numel() * VOCABULARY), group)

    return loss


def _pipeline(groups: Groups) -> nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    embedding = {"init": _init, "group": groups.model}
    model = PipelineModule(
        layers=[
            TiedLayerSpec("embedding", VocabParallelEmbedding, VOCABULARY, WIDTH, **embedding),
            LayerSpec(Block, groups.model),
            LayerSpec(Block, groups.model),
            TiedLayerSpec(
                "embedding", VocabParallelEmbedding, VOCABULARY, WIDTH, forward_fn=logits, **embedding
            ),
        ],
        topology=PipeModelDataParallelTopology(groups.pipe.size, groups.model.size, groups.data.size),
        loss_fn=_loss(groups.model),
        partition_method="uniform",
    )
    mark_stage_copies(model)
    model.plan_names = PIPELINE_NAMES
    return model


def _fill(model: nn.Module, seed: int) -> None:
    for name, param in named_logical_parameters(model):
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        whole = torch.empty(param.logical.shape)
        param.logical.init(whole, torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")))
        block = whole[tuple(slice(*bounds) for bounds in param.logical.slices)]
        param.data.zero_()
        param.data[tuple(slice(0, length) for length in block.shape)] = block


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, unsharded."""
    manifest = Manifest.read(folder)
    reader = ShardReader(folder, manifest)
    tensors = {}
    for name, record in manifest.tensors.items():
        flat = torch.empty(sum(piece.numel for piece in record.pieces), dtype=DTYPES[record.dtype])
        reader.fill(flat, name, (tuple((0, size) for size in record.shape), 0, flat.numel()))
        tensors[name] = flat.view(record.shape)
    return tensors


def check_equal(run: Run, stored: dict[str, Tensor]) -> None:
    """Assert that the engine holds this rank's blocks of the stored tensors, and zeros in the padding."""
    params = dict(named_logical_parameters(run.model))
    for name, value in run.values().items():
        slices = tuple(slice(*bounds) for bounds in params[name.partition("/")[0]].logical.slices)
        expected = stored[name][slices]
        inside = tuple(slice(0, length) for length in expected.shape)
        assert torch.equal(value[inside], expected), name
        value[inside] = 0
        assert not value.any(), f"padding of {name}"


def save_continue_and_resume(directory: str, setups: list[dict[str, Any]]) -> None:
    _prepare()
    for fields in setups:
        setup = Setup(**fields)
        folder = Path(directory) / setup.name
        run = Run(setup, seed=1)
        run.train(2)
        check_equal(run, whole_tensors(run.save(folder)))
        run.train(2)
        resumed = Run(setup, seed=2)
        resumed.load(folder)
        assert resumed.iteration == 2
        assert resumed.state.state == {
            "iteration": 2,
            "samples": 4,
            "validation_samples": 0,
            "batch_sizes": [],
            "tokens": 64,
            "skipped_iterations": 0,
        }
        assert resumed.inner.global_steps == 2
        resumed.train(2)
        expected = run.values()
        for name, value in resumed.values().items():
            assert torch.equal(value, expected[name]), f"{setup.name}: {name}"


def load_each_into_the_next(
    directory: str, setups: list[dict[str, Any]], sources: list[dict[str, Any]]
) -> None:
    """Load each source into the target at its place."""
    _prepare()
    for target, fields in zip(setups, sources, strict=True):
        source = Path(directory) / Setup(**fields).name
        run = Run(Setup(**target), seed=3)
        run.load(source)
        check_equal(run, whole_tensors(source / "global_step2"))
        run.check_model_weights()
        run.train(1)


PLAIN = [
    {"precision": precision, "stage": stage, "model": model}
    for precision in ("fp32", "bf16", "fp16")
    for stage in (0, 1, 2, 3)
    for model in (1, 2)
]
PIPELINE = [
    {"precision": precision, "stage": stage, "pipe": 2}
    for precision in ("fp32", "bf16", "fp16")
    for stage in (0, 1)
]


def _prepare() -> None:
    from deepspeed.accelerator import get_accelerator

    prepare()
    # DeepSpeed's Muon calls it when ZeRO starts, which imports the whole compiler (6 s) for nothing here.
    torch.compile = lambda function=None, **options: function or (lambda inner: inner)
    # DeepSpeed refuses float16 on a CPU, which can do it.
    type(get_accelerator()).is_fp16_supported = lambda accelerator: True
    # ZeRO 3 collects garbage at each start; what torch imported is none.
    gc.freeze()


def read_in_one_process(directory: str, sources: list[dict[str, Any]]) -> None:
    targets = [
        {"precision": precision, "stage": stage}
        for precision, stage in (("fp32", 0), ("bf16", 1), ("bf16", 3))
    ]
    load_each_into_the_next(directory, (targets * len(sources))[: len(sources)], sources)
    for fields in sources:
        folder = Path(directory) / Setup(**fields).name
        model = Tiny(SINGLE_RANK).bfloat16()
        groups = create_groups(1, 1)
        assert load_weights(folder, model=model, groups=groups, config={}) == 2
        stored = whole_tensors(folder / "global_step2")
        for name, param in named_logical_parameters(model):
            assert torch.equal(param, stored[name].bfloat16()), name


def run_in_parts(function: Callable[..., None], size: int, **lists: Any) -> None:
    """Run a function on a few setups per launch: gloo's groups keep their files open until a process ends."""
    directory = str(lists.pop("directory"))
    for start in range(0, len(lists["setups"]), 6):
        part = {name: values[start : start + 6] for name, values in lists.items()}
        run_ranks(function, size=size, directory=directory, timeout_seconds=600, **part)


MIXED = [
    {"precision": "bf16", "stage": 1, "model": 2},
    {"precision": "fp32", "stage": 0, "model": 2},
    {"precision": "bf16", "stage": 3, "model": 2},
    {"precision": "fp32", "stage": 1, "pipe": 2},
    {"precision": "bf16", "stage": 1, "pipe": 2, "model": 2},
]


def test_tensor_pipeline_and_data_parallel_ranks_together(tmp_path):
    run_in_parts(save_continue_and_resume, 4, directory=tmp_path, setups=MIXED)
    sources = MIXED[1:] + MIXED[:1]
    run_in_parts(load_each_into_the_next, 4, directory=tmp_path, setups=MIXED, sources=sources)
    run_ranks(read_in_one_process, size=1, directory=str(tmp_path), sources=MIXED, timeout_seconds=600)


def test_every_optimizer_with_one_value_per_weight_resumes_exactly(tmp_path):
    setups = [
        {"precision": precision, "stage": stage, "optimizer": optimizer}
        for optimizer in OPTIMIZERS
        for precision, stage in (("fp32", 0), ("bf16", 0), ("fp32", 1), ("bf16", 2), ("bf16", 3))
    ]
    run_in_parts(save_continue_and_resume, 1, directory=tmp_path, setups=setups)


def test_any_engine_and_layout_reads_checkpoints_of_any_other(tmp_path):
    setups = PLAIN + PIPELINE
    run_in_parts(save_continue_and_resume, 2, directory=tmp_path, setups=setups)
    sources = setups[7:] + setups[:7]
    run_in_parts(load_each_into_the_next, 2, directory=tmp_path, setups=setups, sources=sources)
