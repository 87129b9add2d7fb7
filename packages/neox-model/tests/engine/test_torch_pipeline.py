"""Pipelines of the torch engine: the same bits as DeepSpeed's, in every schedule; planted faults are found.

`tests/integration/test_layouts.py` compares them with one process, for every architecture.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from support.distributed import run_ranks

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"engine": "torch"},
    "interleaved": {"pipeline_schedule": "interleaved"},
    "zero_bubble": {"pipeline_schedule": "zero_bubble"},
    "zero_bubble, 2 chunks": {"pipeline_schedule": "zero_bubble", "virtual_pipeline_stages": 2},
    "zbv": {"pipeline_schedule": "zbv"},
}
# The gradient of a weight that the forward pass transposes is transposed in memory.
POSITIONS = {"pos_emb": "rpe", "rpe_num_buckets": 8, "rpe_max_distance": 10}
ITERATIONS = 3
TIED = "embedding.word_embeddings.weight"


def settings_of(**more: Any) -> dict[str, Any]:
    from support.layouts import SETTINGS, SMALL

    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    small = SMALL | {"num_layers": 4, "train_micro_batch_size_per_gpu": 2}
    return SETTINGS | small | adam | {"pipe_parallel_size": 2} | more


def trained(**more: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and this rank's weights by name with the states that belong to them."""
    from neox_model.checkpoint.logical import engine_fragments
    from support import layouts
    from support.settings import resolved_from
    from support.worlds import forget_deepspeeds_world

    forget_deepspeeds_world()
    resolved = resolved_from(settings_of(**more), devices=torch.distributed.get_world_size())
    engine, step, groups, _ = layouts.start(resolved)
    batches = layouts.batches_of(resolved, groups)
    losses = [float(step(batches).loss) for _ in range(ITERATIONS)]
    states: dict[str, Tensor] = {}
    for fragment in engine_fragments(engine):
        states[fragment.name] = fragment.weight.clone()
        for key, value in engine.update.optimizer.state[fragment.held.holder].items():
            states[f"{fragment.name}/{key}"] = value.clone()
    return losses, states


def differing(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]):
    """What differs in a bit between two runs, of the tensors that this rank has in both."""
    common = one[1].keys() & other[1].keys()
    assert common
    found = [name for name in sorted(common) if not torch.equal(one[1][name], other[1][name])]
    return found + ([f"losses {one[0]} {other[0]}"] if one[0] != other[0] else [])


def compare_bits(precision: dict[str, Any]) -> dict[str, list[str]]:
    """Each schedule with DeepSpeed's pipeline; runs in both ranks."""
    found = {}
    # Without clipping, whose norm adds the tensors of each rank first.
    precision = precision | {"gradient_clipping": 0.0} | POSITIONS
    for tied, names in ((True, SCHEDULES.keys() - {"zbv"}), (False, {"zbv"})):
        # Stage 0 of ZBV sums both gradients of a tied matrix itself, in the order of the passes.
        settings = precision | {"no_weight_tying": not tied}
        expected = trained(**settings)
        assert expected[0][-1] < expected[0][0]
        for name in sorted(names):
            found[name] = differing(trained(**settings, **SCHEDULES[name]), expected)
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_schedule_trains_what_deepspeeds_pipeline_trains_bit_for_bit(precision):
    for found in run_ranks(compare_bits, size=2, precision=PRECISIONS[precision]):
        assert found == {name: [] for name in SCHEDULES}


@contextmanager
def one_part_before_another() -> Iterator[None]:
    """The second and the third part of the model in each other's place."""
    from neox_model.assembly import as_stages

    partition = as_stages.partition

    def exchanged(*arguments: Any) -> list[tuple[int, int]]:
        first, second, third, last = partition(*arguments)
        return [first, third, second, last]

    with patch.object(as_stages, "partition", exchanged):
        yield


def sums_no_ties() -> AbstractContextManager[Any]:
    from neox_model.assembly.as_stages import StagedModel

    return patch.object(StagedModel, "take_over_ties", lambda model: [])


