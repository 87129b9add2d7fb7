"""Every rule: an example that breaks it, and one near it that does not.

Those of launches, of DeepSpeed's blocks and some of the model have files of their own.
"""

import pytest

from neox_launcher.config.rules import RULES
from neox_launcher.errors import ConfigError

# rule -> (text that breaks it, where, part of the sentence, text that does not)
EXAMPLES = {
    "heads_divide_the_width": (
        "--set num-attention-heads=5",
        "num_attention_heads",
        "does not divide hidden-size: 64\nuse 1, 2, 4, 8",
        "--set num-attention-heads=8",
    ),
    "samples_fit_the_positions": (
        "--set seq-length=64",
        "seq_length",
        "is more than max-position-embeddings: 32",
        "--set seq-length=16",
    ),
    "rotary_turns_pairs_of_channels": (
        "pos-emb: rotary\nrotary-pct: 0.2",
        "rotary_pct",
        "rotates 3 of the 16 channels of a head",
        "pos-emb: rotary\nrotary-pct: 0.25",
    ),
    "attention_config_fits_the_layers": (
        "attention-config: [[[global, local], 3]]",
        "attention_config",
        "describes 6 layers, but num-layers is 4",
        "attention-config: [[[global, local], 2]]",
    ),
    "stages_have_layers": (
        "pipe-parallel-size: 5",
        "pipe_parallel_size",
        "is more than num-layers: 4\nuse at most 4",
        "pipe-parallel-size: 4",
    ),
    "layers_are_dealt_by_a_pattern": (
        "pipe-partition-method: 'type:[a'",
        "pipe_partition_method",
        "is no regular expression behind type:",
        "pipe-partition-method: 'type:[a]'",
    ),
    "shared_layers_come_out_even": (
        "num-unique-layers: 3",
        "num_unique_layers",
        "does not divide num-layers: 4",
        "num-unique-layers: 2",
    ),
    "bias_gelu_needs_gelu": (
        "bias-gelu-fusion: true\nactivation: relu",
        "bias_gelu_fusion",
        "needs activation: gelu, not relu",
        "bias-gelu-fusion: true",
    ),
    "rope_fusion_needs_rotary_positions": (
        "rope-fusion: true",
        "rope_fusion",
        "needs pos-emb: rotary, not learned",
        "rope-fusion: true\npos-emb: rotary",
    ),
    "layernorm_fusion_needs_layernorm": (
        "layernorm-fusion: true\nnorm: apexlayernorm",
        "layernorm_fusion",
        "needs norm: layernorm, not apexlayernorm",
        "layernorm-fusion: true",
    ),
    "one_softmax_fusion": (
        "scaled-masked-softmax-fusion: true\nscaled-upper-triang-masked-softmax-fusion: true",
        "scaled_masked_softmax_fusion",
        "cannot both be true",
        "scaled-masked-softmax-fusion: true",
    ),
    "one_residual_order": (
        "gpt-j-residual: true\napply-residual-connection-post-layernorm: true",
        "gpt_j_residual",
        "cannot both be true",
        "gpt-j-residual: true",
    ),
    "zero_2_and_above_need_the_plain_model": (
        "zero-stage: 2\npipe-parallel-size: 1",
        "zero_optimization.stage",
        "do not work with pipeline parallelism",
        "zero-stage: 1\npipe-parallel-size: 1",
    ),
    "offload_param_needs_stage_3": (
        "zero_optimization: {stage: 2, offload_param: {device: cpu}}",
        "zero_optimization.offload_param.device",
        "needs stage 3, not 2",
        "zero_optimization: {stage: 3, offload_param: {device: cpu}}",
    ),
    "offload_optimizer_needs_zero": (
        "zero_optimization: {stage: 2, offload_optimizer: {device: nvme, nvme_path: /x}}",
        "zero_optimization.offload_optimizer.device",
        "needs stage 3, not 2",
        "zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}",
    ),
    "offloading_says_where": (
        "zero_optimization: {stage: 3, offload_param: {pin_memory: true}}",
        "zero_optimization.offload_param.device",
        "is missing\nadd device: cpu, nvme or none",
        "zero_optimization: {stage: 3, offload_param: {device: cpu, pin_memory: true}}",
    ),
    "nvme_has_a_buffer_per_state": (
        "zero_optimization: {stage: 3, offload_optimizer: {device: nvme, nvme_path: x, buffer_count: 3}}",
        "zero_optimization.offload_optimizer.buffer_count",
        "is less than the 4 tensors that Adam keeps",
        "zero_optimization: {stage: 3, offload_optimizer: {device: nvme, nvme_path: x, buffer_count: 4}}",
    ),
    "nvme_needs_a_path": (
        "zero_optimization: {stage: 3, offload_param: {device: nvme}}",
        "zero_optimization.offload_param.device",
        "needs a folder",
        "zero_optimization: {stage: 3, offload_param: {device: nvme, nvme_path: /x}}",
    ),
    "one_precision": (
        "fp16: {enabled: true}\nbf16: {enabled: true}",
        "bf16.enabled",
        "excludes fp16.enabled: true",
        "fp16: {enabled: true}\nbf16: {enabled: false}",
    ),
    "precision_agrees_with_the_blocks": (
        "precision: fp32\nbf16: {enabled: true}",
        "precision",
        "contradicts bf16.enabled: true",
        "precision: bfloat16\nbf16: {enabled: true}",
    ),
    "amp_excludes_zero": (
        "amp: {enabled: true}\nzero-stage: 1",
        "amp.enabled",
        "does not work with ZeRO",
        "amp: {enabled: true}",
    ),
    "gradients_are_summed_in_fp32_or_the_models_format": (
        "precision: bfloat16\ndata_types: {grad_accum_dtype: fp16}",
        "data_types.grad_accum_dtype",
        "does not go with training in bf16",
        "precision: fp16\ndata_types: {grad_accum_dtype: fp16}",
    ),
    "fp16_cross_entropy_needs_fp16": (
        "fp16-lm-cross-entropy: true",
        "fp16_lm_cross_entropy",
        "needs fp16",
        "fp16-lm-cross-entropy: true\nprecision: fp16",
    ),
    "floor_is_below_the_peak": (
        "min-lr: 0.01",
        "min_lr",
        "is more than optimizer.params.lr: 0.001",
        "min-lr: 0.001",
    ),
    "one_schedule_after_loading": (
        "override-lr-scheduler: true\nuse-checkpoint-lr-scheduler: true",
        "override_lr_scheduler",
        "excludes use-checkpoint-lr-scheduler",
        "override-lr-scheduler: true",
    ),
    "betas_are_decays": (
        "optimizer: {params: {betas: [0.9, 1]}}",
        "optimizer.params.betas",
        "each at least 0 and less than 1",
        "optimizer: {params: {betas: [0, 0.99]}}",
    ),
    "one_bit_adam_is_told_how_to_communicate": (
        "optimizer: {params: {freeze_step: 9, cuda_aware: false}}\n--set optimizer.type=OneBitAdam",
        "optimizer.params.comm_backend_name",
        "is missing, and OneBitAdam needs it",
        "optimizer: {params: {freeze_step: 9, cuda_aware: false, comm_backend_name: nccl}}\n"
        "--set optimizer.type=OneBitAdam",
    ),
    "the_optimizer_is_known": (
        "--set optimizer.type=LBFGS",
        "optimizer.type",
        "is no optimizer here\nuse Adam, AdamW, CPU_Adam",
        "--set optimizer.type=sgd",
    ),
    "optimizers_know_their_arguments": (
        "optimizer: {params: {momentum: 0.9}}",
        "optimizer.params.momentum",
        "is no argument of Adam",
        "optimizer: {params: {momentum: 0.9}}\n--set optimizer.type=SGD",
    ),
    "zero_cuts_weights_for_elementwise_optimizers_only": (
        "zero-stage: 1\nzero-allow-untested-optimizer: true\n--set optimizer.type=Adafactor",
        "optimizer.type",
        "set zero_optimization.stage: 0, or use Adam",
        "zero-stage: 1\nzero-allow-untested-optimizer: true\n--set optimizer.type=Adagrad",
    ),
    "tensor_parallelism_splits_weights_for_elementwise_optimizers_only": (
        "model-parallel-size: 2\n--set optimizer.type=Adafactor",
        "optimizer.type",
        "with model-parallel-size: 2 a rank holds a part of it\nset model-parallel-size: 1, or use Adam",
        "--set optimizer.type=Adafactor",
    ),
    "zero_with_other_optimizers_is_allowed_first": (
        "zero-stage: 1\n--set optimizer.type=SGD",
        "optimizer.type",
        "add zero_allow_untested_optimizer: true",
        "zero-stage: 1\nzero-allow-untested-optimizer: true\n--set optimizer.type=SGD",
    ),
    "micro_batch_or_batch_is_given": (
        "--set train-micro-batch-size-per-gpu=null",
        "train_micro_batch_size_per_gpu",
        "is missing, and so is train-batch-size",
        "train-batch-size: 4\n--set train-micro-batch-size-per-gpu=null",
    ),
    "data_comes_one_way": (
        "train-data-paths: [a]",
        "train_data_paths",
        "is given without valid-data-paths, test-data-paths",
        "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]",
    ),
    "weights_match_the_paths": (
        "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\ntrain-data-weights: [1, 2]",
        "train_data_weights",
        "has 2 numbers for 1 dataset",
        "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\ntrain-data-weights: [2]",
    ),
    "split_keeps_something": ("split: 0,0,0", "split", "gives nothing to any part", 'split: "1"'),
    "saving_needs_an_interval": ("save: x", "save", "needs save-interval", "save: x\nsave-interval: 5"),
    "contiguous_checkpointing_partitions": (
        "contiguous-checkpointing: true",
        "contiguous_checkpointing",
        "needs partition-activations",
        "contiguous-checkpointing: true\npartition-activations: true",
    ),
    "gradient_norms_need_the_plain_model": (
        "log-grad-norm: true\npipe-parallel-size: 2",
        "log_grad_norm",
        "works only without pipeline stages",
        "log-grad-norm: true",
    ),
    "deepspeed_is_the_engine": (
        "deepspeed: false",
        "deepspeed",
        "there is no other engine",
        "deepspeed: true",
    ),
    "predivide_or_prescale": (
        "prescale_gradients: true\ngradient_predivide_factor: 2",
        "gradient_predivide_factor",
        "has no effect with prescale_gradients",
        "gradient_predivide_factor: 2",
    ),
    "reduced_shares_are_divided_once": (
        "zero_optimization: {stage: 1}\ngradient_predivide_factor: 2",
        "gradient_predivide_factor",
        "works with ZeRO only without reduce_scatter",
        "zero_optimization: {stage: 1, reduce_scatter: false}\ngradient_predivide_factor: 2",
    ),
    "gathered_buckets_are_even": (
        "zero_optimization: {stage: 1, allgather_bucket_size: 7}",
        "zero_optimization.allgather_bucket_size",
        "must be an even number\nuse 8",
        "zero_optimization: {stage: 3, allgather_bucket_size: 7}",
    ),
    "twin_flow_needs_stage_3": (
        "zero_optimization: {stage: 2, offload_optimizer: {device: cpu, ratio: 0.3}}",
        "zero_optimization.offload_optimizer.ratio",
        "below 1 needs stage 3",
        "zero_optimization: {stage: 3, offload_optimizer: {device: cpu, ratio: 0.3}}",
    ),
}


