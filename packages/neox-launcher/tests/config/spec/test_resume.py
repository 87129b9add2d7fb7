"""Effect of changing each parameter when training resumes, reviewed by name, and comparison of runs."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neox_config import NeoXConfig, Resolved, load_config, resolve
from neox_config.derive.optimizer_arguments import optimizer_facts
from neox_config.estimate.setup import fewest_devices
from neox_config.schema.config import all_parameters
from neox_config.schema.parameter import Parameter, Section, block, param
from neox_config.spec.resume import IN_EFFECT, Changes, compare, flat_values, in_effect, with_recorded_form
from support.refusals import refused, shows

# Reviewed: each of these makes another function of the same weights, or weights of other shapes.
MODEL = set(
    """
    num_layers hidden_size num_attention_heads num_kv_heads max_position_embeddings norm layernorm_epsilon
    rms_norm_epsilon scalenorm_epsilon activation openai_gelu mlp_width intermediate_size
    expansion_factor mlp_multiple_of use_bias_in_norms sliding_window_width use_bias_in_attn_linear
    use_bias_in_qkv use_bias_in_mlp bias_gelu_fusion
    norm_placement norm_zero_centered gpt_j_tied qk_norm use_qk_layernorm
    apply_residual_connection_post_layernorm gpt_j_residual no_weight_tying
    embedding_scale logit_scale logit_softcap glu_limit glu_alpha glu_up_offset
    num_unique_layers param_sharing_style make_vocab_size_divisible_by gmlp_attn_dim attention_config
    sparsity_config.block sparsity_config.different_layout_per_head sparsity_config.num_local_blocks
    sparsity_config.num_global_blocks sparsity_config.num_different_global_patterns
    sparsity_config.num_random_blocks sparsity_config.local_window_blocks
    sparsity_config.global_block_indices sparsity_config.global_block_end_indices
    sparsity_config.num_sliding_window_blocks pos_emb rpe_num_buckets rpe_max_distance rotary_pct
    rotary_emb_base rotary_scaling.type rotary_scaling.factor
    rotary_scaling.original_max_position_embeddings rotary_scaling.low_freq_factor
    rotary_scaling.high_freq_factor rotary_scaling.beta_fast rotary_scaling.beta_slow
    rotary_scaling.truncate rotary_scaling.attention_factor rotary_scaling.short_factor
    rotary_scaling.long_factor opt_pos_emb_offset
    apply_query_key_layer_scaling tokenizer_type vocab_file merge_file
    head_dim attention_scale attention_softcap attention_sinks attention_gate
    lora_rank lora_alpha lora_target_modules
    moe_num_experts moe_top_k moe_expert_interval moe_layers moe_expert_width moe_scores
    moe_normalize_weights moe_shared_width moe_shared_gate moe_expert_bias
    moe_router_bias moe_weight_scale moe_groups moe_top_groups use_bias_in_experts
    ict_head_size ict_shared_towers
    objective rpe_causal sparsity_config.attention sparsity_config.horizontal_global_attention
    """.split()
)
# Reviewed: each of these makes other updates of the same weights.
TRAINING = set(
    """
    moe_router_type moe_jitter_eps moe_balance_loss moe_balance_over moe_router_z_loss moe_expert_bias_rate
    z_loss seq_length hidden_dropout attention_dropout precision fp16.enabled fp16.loss_scale
    fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis
    fp16.min_loss_scale bf16.enabled amp.enabled amp.opt_level amp.dtype
    amp.loss_scale amp.min_loss_scale amp.max_loss_scale fp16_lm_cross_entropy
    optimizer.type optimizer.params.lr optimizer.params.betas optimizer.params.eps
    optimizer.params.weight_decay optimizer.params.adam_w_mode optimizer.params.bias_correction
    optimizer.params.freeze_step optimizer.params.var_freeze_step optimizer.params.var_update_scaler
    optimizer.params.local_step_scaler optimizer.params.local_step_clipper optimizer.params.max_coeff
    optimizer.params.min_coeff optimizer.params.coeff_beta optimizer.params.factor_max
    optimizer.params.factor_min optimizer.params.factor_threshold
    scheduler.type scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr
    scheduler.params.warmup_num_steps scheduler.params.total_num_steps scheduler.params.warmup_type
    scheduler.params.warmup_min_ratio scheduler.params.cos_min_ratio
    scheduler.params.cycle_min_lr scheduler.params.cycle_max_lr scheduler.params.decay_lr_rate
    scheduler.params.cycle_first_step_size scheduler.params.cycle_second_step_size
    scheduler.params.cycle_first_stair_count scheduler.params.cycle_second_stair_count
    scheduler.params.decay_step_size scheduler.params.cycle_momentum scheduler.params.cycle_min_mom
    scheduler.params.cycle_max_mom scheduler.params.decay_mom_rate
    scheduler.params.lr_range_test_min_lr scheduler.params.lr_range_test_step_size
    scheduler.params.lr_range_test_step_rate scheduler.params.lr_range_test_staircase
    weight_decay gradient_clipping ema_decay ema_interval optimizer.params.state_dtype
    zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients
    lr_decay_style lr_decay_iters lr_decay_fraction min_lr decay_lr_to warmup warmup_iters
    lr_wsd_decay_style lr_wsd_decay_fraction lr_wsd_decay_iters lr_wsd_decays
    train_iters train_epochs train_batch_size
    train_micro_batch_size_per_gpu gradient_accumulation_steps loss_normalization seed
    on_spike spike_threshold spike_window spike_rollback_batches
    data_path train_data_paths valid_data_paths test_data_paths
    train_label_data_paths valid_label_data_paths test_label_data_paths pack_impl allow_chopped
    use_mup mup_base.hidden_size mup_base.num_attention_heads mup_base.head_dim mup_base.mlp_width
    mup_base.num_layers mup_attn_temp mup_output_temp mup_embedding_mult mup_rp_embedding_mult
    lora_dropout mask_prob mask_whole_words mask_token short_seq_prob
    bert_load query_in_block_prob use_one_sent_docs titles_data_path
    fim_rate fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token
    train_data_weights valid_data_weights test_data_weights weight_by_num_documents
    weighted_sampler_alpha split sample_order reset_position_ids reset_attention_mask eod_mask_loss
    prescale_gradients gradient_predivide_factor communication_data_type data_types.grad_accum_dtype
    curriculum_learning.enabled curriculum_learning.curriculum_type curriculum_learning.min_difficulty
    curriculum_learning.max_difficulty curriculum_learning.schedule_type
    curriculum_learning.schedule_config.total_curriculum_step
    curriculum_learning.schedule_config.difficulty_step curriculum_learning.schedule_config.root_degree
    curriculum_learning.schedule_config.difficulty curriculum_learning.schedule_config.max_step
    elasticity.enabled elasticity.max_train_batch_size elasticity.micro_batch_sizes elasticity.min_gpus
    elasticity.max_gpus elasticity.prefer_large_batch elasticity.ignore_non_elastic_batch_info
    elasticity.version elasticity.num_gpus_per_node elasticity.model_parallel_size
    """.split()
)
# Reviewed as a whole, but for what is named; the first block that contains a parameter counts.
WHOLE: dict[str, tuple[str, set[str]]] = {
    "compression_training.layer_reduction": ("training", set()),
    "compression_training": ("model", {"quantizer_kernel", "quantize_verbose"}),
    "attention_kinds": ("model", set()),
    "data_efficiency": (
        "training",
        {"num_workers", "data_cluster_path", "model_mask_name", "model_type", "hidden_state_order"},
    ),
}


def reviewed(name: str) -> str:
    """Return the class that a parameter was reviewed as."""
    blocks = (row for block, row in WHOLE.items() if name.startswith(f"{block}."))
    resume, free = next(blocks, (None, set()))
    if resume is not None:
        return "free" if name.rpartition(".")[2] in free else resume
    return "model" if name in MODEL else "training" if name in TRAINING else "free"


def unreviewed(parameters: Iterable[Parameter]) -> list[str]:
    """Parameters whose class is not the reviewed one."""
    return [
        f"{parameter.name}: declared {parameter.resume}, reviewed {reviewed(parameter.name)}"
        for parameter in parameters
        if not parameter.is_block and parameter.resume != reviewed(parameter.name)
    ]


def test_every_parameter_has_the_class_that_was_reviewed() -> None:
    assert unreviewed(all_parameters()) == []
    assert not MODEL & TRAINING
    assert {parameter.name for parameter in all_parameters()} >= MODEL | TRAINING


@pytest.mark.parametrize("name", ["activation", "layernorm_epsilon", "rotary_pct", "seed", "eval_interval"])
def test_a_lost_class_is_found(name: str) -> None:
    """A parameter whose declared class is not the reviewed one is reported."""
    for resume in {"model", "training", "free"} - {reviewed(name)}:
        planted = [
            replace(parameter, resume=resume) if parameter.name == name else parameter
            for parameter in all_parameters()
        ]
        assert unreviewed(planted) == [f"{name}: declared {resume}, reviewed {reviewed(name)}"]


def test_a_parameter_without_any_class_is_refused() -> None:
    class Inner(Section):
        """A block."""

        size: int = param(1, doc="size", origin="ours")
        width: int = param(1, doc="width", origin="ours", resume="model")

    class Outer(Section):
        """A section."""

        inner: Inner = block(Inner, doc="inner", origin="ours")

    class Classed(Section, resume="free"):
        """A section."""

        inner: Inner = block(Inner, doc="inner", origin="ours")
        other: Inner = block(Inner, doc="inner", origin="ours", resume="training")

    with refused(TypeError, "inner.size does not"):
        list(Outer.parameters())
    found = {parameter.name: parameter.resume for parameter in Classed.parameters()}
    assert found == {
        "inner": None,
        "inner.size": "free",
        "inner.width": "model",
        "other": None,
        "other.size": "training",
        "other.width": "model",
    }


def test_parameter_that_disables_a_value_is_compared() -> None:
    """Otherwise a value used on only one side would be an unreported change."""
    classes = {parameter.name: parameter.resume for parameter in all_parameters()}
    for parameter in all_parameters():
        if parameter.resume in ("model", "training") and parameter.used_when:
            outer = parameter.name.rpartition(".")[0]
            words = re.findall(r"\w+", parameter.used_when)
            deciding = [name for word in words for name in (word, f"{outer}.{word}") if name in classes]
            assert all(classes[name] != "free" for name in deciding), parameter.name


# What counts as a change

Loader = Callable[..., NeoXConfig]


def recorded(resolved: Resolved) -> dict[str, Any]:
    return json.loads(json.dumps(flat_values(resolved.config) | {IN_EFFECT: in_effect(resolved)}))


@pytest.fixture
def changes(load: Loader) -> Callable[..., Changes]:
    """Return `changes(there, here)`, which compares the runs of two lists of overrides."""

    def differing(there: list[str], here: list[str], *, devices: int = 1) -> Changes:
        one, other = (resolve(load("", *values), devices=devices) for values in (there, here))
        found = compare(recorded(one), recorded(other), devices=devices)
        # Written by a version that did not record what is in effect.
        assert compare(flat_values(one.config), recorded(other), devices=devices) == found
        return found

    return differing


def test_a_checkpoint_from_before_mlp_width_keeps_its_width(load) -> None:
    """There, intermediate_size was the exact width; today it is GPT-NeoX's size of both matrices."""
    new = ["mlp_width", "expansion_factor", "mlp_multiple_of"]
    here = resolve(load("", "activation=swiglu", "mlp-width=100"), devices=1)
    values = {name: value for name, value in flat_values(here.config).items() if name not in new}
    values["intermediate_size"] = 100
    assert compare(values, recorded(here), devices=1).model == ()
    other = resolve(load("", "activation=swiglu", "intermediate-size=100"), devices=1)
    (change,) = compare(values, recorded(other), devices=1).model
    assert shows(change, "mlp-width: 100", "33")
    effect = recorded(here)[IN_EFFECT]
    effect["model"]["intermediate_size"] = effect["model"].pop("mlp_width")
    assert compare(values | {IN_EFFECT: effect}, recorded(here), devices=1).model == ()
    assert compare(values | {IN_EFFECT: effect}, recorded(other), devices=1).model == (change,)


