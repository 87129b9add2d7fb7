"""Rules about DeepSpeed's blocks: an example that breaks each rule; the complete example breaks none."""

from pathlib import Path

import pytest

from neox_config import engine_json, load_config, resolve
from neox_config.describe.display import show_config
from neox_config.errors import ConfigError
from neox_config.rules import RULES
from neox_config.spec.resolve import decode_resolved, encode_resolved
from support.refusals import refused, shows

EVERY_BLOCK = (Path(__file__).parents[2] / "data/every_block.yml").read_text()
LTD = "data_efficiency.data_routing.random_ltd"
CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
RARITY = f"{CURRICULUM}.curriculum_metrics.rarity"
COMPRESSION = "compression_training"
OTHER_PARTS_OFF = [
    f"{COMPRESSION}.{part}.shared_parameters.enabled=false"
    for part in ("activation_quantization", "sparse_pruning", "row_pruning", "head_pruning")
]

# rule -> (override that breaks it, where, numbers in the message)
EXAMPLES = {
    "enabled_blocks_have_what_they_need": (f"{LTD}.model_mask_name=null", f"{LTD}.model_mask_name", []),
    "what_nothing_carries_out_is_refused": ("sparse-gradients=true", "sparse_gradients", []),
    "limits_are_in_order": ("autotuning.end_profile_step=2", "autotuning.end_profile_step", ["3"]),
    "limits_are_in_order: elasticity": ("elasticity={min_gpus: 8, max_gpus: 4}", "elasticity.max_gpus",
        ["8"]),
    "elastic_jobs_leave_batch_sizes_to_the_block": ("elasticity.ignore_non_elastic_batch_info=false",
        "train_micro_batch_size_per_gpu", []),
    "elastic_jobs_have_one_copy_per_stage": ("elasticity.model_parallel_size=2",
        "elasticity.model_parallel_size", ["1"]),
    "settings_exclude_each_other": ("use-wandb=true", "wandb.enabled", []),
    "timed_operations_exist": ("comms_logger.prof_ops=[all_gather, allreduce]", "comms_logger.prof_ops", []),
    "token_dropping_names_its_layers": (f"{LTD}.random_ltd_layer_num=2", f"{LTD}.random_ltd_layer_id",
        ["3", "2"]),
    "token_dropping_fits_the_model": (f"{LTD}.random_ltd_layer_id=[1, 2, 4]", f"{LTD}.random_ltd_layer_id",
        ["0", "3"]),
    "curricula_grow_as_their_schedule_says": (f"{RARITY}.schedule_config.root_degree=null",
        f"{RARITY}.schedule_config.root_degree", []),
    "curricula_choose_samples_or_cut_them": ([f"{RARITY}.min_difficulty=0", f"{RARITY}.max_difficulty=0"],
        f"{RARITY}.max_difficulty", []),
    "curricula_cut_to_lengths_that_there_are": ("curriculum_learning.max_difficulty=999999",
        "curriculum_learning.max_difficulty", []),
    "compression_says_what_it_compresses": (f"{COMPRESSION}.row_pruning.different_groups=null",
        f"{COMPRESSION}.row_pruning.different_groups", []),
    "compressed_layers_are_plain: averages": ("ema_decay=0.9", "ema_decay", []),
    "bits_do_not_grow": (f"{COMPRESSION}.weight_quantization.different_groups.wq1.params.target_bits=9",
        f"{COMPRESSION}.weight_quantization.different_groups.wq1.params.target_bits", ["8"]),
    "fp32_weights_are_quantized_forward": (
        f"{COMPRESSION}.weight_quantization.shared_parameters.quantize_weight_in_forward=false",
        f"{COMPRESSION}.weight_quantization.shared_parameters.quantize_weight_in_forward", []),
    "compression_patterns_match": (
        f"{COMPRESSION}.weight_quantization.different_groups.wq1.modules=[attention.qvk]",
        f"{COMPRESSION}.weight_quantization.different_groups.wq1.modules", []),
    "compression_groups_are_disjoint": (
        f"{COMPRESSION}.weight_quantization.different_groups.wq2.modules=['*']",
        f"{COMPRESSION}.weight_quantization.different_groups.wq2.modules", []),
    "compressed_layers_are_plain: experts": (
        ["moe_num_experts=4", *OTHER_PARTS_OFF,
         f"{COMPRESSION}.layer_reduction.enabled=false", "data_efficiency.enabled=false",
         "eigenvalue.enabled=false"], f"{COMPRESSION}.weight_quantization.shared_parameters.enabled", []),
    "compressed_layers_are_plain": (
        ["lora_rank=2", "lora_base=x", f"{COMPRESSION}.layer_reduction.enabled=false"], "lora_rank", []),
    "compressed_layers_are_plain: partitioned": (
        ["engine=deepspeed", "zero_optimization.stage=2", "eigenvalue.enabled=false"],
        "zero_optimization.stage", []),
    "few_bits_are_rounded_to_the_nearest": (
        [ f"{COMPRESSION}.weight_quantization.shared_parameters.rounding=stochastic",
         f"{COMPRESSION}.weight_quantization.different_groups.wq2.params.target_bits=2"],
        f"{COMPRESSION}.weight_quantization.different_groups.wq2.params.target_bits", []),
    "patterns_of_weights_have_their_density": (
        f"{COMPRESSION}.sparse_pruning.shared_parameters.block_pattern='1:4'",
        f"{COMPRESSION}.sparse_pruning.different_groups.sp1.params.dense_ratio", ["0.25", "1", "4"]),
    "groups_and_blocks_divide_their_matrices": (
        f"{COMPRESSION}.sparse_pruning.shared_parameters.block_pattern=7x1",
        f"{COMPRESSION}.sparse_pruning.shared_parameters.block_pattern", []),
    "pruned_rows_and_heads_exist": (f"{COMPRESSION}.head_pruning.shared_parameters.num_heads=3",
        f"{COMPRESSION}.head_pruning.shared_parameters.num_heads", []),
    "limits_are_in_order: pruning": (f"{COMPRESSION}.sparse_pruning.shared_parameters.schedule_offset_end=29",
        f"{COMPRESSION}.sparse_pruning.shared_parameters.schedule_offset_end", ["30"]),
    "eigenvalues_are_those_of_layers": ("eigenvalue.layer_num=5", "eigenvalue.layer_num", ["1", "4"]),
    "students_copy_modules": (f"{COMPRESSION}.layer_reduction.module_name_prefix=bert.encoder.layer",
        f"{COMPRESSION}.layer_reduction.module_name_prefix", []),
    "students_are_whole_models": (
        [ "pipe_parallel_size=1", "engine=deepspeed", f"{COMPRESSION}.layer_reduction.distill.enabled=true",
         "eigenvalue.enabled=false"],
        "pipe_parallel_size", []),
    "students_copy_named_layers": (f"{COMPRESSION}.layer_reduction.teacher_layer=[0, 1, 3]",
        f"{COMPRESSION}.layer_reduction.teacher_layer", ["3", "4"]),
    "pruning_finds_matrices": (f"{COMPRESSION}.sparse_pruning.shared_parameters.excluded_modules=['*']",
        f"{COMPRESSION}.sparse_pruning.shared_parameters.excluded_modules", []),
    "pruning_keeps_something": (f"{COMPRESSION}.head_pruning.different_groups.hp1.params.dense_ratio=0.1",
        f"{COMPRESSION}.head_pruning.different_groups.hp1.params.dense_ratio", ["4", "0"]),
    "copied_layers_keep_their_bias": (
        ["pos_emb=alibi", "apply_query_key_layer_scaling=true", "data_efficiency.enabled=false"],
        "apply_query_key_layer_scaling", []),
}  # fmt: skip
# The override takes a value away from the file, where it would have to be written otherwise.
TAKEN_AWAY = {
    "model_mask_name=null": "      model_mask_name: attention_mask\n",
    "root_degree=null": " root_degree: 2,",
    "row_pruning.different_groups=null": (
        "    different_groups:\n"
        "      rp1: {params: {dense_ratio: 0.5}, modules: [mlp.up], related_modules: [[mlp.down]]}\n"
    ),
}


