"""Recomputed layers: the same gradients wherever their inputs wait, and the inputs wait where they should."""

import gc
import logging
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neox_model.assembly.activation_checkpointing import Recomputation, build_recomputation
from neox_model.assembly.checkpoint_storage import InputStorage
from neox_model.assembly.model import build_model
from neox_model.errors import ModelError
from neox_model.layers.transformer_layer import TransformerLayer
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK, Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.random import seed_streams
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.refusals import refused
from support.settings import resolved_from, specs_from

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "num_layers": 4}
PLACES: dict[str, dict[str, Any]] = {
    "where they are": {},
    "partitioned": {"partition_activations": True},
    "partitioned, one buffer": {"partition_activations": True, "contiguous_checkpointing": True},
    "host": {"checkpoint_in_cpu": True},
    "partitioned, one buffer, host": {
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "checkpoint_in_cpu": True,
    },
    "partitioned, segments of three": {"partition_activations": True, "checkpoint_num_layers": 3},
    "watched": {"synchronize_each_layer": True, "profile_backward": True},
}


def gradients(settings: dict[str, Any], groups: Groups) -> dict[str, Tensor]:
    """Of two micro-batches, with dropout."""
    devices = groups.world.size
    model = build_model(*specs_from(DROPOUT | settings, devices=devices), groups, vocab_size=11)
    seed_streams(5, groups)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        tokens = torch.randint(0, 11, (2, 13), generator=generator)
        model.loss_fn(model(tokens[:, :-1]), (tokens[:, 1:], torch.full((2, 12), 1 / 24))).backward()
    return {name: parameter.grad for name, parameter in named_logical_parameters(model)}


@pytest.mark.parametrize("place", PLACES)
def test_recomputing_changes_no_gradient_wherever_inputs_wait(place):
    expected = gradients({}, SINGLE_PROCESS)
    found = gradients({"checkpoint_activations": True} | PLACES[place], SINGLE_PROCESS)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


SELECTIVE = {"checkpoint_activations": True, "checkpoint_granularity": "selective"}


@pytest.mark.parametrize("scores", [{}, {"apply_query_key_layer_scaling": True}])
def test_recomputing_attention_alone_changes_no_gradient(scores):
    expected = gradients(scores, SINGLE_PROCESS)
    found = gradients(scores | SELECTIVE, SINGLE_PROCESS)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_recomputed_attention_keeps_no_scores():
    """Other activations are kept, as without recomputation."""
    kept: dict[bool, list[torch.Size]] = {}
    stored = DROPOUT | {"apply_query_key_layer_scaling": True}
    for is_recomputed in (False, True):
        resolved = resolved_from(stored | (SELECTIVE if is_recomputed else {}))
        model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=11)
        shapes = kept[is_recomputed] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, shapes=shapes: shapes.append(tensor.shape) or tensor, lambda tensor: tensor
        ):
            model(torch.zeros(2, 12, dtype=torch.long))
    scores = torch.Size((2, 6, 12, 12))
    assert scores in kept[False]
    assert scores not in kept[True]
    wide = torch.Size((12, 2, 96))
    assert kept[True].count(wide) == kept[False].count(wide) > 0


def check_two_ranks() -> None:
    groups = create_groups(2, 1)
    for sequence_parallel in (False, True):
        layout = {"model_parallel_size": 2, "sequence_parallel": sequence_parallel}
        expected = gradients(layout, groups)
        for settings in [*PLACES.values(), SELECTIVE]:
            found = gradients(layout | {"checkpoint_activations": True} | settings, groups)
            for name, gradient in expected.items():
                assert torch.equal(found[name], gradient), (name, settings)
    check_whole_inputs_are_dropped(groups)


def check_whole_inputs_are_dropped(groups: Groups) -> None:
    """After the forward pass, a partitioned input lives as its half alone."""
    for is_partitioned in (False, True):
        settings = DROPOUT | {"checkpoint_activations": True, "model_parallel_size": 2}
        resolved = resolved_from(settings | {"partition_activations": is_partitioned}, devices=2)
        model = build_model(resolved.model, resolved.run, groups, vocab_size=11)
        seen: list[weakref.ref] = []
        for layer in model.modules():
            if isinstance(layer, TransformerLayer):
                layer.register_forward_pre_hook(partial(remember, seen))
        loss = model(torch.zeros(2, 12, dtype=torch.long)).square().mean()
        gc.collect()
        alive = [reference() is not None for reference in seen]
        assert alive == [not is_partitioned] * 4
        loss.backward()