def test_a_checkpoint_from_before_sliding_windows_has_none(load) -> None:
    there, here = (recorded(resolve(load("", *more), devices=1)) for more in ([], ["sliding-window-width=8"]))
    del there["sliding_window_width"]
    del there[IN_EFFECT]["model"]["sliding_window_width"]
    (change,) = compare(there, here, devices=1).model
    assert shows(change, "sliding-window-width", "8")


LORA = ["lora-rank=2", "lora-base=base"]
KINDS = [
    "pos-emb=rotary",
    'attention-config=[[["near", "far"], "all"]]',
    "attention-kinds.near.sliding-window-width=4",
    "attention-kinds.far.rotary-emb-base=900",
]


@pytest.mark.parametrize(
    ("there", "here", "model"),
    [
        ([], ["activation=relu"], ["activation: gelu in the checkpoint, relu in this run"]),
        (
            [],
            ["hidden-size=128"],
            [
                "hidden-size: 64 in the checkpoint, 128 in this run",
                "mlp-width: 256 in the checkpoint, 512 in this run",
            ],
        ),
        ([], ["layernorm-epsilon=1e-6"], ["layernorm-epsilon: 1e-05 in the checkpoint, 1e-06 in this run"]),
        ([], ["rotary-pct=0.5"], []),
        (
            KINDS,
            [*KINDS, "attention-kinds.far.rotary-emb-base=901"],
            ["attention-kinds.far.rotary-emb-base: 900 in the checkpoint, 901 in this run"],
        ),
        (
            KINDS,
            [*KINDS, "attention-kinds.near.sliding-window-width=5"],
            ["attention-kinds.near.sliding-window-width: 4 in the checkpoint, 5 in this run"],
        ),
        (
            KINDS,
            [*KINDS, "attention-kinds.near.pos-emb=none"],
            ["attention-kinds.near.pos-emb: rotary in the checkpoint, none in this run"],
        ),
        (
            KINDS,
            [*KINDS, "rotary-emb-base=77"],
            ["attention-kinds.near.rotary-emb-base: 10000 in the checkpoint, 77 in this run"],
        ),
        (
            KINDS,
            [*KINDS, "attention-kinds.near.rotary-scaling={type: linear, factor: 2}"],
            [
                "attention-kinds.near.rotary-scaling.type: none in the checkpoint, linear in this run",
            ],
        ),
        # What a kind gives as the model has it is no change.
        (KINDS, [*KINDS, "attention-kinds.near.rotary-emb-base=10000", "seq-length=16"], []),
        (
            ["pos-emb=rotary"],
            ["pos-emb=rotary", "rotary-pct=0.5"],
            ["rotary-pct: 1.0 in the checkpoint, 0.5 in this run"],
        ),
        (
            [],
            ["pos-emb=rotary", "rotary-pct=0.5"],
            ["pos-emb: learned in the checkpoint, rotary in this run"],
        ),
        (
            [],
            ["max-position-embeddings=64"],
            ["max-position-embeddings: 32 in the checkpoint, 64 in this run"],
        ),
        (["pos-emb=rotary"], ["pos-emb=rotary", "max-position-embeddings=64"], []),
        ([], ["norm=apexlayernorm"], []),
        ([], ["norm=rmsnorm"], ["norm: layernorm in the checkpoint, rmsnorm in this run"]),
        ([], ["num-kv-heads=4"], []),
        ([], ["num-kv-heads=2"], ["num-kv-heads: 4 in the checkpoint, 2 in this run"]),
        ([], ["mlp-width=256"], []),
        ([], ["intermediate-size=250", "mlp-multiple-of=64"], []),
        (["activation=swiglu", "intermediate-size=300"], ["activation=swiglu", "mlp-width=100"], []),
        (
            [],
            ["use-bias-in-norms=false"],
            ["use-bias-in-norms: true in the checkpoint, false in this run"],
        ),
        ([], ["sliding-window-width=31"], []),
        (["sliding-window-width=8", "seq-length=8"], ["sliding-window-width=8"], []),
        (
            ["sliding-window-width=8", "seq-length=8"],
            ["sliding-window-width=9"],
            ["sliding-window-width: null in the checkpoint, 9 in this run"],
        ),
        ([], ["sliding-window-width=8"], ["sliding-window-width: null in the checkpoint, 8 in this run"]),
        (
            [],
            ["bias-gelu-fusion=auto"],
            ["openai-gelu, bias-gelu-fusion: erf form in the checkpoint, tanh form in this run"],
        ),
        (["openai-gelu=true"], ["bias-gelu-fusion=true"], []),
        ([], ["attention-config=[[[global], 4]]"], []),
        (
            [],
            ["attention-config=[[[global, local], 2]]"],
            ['attention-config: [["global", 4]] in the checkpoint, [["global", 1]'],
        ),
        ([], ["apply-query-key-layer-scaling=true"], []),
        (
            ["pos-emb=alibi"],
            ["pos-emb=alibi", "apply-query-key-layer-scaling=true"],
            ["apply-query-key-layer-scaling: false in the checkpoint, true in this run"],
        ),
        ([], ["num-unique-layers=4"], []),
        ([], ["seed=5"], []),
        ([], ["sparsity_config.block=8"], []),
        (
            [*LORA, "lora-target-modules=[dense, qkv, gate]"],
            [*LORA, "lora-target-modules=[qkv, dense]"],
            [],
        ),
        (
            [*LORA, "lora-target-modules=[dense, qkv]"],
            [*LORA, "lora-target-modules=[up, qkv]"],
            ['lora-target-modules: ["qkv", "dense"] in the checkpoint, ["qkv", "up"] in this run'],
        ),
    ],
)
def test_model(changes, there: list[str], here: list[str], model: list[str]) -> None:
    found = [str(change) for change in changes(there, here).model]
    assert len(found) == len(model)
    assert all(text.startswith(start) for text, start in zip(found, model, strict=True)), found