def without(override):
    """Return the complete example without what the override removes, and the remaining overrides."""
    if isinstance(override, list):
        return EVERY_BLOCK, override
    for ending, text in TAKEN_AWAY.items():
        if override.endswith(ending):
            assert text in EVERY_BLOCK
            return EVERY_BLOCK.replace(text, "", 1), []
    return EVERY_BLOCK, [override]


def test_every_rule_has_an_example():
    files = (".blocks", ".compression.rules", ".data_efficiency.rules", ".elasticity")
    rules = {rule.__name__ for rule in RULES if rule.__module__.endswith(files)}
    elsewhere = {"limits_are_in_order", "settings_exclude_each_other"}
    others = {"micro_batches_fit_an_elastic_batch"}
    assert (rules - others) | elsewhere == {name.partition(":")[0] for name in EXAMPLES}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_broken_rule_is_reported_with_place_and_reason(load, rule):
    override, name, numbers = EXAMPLES[rule]
    text, overrides = without(override)
    with pytest.raises(ConfigError) as found:
        load(text, *overrides)
    (problem,) = found.value.problems
    assert (problem.name, problem.code.partition(".")[2]) == (name, rule.partition(":")[0])
    assert shows(problem.what, *numbers)
    # That of a parameter, not of a block.
    assert "(" not in (problem.value or "")


