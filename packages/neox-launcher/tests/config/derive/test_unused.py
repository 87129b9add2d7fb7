"""Values without effect under the other settings get a note; other values do not."""

import pytest

from neox_config.derive.tokenizer import tokenizer_files
from neox_config.derive.unused import is_understood
from neox_config.schema.config import all_parameters
from support.refusals import shows

# text -> parameters with a note
CASES = [
    ("rotary-pct: 0.5", ["rotary_pct"]),
    ("rotary-pct: 0.5\npos-emb: rotary", []),
    ("rotary-pct: 1.0", []),
    ("engine: deepspeed\nzero_optimization: {stage: 1, round_robin_gradients: true}", []),
    ("engine: torch\nzero_optimization: {stage: 1, round_robin_gradients: true}",
        ["zero_optimization.round_robin_gradients"]),
    ("zero_optimization: {stage: 0, reduce_bucket_size: 1000}", []),
    ("bf16: {enabled: true}\nzero_optimization: {stage: 2}\ndata_types: {grad_accum_dtype: bf16}",
        ["data_types.grad_accum_dtype"]),
    ("bf16: {enabled: true}\nzero_optimization: {stage: 1}\ndata_types: {grad_accum_dtype: bf16}", []),
    (
        "bf16: {enabled: true}\nzero_optimization: {stage: 2}\ndata_types: {grad_accum_dtype: bf16}\n"
        "engine: deepspeed", []),
    ("zero_optimization: {stage: 3, round_robin_gradients: true}",
        ["zero_optimization.round_robin_gradients"]),
    ("zero_optimization: {stage: 2, sub_group_size: 5}", ["zero_optimization.sub_group_size"]),
    ("zero_optimization: {stage: 3, offload_param: {device: cpu, buffer_size: 7}}",
        ["zero_optimization.offload_param.buffer_size"]),
    ("optimizer: {params: {var_freeze_step: 7}}", ["optimizer.params.var_freeze_step"]),
    ("optimizer: {params: {momentum: 0.9}}\n--set optimizer.type=SGD", []),
    ("pipe-partition-method: uniform", ["pipe_partition_method"]),
    ("pipe-partition-method: uniform\npipe-parallel-size: 2", []),
    ("store-cache: folder", ["store_cache"]),
    ("store-cache: folder\nload: s3://bucket/model", []),
    ("store-cache: folder\nlora-rank: 4\nlora-base: s3://bucket/model", []),
    ("fim-spm-rate: 0.9", ["fim_spm_rate"]),
    ("fim-spm-rate: 0.9\nfim-rate: 0.5", []),
    ("fim-rate: 0.5\nobjective: causal", []),
    ("short-seq-prob: 0.2\nmask-prob: 0.3", ["short_seq_prob", "mask_prob"]),
    ("short-seq-prob: 0.2\nmask-prob: 0.3\nobjective: masked", []),
    ("rpe-causal: true\npos-emb: rpe", ["rpe_causal"]),
    ("rpe-causal: true\npos-emb: rpe\nobjective: masked", []),
    ("objective: masked\nsparsity-config: {attention: unidirectional, horizontal_global_attention: true}",
        ["sparsity_config.attention", "sparsity_config.horizontal_global_attention"]),
    (
        'objective: masked\nattention-config: [[["sparse_fixed"], "all"]]\n'
        "sparsity-config: {horizontal_global_attention: true}", []),
    ("split: 1,1,1", ["split"]),
    ("split: 1,1,1\ndata-path: x", []),
    ("norm: rmsnorm\nlayernorm-epsilon: 1e-6", ["layernorm_epsilon"]),
    ("norm: apexlayernorm\nlayernorm-epsilon: 1e-6", []),
    ("elasticity: {enabled: false, num_gpus_per_node: 5, version: 0.1}", []),
    ("comms_logger: {enabled: true, prof_all: true, prof_ops: [all_reduce]}", ["comms_logger.prof_ops"]),
    ("fp16_lm_cross_entropy: true\nfp16: {enabled: true}", []),
    ("fp16: {enabled: true, loss_scale: 128, hysteresis: 4}", ["fp16.hysteresis"]),
    ("fp16: {enabled: true, hysteresis: 4}", []),
    # `precision` enables the block, too.
    ("precision: fp16\nfp16: {loss_scale: 128, hysteresis: 4}", ["fp16.hysteresis"]),
    ("precision: fp16\nfp16: {hysteresis: 4}", []),
    ("fp16: {hysteresis: 4, loss_scale_window: 5}", ["fp16.hysteresis"]),
    ("fp16: {enabled: false, hysteresis: 4}", []),
    ("flops_profiler: {profile_step: 7}", ["flops_profiler.profile_step"]),
    ("tensorboard: {output_path: '', job_name: DeepSpeedJobName}", []),
    ("data_efficiency: {enabled: true}", ["data_efficiency.enabled"]),
    ("data_efficiency: {data_routing: {enabled: true}}",
        ["data_efficiency.data_routing.enabled", "data_efficiency.data_routing.enabled"]),
    ("attention-softmax-in-fp32: true", []),
    ("attention-softmax-in-fp32: false", ["attention_softmax_in_fp32"]),
    ("max-position-embeddings: 32", []),
    ("--set max-position-embeddings=64", []),
    ("pos-emb: rotary", []),
    ("pos-emb: rotary\n--set max-position-embeddings=64", []),
    ("init-method: small_init\ninit-method-std: 0.5", []),
    ("init-method: small_init\noutput-layer-init-method: wang_init\ninit-method-std: 0.5",
        ["init_method_std"]),
    ("sparsity_config: {num_local_blocks: 2}", ["sparsity_config.num_local_blocks"]),
    ("sparsity_config: {num_local_blocks: 2}\nattention-config: [[[global, local], 2]]", []),
    ("gmlp-attn-dim: 32\nattention-config: [[[bigbird], all]]", ["gmlp_attn_dim"]),
    (
        "zero_allow_untested_optimizer: true\noptimizer: {params: {betas: [0.5, 0.9]}}\n"
        "--set optimizer.type=madgrad_wd", ["optimizer.params.betas"]),
    ("weight-decay: 0.1\n--set optimizer.type=Rprop", ["weight_decay"]),
    ("weight-decay: 0.1\n--set optimizer.type=SGD", []),
    ("optimizer: {params: {weight_decay: 0.1}}\n--set optimizer.type=Rprop",
        ["optimizer.params.weight_decay"]),
    ("zero_optimization: {allgather_partitions: true, load_from_fp32_weights: true}", []),
    ("zero_optimization: {stage: 1, allgather_partitions: false}",
        ["zero_optimization.allgather_partitions"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "names"), CASES)
def test_a_value_without_effect_is_noted(load, text, names):
    lines = text.splitlines()
    config = load(
        "\n".join(line for line in lines if not line.startswith("--set")),
        *[line.removeprefix("--set ") for line in lines if line.startswith("--set")],
    )
    assert [notice.name for notice in config.notices] == names


def test_the_note_names_the_condition(load):
    (notice,) = load("rotary-pct: 0.5").notices
    assert shows(notice.what, "pos_emb is rotary")
    assert (notice.value, notice.place.line) == ("0.5", 1)


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("GPT2BPETokenizer", ["vocab_file", "merge_file"]),
        ("HFTokenizer", ["vocab_file"]),
        ("HFGPT2Tokenizer", ["vocab_file"]),
        ("CharLevelTokenizer", []),
    ],
)
def test_files_that_the_tokenizer_does_not_read_are_noted_and_left_out(load, kind, read):
    config = load(f"tokenizer-type: {kind}\nvocab-file: vocab.json\nmerge-file: merges.txt\n")
    noted = {each.name for each in config.notices if "has no effect" in each.what}
    assert list(tokenizer_files(config.tokenizer)) == read
    assert noted == {"vocab_file", "merge_file"} - set(read)