SPARSE = ["attention-config=[[[bigbird], 4]]", "sparsity_config.block=8"]
LOCAL = ["attention-config=[[[local], 4]]", "sparsity_config.block=8"]


def test_random_blocks_of_another_seed_are_another_model(changes) -> None:
    drawn = [*SPARSE, "sparsity_config.num_random_blocks=1"]
    (change,) = changes(drawn, [*drawn, "seed=5"]).model
    assert shows(change, "1234", "5")
    assert changes(SPARSE, [*SPARSE, "seed=5"]).model == ()


@pytest.mark.parametrize(
    ("kind", "more", "is_change"),
    [
        ("bigbird", [], False),
        ("bigbird", ["sparsity_config.num_random_blocks=1"], True),
        ("sparse_variable", [], False),
        ("sparse_variable", ["sparsity_config.num_random_blocks=1"], True),
        ("sparse_fixed", [], False),
        ("bslongformer", ["sparsity_config.num_random_blocks=1"], False),
        ("local", [], False),
    ],
)
def test_a_layout_per_head_counts_where_heads_can_differ(changes, kind, more, is_change) -> None:
    there = [f"attention-config=[[[{kind}], 4]]", "sparsity_config.block=8", *more]
    here = [*there, "sparsity_config.different_layout_per_head=true"]
    expected = (
        ["sparsity-config.different-layout-per-head: false in the checkpoint, true in this run"]
        if is_change
        else []
    )
    assert [str(change) for change in changes(there, here).model] == expected


