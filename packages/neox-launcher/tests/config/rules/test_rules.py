"""Every rule: an example that breaks it, and one near it that does not.

Rules about launches, DeepSpeed's blocks and some of the model are tested in separate files.
"""

import pytest

from neox_config import load_config, resolve, rules
from neox_config.derive.engine import chosen_engine
from neox_config.errors import ConfigError
from neox_config.facts.stores import has_credentials
from neox_config.rules import RULES
from support.refusals import refused, shows

MUP = "use_mup: true\nmup_base: {hidden_size: 64, num_attention_heads: 4, head_dim: 16, mlp_width: 256}\n"
# rule -> (text that breaks it, where, numbers in the message, text that does not)
EXAMPLES = {
    "stop_strings_have_characters": ('--set stop-strings=["."," ",""]', "stop_strings", [],
        '--set stop-strings=["."," "]'),
    "stop_tokens_are_ids": ("--set stop-tokens=[2,-1]", "stop_tokens", ["-1", "0"],
        "--set stop-tokens=[2,1]"),
    "mup_knows_its_base": ("use_mup: true\nmup_base: {hidden_size: 64}", "use_mup", [], MUP),
    "mup_knows_its_base: saving": ("use_mup: true\nsave_base_shapes: true", "save_base_shapes", [],
        "use_mup: true\nsave_base_shapes: true\nbase_shapes_file: base.yml"),
    "mup_knows_the_optimizer": (
        f"{MUP}--set optimizer.type=Lamb", "optimizer.type", [], f"{MUP}--set optimizer.type=Lion"),
    "mup_knows_the_optimizer: decay": (
        f"{MUP}optimizer: {{params: {{adam_w_mode: false}}}}", "optimizer.params.weight_decay", [],
        f"{MUP}optimizer: {{params: {{adam_w_mode: false, weight_decay: 0}}}}"),
    "mup_knows_the_layers": (f"{MUP}attention-config: [[[gmlp], 4]]", "attention_config",
        [], f"{MUP}attention-config: [[[local], 4]]"),
    "mup_knows_the_layers: rpe": (f"{MUP}pos-emb: rpe", "pos_emb", [], f"{MUP}pos-emb: alibi"),
    "mup_knows_the_layers: sinusoidal": (f"{MUP}pos-emb: sinusoidal\nmup-embedding-mult: 2",
        "mup_rp_embedding_mult", [], f"{MUP}pos-emb: sinusoidal\nmup-output-temp: 2"),
    "mup_knows_the_layers: orthogonal": (f"{MUP}init-method: orthogonal", "init_method", [],
        f"{MUP}init-method: xavier_uniform"),
    "mup_scales_branches_before_they_are_added": (
        f"{MUP}num-unique-layers: 2\n--set mup_base.num_layers=2", "mup_base.num_layers", ["4"],
        f"{MUP}num-unique-layers: 2\n--set mup_base.num_layers=4"),
    "mup_scales_branches_before_they_are_added: norms": (
        f"{MUP}norm-placement: both\n--set mup_base.num_layers=2", "mup_base.num_layers", ["4"],
        f"{MUP}norm-placement: both"),
    "sizes_divide_others": ("--set num-attention-heads=5", "num_attention_heads", ["64", "1, 2, 4, 8"],
        "--set num-attention-heads=8"),
    "samples_fit_the_positions": ("--set seq-length=64", "seq_length", ["32"], "--set seq-length=16"),
    "rotary_turns_pairs_of_channels": ("pos-emb: rotary\nrotary-pct: 0.2", "rotary_pct", ["3", "16"],
        "pos-emb: rotary\nrotary-pct: 0.25"),
    "attention_config_fits_the_layers": ("attention-config: [[[global, local], 3]]", "attention_config",
        ["6", "4"], "attention-config: [[[global, local], 2]]"),
    "stages_have_layers": ("pipe-parallel-size: 5", "pipe_parallel_size", ["4", "4"],
        "pipe-parallel-size: 4"),
    "layers_are_dealt_by_a_pattern": ("pipe-partition-method: 'type:[a'", "pipe_partition_method", [],
        "pipe-partition-method: 'type:[a]'"),
    "sizes_divide_others: layers": ("num-unique-layers: 3", "num_unique_layers", ["4"],
        "num-unique-layers: 2"),
    "kernels_suit_the_model": ("bias-gelu-fusion: true\nactivation: relu", "bias_gelu_fusion", [],
        "bias-gelu-fusion: true"),
    "kernels_suit_the_model: rope": ("rope-fusion: true", "rope_fusion", [],
        "rope-fusion: true\npos-emb: rotary"),
    "kernels_suit_the_model: layernorm": ("layernorm-fusion: true\nnorm: apexlayernorm", "layernorm_fusion",
        [], "layernorm-fusion: true"),
    "kernels_suit_the_model: bias": ("layernorm-fusion: true\nuse-bias-in-norms: false", "layernorm_fusion",
        [], "layernorm-fusion: auto\nuse-bias-in-norms: false"),
    "the_width_is_set_once": ("mlp-width: 100\nexpansion-factor: 2", "mlp_width", [],
        "mlp-width: 100\nmlp-multiple-of: 8"),
    "the_width_is_positive": ("expansion-factor: 0.01", "expansion_factor", ["0"], "expansion-factor: 0.02"),
    "each_part_of_the_schedule_is_set_once": ("warmup: 0.1\nwarmup-iters: 2", "warmup_iters", [],
        "min-lr: 0.0001\nwarmup-iters: 2\nlr-decay-fraction: 0.5"),
    "the_warmup_ends_before_the_decay": ("warmup-iters: 11", "warmup_iters", ["10"], "warmup-iters: 10"),
    "settings_exclude_each_other: save-growth": ("save-interval: 5\nsave-growth: 2", "save_growth", [],
        "save: x\nsave-growth: 2"),
    "extra_saves_are_different_iterations": ("extra-save-iters: [4, -1]", "extra_save_iters", ["0"],
        "extra-save-iters: [512, 0, 1]"),
    "kernels_suit_the_model: rmsnorm": ("rmsnorm-fusion: true", "rmsnorm_fusion", [],
        "rmsnorm-fusion: true\nnorm: rmsnorm"),
    "loss_fusion_needs_bf16_or_fp32": ("loss-fusion: true\nfp16: {enabled: true}", "loss_fusion", [],
        "loss-fusion: auto\nfp16: {enabled: true}"),
    "kernels_suit_the_model: glu": ("glu-fusion: true\nactivation: reglu", "glu_fusion", [],
        "glu-fusion: true\nactivation: geglu"),
    "kernels_suit_the_model: glu limit": (
        "glu-fusion: true\nactivation: swiglu\nglu-limit: 7.0", "glu_fusion", [],
        "glu-fusion: auto\nactivation: swiglu\nglu-limit: 7.0"),
    "settings_exclude_each_other": (
        "scaled-masked-softmax-fusion: true\nscaled-upper-triang-masked-softmax-fusion: true",
        "scaled_masked_softmax_fusion", [], "scaled-masked-softmax-fusion: true"),
    "settings_exclude_each_other: residual": (
        "gpt-j-residual: true\napply-residual-connection-post-layernorm: true", "gpt_j_residual", [],
        "gpt-j-residual: true"),
    "norms_of_outputs_suit_the_layers: parallel": (
        "norm-placement: after\ngpt-j-residual: true", "norm_placement", [], "norm-placement: after"),
    "norms_of_outputs_suit_the_layers: residual": (
        "norm-placement: both\napply-residual-connection-post-layernorm: true", "norm_placement", [],
        "norm-placement: both"),
    "norms_of_outputs_suit_the_layers: gmlp": (
        "norm-placement: both\nattention-config: [[[gmlp], all]]", "norm_placement", ["gmlp"],
        "attention-config: [[[gmlp], all]]"),
    "queries_and_keys_have_one_form_of_norm": (
        "use-qk-layernorm: true\nqk-norm: head", "use_qk_layernorm", ["head"], "use-qk-layernorm: true"),
    "queries_and_keys_have_one_form_of_norm: shared keys": (
        "use-qk-layernorm: true\nnum-kv-heads: 2", "use_qk_layernorm", ["2"],
        "qk-norm: width\nnum-kv-heads: 2"),
    "chunks_suit_the_schedule": (
        "pipe-parallel-size: 2\npipeline-schedule: interleaved\nvirtual-pipeline-stages: 1",
        "virtual_pipeline_stages", ["2"],
        "pipe-parallel-size: 2\npipeline-schedule: interleaved\nvirtual-pipeline-stages: 2"),
    "chunks_have_layers": (
        "pipe-parallel-size: 2\npipeline-schedule: interleaved\nvirtual-pipeline-stages: 3",
        "virtual_pipeline_stages", ["2", "3", "4"],
        "pipe-parallel-size: 2\npipeline-schedule: interleaved\nvirtual-pipeline-stages: 2"),
    "only_the_torch_engine_has_other_schedules": (
        "pipe-parallel-size: 2\npipeline-schedule: zero_bubble\nengine: deepspeed", "pipeline_schedule", [],
        "pipe-parallel-size: 2\npipeline-schedule: zero_bubble"),
    "split_backward_passes_store_activations": (
        "pipe-parallel-size: 2\npipeline-schedule: zero_bubble\ncheckpoint-activations: true",
        "pipeline_schedule", [], "pipe-parallel-size: 2\nengine: torch\ncheckpoint-activations: true"),
    "one_buffer_of_checkpoints_has_a_size": (
        "pipe-parallel-size: 2\npipeline-schedule: interleaved\ncheckpoint-activations: true\n"
        "partition-activations: true\ncontiguous-checkpointing: true", "contiguous_checkpointing", [],
        "pipe-parallel-size: 2\npipeline-schedule: interleaved\ncheckpoint-activations: true\n"
        "partition-activations: true\ncontiguous-checkpointing: true\nnumber-checkpoints: 8"),
    "zero_stages_suit_the_pipeline": ("zero-stage: 2\npipe-parallel-size: 1\nengine: deepspeed",
        "zero_optimization.stage", ["1"], "zero-stage: 2\npipe-parallel-size: 1"),
    "split_backward_passes_keep_weights": (
        "zero-stage: 3\npipe-parallel-size: 2\npipeline-schedule: zero_bubble", "zero_optimization.stage",
        ["2"], "zero-stage: 2\npipe-parallel-size: 2\npipeline-schedule: zero_bubble"),
    "offloading_has_its_stage": ("zero_optimization: {stage: 2, offload_param: {device: cpu}}",
        "zero_optimization.offload_param.device", ["3", "2"],
        "zero_optimization: {stage: 3, offload_param: {device: cpu}}"),
    "offloading_has_its_stage: states": (
        "zero_optimization: {stage: 2, offload_optimizer: {device: nvme, nvme_path: /x}}",
        "zero_optimization.offload_optimizer.device", ["3", "2"],
        "zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}"),
    "offloading_says_where": ("zero_optimization: {stage: 3, offload_param: {pin_memory: true}}",
        "zero_optimization.offload_param.device", [],
        "zero_optimization: {stage: 3, offload_param: {device: cpu, pin_memory: true}}"),
    "nvme_has_a_buffer_per_state": (
        "zero_optimization: {stage: 3, offload_optimizer: {device: nvme, nvme_path: x, buffer_count: 3}}",
        "zero_optimization.offload_optimizer.buffer_count", ["4"],
        "zero_optimization: {stage: 3, offload_optimizer: {device: nvme, nvme_path: x, buffer_count: 4}}"),
    "offloading_says_where: nvme": ("zero_optimization: {stage: 3, offload_param: {device: nvme}}",
        "zero_optimization.offload_param.device", [],
        "zero_optimization: {stage: 3, offload_param: {device: nvme, nvme_path: /x}}"),
    "one_precision": ("fp16: {enabled: true}\nbf16: {enabled: true}", "bf16.enabled", [],
        "fp16: {enabled: true}\nbf16: {enabled: false}"),
    "precision_agrees_with_the_blocks": ("precision: fp32\nbf16: {enabled: true}", "precision", [],
        "precision: bfloat16\nbf16: {enabled: true}"),
    "amp_keeps_float32_weights": ("amp: {enabled: true, opt_level: O2}", "amp.opt_level", [],
        "amp: {enabled: true, opt_level: O1}"),
    "amp_scales_between_its_limits": ("amp: {enabled: true, min_loss_scale: 8, max_loss_scale: 4}",
        "amp.max_loss_scale", ["8"], "amp: {enabled: true, min_loss_scale: 4, max_loss_scale: 4}"),
    "amp_uses_operators_of_pytorch": ("amp: {enabled: true}\nbias-gelu-fusion: true", "bias_gelu_fusion", [],
        "amp: {enabled: true, opt_level: O0}\nbias-gelu-fusion: true"),
    "amp_excludes_zero": ("amp: {enabled: true}\nzero-stage: 1", "amp.enabled", [], "amp: {enabled: true}"),
    "gradients_are_summed_in_fp32_or_the_models_format": (
        "precision: bfloat16\ndata_types: {grad_accum_dtype: fp16}", "data_types.grad_accum_dtype", [],
        "precision: fp16\ndata_types: {grad_accum_dtype: fp16}"),
    "fp16_cross_entropy_needs_fp16": ("fp16-lm-cross-entropy: true", "fp16_lm_cross_entropy", [],
        "fp16-lm-cross-entropy: true\nprecision: fp16"),
    "floor_is_below_the_peak": ("min-lr: 0.01", "min_lr", ["0.001"], "min-lr: 0.001"),
    "the_parts_of_wsd_fit_the_schedule": ("lr-decay-style: wsd\nwarmup: 0.5\nlr-wsd-decay-iters: 6",
        "lr_wsd_decay_iters", ["6", "10", "5"], "lr-decay-style: wsd\nwarmup: 0.5\nlr-wsd-decay-iters: 5"),
    "the_parts_of_wsd_fit_the_schedule: order": (
        "lr-decay-style: wsd\nlr-wsd-decays: [5, 3]", "lr_wsd_decays", ["10"],
        "lr-decay-style: wsd\nlr-wsd-decays: [3, 5]"),
    "the_parts_of_wsd_fit_the_schedule: end": (
        "lr-decay-style: wsd\nlr-wsd-decays: [10]", "lr_wsd_decays", ["10"],
        "lr-decay-style: wsd\nlr-wsd-decays: [9]"),
    "the_parts_of_wsd_fit_the_schedule: two decays": (
        "lr-decay-style: wsd\nlr-wsd-decays: [4, 6]\nlr-wsd-decay-iters: 3", "lr_wsd_decay_iters",
        ["3", "6", "4"], "lr-decay-style: wsd\nlr-wsd-decays: [4, 7]\nlr-wsd-decay-iters: 3"),
    "averaged_weights_are_the_same_on_all_replicas": (
        "ema-decay: 0.9\n--set optimizer.type=ZeroOneAdam", "ema_decay", [],
        "ema-decay: 0.9\n--set optimizer.type=OneBitAdam"),
    "states_are_rounded_by_their_place": (
        "optimizer: {params: {state_dtype: bf16}}\nzero-stage: 1\nengine: deepspeed",
        "optimizer.params.state_dtype", [],
        "optimizer: {params: {state_dtype: bf16}}\nzero-stage: 0\nengine: deepspeed"),
    "states_are_rounded_by_their_place: Lamb": (
        "optimizer: {params: {state_dtype: bf16}}\n--set optimizer.type=Lamb",
        "optimizer.params.state_dtype", [],
        "optimizer: {params: {state_dtype: bf16}}\nzero-stage: 3"),
    "a_scheduler_has_a_type": ("scheduler: {params: {warmup_num_steps: 5}}", "scheduler.params", [],
        "scheduler: {type: WarmupLR, params: {warmup_num_steps: 5}}"),
    "one_schedule_is_given": ("scheduler: {type: WarmupLR}\nlr-decay-style: cosine", "lr_decay_style", [],
        "scheduler: {type: WarmupLR}\nmin-lr: 0.5\nwarmup-iters: 90"),
    "one_cycle_has_learning_rates": ("scheduler: {type: OneCycle, params: {cycle_max_lr: 0.2}}",
        "scheduler.params.cycle_min_lr", ["0.0001"],
        "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}"),
    "bounds_of_the_scheduler_are_ordered": (
        "scheduler: {type: WarmupDecayLR, params: {warmup_num_steps: 2, warmup_min_lr: 0.01}}",
        "scheduler.params.warmup_min_lr", ["0.001"],
        "scheduler: {type: WarmupLR, params: {warmup_min_lr: 0.01, warmup_max_lr: 0.01}}"),
    "the_warmup_of_the_scheduler_ends_before_its_decay": (
        "scheduler: {type: WarmupCosineLR, params: {warmup_num_steps: 11}}",
        "scheduler.params.warmup_num_steps", ["10", "10"],
        "scheduler: {type: WarmupCosineLR, params: {warmup_num_steps: 11, total_num_steps: 11}}"),
    "the_optimizer_has_a_momentum_to_cycle": (
        "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}\n"
        "--set optimizer.type=Adadelta", "scheduler.params.cycle_momentum", [],
        "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2, cycle_momentum: false}}\n"
        "--set optimizer.type=Adadelta"),
    "the_momentum_stays_below_one": (
        "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2, cycle_first_step_size: 2,"
        " decay_step_size: 1, decay_mom_rate: 0.05}}",
        "scheduler.params.decay_mom_rate", ["1.125"],
        "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2, cycle_first_step_size: 2,"
        " decay_step_size: 2, decay_mom_rate: 0.04}}"),
    "settings_exclude_each_other: schedule": (
        "override-lr-scheduler: true\nuse-checkpoint-lr-scheduler: true", "override_lr_scheduler", [],
        "override-lr-scheduler: true"),
    "arguments_are_within_their_limits": (
        "optimizer: {params: {momentum: 1.0}}\n--set optimizer.type=madgrad_wd", "optimizer.params.momentum",
        ["0", "1"], "optimizer: {params: {momentum: 0}}\n--set optimizer.type=madgrad_wd"),
    "the_trust_ratio_has_a_range": (
        "optimizer: {params: {min_coeff: 2, max_coeff: 1.5}}\n--set optimizer.type=Lamb",
        "optimizer.params.min_coeff", ["1.5"],
        "optimizer: {params: {min_coeff: 1.5, max_coeff: 1.5}}\n--set optimizer.type=Lamb"),
    "a_second_learning_rate_is_relative_to_the_first": (
        "optimizer: {params: {adam_lr: 0.1}}\n--set optimizer.type=Muon\n--set optimizer.params.lr=0",
        "optimizer.params.adam_lr", ["0"], "optimizer: {params: {adam_lr: 0.1}}\n--set optimizer.type=Muon"),
    "the_factor_of_the_trust_ratio_has_a_range": (
        "optimizer: {params: {factor_min: 1.1}}\n--set optimizer.type=OneBitLamb",
        "optimizer.params.factor_min", ["1"],
        "optimizer: {params: {factor_min: 1.0}}\n--set optimizer.type=OneBitLamb"),
    "betas_are_below_one": ("optimizer: {params: {betas: [0.9, 1]}}", "optimizer.params.betas", ["0", "1"],
        "optimizer: {params: {betas: [0, 0.99]}}"),
    "replicas_that_compress_hold_all_states": ("zero-stage: 1\n--set optimizer.type=OneBitAdam",
        "optimizer.type", [], "zero-stage: 0\n--set optimizer.type=OneBitAdam"),
    "the_noise_scale_reads_averaged_gradients": (
        "log-gradient-noise-scale: true\n--set optimizer.type=OneBitAdam", "log_gradient_noise_scale", [],
        "log-gradient-noise-scale: true\n--set optimizer.type=Adam"),
    "the_optimizer_is_known": ("--set optimizer.type=LBFGS", "optimizer.type", [],
        "--set optimizer.type=sgd"),
    "optimizers_know_their_arguments": ("optimizer: {params: {momentum: 0.9}}", "optimizer.params.momentum",
        [], "optimizer: {params: {momentum: 0.9}}\n--set optimizer.type=SGD"),
    "zero_cuts_weights_for_elementwise_optimizers_only": (
        "zero-stage: 1\nzero-allow-untested-optimizer: true\n--set optimizer.type=Adafactor",
        "optimizer.type", ["0"],
        "zero-stage: 1\nzero-allow-untested-optimizer: true\n--set optimizer.type=Adagrad"),
    "tensor_parallelism_splits_weights_for_elementwise_optimizers_only": (
        "model-parallel-size: 2\n--set optimizer.type=Adafactor", "optimizer.type", ["2", "1"],
        "--set optimizer.type=Adafactor"),
    "zero_with_other_optimizers_is_allowed_first": (
        "engine: deepspeed\nzero-stage: 1\n--set optimizer.type=SGD", "optimizer.type", [],
        "engine: torch\nzero-stage: 1\n--set optimizer.type=SGD"),
    "the_length_of_training_is_given_once": ("train-epochs: 2", "train_epochs", [],
        "train-epochs: 2\n--set train-iters=null"),
    "a_pass_reads_one_dataset_in_order": (
        "train-epochs: 2\ntrain-data-paths: [a, b]\nvalid-data-paths: [c]\ntest-data-paths: [c]\n"
        "--set train-iters=null", "train_epochs", ["2"],
        "train-epochs: 2\ntrain-data-paths: [a]\nvalid-data-paths: [c]\ntest-data-paths: [c]\n"
        "--set train-iters=null"),
    "micro_batch_or_batch_is_given": ("--set train-micro-batch-size-per-gpu=null",
        "train_micro_batch_size_per_gpu", [],
        "train-batch-size: 4\n--set train-micro-batch-size-per-gpu=null"),
    "data_comes_one_way": ("train-data-paths: [a]", "train_data_paths", [],
        "train-data-paths: [a]\neval-iters: 0"),
    "lists_match_the_paths": (
        "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\ntrain-data-weights: [1, 2]",
        "train_data_weights", ["2", "1"],
        "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\ntrain-data-weights: [2]"),
    "adapters_have_a_base": ("lora-rank: 4", "lora_rank", [], "lora-rank: 4\nlora-base: pretrained"),
    "adapters_have_matrices": ("lora-rank: 4\nlora-base: pretrained\nlora-target-modules: [gate]",
        "lora_target_modules", [],
        "lora-rank: 4\nlora-base: pretrained\nlora-target-modules: [gate]\nactivation: swiglu"),
    "adapters_are_not_orthogonalized": (
        "lora-rank: 4\nlora-base: x\noptimizer: {params: {adam_lr: 0.001}}\n--set optimizer.type=Muon",
        "optimizer.type", [], "optimizer: {params: {adam_lr: 0.001}}\n--set optimizer.type=Muon"),
    "adapters_are_on_every_stage": (
        "lora-rank: 4\nlora-base: x\npipe-parallel-size: 2\npipe-partition-method: uniform",
        "pipe_partition_method", [], "lora-rank: 4\nlora-base: x\npipe-parallel-size: 2"),
    "lists_match_the_paths: labels": (
        "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\ntrain-label-data-paths: [d, e]",
        "train_label_data_paths", ["2", "1"],
        "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\nlabel-data-paths: [d]"),
    "encoders_do_not_continue_texts": ("objective: masked\nfim-rate: 0.5", "fim_rate", [],
        "objective: masked\nmask-prob: 0.3"),
    "labels_are_those_of_the_objective": (
        "objective: masked\ntrain-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\n"
        "label-data-paths: [d]", "train_label_data_paths", [],
        "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\nlabel-data-paths: [d]"),
    "global_rows_see_later_blocks": (
        'objective: masked\nattention-config: [[["sparse_fixed", "global"], 2]]\n'
        "sparsity-config: {attention: unidirectional, horizontal_global_attention: true}",
        "sparsity_config.horizontal_global_attention", [],
        'objective: masked\nattention-config: [[["sparse_fixed", "global"], 2]]\n'
        "sparsity-config: {horizontal_global_attention: true}"),
    "buckets_are_shared_by_both_directions": ("objective: masked\npos-emb: rpe\nrpe-num-buckets: 7",
        "rpe_num_buckets", ["4"], "objective: masked\npos-emb: rpe\nrpe-num-buckets: 7\nrpe-causal: true"),
    "layers_are_causal_or_see_everything": (
        'objective: masked\nattention-config: [[["local"], "all"]]\n'
        "sparsity-config: {attention: unidirectional}", "sparsity_config.attention", [],
        'objective: masked\nattention-config: [[["local", "global"], 2]]\n'
        "sparsity-config: {attention: unidirectional}"),
    "embeddings_have_a_width": ("objective: ict", "ict_head_size", [], "objective: ict\nict-head-size: 128"),
    "samples_of_retrieval_are_blocks": ("objective: ict\nict-head-size: 128\npack-impl: unpacked",
        "pack_impl", [], "objective: ict\nict-head-size: 128\npack-impl: packed"),
    "samples_of_retrieval_are_blocks: room": (
        "objective: ict\nict-head-size: 128\n--set seq-length=4", "seq_length", ["8"],
        "objective: ict\nict-head-size: 128\n--set seq-length=8"),
    "towers_are_not_compressed": (
        "objective: ict\nict-head-size: 8\neigenvalue: {enabled: true, layer_name: layers, layer_num: 4}",
        "eigenvalue.enabled", [],
        "objective: masked\neigenvalue: {enabled: true, layer_name: layers, layer_num: 4}"),
    "accuracies_count_from_one": ("objective: ict\nict-head-size: 128\nreport-topk-accuracies: [1, 5, 1]",
        "report_topk_accuracies", ["1"],
        "objective: ict\nict-head-size: 128\nreport-topk-accuracies: [1, 5, 20]"),
    "rearranged_documents_have_no_labels": (
        "fim-rate: 0.5\ntrain-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]\n"
        "label-data-paths: [d]", "fim_rate", [],
        "fim-rate: 0.5\ntrain-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]"),
    "parts_of_rearranged_documents_differ": ('fim-rate: 0.5\nfim-suffix-token: "<|fim_prefix|>"',
        "fim_suffix_token", [], 'fim-rate: 0.5\nfim-suffix-token: "<|suffix|>"'),
    "whole_documents_have_an_order": ("sample-order: lazy\npack-impl: unpacked", "sample_order", [],
        "sample-order: lazy\npack-impl: packed"),
    "split_keeps_something": ("split: 0,0,0", "split", ["0"], 'split: "1"'),
    "saving_needs_an_interval": ("save: x", "save", [], "save: x\nsave-interval: 5"),
    "checkpoints_are_saved_locally_first": ("save-interval: 5\nsave: s3://bucket/run", "save", [],
        "save: x\nsave-interval: 5\ncheckpoint-store: s3://bucket/run"),
    "exports_need_checkpoints": ("hf-export: exported", "hf_export", [],
        "save: x\nsave-interval: 5\nhf-export: exported"),
    "local_checkpoints_are_used_alone": (
        "save: x\nsave-interval: 5\ncheckpoint-store: s3://b/r\ncheckpoint: {use_node_local_storage: true}",
        "checkpoint_store", [], "save: x\nsave-interval: 5\ncheckpoint: {use_node_local_storage: true}"),
    "stores_are_urls": ("save: x\nsave-interval: 5\ncheckpoint-store: bucket/run", "checkpoint_store", [],
        "save: x\nsave-interval: 5\ns3-path: s3://bucket/run\nload: s3://bucket/run"),
    "contiguous_checkpointing_partitions": ("contiguous-checkpointing: true", "contiguous_checkpointing", [],
        "contiguous-checkpointing: true\npartition-activations: true"),
    "one_engine_is_requested": ("deepspeed: false\nengine: deepspeed", "deepspeed", [],
        "deepspeed: false\nengine: torch"),
    "the_torch_engine_carries_out_all_settings": (
        "engine: torch\nzero_optimization: {stage: 1, offload_optimizer: {device: cpu}}",
        "zero_optimization.offload_optimizer.device", [],
        "engine: auto\nzero_optimization: {stage: 1, offload_optimizer: {device: cpu}}"),
    "predivide_or_prescale": ("prescale_gradients: true\ngradient_predivide_factor: 2",
        "gradient_predivide_factor", [], "gradient_predivide_factor: 2"),
    "reduced_shares_are_divided_once": ("zero_optimization: {stage: 1}\ngradient_predivide_factor: 2",
        "gradient_predivide_factor", [],
        "zero_optimization: {stage: 1, reduce_scatter: false}\ngradient_predivide_factor: 2"),
    "gathered_buckets_are_even": ("zero_optimization: {stage: 1, allgather_bucket_size: 7}",
        "zero_optimization.allgather_bucket_size", ["8"],
        "zero_optimization: {stage: 3, allgather_bucket_size: 7}"),
    "gradients_are_read_before_the_update": (
        "engine: deepspeed\nlog-gradient-noise-scale: true\nzero-stage: 1", "log_gradient_noise_scale", [],
        "log-gradient-noise-scale: true\nzero-stage: 1"),
    "gradients_are_read_before_the_update: zeros": (
        "engine: deepspeed\nlog-zero-gradients: true\nzero-stage: 2", "log_zero_gradients", [],
        "log-zero-gradients: true\nzero-stage: 2"),
    "autoresume_requires_checkpoints": ("adlr-autoresume: true\nsave: one\nload: other\nsave-interval: 10",
        "adlr_autoresume", [], "adlr-autoresume: true\nsave: one\nload: one\nsave-interval: 10"),
    "autoresume_names_an_object": ("adlr-autoresume-service: userlib.auto_resume", "adlr_autoresume_service",
        [], "adlr-autoresume-service: userlib.auto_resume:AutoResume"),
    "gradients_are_read_before_the_update: spikes": ("engine: deepspeed\non-spike: skip\nzero-stage: 1",
        "on_spike", [], "on-spike: skip\nzero-stage: 1"),
    "checkpoints_are_saved_locally_first: rollback": ("on-spike: rollback", "on_spike", [],
        "on-spike: rollback\nsave: somewhere\nsave-interval: 10"),
    "profiled_iterations_are_in_order": ("profile: true\nlog-dir: logs\nprofile-step-stop: 9",
        "profile_step_stop", ["10", "10"], "memory-profiling: true\nlog-dir: logs\nprofile-step-stop: 9"),
    "operations_are_counted_before_the_end": (
        "flops_profiler: {enabled: true, profile_step: 11}\ntrain-iters: 10", "flops_profiler.profile_step",
        ["10", "10"], "flops_profiler: {enabled: true, profile_step: 10}\ntrain-iters: 10"),
    "profilers_have_a_folder": ("memory-profiling: true", "memory_profiling", [],
        "memory-profiling: true\nmemory-profiling-path: logs\nprofile: true\ntensorboard-dir: logs"),
    "ranks_are_compared_below_stage_3: copies": ("sdc-check-interval: 100\nzero_optimization: {stage: 3}",
        "sdc_check_interval", ["3"], "sdc-check-interval: 100\nzero_optimization: {stage: 2}"),
    "ranks_are_compared_below_stage_3": ("straggler-threshold: 1.5\nzero_optimization: {stage: 3}",
        "straggler_threshold", ["3"], "straggler-threshold: 1.5\nzero_optimization: {stage: 2}"),
    "quantized_weights_need_stage_3": ("zero_optimization: {stage: 2, zero_quantized_weights: true}",
        "zero_optimization.zero_quantized_weights", ["3", "2"],
        "zero_optimization: {stage: 3, zero_quantized_weights: true}"),
    "attention_kinds_override_what_layers_use": (
        "pos-emb: rotary\nattention-kinds: {far: {rotary-emb-base: 9}}", "attention_kinds.far", [],
        "pos-emb: rotary\nattention-config: [[[far], all]]\nattention-kinds: {far: {rotary-emb-base: 9}}"),
    "attention_kinds_override_what_layers_use: types": (
        "attention-config: [[[local], all]]\nattention-kinds: {local: {sliding-window-width: 9}}",
        "attention_kinds.local", [],
        "attention-config: [[[far], all]]\nattention-kinds: {far: {sliding-window-width: 9}}"),
    "attention_kinds_override_what_layers_use: other positions": (
        "pos-emb: alibi\nattention-config: [[[far], all]]\nattention-kinds: {far: {pos-emb: none}}",
        "attention_kinds.far.pos_emb", ["alibi"],
        "pos-emb: rotary\nattention-config: [[[far], all]]\nattention-kinds: {far: {pos-emb: none}}"),
    "attention_kinds_override_what_layers_use: not rotated": (
        "pos-emb: rotary\nattention-config: [[[far], all]]\n"
        "attention-kinds: {far: {pos-emb: none, rotary-emb-base: 9}}",
        "attention_kinds.far.rotary_emb_base", [],
        "pos-emb: rotary\nattention-config: [[[far], all]]\n"
        "attention-kinds: {far: {pos-emb: rotary, rotary-emb-base: 9}}"),
    "attention_kinds_override_what_layers_use: scaling without type": (
        "pos-emb: rotary\nattention-config: [[[far], all]]\n"
        "attention-kinds: {far: {rotary-scaling: {factor: 2.0}}}",
        "attention_kinds.far.rotary_scaling", [],
        "pos-emb: rotary\nattention-config: [[[far], all]]\n"
        "attention-kinds: {far: {rotary-scaling: {type: linear, factor: 2.0}}}"),
    "longrope_scales_each_pair: of given heads": (
        "pos-emb: rotary\nhead-dim: 4\n"
        "rotary-scaling: {type: longrope, short-factor: [1, 1, 1], long-factor: [1, 1]}",
        "rotary_scaling.short_factor", ["2"],
        "pos-emb: rotary\nhead-dim: 4\n"
        "rotary-scaling: {type: longrope, short-factor: [1, 1], long-factor: [1, 1]}"),
    "longrope_scales_each_pair: finite": (
        "pos-emb: rotary\nhead-dim: 4\n"
        "rotary-scaling: {type: longrope, short-factor: [1, Infinity], long-factor: [1, 1]}",
        "rotary_scaling.short_factor", ["2"],
        "pos-emb: rotary\nhead-dim: 4\n"
        "rotary-scaling: {type: longrope, short-factor: [1, 9], long-factor: [1, 1]}"),
    "longrope_scales_each_pair": (
        "pos-emb: rotary\n"
        "rotary-scaling: {type: longrope, short-factor: [1], long-factor: [1, 1, 1, 1, 1, 1, 1, 1]}",
        "rotary_scaling.short_factor", ["8"],
        "pos-emb: rotary\nrotary-pct: 0.125\n"
        "rotary-scaling: {type: longrope, short-factor: [1], long-factor: [2]}"),
    "experts_run_where_they_are_built": (
        "moe-num-experts: 4\nengine: deepspeed", "engine", [],
        "moe-num-experts: 4\nengine: torch"),
    "experts_run_where_they_are_built: one bit": (
        "moe-num-experts: 4\n--set optimizer.type=OneBitAdam", "optimizer.type", [],
        "moe-num-experts: 4\n--set optimizer.type=Muon"),
    "experts_run_where_they_are_built: sm3": (
        "moe-num-experts: 4\n--set optimizer.type=SM3", "optimizer.type", [],
        "moe-num-experts: 4\n--set optimizer.type=Lamb"),
    "experts_run_where_they_are_built: shared layers": (
        "moe-num-experts: 4\nnum-unique-layers: 2", "num_unique_layers", [],
        "moe-num-experts: 4"),
    "experts_run_where_they_are_built: gmlp": (
        "moe-num-experts: 4\nattention-config: [[[gmlp, global], 2]]", "attention_config", [],
        "moe-num-experts: 4\nattention-config: [[[local, global], 2]]"),
    "ranks_have_equally_many_experts": (
        "moe-num-experts: 6\nexpert-parallel-size: 4", "expert_parallel_size", ["6"],
        "moe-num-experts: 6\nexpert-parallel-size: 3"),
    "a_token_has_at_most_all_experts": ("moe-num-experts: 4\nmoe-top-k: 5", "moe_top_k", ["4"],
        "moe-num-experts: 4\nmoe-top-k: 4"),
    "experts_are_in_layers": ("moe-num-experts: 4\nmoe-layers: [1, 4]", "moe_layers", ["0", "3"],
        "moe-num-experts: 4\nmoe-layers: [1, 3]"),
    "experts_are_in_layers: order": ("moe-num-experts: 4\nmoe-layers: [2, 1]", "moe_layers", ["0", "3"],
        "moe-num-experts: 4\nmoe-layers: [1, 2]"),
    "experts_are_balanced_in_one_way": ("moe-num-experts: 4\nmoe-balance-loss: 0.1", "moe_balance_loss", [],
        "moe-num-experts: 4\nmoe-balance-loss: 0.1\nmoe-router-type: topk"),
    "experts_are_balanced_in_one_way: bias": ("moe-num-experts: 4\nmoe-expert-bias: true",
        "moe_expert_bias", [],
        "moe-num-experts: 4\nmoe-expert-bias: true\nmoe-router-type: topk"),
    "experts_are_balanced_in_one_way: groups": ("moe-num-experts: 4\nmoe-groups: 2", "moe_groups", [],
        "moe-num-experts: 4\nmoe-groups: 2\nmoe-router-type: topk"),
    "groups_have_the_experts_of_a_token": (
        "moe-num-experts: 10\nmoe-router-type: topk\nmoe-groups: 4", "moe_groups", ["10"],
        "moe-num-experts: 12\nmoe-router-type: topk\nmoe-groups: 4"),
    "groups_have_the_experts_of_a_token: one": (
        "moe-num-experts: 4\nmoe-router-type: topk\nmoe-groups: 4", "moe_groups", ["4"],
        "moe-num-experts: 4\nmoe-router-type: topk\nmoe-groups: 2"),
    "groups_have_the_experts_of_a_token: few": (
        "moe-num-experts: 8\nmoe-router-type: topk\nmoe-groups: 4\nmoe-top-k: 3", "moe_top_groups",
        ["3", "2"],
        "moe-num-experts: 8\nmoe-router-type: topk\nmoe-groups: 4\nmoe-top-k: 3\nmoe-top-groups: 2"),
    "groups_have_the_experts_of_a_token: many": (
        "moe-num-experts: 8\nmoe-router-type: topk\nmoe-groups: 4\nmoe-top-groups: 5", "moe_top_groups",
        ["4"],
        "moe-num-experts: 8\nmoe-router-type: topk\nmoe-groups: 4\nmoe-top-groups: 4"),
    "all_states_are_offloaded": (
        "zero_optimization: {stage: 3, offload_optimizer: {device: cpu, ratio: 0.3}}",
        "zero_optimization.offload_optimizer.ratio", [],
        "zero_optimization: {stage: 3, offload_optimizer: {device: cpu, ratio: 1.0}}"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["finetune", "no_load_optim", "no_load_rng", "no_save_optim"])
def test_autoresume_must_continue_from_the_state_that_was_saved(minimal, name):
    settings = ["save=x", "load=x", "save-interval=5", "adlr-autoresume=true"]
    with refused(ConfigError, f"with {name.replace('_', '-')}"):
        resolve(load_config([minimal], overrides=[*settings, f"{name}=true"]), devices=1)


def split_overrides(text):
    lines = text.splitlines()
    overrides = [line.removeprefix("--set ") for line in lines if line.startswith("--set ")]
    return "\n".join(line for line in lines if not line.startswith("--set ")), overrides


ELSEWHERE = ("launch", "blocks", "compression.rules", "data_efficiency.rules", "elasticity")
# In test_config_model_rules.py.
OF_THE_MODEL = {
    "compiled_layers_stay_as_they_are",
    "exported_models_have_no_kernels",
    "far_distances_share_buckets",
    "patterns_of_global_blocks_fit_the_window",
    "listed_blocks_are_ranges",
    "shared_weights_fit",
    "token_dropping_knows_the_direction",
}


def test_every_rule_has_its_examples():
    here = {rule.__name__ for rule in RULES if not rule.__module__.endswith(ELSEWHERE)}
    with_examples = {name.partition(":")[0] for name in EXAMPLES} | {"limits_are_in_order"}
    assert here - OF_THE_MODEL == with_examples
    assert here >= OF_THE_MODEL


def test_every_rule_is_run_once():
    names = [rule.__name__ for rule in RULES]
    assert sorted(names) == sorted(set(names))
    assert [rule.__name__ for rule in RULES if not rule.__doc__] == []


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_refuses_its_example_alone(load, rule):
    breaking, name, numbers, _ = EXAMPLES[rule]
    text, overrides = split_overrides(breaking)
    with pytest.raises(ConfigError) as found:
        load(text, *overrides)
    (problem,) = found.value.problems
    assert (problem.name, problem.code.partition(".")[2]) == (name, rule.partition(":")[0])
    assert shows(f"{problem.what}\n{problem.remedy}", *numbers)


@pytest.mark.parametrize(
    ("invalid", "breaking", "name"),
    [
        (
            "scaled-masked-softmax-fusion: 7",
            "gpt-j-residual: true\napply-residual-connection-post-layernorm: true",
            "gpt_j_residual",
        ),
        (
            "autotuning: {start_profile_step: x}",
            "curriculum_learning: {min_difficulty: 4, max_difficulty: 2}",
            "curriculum_learning.max_difficulty",
        ),
        ("attention-config: 7", "num-kv-heads: 3", "num_kv_heads"),
        ("num-unique-layers: x", "num-kv-heads: 3", "num_kv_heads"),
        ("bias-gelu-fusion: 7", "glu-fusion: true", "glu_fusion"),
    ],
)
def test_an_invalid_value_does_not_hide_other_relations(load, invalid, breaking, name):
    with pytest.raises(ConfigError) as found:
        load(f"{invalid}\n{breaking}")
    assert {problem.name for problem in found.value.problems} >= {name}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_accepts_a_similar_configuration(load, rule):
    text, overrides = split_overrides(EXAMPLES[rule][3])
    assert load(text, *overrides).model.num_layers == 4


PATHS = "train-data-paths: [a]\nvalid-data-paths: [b]\ntest-data-paths: [c]"
OFFLOAD = "zero_optimization: {offload_optimizer: {device: cpu}}"
# text, where, part of the sentence
MORE = [
    (f"data-path: x\n{PATHS}", "train_data_paths", "cannot be combined with data-path"),
    (PATHS.replace("[a]", "[]"), "train_data_paths", "is empty"),
    ("save: x\nextra-save-iters: []", "save", "requires save-interval"),
    ("save: x\nextra-save-iters: [2, 3, 2]", "extra_save_iters",
        "must be a list of different numbers from 0"),
    (f"split: {'9' * 400},1", "split", "contains a number that is too large"),
    (f"{PATHS}\ntrain-data-weights: [-1]", "train_data_weights", "must not contain a negative weight"),
    ("train-data-weights: [1]", "train_data_weights", "is given without train-data-paths"),
    ("lora-rank: 4\nlora-base: s3://me:secret@bucket/base", "lora_base", "contains a user name, and every"),
    ("lora-rank: 4\nlora-base: x\ngmlp-attn-dim: 8\nattention-config: [[[gmlp], 4]]", "lora_rank",
        "cannot be used with gmlp or amlp layers"),
    ("valid-label-data-paths: [a]", "valid_label_data_paths", "is given without valid-data-paths"),
    (OFFLOAD, "zero_optimization.offload_optimizer.device", "requires ZeRO"),
    ("precision: fp16\nfp16: {enabled: false}", "precision", "contradicts the block with enabled: false"),
    ("attention-config: [[[global], 2], [[local], all]]", "attention_config", "has other entries"),
    ("attention-config: [[[global, local, local], all]]", "attention_config",
        "does not divide num-layers: 4"),
    ("attention-config: [global]", "attention_config", "describes 1 layer,"),
    ("attention-config: [[global, global], 2]", "attention_config", "has a count that is not a positive"),
    ("attention-config: [[[global], -1]]", "attention_config", "has a count that is not a positive"),
    ("attention-config: [[[global], 10000000000]]", "attention_config", "10,000,000,000 layers"),
    ("attention-config: [[[global]]]", "attention_config", "is not a list of [[types], count]"),
]  # fmt: skip


def test_the_default_of_a_warmup_that_is_too_long_is_named(load):
    with pytest.raises(ConfigError) as found:
        load("scheduler: {type: WarmupDecayLR}", "train-iters=20")
    (problem,) = found.value.problems
    assert problem.name == "scheduler.params.warmup_num_steps"
    assert problem.what.startswith("is not set; its default, 1,000, is more than the 20 iterations")
    assert "at most 20" in problem.remedy


@pytest.mark.parametrize(("text", "name", "sentence"), MORE)
def test_further_messages_of_rules(load, text, name, sentence):
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
        "rmsnorm-fusion: auto\nglu-fusion: auto",
        "scaled-masked-softmax-fusion: auto\nscaled-upper-triang-masked-softmax-fusion: true",
    ],
)
def test_a_fusion_that_is_left_open_contradicts_nothing(load, text):
    assert load(text)