def split_overrides(text):
    lines = text.splitlines()
    overrides = [line.removeprefix("--set ") for line in lines if line.startswith("--set ")]
    return "\n".join(line for line in lines if not line.startswith("--set ")), overrides


ELSEWHERE = ("launch", "blocks", "compression", "data_efficiency", "elasticity")
# In test_config_model_rules.py.
OF_THE_MODEL = {
    "blocks_divide_the_samples",
    "compiled_layers_stay_as_they_are",
    "exported_models_have_no_kernels",
    "far_distances_share_buckets",
    "fused_gelu_adds_a_bias",
    "global_blocks_divide_the_window",
    "keys_are_shared_evenly",
    "listed_blocks_are_ranges",
    "shared_weights_fit",
}


def test_every_rule_has_its_examples():
    here = {rule.__name__ for rule in RULES if not rule.__module__.endswith(ELSEWHERE)}
    assert here - OF_THE_MODEL == set(EXAMPLES)
    assert here >= OF_THE_MODEL


def test_every_rule_is_run_once():
    names = [rule.__name__ for rule in RULES]
    assert sorted(names) == sorted(set(names))
    assert [rule.__name__ for rule in RULES if not rule.__doc__] == []


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_refuses_its_example_alone(load, rule):
    breaking, name, sentence, _ = EXAMPLES[rule]
    text, overrides = split_overrides(breaking)
    with pytest.raises(ConfigError) as found:
        load(text, *overrides)
    (problem,) = found.value.problems
    assert problem.name == name
    assert sentence in f"{problem.what}\n{problem.remedy}"


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_lets_its_neighbour_pass(load, rule):
    text, overrides = split_overrides(EXAMPLES[rule][3])
    assert load(text, *overrides).model.num_layers == 4