def test_global_patterns_that_heads_alternate_between_are_a_change(changes) -> None:
    there = ["attention-config=[[[sparse_fixed], 4]]", "sparsity_config.block=8"]
    name = "sparsity_config.num_different_global_patterns"
    here = [*there, "sparsity_config.different_layout_per_head=true", f"{name}=2"]
    for one, other in ((there, here), (here, there)):
        assert [change.label for change in changes(one, other).model] == [name]


def test_a_local_window_is_the_first_of_two_settings_that_is_given(load: Loader) -> None:
    """Both values are their defaults, and the window is 4 or 3 blocks by which of them was written."""
    runs = [
        recorded(resolve(load("", *LOCAL, *more), devices=1))
        for more in (
            [],
            ["sparsity_config.num_sliding_window_blocks=3"],
            ["sparsity_config.num_local_blocks=4"],
        )
    ]
    (change,) = compare(runs[0], runs[1], devices=1).model
    assert (change.there, change.here) == (4, 3)
    assert compare(runs[0], runs[2], devices=1).model == ()


@pytest.mark.parametrize(
    ("there", "here", "training"),
    [
        ([], ["gradient-accumulation-steps=1"], []),
        ([], ["train-batch-size=2"], []),
        (["train-batch-size=4"], ["gradient-accumulation-steps=2"], []),
        ([], ["gradient-accumulation-steps=3"], ["train-batch-size: 2 in the checkpoint, 6 in this run"]),
        ([], ["precision=bfloat16"], ["precision: fp32 in the checkpoint, bf16 in this run"]),
        (["precision=bfloat16"], ["bf16.enabled=true"], []),
        ([], ["fp16.loss_scale_window=5"], []),
        (["fp16.enabled=true"], ["precision=fp16", "fp16.loss_scale_window=5"],
            ["fp16.loss-scale-window: 1000 in the checkpoint, 5 in this run"]),
        (["fp16.enabled=true"], ["fp16.enabled=true", "fp16.auto_cast=true"], []),
        (["amp.enabled=true"], ["amp.enabled=true", "amp.loss_scale=128"],
            ["amp.loss-scale: 0.0 in the checkpoint, 128.0 in this run"]),
        # bfloat16 scales no loss.
        (["amp.enabled=true", "amp.dtype=bf16"],
            ["amp.enabled=true", "amp.dtype=bf16", "amp.loss_scale=128", "amp.max_loss_scale=256"], []),
        (["amp.enabled=true", "amp.dtype=bf16"], ["amp.enabled=true"],
            ["amp.dtype: bf16 in the checkpoint, fp16 in this run"]),
        ([], ["amp.enabled=true", "amp.opt_level=O0"], []),
        ([], ["amp.enabled=true", "amp.dtype=bf16"],
            ["amp.enabled: false in the checkpoint, true in this run"]),
        ([], ["lr-decay-iters=10"], []),
        ([], ["lr-decay-iters=8"], ["lr-decay-iters: 10 in the checkpoint, 8 in this run"]),
        ([], ["weight-decay=0.01"], []),
        ([], ["weight-decay=0.1"],
            ["optimizer.params.weight-decay: 0.01 in the checkpoint, 0.1 in this run"]),
        ([], ["optimizer.params.betas=[0.9, 0.95]"],
            ["optimizer.params.betas: [0.9, 0.999] in the checkpoint, [0.9, 0.95] in this run"]),
        ([], ["optimizer.type=adam"], []),
        ([], ["optimizer.params.adam_w_mode=false"],
            ["optimizer.params.adam-w-mode: true in the checkpoint, false in this run"]),
        (["weight-decay=0"], ["weight-decay=0", "optimizer.params.adam_w_mode=false"], []),
        ([], ["seed=5"], ["seed: 1234 in the checkpoint, 5 in this run"]),
        ([], ["hidden-dropout=0.2"], ["hidden-dropout: 0.1 in the checkpoint, 0.2 in this run"]),
        ([], ["eval-interval=5", "eval-iters=1", "save=x", "save-interval=1", "log-interval=1"], []),
        ([], ["zero_optimization.stage=1", "checkpoint-activations=true", "rope-fusion=auto"], []),
    ],
)  # fmt: skip
def test_training(changes, there: list[str], here: list[str], training: list[str]) -> None:
    found = changes(there, here)
    assert [str(change) for change in found.training] == training
    assert found.model == ()


