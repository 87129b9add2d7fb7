"""The estimate against the model that is really built: every parameter, and what a layer really keeps."""

import re
from collections import Counter
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch

from neox_config import load_config, resolve
from neox_config.estimate import (
    activation_bytes_per_layer,
    count_parameters,
    estimate,
    flops_per_token,
)
from neox_config.estimate.parameters import local_state_values
from neox_config.estimate.setup import Setup, setup_of
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_kernels import Operator
from neox_model.assembly import operators
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.model import build_model
from neox_model.assembly.optimizer import build_optimizer
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from neox_model.parallel.logical import named_logical_parameters
from support.documents import blocks_of, read
from support.fused_on_cpu import make_available
from support.settings import resolved_from

VOCABULARY = 11

NORMS = ("layernorm", "rmsnorm", "scalenorm")
POSITIONS = ("learned", "rotary", "sinusoidal", "rpe", "alibi", "none")
# One of each kind of feed-forward part and of what it keeps.
ACTIVATIONS = ("gelu", "relu", "softsign", "geglu", "reglu", "glu", "bilinear")


def build(**settings) -> tuple[SequentialModel, Setup]:
    resolved = resolved_from({"make_vocab_size_divisible_by": 8} | settings)
    return (
        build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=VOCABULARY),
        setup_of(resolved, vocab_size=VOCABULARY),
    )


def flops(setup: Setup) -> int:
    return flops_per_token(setup.model, entries=setup.entries, length=setup.run.batch.length)


def part_of(name: str) -> str:
    if "position_embeddings" in name or ".position." in name:
        return "positions"
    if "norm" in name:
        return "norms"
    return next(
        part
        for key, part in {
            "embedding": "embedding",
            "attention": "attention",
            "mlp": "mlp",
            "lm_head": "head",
        }.items()
        if key in name
    )


@pytest.mark.parametrize("is_untied", [False, True])
@pytest.mark.parametrize(("norm", "position"), list(product(NORMS, POSITIONS)))
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_parameter_counts_equal_the_built_model_part_by_part(norm, position, activation, is_untied):
    model, setup = build(norm=norm, pos_emb=position, activation=activation, no_weight_tying=is_untied)
    built = dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0)
    for name, parameter in named_logical_parameters(model):
        built[part_of(name)] += prod(parameter.logical.shape)
    assert count_parameters(setup.model, setup.entries) == built


@pytest.mark.parametrize(
    "settings",
    [
        {"mlp_width": 50},
        {"gpt_j_residual": True},
        {"gpt_j_residual": True, "gpt_j_tied": True, "use_qk_layernorm": True},
        {"norm_placement": "both", "qk_norm": "head", "norm_zero_centered": True},
        {"norm_placement": "after", "qk_norm": "width", "num_kv_heads": 2, "norm": "scalenorm"},
        {"norm": "non_parametric_layernorm", "qk_norm": "width"},
        {"num_layers": 1},
        {"num_kv_heads": 2, "pos_emb": "rpe", "rpe_num_buckets": 9},
        {"use_bias_in_mlp": False},
        {"head_dim": 10, "attention_sinks": True, "attention_gate": "element"},
        {"head_dim": 2, "num_kv_heads": 2, "attention_gate": "head", "use_bias_in_attn_linear": False},
        {"use_bias_in_attn_linear": False, "attention_config": [[["amlp"], "all"]]},
        {"attention_config": ["local", "gmlp", "amlp"], "gmlp_attn_dim": 5, "norm": "scalenorm"},
        {"attention_config": [[["amlp", "bigbird", "gmlp"], 1]], "gmlp_attn_dim": None},
    ],
)
def test_parameters_with_other_settings(settings):
    model, setup = build(**settings | {"sparsity_config": {"block": 4}})
    built = dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0)
    for name, parameter in named_logical_parameters(model):
        built[part_of(name)] += prod(parameter.logical.shape)
    assert count_parameters(setup.model, setup.entries) == built