PATHS = "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]"
OFFLOAD = "zero_optimization: {offload_optimizer: {device: cpu}}"
# text, where, part of the sentence
MORE = [
    (f"data-path: x\n{PATHS}", "train_data_paths", "excludes data-path"),
    (PATHS.replace("[a]", "[]"), "train_data_paths", "is empty"),
    (f"{PATHS}\ntrain-data-weights: [-1]", "train_data_weights", "none is negative"),
    ("train-data-weights: [1]", "train_data_weights", "has no train-data-paths to weigh"),
    (OFFLOAD, "zero_optimization.offload_optimizer.device", "needs ZeRO"),
    ("precision: fp16\nfp16: {enabled: false}", "precision", "contradicts the block that says"),
    ("attention-config: [[[global], 2], [[local], all]]", "attention_config", "has other entries"),
    ("attention-config: [[[global, local, local], all]]", "attention_config", "do not fill num-layers: 4"),
    ("attention-config: [global]", "attention_config", "describes 1 layers"),
    ("attention-config: [[global, global], 2]", "attention_config", "has a count that is no positive"),
    ("attention-config: [[[global], -1]]", "attention_config", "has a count that is no positive"),
    ("attention-config: [[[global], 10000000000]]", "attention_config", "10,000,000,000 layers"),
    ("attention-config: [[[global]]]", "attention_config", "is not a list of [[types], count]"),
]