def test_another_layout_of_the_same_batch_is_no_change(load: Loader) -> None:
    one = resolve(load("", "gradient-accumulation-steps=4"), devices=1)
    other = resolve(load("", "model-parallel-size=2", "gradient-accumulation-steps=2"), devices=4)
    assert compare(recorded(one), recorded(other), devices=1) == Changes()
    assert compare(flat_values(one.config), recorded(other), devices=1) == Changes()


@pytest.mark.parametrize(
    ("kind", "name", "there", "here", "changes_states"),
    [
        ("Adam", "adam_w_mode", "true", "false", True),
        ("Adam", "bias_correction", "true", "false", True),
        ("Adam", "eps", "1e-8", "1e-6", False),
        ("SM3", "beta", "0.0", "0.9", True),
        ("SM3", "beta", "0.9", "0.8", False),
        # Lamb corrects in the step, and stores the same means.
        ("Lamb", "bias_correction", "true", "false", False),
        ("NAdam", "decoupled_weight_decay", "true", "false", True),
        ("RMSprop", "centered", "false", "true", True),
        ("RMSprop", "momentum", "0.9", "0.8", False),
        ("RMSprop", "momentum", "0.9", "0.0", True),
        # MADGRAD stores the same states with and without momentum.
        ("madgrad_wd", "momentum", "0.9", "0.0", False),
    ],
)
def test_changes_that_invalidate_optimizer_states(
    changes, kind: str, name: str, there: str, here: str, changes_states: bool
) -> None:
    overrides = [[f"optimizer.type={kind}", f"optimizer.params.{name}={value}"] for value in (there, here)]
    (change,) = changes(*overrides).training
    assert change.changes_states == changes_states