def test_gradients_are_divided_before_the_sum_in_stage_1_anyway(load):
    load("zero_optimization: {stage: 1}\nprescale_gradients: true")
    with refused(ConfigError, "computes another mean"):
        load("zero_optimization: {stage: 3, reduce_scatter: false}\ngradient_predivide_factor: 2")
    with refused(ConfigError, "ZeRO", "stage 2", "reduce_scatter"):
        load("zero_optimization: {stage: 2}\nprescale_gradients: true")
    load("zero_optimization: {stage: 2, reduce_scatter: false}\nprescale_gradients: true")


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [
        ("engine: torch", "engine is torch"),
        ("deepspeed: false", "deepspeed is false"),
        ("pipe-parallel-size: 2\npipeline-schedule: interleaved", "pipeline-schedule is interleaved"),
    ],
)
def test_settings_of_deepspeed_name_what_has_chosen_the_torch_engine(load, engine, remedy):
    change = f"or change what selects the torch engine: {remedy}"
    with refused(ConfigError, f"remove offload_optimizer, {change}"):
        load(f"{engine}\nzero_optimization: {{stage: 1, offload_optimizer: {{device: cpu}}}}")


_WHOLE, _MOMENTA = "whole weights for its update", "averages momenta over data-parallel ranks"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Adafactor", _WHOLE),
        ("OneBitAdam", _MOMENTA),
        ("OneBitLamb", _MOMENTA),
    ],
)
def test_an_optimizer_that_is_not_elementwise_has_one_problem_under_zero(load, kind, reason):
    with pytest.raises(ConfigError) as caught:
        load("zero-stage: 2\nzero-allow-untested-optimizer: true", f"optimizer.type={kind}")
    assert [problem.name for problem in caught.value.problems] == ["optimizer.type"]
    assert reason in caught.value.problems[0].what


