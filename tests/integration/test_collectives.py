"""The collectives of a step on real processes are those that `neox-config estimate --step` predicts."""

import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from support.distributed import run_ranks

pytestmark = pytest.mark.slow

# Eleven tokens need a padding row; sizes that two ranks divide, also the sequence.
BASE: dict[str, Any] = {
    "num_layers": 3,
    "train_iters": 20,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": None,
    "model_parallel_size": 2,
}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "pos_emb": "rotary",
    "use_bias_in_mlp": False,
    "use_bias_in_attn_linear": False,
    "no_weight_tying": True,
}
ONCE: dict[str, Any] = {"gpt_j_residual": True}
RECOMPUTED: dict[str, Any] = {"checkpoint_activations": True}
SELECTIVE: dict[str, Any] = {"checkpoint_activations": True, "checkpoint_granularity": "selective"}
GMLP: dict[str, Any] = {"gmlp_attn_dim": 8, "attention_config": [[["amlp", "gmlp", "global"], 1]]}
AMP: dict[str, Any] = {"amp": {"enabled": True}}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "parallel residual": ONCE,
    "parallel residual, dropout": {**ONCE, "hidden_dropout": 0.1},
    "gated": LLAMA,
    "gated, parallel residual": {**LLAMA, **ONCE},
    "one norm for both": {**ONCE, "gpt_j_tied": True},
    "norms of outputs, queries and keys": {"norm_placement": "after", "qk_norm": "width"},
    "norms of heads": {**LLAMA, "norm_placement": "both", "qk_norm": "head", "norm_zero_centered": True},
    "recomputed": RECOMPUTED,
    "recomputed in pairs, dropout": {**RECOMPUTED, "checkpoint_num_layers": 2, "hidden_dropout": 0.1},
    "recomputed, parallel residual, inputs divided": {**RECOMPUTED, **ONCE, "partition_activations": True},
    "gMLP with attention": GMLP,
    "gMLP, recomputed": {**RECOMPUTED, "attention_config": [[["gmlp"], 3]], "pos_emb": "none"},
}
LAYOUTS: dict[str, dict[str, Any]] = {"tensor": {}, "sequence": {"sequence_parallel": True}}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"precision": "bfloat16"}}

OPTIMIZERS = ("Adam", "Muon", "Lamb", "SM3")
ZERO: dict[str, dict[str, Any]] = {
    f"ZeRO {stage}, {kind}": BASE
    | PRECISIONS["bf16"]
    | {
        "model_parallel_size": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": kind, "params": {"lr": 0.01}},
    }
    for stage in (1, 3)
    for kind in OPTIMIZERS
}
# Sums of the squares of rows are joined, too.
ROWS = {"optimizer": {"type": "Muon", "params": {"lr": 0.01, "row_beta": 0.9}}}
# Two ranks that divide three experts have two and one.
MOE: dict[str, Any] = {
    "moe_num_experts": 3,
    "moe_layers": [0, 2],
    "moe_expert_width": 24,
    "moe_shared_width": 8,
}
ZERO |= {f"ZeRO 3, experts, {kind}": ZERO[f"ZeRO 3, {kind}"] | MOE for kind in ("Adam", "Muon", "Lamb")}
ZERO |= {f"{case}-rows": settings | ROWS for case, settings in ZERO.items() if case.endswith("Muon")}