@pytest.mark.parametrize(
    ("kind", "given", "change"),
    [
        ("SGD", "momentum=0.0", None),
        ("SGD", "momentum=0.9", "momentum: 0.0 in the checkpoint, 0.9 in this run"),
        ("SGD", "foreach=null", None),
        ("madgrad_wd", "momentum=0.9", None),
        ("madgrad_wd", "momentum=0.8", "momentum: 0.9 in the checkpoint, 0.8 in this run"),
        ("madgrad_wd", "eps=1e-6", None),
        ("Lion", "betas=[0.9, 0.99]", None),
        ("Adagrad", "eps=1e-10", None),
        ("Adadelta", "eps=1e-6", None),
        ("Adamax", "betas=[0.9, 0.999]", None),
        ("Rprop", "etas=[0.5, 1.2]", None),
    ],
)
def test_a_default_that_is_written_out_is_no_change(
    changes, kind: str, given: str, change: str | None
) -> None:
    there = [f"optimizer.type={kind}"]
    here = [*there, f"optimizer.params.{given}"]
    expected = [] if change is None else [f"optimizer.params.{change}"]
    assert [str(change) for change in changes(there, here).training] == expected
    assert len(changes(here, there).training) == len(expected)


@pytest.mark.parametrize(("kind", "default"), [("Adagrad", 1e-10), ("Adadelta", 1e-6)])
def test_the_declared_default_is_a_change_where_the_class_has_another(
    load: Loader, kind: str, default: float
) -> None:
    there = load("", f"optimizer.type={kind}")
    here = load("", f"optimizer.type={kind}", "optimizer.params.eps=1e-8")
    one, other = (recorded(resolve(config, devices=1)) for config in (there, here))
    (change,) = compare(one, other, devices=1).training
    assert (change.label, change.there, change.here) == ("optimizer.params.eps", default, 1e-8)
    # Older checkpoints do not record whether it was set.
    assert compare(flat_values(there), other, devices=1) == Changes()