def remember(seen: list[weakref.ref], layer: nn.Module, inputs: tuple[Tensor]) -> None:
    # A tensor's Python object may die before its memory does: the storage is what counts.
    seen.append(weakref.ref(inputs[0].untyped_storage()))


@pytest.mark.slow
def test_two_tensor_parallel_ranks_keep_half_of_each_input():
    run_ranks(check_two_ranks, size=2)


def pack(keeper: InputStorage, *tensors: Tensor) -> list[Any]:
    return [keeper._pack(tensor) for tensor in tensors]


def test_a_share_is_the_rank_s_run_of_the_numbers_and_documents_stay():
    keeper = InputStorage(group=SINGLE_RANK)
    hidden, documents = torch.arange(6.0).view(2, 3), torch.arange(4)
    kept, ids = pack(keeper, hidden, documents)
    assert ids is documents
    hidden.zero_()
    assert torch.equal(keeper._unpack(kept), torch.arange(6.0).view(2, 3))


def test_one_buffer_holds_all_inputs_and_their_places_are_used_again():
    keeper = InputStorage(slots=2)
    first, second = pack(keeper, torch.ones(3, 2), torch.full((3, 2), 2.0))
    assert first.share.untyped_storage().data_ptr() == second.share.untyped_storage().data_ptr()
    with refused(ModelError, "2 inputs", "number_checkpoints"):
        pack(keeper, torch.ones(3, 2))
    place = first.share.data_ptr()
    del first
    (third,) = pack(keeper, torch.full((3, 2), 3.0))
    assert third.share.data_ptr() == place
    assert torch.equal(keeper._unpack(second), torch.full((3, 2), 2.0))


@pytest.mark.slow
def test_the_buffer_has_room_for_the_segments_of_all_outstanding_micro_batches():
    def layer(hidden: Tensor) -> Tensor:
        return hidden

    keeper = InputStorage(slots=0)
    recomputation = Recomputation(segment_layers=2, keeper=keeper, passes=3)
    model = build_model(*specs_from({"num_layers": 5}), SINGLE_PROCESS, vocab_size=11)
    layers = [layer, *model.stack[1:6], layer]
    hidden = torch.ones(12, 2, 24, requires_grad=True)
    results = [recomputation.run(layers, hidden) for _ in range(3)]
    assert keeper._memory.shape == (3 * 3, hidden.numel())
    assert keeper._free == []
    with pytest.raises(ModelError):
        recomputation.run(layers, hidden)
    for result in results:
        result.sum().backward()
    del result, results
    gc.collect()
    assert len(keeper._free) == 9


@pytest.mark.parametrize(("segment_layers", "segments"), [(1, 4), (3, 2)])
def test_the_device_is_waited_for_around_both_passes_of_each_segment(monkeypatch, segment_layers, segments):
    calls = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda device=None: calls.append(device))
    settings = {"checkpoint_activations": True, "checkpoint_num_layers": segment_layers}
    for is_asked in (False, True):
        calls.clear()
        gradients(settings | {"synchronize_each_layer": is_asked}, SINGLE_PROCESS)
        assert len(calls) == (2 * segments * 4 if is_asked else 0)


def test_profiling_logs_both_passes_of_each_segment(caplog):
    caplog.set_level(logging.INFO, logger="neox_model.assembly.activation_checkpointing")
    gradients(
        {"checkpoint_activations": True, "profile_backward": True, "checkpoint_num_layers": 3}, SINGLE_PROCESS
    )
    lines = [record.getMessage() for record in caplog.records if "recomputed" in record.getMessage()]
    assert len(lines) == 2 * 2
    assert lines[0].startswith("segment 2 of 1 recomputed layers: forward ")
    assert lines[1].startswith("segment 1 of 3 recomputed layers: forward ")
    assert all("backward with recomputation" in line for line in lines)


def test_without_recomputation_there_is_none():
    assert build_recomputation(resolved_from({}).run.recomputation, SINGLE_RANK, passes=1) is None