def divides_no_loss() -> AbstractContextManager[Any]:
    from neox_model.engine.torch_pipeline import TorchPipelineEngine

    def undivided(engine: Any, loss: Tensor, target: Tensor) -> Tensor:
        engine._losses.append(loss.detach())
        return engine.update.guard(loss) * 1.0

    return patch.object(TorchPipelineEngine, "_loss", undivided)


def collects_no_gradients() -> AbstractContextManager[Any]:
    from neox_model.optim.mixed_precision import MixedPrecisionOptimizer

    return patch.object(MixedPrecisionOptimizer, "collect", lambda update: None)


def leaves_out_the_weights_of_a_micro_batch() -> AbstractContextManager[Any]:
    from neox_model.pipelining_compat import PipelineChunk

    compute = PipelineChunk.backward_weight_one_chunk

    def but_the_first(chunk: Any, index: int, **named: Any) -> None:
        if index:
            compute(chunk, index, **named)

    return patch.object(PipelineChunk, "backward_weight_one_chunk", but_the_first)


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]] = {
    "tied gradients are not summed": (sums_no_ties, SCHEDULES["interleaved"]),
    "the loss is not divided by the micro-batches": (divides_no_loss, SCHEDULES["1f1b"]),
    "parts in another order": (one_part_before_another, SCHEDULES["interleaved"]),
    "gradients of weights in 16 bit": (
        collects_no_gradients,
        # A tied matrix would have gradients of two data types, and end the processes.
        SCHEDULES["zero_bubble"] | PRECISIONS["bf16"] | {"no_weight_tying": True},
    ),
    "a micro-batch without gradients of weights": (
        leaves_out_the_weights_of_a_micro_batch,
        SCHEDULES["zbv"],
    ),
}


def plant_each() -> dict[str, list[str]]:
    found = {}
    for name, (fault, settings) in FAULTS.items():
        correct = trained(**settings)
        with fault():
            found[name] = differing(trained(**settings), correct)
    return found


def test_each_planted_fault_changes_bits():
    first, second = run_ranks(plant_each, size=2)
    for name in FAULTS:
        assert first[name] or second[name], name
    # Each stage has followed its own gradient of the tied matrix.
    assert TIED in first["tied gradients are not summed"]


def evaluated(count: int) -> dict[str, list[float]]:
    """Losses of evaluations through each schedule's stages, and of the plain model; runs in both ranks."""
    from neox_model.assembly.model import build_model
    from neox_model.engine.build import build_forward, prepare_engine
    from neox_model.parallel.topology import create_groups
    from neox_model.train.data.batch import DocumentEnds, as_batch
    from neox_model.train.step import as_micro_batches
    from support.settings import resolved_from

    ends = DocumentEnds(token=0, masks_loss=True, hides_others=True, restarts_positions=True)
    generator = torch.Generator().manual_seed(1)
    windows = [torch.randint(0, 11, (2, 16), generator=generator) for _ in range(count)]
    found: dict[str, list[float]] = {}
    for name, schedule in {"plain": {"pipe_parallel_size": 0}, **SCHEDULES}.items():
        resolved = resolved_from(settings_of(**schedule, reset_attention_mask=True), devices=2)
        groups = create_groups(1, resolved.config.parallelism.pipe_parallel_size)
        prepare_engine(resolved.run)
        engine = build_forward(
            resolved.run, build_model(resolved.model, resolved.run, groups, vocab_size=11), groups=groups
        )
        found[name] = [
            float(engine.evaluate(as_micro_batches(map(as_batch, windows)), count)),
            float(engine.evaluate(as_micro_batches(as_batch(one, ends=ends) for one in windows[:1]), 1))
            if name == "plain"
            else _with_documents(engine, [as_batch(one, ends=ends) for one in windows[:1]]),
        ]
    return found


def _with_documents(engine: Any, batches: list[Any]) -> float:
    from neox_model.train.step import as_micro_batches

    engine.forget_shapes()
    return float(engine.evaluate(as_micro_batches(iter(batches)), len(batches)))


