"""Estimates of models with experts against what is built and counted, and formulas of what is sent."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from neox_config.estimate import (
    activation_bytes_per_layer,
    communication_bytes,
    device_memory,
    flops_per_token,
)
from neox_config.estimate.parameters import local_parameters
from neox_config.estimate.setup import Setup, setup_of
from neox_config.estimate.suggest import USABLE_MEMORY, Cluster, suggest
from neox_model.assembly.model import build_model
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.train.run_info import model_throughput
from support.settings import resolved_from
from support.setups import make, on

LENGTH, WIDTH, NUMBER, CHOSEN, ENTRIES = 12, 24, 5, 2, 16
EXPERTS: dict[str, Any] = {
    "moe_num_experts": NUMBER,
    "moe_top_k": CHOSEN,
    "moe_expert_width": 16,
    "moe_router_type": "topk",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "use_bias_in_attn_linear": False,
    "make_vocab_size_divisible_by": 1,
}


def built(**settings: Any) -> tuple[torch.nn.Module, Setup]:
    resolved = resolved_from(EXPERTS | settings)
    model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=ENTRIES)
    return model, setup_of(resolved, vocab_size=ENTRIES)


def counted(model: torch.nn.Module) -> int:
    """Return the operations of matrix products of one sample, without the tables of angles."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, LENGTH, dtype=torch.int64))
    return sum(counter.get_flop_counts()["Global"].values())


def test_operations_per_token_are_those_that_transformers_computes():
    config = transformers.OlmoeConfig(
        num_hidden_layers=3,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=16,
        num_experts=NUMBER,
        num_experts_per_tok=CHOSEN,
        vocab_size=ENTRIES,
        max_position_embeddings=LENGTH,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model, setup = built(num_layers=3, hidden_size=WIDTH, num_attention_heads=4, qk_norm="width")
    formula = flops_per_token(setup.model, entries=ENTRIES, length=LENGTH)
    expected = 3 * counted(transformers.OlmoeForCausalLM(config).eval())
    assert LENGTH * formula == expected
    rates = model_throughput(setup.model, setup.run, model, SINGLE_PROCESS)
    assert LENGTH * rates.flops_per_token == expected


def test_the_log_and_the_record_name_the_parameters_that_a_token_uses(caplog):
    model, setup = built()
    with caplog.at_level("INFO"):
        model_throughput(setup.model, setup.run, model, SINGLE_PROCESS)
    total = sum(parameter.numel() for parameter in model.parameters())
    unused = len(setup.model.layers) * (NUMBER - CHOSEN) * 3 * 16 * setup.model.width
    assert f"{total:,}" in caplog.text
    assert f"{total - unused:,}" in caplog.text


def bytes_kept(layer: torch.nn.Module, hidden_SBD: torch.Tensor) -> int:
    """Return the memory that a forward pass leaves for the backward pass, weights not counted."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        layer(hidden_SBD)
    return sum(memory.nbytes() for memory in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation": "gelu"},
        {"moe_shared_width": 64, "moe_shared_gate": True, "moe_normalize_weights": True},
        {"moe_num_experts": 16, "moe_top_k": 1},
    ],
)
def test_stored_activations_equal_the_formula(settings, dtype):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "max_position_embeddings": 128}
    model, setup = built(**sizes, moe_expert_width=128, **settings)
    model.to(dtype)
    weights = "fp32" if dtype == torch.float32 else "bf16"
    setup = on(setup, micro=6).changed(precision={"weights": weights})
    hidden_SBD = torch.randn(128, 6, 64, dtype=dtype, requires_grad=True) * 1.0
    found = bytes_kept(model.stack[2], hidden_SBD)
    assert activation_bytes_per_layer(setup, setup.model.layers[1], device="cpu") == pytest.approx(
        found, rel=0.02
    )


def total(setup: Setup) -> tuple[int, int]:
    """Return the parameters of all experts, and the others."""
    layers, width = len(setup.model.layers), setup.model.width
    of_experts = layers * 8 * 3 * 128 * width
    return of_experts, local_parameters(on(setup, experts=1), 0) - of_experts


LARGE = make(
    *(2, 64, 4, 128, 2048),
    **EXPERTS | {"moe_num_experts": 8, "moe_expert_width": 128, "precision": "bfloat16"},
)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_rank_has_its_part_of_the_experts_and_all_other_weights(size):
    setup = on(LARGE, data=8, experts=size, zero=0)
    experts, others = total(setup)
    memory = device_memory(setup)
    assert memory.weights == 2 * (experts // size + others)
    assert memory.gradients == 2 * (experts // size + others)
    # Master weights and both moments in float32.
    assert memory.optimizer == 12 * (experts // size + others)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_divides_experts_over_the_ranks_that_have_the_same_ones(size, zero):
    setup = on(LARGE, data=8, experts=size, zero=zero)
    experts, others = total(setup)
    memory = device_memory(setup)
    of_rank = experts // size // (8 // size) + others // 8
    assert memory.optimizer == 12 * of_rank
    if zero > 1:
        assert memory.gradients == 4 * of_rank
    if zero < 3:
        assert memory.weights == 2 * (experts // size + others)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("segment", "passes"), [(None, 4), (1, 6)])
def test_a_rank_sends_the_rows_for_the_experts_of_others(size, segment, passes):
    setup = on(LARGE, data=8, experts=size, accumulation=3, micro=2, segment=segment)
    rows = 2 * 128 * CHOSEN * (size - 1) / size
    # Each forward pass sends the number of rows of each expert, too.
    numbers = 8 * 8 * (size - 1) / size
    sent = communication_bytes(setup)
    assert sent.experts == 3 * 2 * (passes * rows * 64 * 2 + (passes // 2 - 1) * numbers)
    # Gradients of experts are reduced over the ranks that have the same ones.
    experts, others = total(setup)
    of_experts = 2 * 2 * (experts // size) * (8 // size - 1) // (8 // size)
    assert sent.data == of_experts + 2 * 2 * others * 7 // 8


def test_stages_send_the_rows_of_their_own_layers():
    whole, staged = (
        communication_bytes(on(LARGE, data=8, experts=4, stages=stages, is_pipeline=stages > 1)).experts
        for stages in (1, 2)
    )
    assert whole == 2 * staged > 0


def test_suggested_layouts_with_experts_fit_and_divide_what_they_can():
    olmoe = make(
        *(16, 2048, 16, 4096, 50_304),
        **EXPERTS | {"moe_num_experts": 64, "moe_top_k": 8, "moe_expert_width": 1024, "qk_norm": "width"},
    )
    for memory in (24, 80):
        cluster = Cluster(devices=64, memory=memory * 2**30)
        found = suggest(olmoe, cluster, samples=1024)
        assert found
        for one in found:
            layout = one.setup.run.layout
            stages = (device_memory(one.setup, stage).total for stage in range(layout.stages))
            assert max(stages) == one.memory.total <= USABLE_MEMORY * cluster.memory
            assert layout.data % layout.experts == 64 % layout.experts == 1024 % layout.tensor == 0
        assert any(one.setup.run.layout.experts > 1 for one in found)