@pytest.mark.parametrize(("text", "name", "sentence"), MORE)
def test_rules_have_more_to_say(load, text, name, sentence):
    with pytest.raises(ConfigError) as found:
        load(text)
    told = [problem.what for problem in found.value.problems if problem.name == name]
    assert [sentence in what for what in told] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "bias-gelu-fusion: auto\nactivation: relu",
        "rope-fusion: auto",
        "layernorm-fusion: auto\nnorm: rmsnorm",
        "scaled-masked-softmax-fusion: auto\nscaled-upper-triang-masked-softmax-fusion: true",
    ],
)
def test_a_fusion_that_is_left_open_contradicts_nothing(load, text):
    assert load(text)


def test_gradients_are_divided_before_the_sum_in_stage_1_anyway(load):
    load("zero_optimization: {stage: 1}\nprescale_gradients: true")
    with pytest.raises(ConfigError, match="ZeRO stage 2 and above only without reduce_scatter"):
        load("zero_optimization: {stage: 2}\nprescale_gradients: true")
    load("zero_optimization: {stage: 2, reduce_scatter: false}\nprescale_gradients: true")


@pytest.mark.parametrize("kind", ["Adafactor", "Lamb", "OneBitLamb", "SM3"])
def test_an_optimizer_that_is_not_elementwise_has_one_problem_under_zero(load, kind):
    with pytest.raises(ConfigError) as caught:
        load("zero-stage: 2\nzero-allow-untested-optimizer: true", f"optimizer.type={kind}")
    assert [problem.name for problem in caught.value.problems] == ["optimizer.type"]
    assert "means or norms over whole weights" in caught.value.problems[0].what


@pytest.mark.parametrize(
    ("kind", "argument", "what", "remedy"),
    [
        ("SGD", "momentun", "is no argument of SGD", "did you mean momentum?"),
        ("RMSprop", "betas", "is no argument of RMSprop", "leave it out, or use alpha, eps, momentum"),
        ("Adafactor", "eps", "is a pair of numbers in Adafactor", "leave it out"),
        ("RAdam", "maximize", "would raise the loss", "leave it out"),
        ("NAdam", "capturable", "is for CUDA graphs", "leave it out"),
        ("madgrad_wd", "beta", "is no argument of madgrad_wd", "did you mean betas?"),
    ],
)
def test_arguments_that_an_optimizer_does_not_take_are_refused_before_the_start(
    load, kind, argument, what, remedy
):
    value = "[0.9, 0.9]" if argument == "betas" else "0.1"
    with pytest.raises(ConfigError) as caught:
        load("", f"optimizer.type={kind}", f"optimizer.params.{argument}={value}")
    (problem,) = caught.value.problems
    assert problem.name == f"optimizer.params.{argument}"
    assert problem.what.startswith(what)
    assert problem.remedy.startswith(remedy)