# Further examples: overrides, parameter, code (none: it is no value of its type), numbers in the message.
MORE = [
    (["elasticity.max_train_batch_size=5"], "elasticity.micro_batch_sizes",
        "elasticity.micro_batches_fit_an_elastic_batch", ["6"]),
    ([f"{LTD}.total_layer_num=2"], f"{LTD}.random_ltd_layer_num",
        "data_efficiency.token_dropping_names_its_layers", ["2"]),
    ([f"{LTD}.total_layer_num=5"], f"{LTD}.total_layer_num", "data_efficiency.token_dropping_fits_the_model",
        ["4"]),
    (["pos-emb=alibi"], f"{LTD}.enabled", "data_efficiency.token_dropping_fits_the_model", []),
    (["sequence-parallel=true"], f"{LTD}.enabled", "data_efficiency.token_dropping_fits_the_model", []),
    (["attention-config=[[[local], all]]"], f"{LTD}.enabled", "data_efficiency.token_dropping_fits_the_model",
        []),
    ([f"{LTD}.random_ltd_schedule.max_value=7"], f"{LTD}.random_ltd_schedule.max_value",
        "relations.limits_are_in_order", ["8"]),
    (["curriculum_learning.max_difficulty=7"], "curriculum_learning.max_difficulty",
        "relations.limits_are_in_order", ["8"]),
    ([f"{RARITY}.max_difficulty=0"], f"{RARITY}.max_difficulty", "relations.limits_are_in_order", ["1"]),
    ([f"{RARITY}.schedule_config.max_step=[1]"], f"{RARITY}.schedule_config.max_step",
        "data_efficiency.curricula_grow_as_their_schedule_says", ["1", "3"]),
    ([f"{RARITY}.schedule_config.difficulty=[1, 3, 2]"], f"{RARITY}.schedule_config.difficulty",
        "data_efficiency.curricula_grow_as_their_schedule_says", []),
    ([f"{COMPRESSION}.channel_pruning.shared_parameters.enabled=true"],
        f"{COMPRESSION}.channel_pruning.shared_parameters.enabled",
        "blocks.what_nothing_carries_out_is_refused", []),
    ([f"{COMPRESSION}.layer_reduction.other_module_name=[embeding]"],
        f"{COMPRESSION}.layer_reduction.other_module_name", "compression.students_copy_modules", []),
    ([f"{COMPRESSION}.layer_reduction.teacher=null"], f"{COMPRESSION}.layer_reduction.teacher",
        "compression.students_copy_named_layers", []),
    ([f"{COMPRESSION}.layer_reduction.teacher_layer=null"], f"{COMPRESSION}.layer_reduction.teacher_layer",
        "compression.students_copy_named_layers", []),
    ([f"{COMPRESSION}.layer_reduction.{name}=null" for name in ("module_name_prefix", "other_module_name")],
        f"{COMPRESSION}.layer_reduction.module_name_prefix", "compression.students_copy_modules", []),
    (["eigenvalue.layer_name=bert"], "eigenvalue.layer_name", "compression.eigenvalues_are_those_of_layers",
        []),
    (["model-parallel-size=2"], "model_parallel_size", "compression.eigenvalues_are_those_of_layers", []),
    ([f"{COMPRESSION}.weight_quantization.shared_parameters.quantizer_kernel=true"],
        f"{COMPRESSION}.weight_quantization.shared_parameters.quantizer_kernel",
        "blocks.what_nothing_carries_out_is_refused", []),
    ([f"{COMPRESSION}.weight_quantization.shared_parameters.quantize_groups=7"],
        f"{COMPRESSION}.weight_quantization.shared_parameters.quantize_groups",
        "compression.groups_and_blocks_divide_their_matrices", []),
    ([f"{COMPRESSION}.sparse_pruning.shared_parameters.excluded_modules=['(']"],
        f"{COMPRESSION}.sparse_pruning.shared_parameters.excluded_modules",
        "compression.compression_patterns_match", []),
    ([f"{COMPRESSION}.row_pruning.different_groups.rp1.modules=[mlp.down]"],
        f"{COMPRESSION}.row_pruning.different_groups.rp1.modules", "compression.pruned_rows_and_heads_exist",
        []),
    ([f"{COMPRESSION}.row_pruning.different_groups.rp1.related_modules=[[attention.qkv]]"],
        f"{COMPRESSION}.row_pruning.different_groups.rp1.related_modules",
        "compression.pruned_rows_and_heads_exist", []),
    ([f"{COMPRESSION}.row_pruning.different_groups.rp1.related_modules=[[mlp.down], [mlp.down]]"],
        f"{COMPRESSION}.row_pruning.different_groups.rp1.related_modules",
        "compression.pruned_rows_and_heads_exist", ["2", "1"]),
    (["optimizer.type=OneBitAdam", "optimizer.params.freeze_step=10"], "optimizer.type",
        "compression.compressed_layers_are_plain", []),
    ([f"{COMPRESSION}.weight_quantization.different_groups.wq3={{}}"],
        f"{COMPRESSION}.weight_quantization.different_groups.wq3.params.start_bits", "", []),
    ([f"{COMPRESSION}.weight_quantization.different_groups.wq1.params.start_bits=0"],
        f"{COMPRESSION}.weight_quantization.different_groups.wq1.params.start_bits", "", ["1"]),
    ([f"{COMPRESSION}.weight_quantization.different_groups.wq1.param.start_bits=8"],
        f"{COMPRESSION}.weight_quantization.different_groups.wq1.param.start_bits", "", []),
    ([f"{COMPRESSION}.weight_quantization.different_groups.w q={{}}"],
        f"{COMPRESSION}.weight_quantization.different_groups.w q", "", []),
    ([f"{COMPRESSION}.weight_quantization.different_groups=5"],
        f"{COMPRESSION}.weight_quantization.different_groups", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "name", "code", "numbers"), MORE)