@pytest.mark.parametrize("kind", ["Lamb", "Muon", "SM3"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("pipeline", ["", "pipe-parallel-size: 2"])
def test_optimizers_that_join_rows_train_under_the_torch_engines_zero(load, kind, stage, pipeline):
    loaded = load(f"zero-stage: {stage}\n{pipeline}", f"optimizer.type={kind}")
    assert chosen_engine(loaded).name == "torch"


@pytest.mark.parametrize(
    ("settings", "reason", "remedy"),
    [
        ("engine: deepspeed\nzero-stage: 2", "engine is deepspeed", "remove what requires DeepSpeed"),
        ("zero_optimization: {stage: 1, offload_optimizer: {device: cpu}}",
            "zero-optimization.offload-optimizer.device is carried out by DeepSpeed's engine alone",
            "remove what requires DeepSpeed"),
        ("engine: deepspeed\nsdc-check-interval: 5\nzero-stage: 1", "engine is deepspeed",
            "remove what requires DeepSpeed, so that the torch engine trains, or set "
            "zero_optimization.stage: 0, or use Adam"),
    ],
)  # fmt: skip
def test_optimizers_that_join_rows_are_refused_where_deepspeed_trains(load, settings, reason, remedy):
    with pytest.raises(ConfigError) as caught:
        load(settings, "optimizer.type=Muon")
    (problem,) = [each for each in caught.value.problems if each.name == "optimizer.type"]
    assert f"{reason})" in problem.what
    assert problem.remedy.startswith(remedy)


@pytest.mark.parametrize("kind", ["Adagrad", "Lion"])
def test_zero_accepts_the_optimizers_that_deepspeed_lists(load, kind):
    assert load("zero-stage: 2", f"optimizer.type={kind}").optimizer.zero_allow_untested_optimizer is False


@pytest.mark.parametrize(
    ("scheduler", "params", "sentence"),
    [
        ("{}", "{lr: 0, adam_lr: 0}", "in proportion to its largest learning rate (optimizer.params.lr)"),
        (
            "{type: WarmupLR, params: {warmup_max_lr: 0}}",
            "{lr: 0.1, adam_lr: 0.1}",
            "in proportion to its largest learning rate (scheduler.params.warmup_max_lr)",
        ),
        ("{}", "{lr: 0.1, adam_lr: 1.0e+300}", "must be a number of at least 0 and at most 1e30, or null"),
    ],
)
def test_learning_rates_of_muon_that_cannot_be_reached_are_refused(load, scheduler, params, sentence):
    with pytest.raises(ConfigError) as found:
        load(f"scheduler: {scheduler}", f"optimizer={{type: Muon, params: {params}}}")
    (problem,) = found.value.problems
    assert problem.name == "optimizer.params.adam_lr"
    assert sentence in problem.what


@pytest.mark.parametrize("given", ["{lr: 0, adam_lr: null}", "{lr: 0.1, adam_lr: 0}"])
def test_further_learning_rates_of_muon_are_accepted(load, given):
    assert load("", f"optimizer={{type: Muon, params: {given}}}").optimizer.optimizer.kind == "muon"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("coefficients", "newton"),
        ("qkv", "split"),
        ("scale", "1"),
        ("row_beta", "1.0"),
        ("cautious_decay", "1"),
    ],
)
def test_forms_of_muon_that_do_not_exist_are_refused(load, argument, value):
    with refused(ConfigError, value) as found:
        load("", f"optimizer={{type: Muon, params: {{lr: 1, {argument}: {value}}}}}")
    assert [problem.name for problem in found.value.problems] == [f"optimizer.params.{argument}"]


