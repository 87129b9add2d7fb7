"""`make gpu-gate`: its comparison with stored figures, its document, and what it counts, on a small layer."""

from pathlib import Path

import pytest
import torch

from support.gpu_gate_cache import Cache, digest
from support.gpu_gate_cubins import Kernel, summarize
from support.gpu_gate_faults import LAYER_FAULTS
from support.gpu_gate_figures import differences, page, read_figures
from support.gpu_gate_layers import ARCHITECTURES, build_layer_of, expected_flops, inputs_of
from support.gpu_gate_lowering import count_graph_breaks

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


@pytest.mark.parametrize("fault", ["an .item()", "a graph break"])
def test_a_planted_interruption_is_a_graph_break(layer, fault):
    LAYER_FAULTS[fault](layer)
    assert graph_breaks(layer) > 0


def test_a_figure_that_changes_is_reported_with_both_values():
    cell = ("layer", "Llama", "sm_90")
    before, after = {cell: {"copies": 0, "operations": 7}}, {cell: {"copies": 1024, "operations": 7}}
    assert differences(before, after) == ["Llama on sm_90: copies: before 0, after 1,024"]
    assert differences(after, after) == []


def test_a_cell_that_is_new_or_missing_is_reported():
    figures = {("source", "gated.cu", "sm_80"): {"kernels": 3}}
    assert differences(figures, {}) == ["gated.cu on sm_80: kernels: before 3, after none"]
    assert differences({}, figures) == ["gated.cu on sm_80: kernels: before none, after 3"]


def test_the_document_shows_the_stored_figures():
    assert (ROOT / "docs/gpu-gate.md").read_text(encoding="utf-8") == page(read_figures())


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