def test_further_examples_of_the_rules_of_blocks(load, overrides, name, code, numbers):
    with pytest.raises(ConfigError) as found:
        load(EVERY_BLOCK, *overrides)
    (problem,) = [problem for problem in found.value.problems if problem.name == name]
    assert problem.code == code
    assert shows(problem.what, *numbers)


def test_blocks_survive_being_shown_and_being_sent_to_workers(load, tmp_path):
    config = load(EVERY_BLOCK)
    shown = tmp_path / "shown.yml"
    shown.write_text(show_config(config))
    assert load_config([shown]) == config
    resolved = resolve(config, devices=1)
    assert decode_resolved(encode_resolved(resolved)) == resolved


def test_elastic_jobs_need_no_batch_size(load):
    config = load("elasticity: {enabled: true}", "train-micro-batch-size-per-gpu=null")
    assert config.training.train_micro_batch_size_per_gpu is None


def test_a_secret_is_neither_shown_nor_sent(load):
    config = load("comet: {api_key: hush, workspace: w}")
    resolved = resolve(config, devices=1)
    sent = decode_resolved(encode_resolved(resolved))
    assert config.monitors.comet.api_key.get_secret_value() == "hush"
    assert sent.config.monitors.comet.api_key is None
    assert sent.config.monitors.comet.workspace == "w"
    for text in (show_config(config), repr(config), str(config.model_dump()), str(engine_json(resolved))):
        assert "hush" not in text


def test_a_missing_block_is_located_at_the_parameters_beside_it(load):
    text = "compression_training:\n  row_pruning:\n    shared_parameters: {enabled: true, method: l1}\n"
    with pytest.raises(ConfigError) as found:
        load(text)
    (problem,) = found.value.problems
    assert problem.name == "compression_training.row_pruning.different_groups"
    assert (problem.place.line, problem.place.spelling) == (3, "")


def test_a_communication_logger_that_would_time_nothing_is_refused(load):
    with refused(ConfigError, "that nothing would"):
        load("comms_logger: {enabled: true, prof_all: false}")
    load("comms_logger: {enabled: true}")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            f"{COMPRESSION}:\n  activation_quantization:\n    shared_parameters: {{enabled: true}}\n",
            f"{COMPRESSION}.activation_quantization.shared_parameters.enabled",
        ),
        (
            f"{COMPRESSION}:\n  layer_reduction: {{enabled: true, teacher: big, keep_number_layer: 4, "
            "teacher_layer: [0, 1, 2, 3], module_name_prefix: layers}\n",
            f"{COMPRESSION}.layer_reduction.enabled",
        ),
        ("eigenvalue: {enabled: true, layer_name: layers, layer_num: 4}\n", "eigenvalue.enabled"),
    ],
)
def test_retrieval_models_are_not_compressed(load, text, name):
    with pytest.raises(ConfigError) as found:
        load(text + "objective: ict\nict-head-size: 8\n")
    problems = {problem.name: problem.what for problem in found.value.problems}
    assert "of two towers" in problems[name]