def test_problems_of_arguments_are_in_the_order_of_the_optimizer(load):
    with pytest.raises(ConfigError) as found:
        load(
            "", "optimizer={type: Muon, params: {lr: 1, ns_steps: 0, adam_lr: -1, nesterov: 1, momentum: 1}}"
        )
    names = [problem.name.rpartition(".")[2] for problem in found.value.problems]
    assert names == ["momentum", "nesterov", "ns_steps", "adam_lr"]


_CYCLE = "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2"


@pytest.mark.parametrize(
    ("params", "overrides", "name", "what"),
    [
        ("", ["optimizer.type=SGD"], "cycle_momentum", "and SGD stores none while momentum is 0"),
        ("", ["optimizer.type=RMSprop"], "cycle_momentum", "and RMSprop stores none while momentum is 0"),
        (
            ", cycle_min_mom: 0",
            ["optimizer.type=SGD", "optimizer.params.momentum=0.9"],
            "cycle_min_mom",
            "must be more than 0: SGD stores no momentum while it is 0",
        ),
        (", cycle_min_mom: 0.95", [], "cycle_min_mom", "is more than scheduler.params.cycle_max_mom: 0.9"),
        (", cycle_max_mom: 1", [], "cycle_max_mom", "must be less than 1"),
        (", cycle_min_mom: -0.1", [], "cycle_min_mom", "must be at least 0"),
    ],
)
def test_a_momentum_that_cannot_be_cycled_is_refused_with_its_line(load, params, overrides, name, what):
    with pytest.raises(ConfigError) as caught:
        load(f"{_CYCLE}{params}}}}}", *overrides)
    (problem,) = caught.value.problems
    assert problem.name == f"scheduler.params.{name}"
    assert what in problem.what


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "CPU_Adam", "madgrad_wd", "NAdam", "RAdam", "Adamax"])
def test_every_optimizer_with_a_momentum_can_cycle_it(load, kind):
    assert load(f"{_CYCLE}}}}}", f"optimizer.type={kind}")