def test_the_note_names_the_types_of_the_layers(load):
    (notice,) = load("sparsity_config: {num_local_blocks: 2}").notices
    assert shows(notice.what, "attention_config", "sparse_fixed")


# The hosts of a job, and thereby who starts its workers, are not known when a configuration is read.
UNKNOWN = {"launcher", "launcher_address", "launcher_port", "remote_prefix", "remote_setup"}


def test_every_condition_is_one_that_can_be_judged():
    conditions = {each.name: each.used_when for each in all_parameters() if each.used_when}
    assert {name for name, text in conditions.items() if not is_understood(name, text)} == UNKNOWN


def test_weights_are_not_used_when_documents_are_counted(load):
    lists = "train-data-paths: [a, b]\nvalid-data-paths: [v]\ntest-data-paths: [t]\n"
    weighted = lists + "train-data-weights: [1, 2]\n"
    assert load(weighted).notices == ()
    (notice,) = load(weighted + "weight-by-num-documents: true").notices
    assert notice.name == "train_data_weights"


def test_one_bit_adam_follows_its_own_schedule(load):
    keys = "lr-decay-style: linear\noptimizer: {params: {freeze_step: 9}}"
    (notice,) = load(keys, "optimizer.type=OneBitAdam").notices
    assert notice.name == "lr_decay_style"


def test_one_bit_adam_takes_the_communication_arguments_of_gpt_neox_with_a_note(load):
    keys = "optimizer: {params: {freeze_step: 9, cuda_aware: false, comm_backend_name: nccl}}"
    assert load(keys, "optimizer.type=OneBitAdam").notices == ()
    keys = "optimizer: {params: {freeze_step: 9, cuda_aware: true, comm_backend_name: mpi}}"
    notices = load(keys, "optimizer.type=OneBitAdam").notices
    assert [notice.name for notice in notices] == [
        "optimizer.params.cuda_aware",
        "optimizer.params.comm_backend_name",
    ]
    assert all("averaged through distributed_backend" in notice.what for notice in notices)


LOCAL_STEPS = (
    "optimizer: {params: {var_freeze_step: 10, var_update_scaler: 2, local_step_scaler: 4, "
    "local_step_clipper: 8}}"
)


@pytest.mark.parametrize(("last", "average"), [(18, None), (21, 20), (31, 24), (10**9 - 1, 10**9 - 8)])
def test_a_training_that_ends_between_two_averages_of_its_replicas_is_noted(load, last, average):
    """The interval is 1 from update 11, 2 from 15, 4 from 19 and 8 from 23."""
    notices = load(LOCAL_STEPS, "optimizer.type=ZeroOneAdam", f"train-iters={last}").notices
    expected = [] if average is None else [("train_iters", f"set train-iters: {average}")]
    assert [(notice.name, notice.remedy) for notice in notices] == expected
    what = f"of the average in iteration {average or 0:,}, if no update is skipped"
    assert all(notice.what.endswith(what) for notice in notices)


def test_a_block_that_may_be_off_on_purpose_is_not_only_told_to_be_on(load):
    (note,) = load("fp16: {initial_scale_power: 12}").notices
    assert shows(note.what, "no effect", "fp16.enabled is false")
    assert shows(note.remedy, "set", "true")
    assert load("fp16: {initial_scale_power: 12}", "fp16.enabled=false").notices == ()
