"""`make gpu-gate`: its comparison with stored figures, its document, and what it counts, on a small layer."""

from pathlib import Path

import pytest
import torch

from gpu_gate.cache import Cache, digest
from gpu_gate.cubins import Kernel, summarize
from gpu_gate.faults import LAYER_FAULTS
from gpu_gate.figures import differences, page, read_figures
from gpu_gate.layers import ARCHITECTURES, build_layer_of, expected_flops, inputs_of
from gpu_gate.lowering import count_graph_breaks
from gpu_gate.operators import WORKS, demangle, operator_figures, predicted_share
from neox_model.layers.experts import looped_product
from support.refusals import refused, shows

ROOT = Path(__file__).parents[2]
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 16, "max_position_embeddings": 16}


@pytest.fixture
def layer():
    yield build_layer_of(ARCHITECTURES["GPT-NeoX"].resolved(**SMALL))
    torch.compiler.reset()


def graph_breaks(layer):
    resolved = ARCHITECTURES["GPT-NeoX"].resolved(**SMALL)
    inputs = inputs_of(resolved, "cpu", torch.float32, has_documents=False)
    return count_graph_breaks(layer.block, inputs, "eager")


def test_a_layer_has_no_graph_break(layer):
    assert graph_breaks(layer) == 0


def test_a_layer_with_experts_has_no_graph_break():
    """Nor does the loop over experts, which the host drives, pass as none."""
    resolved = ARCHITECTURES["experts"].resolved(**SMALL, moe_num_experts=4, moe_top_k=2)
    inputs = inputs_of(resolved, "cpu", torch.bfloat16, has_documents=False)
    layer = build_layer_of(resolved).to(torch.bfloat16)
    assert count_graph_breaks(layer.block, inputs, "eager") == 0
    torch.compiler.reset()
    layer.mlp.experts.product = looped_product
    assert count_graph_breaks(layer.block, inputs, "eager") > 0
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["an .item()", "a graph break"])
def test_a_planted_interruption_is_a_graph_break(layer, fault):
    LAYER_FAULTS[fault](layer)
    assert graph_breaks(layer) > 0


def test_a_figure_that_changes_is_reported_with_both_values():
    cell = ("layer", "Llama", "sm_90")
    before, after = {cell: {"copies": 0, "operations": 7}}, {cell: {"copies": 1024, "operations": 7}}
    assert shows(differences(before, after), "sm_90", "before 0", "after 1,024")
    assert differences(after, after) == []


def test_a_cell_that_is_new_or_missing_is_reported():
    figures = {("source", "gated.cu", "sm_80"): {"kernels": 3}}
    assert shows(differences(figures, {}), "gated.cu", "sm_80", "before 3")
    assert shows(differences({}, figures), "gated.cu", "sm_80", "after 3")


def test_the_document_shows_the_stored_figures():
    assert (ROOT / "docs/reports/gpu-gate.md").read_text(encoding="utf-8") == page(read_figures())


def test_figures_of_kernels_are_joined():
    kernels = [Kernel(40, 0, 0, {16: 2, 4: 1}), Kernel(128, 2048, 12, {2: 3})]
    assert summarize(kernels) == {
        "kernels": 2,
        "most registers": 128,
        "registers, summed": 168,
        "bytes spilled": 12,
        "most shared bytes": 2048,
        "accesses of 16 bytes": 2,
        "accesses of 8 bytes": 0,
        "accesses of 4 bytes or fewer": 4,
    }


# Most instructions per element on an H100.
LIMITS = {
    "scaled_softmax forward": 24,
    "scaled_causal_softmax forward": 24,
    "scaled_masked_softmax forward": 24,
    "bias_dropout_add backward": 20,
    "rotary, vectors of 8": 15,
    "rotary, vectors of 4": 15,
    "rotary, vectors of 2": 15,
}


@pytest.mark.parametrize("operator", WORKS)
def test_operators_keep_their_limits(operator):
    stored = read_figures()
    for gpu in ("sm_80", "sm_90", "sm_100"):
        figures = stored["operator", operator, gpu]
        assert figures["bytes spilled"] == 0
        assert figures["accesses of 1 or 2 bytes"] == 0
    figures = stored["operator", operator, "sm_90"]
    assert figures["blocks"] >= 2
    assert figures["instructions of 100 elements"] <= 100 * LIMITS.get(operator, 40)
    assert predicted_share(operator, figures)[2] >= 0.85


# A loop that stores 16 bytes, of two that load them; the rest is before, after, or jumps back into the loop.
MACHINE_CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.U16 R2, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0040*/                   FADD R4, R4, R8 ;
        /*0050*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0060*/               @P1 BRA 0x20 ;
        /*0070*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*0080*/                   EXIT ;
        /*0090*/                   FADD R4, R4, R8 ;
        /*00a0*/                   BRA 0x40 ;
        /*00b0*/                   NOP ;
"""
SYMBOL = "_ZN4neox12_GLOBAL__N_132bias_dropout_add_backward_kernelI13__nv_bfloat16Li8ELb1EEEvPKT_"
FORWARD = SYMBOL.replace("32bias_dropout_add_backward", "31bias_dropout_add_forward")


def test_instructions_and_bytes_are_those_of_the_loop_that_stores():
    kernels = {name: Kernel(64, 10_240, code=MACHINE_CODE) for name in (SYMBOL, FORWARD)}
    assert demangle([SYMBOL]) == ["bias_dropout_add_backward_kernel<__nv_bfloat16, 8, true>"]
    assert operator_figures("bias_dropout_add", kernels, "sm_90")["bias_dropout_add backward"] == {
        "registers": 64,
        "bytes spilled": 0,
        "blocks": 4,
        "instructions of 100 elements": 62,  # 5 for 8 elements
        "bytes of 100 elements": 100 * 48 // 8,
        "accesses of 1 or 2 bytes": 0,
        "bytes in flight of a thread": 32,
    }


def test_a_kernel_that_is_missing_is_reported():
    with refused(RuntimeError, "bias_dropout_add.cu", "0 kernels", "bias_dropout_add_f"):
        operator_figures("bias_dropout_add", {SYMBOL: Kernel(64, 0, code=MACHINE_CODE)}, "sm_90")


def test_too_few_blocks_and_too_many_instructions_lower_the_predicted_share():
    figures = read_figures()["operator", "scaled_softmax forward", "sm_90"]
    memory, issue, share = predicted_share("scaled_softmax forward", figures)
    assert memory == 1
    fewer = predicted_share("scaled_softmax forward", figures | {"blocks": 1})
    assert fewer[0] < 0.5
    assert fewer[2] < 0.5
    more = figures | {"instructions of 100 elements": 4 * figures["instructions of 100 elements"]}
    assert predicted_share("scaled_softmax forward", more)[1] == pytest.approx(issue / 4)
    assert predicted_share("scaled_softmax forward", more)[2] < 0.65 < share


def test_a_result_is_computed_once_per_content(tmp_path):
    cache, calls = Cache(tmp_path), []
    for text in (b"one", b"one", b"two"):
        found = cache.get(digest(text), lambda folder: calls.append(folder) or {"kernels": 1})
        assert found == {"kernels": 1}
    assert len(calls) == 2


def test_operations_are_those_of_the_layer_without_the_head():
    resolved = ARCHITECTURES["GPT-NeoX"].resolved(**SMALL)
    matrices, scores = 12 * 64 * 64, 2 * 16 * 64
    assert expected_flops(resolved) == 3 * 2 * (matrices + scores) * 16 * 2
