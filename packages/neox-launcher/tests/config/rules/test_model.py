"""Each rule about the model: a configuration that breaks it and one that does not."""

import json

import pytest

from neox_config import load_config
from neox_config.errors import ConfigError
from support.refusals import shows

MINIMAL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
    "train_iters": 10,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}


def problems_of(tmp_path, settings):
    path = tmp_path / "settings.yml"
    path.write_text(json.dumps(MINIMAL | settings))
    try:
        load_config([path])
    except ConfigError as error:
        return {problem.name: problem for problem in error.problems}
    return {}


def of_type(kind, **sparsity):
    return {"attention_config": [[[kind], "all"]], "sparsity_config": sparsity}


EIGENVALUES = {"eigenvalue": {"enabled": True, "layer_name": "layers", "layer_num": 4}}
LENGTHS = {
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 8},
    }
}
TOKENS = {
    "data_efficiency": {
        "enabled": True,
        "data_routing": {
            "enabled": True,
            "random_ltd": {
                "enabled": True,
                "total_layer_num": 4,
                "random_ltd_layer_num": 1,
                "random_ltd_layer_id": [1],
                "model_mask_name": "attention_mask",
                "model_type": "decoder",
                "hidden_state_order": "seq_batch_dim",
                "random_ltd_schedule": {
                    "min_value": 8,
                    "max_value": 32,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": 3, "seq_per_step": 8},
                },
            },
        },
    }
}

_ROUTING = TOKENS["data_efficiency"]["data_routing"]
_ENCODER = {**_ROUTING["random_ltd"], "model_type": "encoder"}


def of_encoder(**changes):
    routing = {**_ROUTING, "random_ltd": {**_ENCODER, **changes}}
    return {"objective": "masked", "data_efficiency": {"enabled": True, "data_routing": routing}}


BROKEN = [
    ({"objective": "masked", **TOKENS}, "data_efficiency.data_routing.random_ltd.model_type",
        "objective.token_dropping_knows_the_direction", [], of_encoder()),
    (of_encoder(model_mask_name="mask"), "data_efficiency.data_routing.random_ltd.model_mask_name",
        "objective.token_dropping_knows_the_direction", [], of_encoder()),
    ({"num_unique_layers": 2, "attention_config": ["gmlp", "global", "local", "global"]}, "num_unique_layers",
        "model.shared_weights_fit", ["2", "0"],
        {"num_unique_layers": 2, "attention_config": ["gmlp", "global", "gmlp", "local"]}),
    ({"num_kv_heads": 3}, "num_kv_heads", "relations.sizes_divide_others", ["1, 2, 4, 8"],
        {"num_kv_heads": 2}),
    ({"num_attention_heads": 7}, "num_attention_heads", "relations.sizes_divide_others", ["hidden-size"],
        {"num_attention_heads": 7, "head_dim": 8}),
    ({"head_dim": 9, "pos_emb": "rotary"}, "rotary_pct", "attention.rotary_turns_pairs_of_channels",
        ["9", "head-dim"], {"head_dim": 10, "pos_emb": "rotary"}),
    ({"bias_gelu_fusion": True, "use_bias_in_mlp": False}, "bias_gelu_fusion",
        "relations.kernels_suit_the_model", [], {"bias_gelu_fusion": "auto", "use_bias_in_mlp": False}),
    (of_type("local", block=12), "sparsity_config.block", "relations.sizes_divide_others",
        ["32", "2, 4, 8, 16"], of_type("global", block=12)),
    (of_type("sparse_fixed", num_local_blocks=4, num_global_blocks=3), "sparsity_config.num_global_blocks",
        "relations.sizes_divide_others", ["4"], of_type("bigbird", num_local_blocks=4, num_global_blocks=3)),
    (of_type("sparse_fixed", num_different_global_patterns=5, different_layout_per_head=True),
        "sparsity_config.num_different_global_patterns", "attention.patterns_of_global_blocks_fit_the_window",
        ["4"], of_type("sparse_fixed", num_different_global_patterns=4, different_layout_per_head=True)),
    (of_type("sparse_fixed", num_different_global_patterns=2),
        "sparsity_config.num_different_global_patterns", "attention.patterns_of_global_blocks_fit_the_window",
        [], of_type("sparse_fixed", num_different_global_patterns=1)),
    (of_type("sparse_variable", local_window_blocks=[2, 0]), "sparsity_config.local_window_blocks",
        "attention.listed_blocks_are_ranges", ["1"], of_type("sparse_variable", local_window_blocks=[2, 1])),
    (of_type("bslongformer", global_block_indices=[-1]), "sparsity_config.global_block_indices",
        "attention.listed_blocks_are_ranges", ["0"], of_type("bslongformer", global_block_indices=[1])),
    (of_type("bslongformer", global_block_indices=[0, 4], global_block_end_indices=[1]),
        "sparsity_config.global_block_end_indices", "attention.listed_blocks_are_ranges", ["1", "2"],
        of_type("bslongformer", global_block_indices=[0, 4], global_block_end_indices=[1, 5])),
    (of_type("sparse_variable", global_block_indices=[4], global_block_end_indices=[4]),
        "sparsity_config.global_block_end_indices", "attention.listed_blocks_are_ranges", [],
        of_type("sparse_fixed", global_block_indices=[4], global_block_end_indices=[4])),
    ({"onnx_safe": True, "bias_gelu_fusion": True}, "bias_gelu_fusion",
        "model.exported_models_have_no_kernels", [], {"onnx_safe": True, "bias_gelu_fusion": "auto"}),
    ({"pos_emb": "rpe", "rpe_max_distance": 16}, "rpe_max_distance", "attention.far_distances_share_buckets",
        ["16"], {"pos_emb": "rpe", "rpe_max_distance": 17}),
    ({"compile": True, "zero_optimization": {"stage": 3}}, "compile",
        "model.compiled_layers_stay_as_they_are", ["3"],
        {"compile": "auto", "zero_optimization": {"stage": 3}}),
    ({"compile": True, "recompute_gated_product": True, "activation": "swiglu"}, "compile",
        "model.compiled_layers_stay_as_they_are", [],
        {"compile": True, "recompute_gated_product": "auto", "activation": "swiglu"}),
    ({"recompute_gated_product": True, "activation": "swiglu", **EIGENVALUES}, "recompute_gated_product",
        "compression.eigenvalues_are_those_of_layers", [], {"recompute_gated_product": True, **EIGENVALUES}),
    ({"compile": True, **LENGTHS}, "compile", "model.compiled_layers_stay_as_they_are", [],
        {"compile": "auto", **LENGTHS}),
    ({"compile": True, **TOKENS}, "compile", "model.compiled_layers_stay_as_they_are", [],
        {"compile": True, "data_efficiency": {**TOKENS["data_efficiency"], "enabled": False}}),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "name", "code", "numbers", "kept"), BROKEN)
def test_a_rule_refuses_what_breaks_it_and_accepts_what_is_near(tmp_path, broken, name, code, numbers, kept):
    found = problems_of(tmp_path, broken)
    assert set(found) == {name}
    assert found[name].code == code
    assert shows(f"{found[name].what}; {found[name].remedy}", *numbers)
    assert problems_of(tmp_path, kept) == {}


def test_a_wrong_attention_config_is_reported_once(tmp_path):
    assert set(problems_of(tmp_path, of_type("sparse", block=7))) == {"attention_config"}