def test_arguments_that_one_of_two_optimizers_does_not_take_are_not_compared(changes) -> None:
    adam, sgd = ["optimizer.params.betas=[0.8, 0.9]"], ["optimizer.type=SGD", "optimizer.params.momentum=0.9"]
    for there, here in ((adam, sgd), (sgd, adam)):
        assert [change.label for change in changes(there, here).training] == ["optimizer.type"]


def test_an_argument_that_a_checkpoint_did_not_record_had_its_default(load: Loader) -> None:
    runs = [
        recorded(resolve(load("", "optimizer.type=SGD", *more), devices=1))
        for more in ([], ["optimizer.params.momentum=0.9"])
    ]
    older = runs[0] | {IN_EFFECT: json.loads(json.dumps(runs[0][IN_EFFECT]))}
    del older[IN_EFFECT]["training"]["optimizer.params.momentum"]
    assert compare(older, runs[0], devices=1) == Changes()
    (change,) = compare(older, runs[1], devices=1).training
    assert shows(change, "optimizer.params.momentum: 0.0", "0.9")


FORM = {"coefficients": ("quintic", "polar_express"), "qkv": ("together", "separate")}


def written(folder: Path, values: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint with these recorded values."""
    checkpoint = folder / "global_step3"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text("global_step3")
    (checkpoint / "manifest.json").write_text(json.dumps({"contents": {"config": values}}))


def muon(load: Loader, folder: Path, *more: str) -> NeoXConfig:
    return load("", "optimizer.type=Muon", f"load={folder}", *more)


def without_form(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a version before the form of Muon could be chosen recorded of a training."""
    older: dict[str, Any] = json.loads(json.dumps(values))
    for name in FORM:
        del older[IN_EFFECT]["training"][f"optimizer.params.{name}"]
    return older


def test_a_training_of_muon_continues_with_its_form(load: Loader, tmp_path: Path) -> None:
    new = muon(load, tmp_path)
    assert with_recorded_form(new) == new  # There is no checkpoint yet.
    here = recorded(resolve(new, devices=1))
    written(tmp_path, here)
    assert with_recorded_form(new) == new
    older = without_form(here)
    written(tmp_path, older)
    kept = with_recorded_form(new)
    given = kept.optimizer.optimizer.params.given()
    assert {name: given[name] for name in FORM} == {name: there for name, (there, _) in FORM.items()}
    for note in kept.notices[len(new.notices) :]:
        assert shows(note, "global_step3", FORM[note.name.rpartition(".")[2]][1])
    assert len(kept.notices) == len(new.notices) + len(FORM)
    assert compare(older, recorded(resolve(kept, devices=1)), devices=1) == Changes()
    # From then on it is recorded.
    written(tmp_path, recorded(resolve(kept, devices=1)))
    assert with_recorded_form(new) == kept


def test_a_form_of_muon_that_is_given_is_a_change(load: Loader, tmp_path: Path) -> None:
    given = [f"optimizer.params.{name}={here}" for name, (_, here) in FORM.items()]
    chosen = muon(load, tmp_path, *given)
    here = recorded(resolve(chosen, devices=1))
    for older in (
        without_form(recorded(resolve(muon(load, tmp_path), devices=1))),
        flat_values(muon(load, tmp_path)),
    ):
        written(tmp_path, older)
        assert with_recorded_form(chosen) == chosen
        changes = compare(older, here, devices=1).training
        found = {change.label.rpartition(".")[2]: (change.there, change.here) for change in changes}
        assert found == FORM


@pytest.mark.parametrize(("value", "changes_states"), [("row_beta=0.9", True), ("qkv=per_head", False)])
def test_only_rows_of_muon_require_other_states(
    load: Loader, tmp_path: Path, value: str, changes_states: bool
) -> None:
    there, here = (
        recorded(resolve(muon(load, tmp_path, *more), devices=1))
        for more in ([], [f"optimizer.params.{value}"])
    )
    (change,) = compare(there, here, devices=1).training
    assert change.changes_states == changes_states


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({"optimizer": {"type": "Adam"}}, []),
        ({"optimizer": []}, []),
        ({"optimizer": {"type": "Muon"}, IN_EFFECT: []}, []),
        ({"optimizer": {"type": "Muon"}}, ["finetune=true"]),
    ],
)
def test_a_checkpoint_without_states_of_muon_has_no_form(
    load: Loader, tmp_path: Path, values: dict[str, Any], more: list[str]
) -> None:
    written(tmp_path, values)
    config = muon(load, tmp_path, *more)
    assert with_recorded_form(config) == config
    written(tmp_path, {"optimizer": {"type": "Muon"}})
    assert (with_recorded_form(config) == config) is bool(more)