def test_an_evaluation_through_the_stages_is_that_of_the_plain_model():
    first, second = run_ranks(evaluated, size=2, count=5)
    assert first == second
    plain = first.pop("plain")
    assert plain[0] != plain[1]
    for name, found in first.items():
        assert found == pytest.approx(plain, abs=1e-6), name


def phases_of_an_iteration() -> dict[str, int]:
    """How often each phase is entered in an update of four micro-batches; runs in both ranks."""
    from support import layouts
    from support.settings import resolved_from

    resolved = resolved_from(settings_of(**SCHEDULES["zero_bubble"]), devices=2)
    engine, step, groups, _ = layouts.start(resolved)
    entered: Counter[str] = Counter()

    def measure(phase: str) -> AbstractContextManager[None]:
        entered[phase] += 1
        return nullcontext()

    engine.measure_phases(measure)
    step(layouts.batches_of(resolved, groups))
    _, schedule = engine._schedule
    held = [
        message.buffer
        for stage in schedule._stages
        for table in (stage.args_recv_info, stage.grad_recv_info)
        for messages in table.values()
        for message in messages
        if message.buffer is not None
    ]
    # Messages have no memory between updates.
    assert {buffer.device.type for buffer in held} <= {"meta"}
    return dict(entered)


def test_each_pass_of_a_chunk_is_a_phase():
    expected = {"data": 1, "forward": 4, "backward_inner": 8, "pipeline": 1, "step": 1}
    found = run_ranks(phases_of_an_iteration, size=2)
    assert [{name: phases[name] for name in expected} for phases in found] == [expected] * 2


def lengths_in_turn() -> list[list[float]]:
    """Losses of batches of other lengths, of a pipeline and of one with documents; runs in both ranks."""
    from neox_model.train.data.batch import DocumentEnds, as_batch
    from support import layouts
    from support.settings import resolved_from
    from support.worlds import forget_deepspeeds_world

    losses = []
    for schedule in ({"engine": "deepspeed"}, *SCHEDULES.values()):
        forget_deepspeeds_world()
        resolved = resolved_from(settings_of(**schedule, pos_emb="rotary"), devices=2)
        engine, step, _, _ = layouts.start(resolved)
        generator = torch.Generator().manual_seed(1)
        losses.append([])
        for length in (6, 15, 9):
            windows = torch.randint(0, 11, (4, 2, length + 1), generator=generator)
            ends = DocumentEnds(
                token=0, masks_loss=False, hides_others=length == 15, restarts_positions=False
            )
            engine.forget_shapes()
            losses[-1].append(float(step(iter([as_batch(one, ends=ends) for one in windows])).loss))
            losses[-1].append(
                float(step.evaluate(iter([as_batch(one, ends=ends) for one in windows[:3]]), 3))
            )
    return losses


def test_lengths_and_documents_may_change_between_batches():
    for found in run_ranks(lengths_in_turn, size=2):
        deepspeed, *ours = found
        assert ours == [pytest.approx(deepspeed, abs=1e-6)] * len(SCHEDULES)


def refused_length(folder: str) -> str:
    """The error of a micro-batch whose length was not announced, on the first stage; runs in both ranks."""
    from neox_model.errors import ModelError
    from neox_model.train.data.batch import as_batch
    from support import layouts
    from support.settings import resolved_from

    more = {"engine": "torch", "pipe_parallel_size": 2, "pos_emb": "rotary"}
    _, step, groups, _ = layouts.start(resolved_from(settings_of(**more), devices=2))
    step(iter([as_batch(torch.zeros(2, 9, dtype=torch.long))] * 4))
    if groups.pipe.rank > 0:
        return ""
    with pytest.raises(ModelError) as caught:
        step(iter([as_batch(torch.zeros(2, 7, dtype=torch.long))] * 4))
    return str(caught.value)


def test_another_length_that_was_not_announced_is_an_error(tmp_path: Path):
    message, _ = run_ranks(refused_length, size=2, folder=str(tmp_path))
    assert "length=6" in message
    assert "length=8" in message