@pytest.mark.parametrize("is_untied", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_operations_are_six_per_number_of_a_matrix_and_the_attention(activation, is_untied):
    """Source: arXiv:2204.02311, appendix B. Embeddings are looked up; a tied one is the output matrix."""
    model, setup = build(activation=activation, no_weight_tying=is_untied)
    looked_up = {"embedding.position_embeddings.weight"}
    looked_up |= {"embedding.word_embeddings.weight"} if is_untied else set()
    multiplied = sum(
        prod(parameter.logical.shape)
        for name, parameter in named_logical_parameters(model)
        if parameter.dim() == 2 and name not in looked_up
    )
    assert flops(setup) == 6 * multiplied + 12 * 3 * 24 * 12


def test_shared_layers_work_as_often_as_they_are_used():
    _, shared = build(num_layers=4, num_unique_layers=2)
    _, apart = build(num_layers=4)
    assert flops(shared) == flops(apart)


def bytes_kept(model: SequentialModel, layer_index: int) -> int:
    """Memory that the forward pass of one layer leaves for its backward pass, weights not counted."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            # The tensor is kept, too, so that its memory is not given to another one.
            kept[memory.data_ptr()] = (memory.nbytes(), tensor)
        return tensor

    layer = model.stack[1 + layer_index]
    dtype = next(layer.parameters()).dtype
    # Enough tokens for the norm's own backward pass on a CPU.
    hidden_SBD = torch.randn(128, 6, 64, dtype=dtype, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        result = layer(hidden_SBD)
    assert result.shape == hidden_SBD.shape
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("norm", "position"), [("layernorm", "learned"), ("rmsnorm", "rotary"), ("scalenorm", "none")]
)
@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("recomputes", [False, True])
def test_stored_activations_equal_the_formula(norm, position, activation, dtype, shared, recomputes):
    if recomputes and not ACTIVATION_FACTS[activation].is_gated:
        pytest.skip("there is no product")
    sizes = {
        "num_kv_heads": 4 // shared,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 128,
        "max_position_embeddings": 128,
    }
    settings = {"norm": norm, "pos_emb": position, "activation": activation, **sizes}
    model, setup = build(recompute_gated_product=recomputes, **settings)
    model.to(dtype)
    weights = "fp32" if dtype == torch.float32 else "bf16"
    setup = setup.changed(batch={"micro": 6}, precision={"weights": weights})
    # Statistics of the norms and tables of angles are the difference; it gets smaller in wider models.
    assert activation_bytes_per_layer(setup, setup.model.layers[1], device="cpu") == pytest.approx(
        bytes_kept(model, 1), rel=0.0125
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 24, "pos_emb": "rotary", "num_kv_heads": 2},
        {"attention_gate": "head", "head_dim": 24},
        {"attention_gate": "element"},
        # Layer scaling stores scores on every device.
        {"attention_sinks": True, "apply_query_key_layer_scaling": True},
        {"attention_sinks": True, "attention_softcap": 2.0, "apply_query_key_layer_scaling": True},
    ],
)
def test_stored_activations_of_attention_equal_the_formula(settings, dtype):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "max_position_embeddings": 128}
    model, setup = build(**sizes, **settings)
    model.to(dtype)
    weights = "fp32" if dtype == torch.float32 else "bf16"
    setup = setup.changed(batch={"micro": 6}, precision={"weights": weights})
    assert activation_bytes_per_layer(setup, setup.model.layers[1], device="cpu") == pytest.approx(
        bytes_kept(model, 1), rel=0.015
    )


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("recomputes", ["auto", False])
def test_stored_activations_of_fused_operators_equal_the_formula(monkeypatch, kv_heads, recomputes):
    for name, operator in vars(operators).copy().items():
        if isinstance(operator, Operator):
            monkeypatch.setattr(operators, name, operator)
    make_available(Counter())
    settings = {
        "layernorm_fusion": True,
        "pos_emb": "rotary",
        "rope_fusion": True,
        "num_kv_heads": kv_heads,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 128,
        "max_position_embeddings": 128,
        "activation": "swiglu",
        "glu_fusion": True,
        "recompute_gated_product": recomputes,
    }
    model, setup = build(**settings)
    setup = setup.changed(batch={"micro": 6})
    # Statistics and angles, as above, of a layer that keeps less.
    expected = activation_bytes_per_layer(setup, setup.model.layers[1], device="cpu")
    assert expected == pytest.approx(bytes_kept(model, 1), rel=0.02)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("Adam", {}),
        ("Adafactor", {}),
        ("Lamb", {}),
        ("Lion", {}),
        ("Muon", {}),
        ("Muon", {"row_beta": 0.9}),
        ("SM3", {}),
        ("SM3", {"momentum": 0.9}),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"no_weight_tying": True, "pos_emb": "rpe", "activation": "geglu"},
        {"attention_config": ["gmlp", "amlp"], "num_layers": 2, "gmlp_attn_dim": 5},
        {"moe_num_experts": 3, "activation": "swiglu", "moe_shared_width": 8, "moe_shared_gate": True},
        {
            "moe_num_experts": 3,
            "activation": "swiglu",
            "moe_shared_width": 8,
            "lora_rank": 2,
            "lora_base": "x",
        },
    ],
)
def test_estimated_states_equal_those_that_an_optimizer_stores(kind, params, settings):
    optimizer = {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
    is_refused = "moe_num_experts" in settings and kind in ("Adafactor", "SM3")
    if is_refused or ("lora_rank" in settings and kind == "Muon"):
        pytest.skip("refused by a rule")
    resolved = resolved_from({"make_vocab_size_divisible_by": 8} | settings | optimizer)
    model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=VOCABULARY)
    built = build_optimizer(
        resolved.update.optimizer, resolved.run, model, model_group=SINGLE_RANK, data_group=SINGLE_RANK
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    built.step()
    stored = sum(
        value.numel()
        for state in built.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    assert local_state_values(setup_of(resolved, vocab_size=VOCABULARY), 0) == stored


EXAMPLES = Path(__file__).parents[2] / "configs"
# A row of the table of sizes: [20B.yml](20B.yml) | name | parameters | layout | devices | GiB.
ROW = re.compile(r"\| \[(\S+\.yml)\]\(\1\) \| [^|]+ \| ([\d,]+) \| [^|]+ \| ([\d,]+) \| (\d+) GiB \|")
SIZES = ROW.findall((EXAMPLES / "README.md").read_text())


@pytest.mark.parametrize(("file", "parameters", "devices", "gibibytes"), SIZES)
def test_table_of_examples_equals_the_estimate(file, parameters, devices, gibibytes):
    resolved = resolve(load_config([EXAMPLES / file]), devices=int(devices.replace(",", "")))
    result = estimate(setup_of(resolved, vocab_size=50_257))
    assert f"{result.total_parameters:,}" == parameters
    assert round(result.memory[result.fullest_stage].total / 2**30) == int(gibibytes)


def test_the_table_of_examples_has_all_sizes():
    assert len(SIZES) == 11


# Rows of the table of layouts in docs/performance.md.
FILES = {"125M": "125M.yml", "1.3B": "1-3B.yml", "13B": "13B.yml", "70B": "models/llama-2-70b.yml"}
CELLS = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in re.findall(r"^\| (?:125M|1\.3B|13B|70B) \|.*$", read("docs/performance.md"), re.MULTILINE)
]


@pytest.mark.parametrize("cells", CELLS)
def test_table_of_layouts_equals_the_estimate(cells, tmp_path):
    size, devices, memory_of_device, tensor, stages, zero, micro, accumulation, recomputed, total = cells
    files: list[str | Path] = [EXAMPLES / FILES[size]]
    if size == "70B":
        block = next(
            block for block in blocks_of(read("docs/performance.md")) if block.file_name == "70B.yml"
        )
        (tmp_path / "70B.yml").write_text(block.text)
        files.append(tmp_path / "70B.yml")
    overrides = [
        f"model-parallel-size={tensor}",
        f"pipe-parallel-size={stages if stages != '1' else 0}",
        f"zero-optimization.stage={zero}",
        f"train-micro-batch-size-per-gpu={micro}",
        f"gradient-accumulation-steps={accumulation}",
        f"checkpoint-activations={'true' if recomputed == 'yes' else 'false'}",
    ]
    if size != "70B":
        overrides += ["bf16.enabled=true", "fp16.enabled=false"]
    resolved = resolve(load_config(files, overrides=overrides), devices=int(devices))
    vocabulary = 32_000 if size == "70B" else 50_257
    result = estimate(setup_of(resolved, vocab_size=vocabulary))
    gibibytes = result.memory[result.fullest_stage].total / 2**30
    assert f"{gibibytes:.1f}" == total
    assert gibibytes < int(memory_of_device.partition(" ")[0].strip(","))


def test_the_table_of_layouts_has_all_sizes():
    assert {size for size, *_ in CELLS} == FILES.keys()
    assert len(CELLS) == 20