def test_a_parameter_that_the_checkpoint_does_not_know_had_its_default(load: Loader) -> None:
    runs = [recorded(resolve(load("", *more), devices=1)) for more in ([], ["gpt-j-residual=true"])]
    older = {name: value for name, value in runs[0].items() if name != "gpt_j_residual"}
    older[IN_EFFECT] = json.loads(json.dumps(runs[0][IN_EFFECT]))
    del older[IN_EFFECT]["model"]["gpt_j_residual"]
    assert compare(older, runs[0], devices=1) == Changes()
    (change,) = compare(older, runs[1], devices=1).model
    assert shows(change, "gpt-j-residual")
    older.pop(IN_EFFECT)
    assert compare(older, runs[1], devices=1).model == (change,)


def test_a_configuration_that_cannot_be_read_is_reported_as_unknown(load: Loader) -> None:
    here = recorded(resolve(load(), devices=1))
    assert "unknown to this" in str(compare({"num_layers": "x"}, here, devices=1).unknown)
    other = {name: value for name, value in here.items() if name != IN_EFFECT} | {"attention_config": [1]}
    assert shows(compare(other, here, devices=1).unknown, "attention_config does not")


def test_secrets_are_not_recorded(load: Loader) -> None:
    text = json.dumps(recorded(resolve(load("comet: {api_key: hunter2}"), devices=1)))
    assert "hunter2" not in text


EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[5] / "configs").glob("*.yml"))
    if "num-layers" in path.read_text()
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_run_is_no_change_of_itself(path: Path) -> None:
    config = load_config([path])
    devices = fewest_devices(config)
    run = recorded(resolve(config, devices=devices))
    assert compare(run, run, devices=devices) == Changes()
    former = [f"optimizer.params.{name}={value}" for name, value in optimizer_facts(config).former.items()]
    then = recorded(resolve(load_config([path], overrides=former), devices=devices))
    assert compare(flat_values(config), then, devices=devices) == Changes()