def test_values_without_effect_beside_a_scheduler_are_noted(load):
    momentum = "cycle_momentum: false, cycle_min_mom: 0.1"
    config = load(f"{_CYCLE}, {momentum}}}}}\nmin-lr: 0.0001\nlr-decay-iters: 5")
    assert {notice.name: notice.what for notice in config.notices} == {
        "optimizer.params.lr": (
            "has no effect: scheduler.type is OneCycle, which uses scheduler.params.cycle_max_lr"
        ),
        "min_lr": "has no effect: it is used only when scheduler.type is null",
        "lr_decay_iters": (
            "has no effect: it is used only when scheduler.type is null, or its total_num_steps is needed "
            "and null"
        ),
        "scheduler.params.cycle_min_mom": (
            "has no effect: it is used only when type is OneCycle and cycle_momentum is true"
        ),
    }
    used = load("scheduler: {type: WarmupDecayLR, params: {warmup_num_steps: 2}}\nlr-decay-iters: 5")
    assert used.notices == ()


@pytest.mark.parametrize(
    ("kind", "argument", "what", "remedy"),
    [
        ("SGD", "momentun", "is not an argument of SGD", "did you mean momentum?"),
        ("RMSprop", "betas", "is not an argument of RMSprop", "remove it, or use alpha, eps, momentum"),
        ("Adafactor", "eps", "is a pair of numbers in Adafactor", "remove it"),
        ("RAdam", "maximize", "would maximize the loss", "remove it"),
        ("NAdam", "capturable", "is for CUDA graphs", "remove it"),
        ("madgrad_wd", "beta", "is not an argument of madgrad_wd", "did you mean betas?"),
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


def test_a_rule_that_reads_an_invalid_value_is_skipped(load):
    with pytest.raises(ConfigError) as found:
        load("hidden-size: none at all\nlayernorm-fusion: true\nnorm: rmsnorm")
    assert [problem.name for problem in found.value.problems] == ["hidden_size", "layernorm_fusion"]


def test_a_rule_that_names_an_invalid_value_is_skipped(load):
    params = "{lr: 0.001, comm_backend_name: [nccl]}"
    with pytest.raises(ConfigError) as found:
        load(f"optimizer: {{type: OneBitAdam, params: {params}}}")
    assert "optimizer.params.comm_backend_name" in [problem.name for problem in found.value.problems]


@pytest.mark.parametrize("text", ["", "hidden-size: none at all"], ids=["valid", "with an invalid value"])
def test_a_mistake_in_a_rule_is_not_hidden(load, monkeypatch, text):
    def misspelled(config):
        yield config.model.num_layerz

    monkeypatch.setattr(rules, "RULES", (misspelled,))
    with refused(AttributeError, "num_layerz"):
        load(text)


def test_iterations_after_the_end_of_the_training_cannot_be_profiled(load):
    with refused(ConfigError, "train-iters: 9", "most 9"):
        load("profile: true\nlog-dir: logs", "train-iters=9")
    load("profile: true\nlog-dir: logs", "train-iters=10")


def test_traces_have_a_folder(load):
    with refused(ConfigError, "log-dir"):
        load("profile: true")


def test_the_container_in_a_url_of_azure_is_no_user_name():
    assert not has_credentials("abfss://container@account.dfs.core.windows.net/run")
    assert has_credentials("s3://name:secret@bucket/run")


def test_an_unknown_name_with_a_dot_has_a_value(tmp_path):
    path = tmp_path / "job.yml"
    path.write_text('{"optimizer": {"type": "Adam", "params": {"lr": 0.1, "local_.x": 16}}}')
    with refused(ConfigError, "optimizer.params.local_.x: 16"):
        load_config([path])