CASES: dict[str, dict[str, Any]] = {
    f"{layout}, {architecture}": BASE | LAYOUTS[layout] | ARCHITECTURES[architecture]
    for layout in LAYOUTS
    for architecture in ARCHITECTURES
} | {
    "bf16, sequence, parallel residual": BASE | LAYOUTS["sequence"] | ONCE | PRECISIONS["bf16"],
    "bf16, tensor, gated, parallel residual": BASE | LLAMA | ONCE | PRECISIONS["bf16"],
    "amp, sequence": BASE | LAYOUTS["sequence"] | AMP,
    "amp, sequence, gated, parallel residual": BASE | LAYOUTS["sequence"] | LLAMA | ONCE | AMP,
    "amp, tensor": BASE | AMP,
    "amp, sequence, gMLP with attention": BASE | LAYOUTS["sequence"] | GMLP | AMP,
    "recomputed attention": BASE | LAYOUTS["sequence"] | SELECTIVE,
    **{
        f"tensor, {kind}": BASE | {"optimizer": {"type": kind, "params": {"lr": 0.01}}} for kind in OPTIMIZERS
    },
    "bf16, tensor, Muon": BASE | PRECISIONS["bf16"] | {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "tensor, Muon-rows": BASE | ROWS,
    "tensor, experts": BASE | MOE,
    "sequence, experts, gated": BASE | LAYOUTS["sequence"] | LLAMA | MOE,
    "tensor, experts, Muon-rows": BASE | MOE | ROWS,
    "tensor, experts, Lamb": BASE | MOE | {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
    "tensor, gated, SM3": BASE | LLAMA | {"optimizer": {"type": "SM3", "params": {"lr": 0.01}}},
    "data": BASE | {"model_parallel_size": 1},
    "data, overlapped": BASE | {"model_parallel_size": 1, "zero_optimization": {"overlap_comm": True}},
    "data, loss over all tokens": BASE | {"model_parallel_size": 1, "loss_normalization": "global"},
}


def count(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what this rank called, and what is predicted, by case."""
    from neox_config.estimate.setup import setup_of
    from neox_config.estimate.step import step_collectives
    from support.collectives import counted_step
    from support.layouts import VOCAB
    from support.settings import resolved_from

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    found = {}
    for name, settings in cases.items():
        resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
        setup = setup_of(resolved, vocab_size=VOCAB)
        predicted: dict[str, list[int]] = {}
        # All ranks are one process group.
        named = {"experts": "data"} if setup.run.layout.experts == setup.devices else {}
        for each in step_collectives(setup, device="cpu"):
            group = named.get(each.group, each.group)
            total = predicted.setdefault(f"{each.operation} over {group}", [0, 0])
            total[0] += each.calls
            total[1] += each.bytes
        found[name] = {"pluralize": counted_step(resolved), "predicted": predicted}
    return found


# Each of four experts has as many rows: positions choose in turn.
DIVIDED = (
    BASE
    | LLAMA
    | {
        "train_micro_batch_size_per_gpu": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_layers": [0, 2],
        "moe_expert_width": 24,
        "moe_router_type": "topk",
        "expert_parallel_size": 2,
    }
)
OF_FOUR: dict[str, dict[str, Any]] = {
    "experts over all replicas": DIVIDED | {"model_parallel_size": 1, "expert_parallel_size": 4},
    "experts over half of the replicas": DIVIDED | {"model_parallel_size": 1},
    "experts x tensor": DIVIDED,
    "experts x sequence, recomputed": DIVIDED | LAYOUTS["sequence"] | RECOMPUTED,
    "bf16, experts x tensor, recomputed in pairs": DIVIDED
    | PRECISIONS["bf16"]
    | {**RECOMPUTED, "checkpoint_num_layers": 2},
}


@pytest.fixture(scope="module")
def counted_of_four() -> list[dict[str, Any]]:
    return run_ranks(count, size=4, cases=OF_FOUR, timeout_seconds=900)


@pytest.mark.parametrize("case", OF_FOUR)
def test_ranks_that_divide_experts_exchange_the_predicted_rows(counted_of_four, case):
    for rank in counted_of_four:
        assert rank[case]["pluralize"] == rank[case]["predicted"]


# Each waits for the device.
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__")


def reads(settings: dict[str, Any]) -> dict[str, int]:
    """Return how often layers with experts read values on the host in an update, by method."""
    from torch import Tensor

    from support.layouts import batches_of, start
    from support.settings import resolved_from

    resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
    _, step, groups, _ = start(resolved)
    batches, found = batches_of(resolved, groups), Counter[str]()
    step(batches)

    def counted(name: str, read: Callable[..., Any], *arguments: Any) -> Any:
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        found[name] += any("layers/experts/" in file for file in files)
        return read(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            read = partial(counted, name, getattr(Tensor, name))
            # A method: a partial function is not bound to its tensor.
            patch.setattr(Tensor, name, lambda *arguments, read=read: read(*arguments))
        step(batches)
    return {name: number for name, number in found.items() if number}


def test_the_host_reads_once_per_layer_and_micro_batch():
    layers, micro_batches, passes = 2, 2, 2
    recomputed = OF_FOUR["experts x sequence, recomputed"]
    assert (
        run_ranks(reads, size=4, settings=recomputed, timeout_seconds=300)
        == [{"tolist": layers * micro_batches * passes}] * 4
    )


@pytest.fixture(scope="module")
def counted() -> list[dict[str, Any]]:
    return run_ranks(count, size=2, cases=CASES | ZERO, timeout_seconds=900)


@pytest.mark.parametrize("case", CASES)
def test_a_step_calls_the_predicted_collectives(counted, case):
    for rank in counted:
        assert rank[case]["pluralize"] == rank[case]["predicted"]


def of_optimizer(counts: dict[str, dict[str, list[int]]], case: str) -> dict[str, list[int]]:
    """Return the calls and bytes that a case has more than the same one with Adam."""
    adam = counts[f"{case.rpartition(' ')[0]} Adam"]
    more = {
        name: [one - other for one, other in zip(found, adam.get(name, [0, 0]), strict=True)]
        for name, found in counts[case].items()
    }
    return {name: found for name, found in more.items() if any(found)}


@pytest.mark.parametrize("case", [case for case in ZERO if not case.endswith("Adam")])
def test_an_optimizer_that_joins_rows_adds_the_predicted_collectives(counted, case):
    found, predicted = (
        of_optimizer({name: counts[kind] for name, counts in counted[0].items()}, case)
        for kind in ("pluralize", "predicted")
    )
    assert predicted
    assert found == predicted


def test_muon_sends_rows_of_as_many_matrices_as_there_are_ranks_there_and_back_at_once(counted):
    found = {name: counts["pluralize"] for name, counts in counted[0].items()}
    # Four matrices in each of three layers.
    assert of_optimizer(found, "ZeRO 1, Muon")["all_to_all_single over data"][0] == 2 * 12 // 2


# Calls per layer and micro-batch, in both passes.
PER_LAYER = {
    "tensor, sequential": {"all_reduce": 4},
    "tensor, parallel residual": {"all_reduce": 2},
    "tensor, parallel residual, dropout": {"all_reduce": 3},
    "tensor, gated": {"all_reduce": 4},
    "tensor, gated, parallel residual": {"all_reduce": 2},
    "sequence, sequential": {"reduce_scatter_tensor": 4, "all_gather_into_tensor": 6},
    "sequence, parallel residual": {"reduce_scatter_tensor": 2, "all_gather_into_tensor": 3},
    "sequence, gated": {"reduce_scatter_tensor": 4, "all_gather_into_tensor": 6},
}


@pytest.mark.parametrize("case", PER_LAYER)
def test_layers_call_as_few_collectives_as_their_form_allows(counted, case):
    """Embedding and head call one each, or two of each kind with a split sequence; the update the rest."""
    calls = {name: number for name, (number, _) in counted[0][case]["pluralize"].items()}
    splits = case.startswith("sequence")
    outside = {"all_reduce": 0 if splits else 2, "reduce_scatter_tensor": 2, "all_gather_into_tensor": 3}
    layers, micro_batches = BASE["num_layers"], 2
    for operation, per_layer in PER_LAYER[case].items():
        update = (2 if splits or "parallel" in case else 1) if operation == "all_reduce" else 0
        expected = micro_batches * (layers * per_layer + outside[operation]) + update
        assert calls[f"{operation} over model"] == expected, operation


def test_a_split_sequence_sums_all_replicated_gradients_in_one_message(counted):
    # One for them, and one for the norm of all gradients.
    assert counted[0]["sequence, sequential"]["pluralize"]["all_reduce over model"][0] == 2
