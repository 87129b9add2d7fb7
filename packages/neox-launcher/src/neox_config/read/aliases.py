"""Accepted names that are not parameters: which parameter they mean, or why they are ignored.

There is one table per kind, and the documentation lists them all: *shorthands* (other names of a parameter),
*older spellings* (names whose value is translated), *computed* (set by the system; a given value is not used)
and *retired* (without effect here). Names of features that this project does not have are in `features.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neox_config.facts.checkpoints import checkpoint_name
from neox_config.problems import Problem, as_block, in_words
from neox_config.read.features import features_off
from neox_config.read.reading import Leaf

__all__ = [
    "COMPUTED",
    "EXTRA_BLOCK",
    "FOREIGN_NAMES",
    "FOREIGN_REMEDIES",
    "OLDER_SPELLINGS",
    "RETIRED",
    "SHORTHANDS",
    "OlderSpelling",
    "Unfolded",
    "fold_aliases",
    "has_no_effect",
    "shorthand_of",
    "usual_value",
]

_ITERATION = "iteration"

SHORTHANDS: Mapping[str, str] = {
    "optimizer_type": "optimizer.type",
    "lr": "optimizer.params.lr",
    "adam_eps": "optimizer.params.eps",
    "zero_stage": "zero_optimization.stage",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "batch_size": "train_micro_batch_size_per_gpu",
    "train_step_batch_size": "train_micro_batch_size_per_gpu",
    "gas": "gradient_accumulation_steps",
    "clip_grad": "gradient_clipping",
    "optimizer.params.max_grad_norm": "gradient_clipping",
    "loss_scale": "fp16.loss_scale",
    "loss_scale_window": "fp16.loss_scale_window",
    "hysteresis": "fp16.hysteresis",
    "min_scale": "fp16.min_loss_scale",
    "min_loss_scale": "fp16.min_loss_scale",
    "fp16.min_scale": "fp16.min_loss_scale",
    "fp16.initial_loss_scale_power": "fp16.initial_scale_power",
    "fp16.fp16": "fp16.enabled",
    "bfloat16": "bf16",
    "contigious_checkpointing": "contiguous_checkpointing",
    "distribute_checkpointed_activations": "partition_activations",
    "activation_checkpointing.partition_activations": "partition_activations",
    "activation_checkpointing.cpu_checkpointing": "checkpoint_in_cpu",
    "activation_checkpointing.contiguous_memory_optimization": "contiguous_checkpointing",
    "activation_checkpointing.number_checkpoints": "number_checkpoints",
    "activation_checkpointing.synchronize_checkpoint_boundary": "synchronize_each_layer",
    "activation_checkpointing.profile": "profile_backward",
    "sparse_attention": "sparsity_config",
    "label_data_paths": "train_label_data_paths",
    "s3_path": "checkpoint_store",
    "s3_chunk_size": "store_chunk_size",
    "elasticity.prefer_larger_batch": "elasticity.prefer_large_batch",
    "bf16.bf16": "bf16.enabled",
    "use_comet": "comet.enabled",
    "comet_workspace": "comet.workspace",
    "comet_project": "comet.project",
    "comet_experiment_name": "comet.experiment_name",
    "comet_tags": "comet.tags",
    "comet_others": "comet.others",
}

COMPUTED: Mapping[str, str] = {
    "world_size": "the number of devices of the job",
    "is_pipe_parallel": "whether pipe-parallel-size is at least 1",
    "rank": "the global rank of the worker",
    "local_rank": "the rank of the worker on its host",
    _ITERATION: "read from the checkpoint",
    "do_train": "whether there is training data",
    "do_valid": "whether there is validation data",
    "do_test": "whether there is test data",
    "padded_vocab_size": "the tokenizer's size, rounded up by make-vocab-size-divisible-by",
    "dynamic_loss_scale": "whether fp16.loss_scale is 0",
    "git_hash": "read from the repository",
    "user_script": "the training program",
    "global_num_gpus": "the number of devices of the job",
    "config_files": "the files of the configuration",
    "curriculum_seqlen": "the current length of the curriculum",
    "scheduler.params.last_batch_iteration": "the number of updates so far, read from the checkpoint",
    "comet_experiment": "created by the Comet writer",
}

# Names of parameters in other programs: not accepted, because their values may have another meaning, but
# suggested in the error message.
FOREIGN_NAMES: Mapping[str, str] = {
    "learning_rate": "optimizer.params.lr",
    "max_lr": "optimizer.params.lr",
    "lr_warmup_fraction": "warmup",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup_iters",
    "num_warmup_steps": "warmup_iters",
    "lr_warmup_steps": "warmup_iters",
    "lr_warmup_iters": "warmup_iters",
    "lr_scheduler_type": "lr_decay_style",
    "n_layer": "num_layers",
    "num_hidden_layers": "num_layers",
    "n_head": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_positions": "max_position_embeddings",
    "ffn_hidden_size": "mlp_width",
    "sequence_length": "seq_length",
    "max_seq_length": "seq_length",
    "block_size": "seq_length",
    "num_train_epochs": "train_epochs",
    "max_epochs": "train_epochs",
    "max_steps": "train_iters",
    "num_iters": "train_iters",
    "train_steps": "train_iters",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size",
    "tensor_model_parallel_size": "model_parallel_size",
    "tensor_parallel_size": "model_parallel_size",
    "tp": "model_parallel_size",
    "pipeline_model_parallel_size": "pipe_parallel_size",
    "pipeline_parallel_size": "pipe_parallel_size",
    "pp": "pipe_parallel_size",
    "max_grad_norm": "gradient_clipping",
    "max_checkpoint_keep": "keep_last_n_checkpoints",
    "save_total_limit": "keep_last_n_checkpoints",
    "save_steps": "save_interval",
    "save_iters": "extra_save_iters",
    "logging_steps": "log_interval",
    "eval_steps": "eval_interval",
    "output_dir": "save",
    "hidden_act": "activation",
    "num_key_value_heads": "num_kv_heads",
    "num_query_groups": "num_kv_heads",
    "rope_theta": "rotary_emb_base",
    "rotary_base": "rotary_emb_base",
    "rotary_percent": "rotary_pct",
    "partial_rotary_factor": "rotary_pct",
    "rms_norm_eps": "rms_norm_epsilon",
    "layer_norm_eps": "layernorm_epsilon",
    "layer_norm_epsilon": "layernorm_epsilon",
    "attn_pdrop": "attention_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
    "hidden_dropout_prob": "hidden_dropout",
    "initializer_range": "init_method_std",
    "sliding_window": "sliding_window_width",
    "adam_epsilon": "optimizer.params.eps",
    "gradient_checkpointing": "checkpoint_activations",
    "dataloader_num_workers": "num_workers",
    "run_name": "wandb_run_name",
    "dtype": "precision",
    "torch_dtype": "precision",
    "eval_strategy": "eval_interval",
    "evaluation_strategy": "eval_interval",
    "max_new_tokens": "maximum_tokens",
    "lora_r": "lora_rank",
    "r": "lora_rank",
    "target_modules": "lora_target_modules",
}

# Names of other programs for behaviour that is fixed here, or configured differently.
FOREIGN_REMEDIES: Mapping[str, str] = {
    "resume_from_checkpoint": "use load: FOLDER and finetune: false; FOLDER is the save folder of the "
    "training to continue, or one of its checkpoints",
    "dp": "remove it: the data-parallel size is the number of devices divided by model-parallel-size and "
    "pipe-parallel-size",
    "dropout": "use hidden-dropout and attention-dropout",
    "max_tokens": "use maximum-tokens for the tokens to generate, or serve.max_tokens for the most that a "
    "request to a server may state",
    **dict.fromkeys(
        (
            *("num_experts", "num_local_experts", "n_routed_experts", "moe_expert_parallel_size"),
            *("ep", "expert_parallel_size", "expert_model_parallel_size"),
        ),
        "remove it: mixture-of-experts layers (MoE) are not supported",
    ),
    **dict.fromkeys(
        ("cp", "context_parallel_size"),
        "remove it: context parallelism is not supported; for long sequences, set model-parallel-size and "
        "sequence-parallel: true",
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type"),
        "remove it: training on quantized weights (QLoRA) is not supported; lora-rank trains adapters of "
        "weights in bf16, fp16 or fp32",
    ),
    "use_rslora": "remove it: the scale of adapters is lora-alpha / lora-rank; for that of rsLoRA, multiply "
    "lora-alpha by the square root of lora-rank",
    "use_dora": "remove it: of adapters, only LoRA is supported (lora-rank)",
    **dict.fromkeys(
        (
            "use_axonn_model_parallelism",
            *(f"{part}_model_parallel_size" for part in ("depth", "row", "column")),
        ),
        "remove it: AxoNN is not supported; model-parallel-size splits the layers",
    ),
    "mlp_type": "remove it, and set activation; use activation: swiglu for Llama",
    "optim": "set the type of the optimizer in its block, such as optimizer: {type: AdamW}",
    "report_to": "set tensorboard-dir, use-wandb or comet.enabled",
    "packing": "set pack-impl: packed (the default) joins documents, best_fit keeps them whole",
    "group_by_length": "use pack-impl: best_fit, whole documents with little padding",
    "assistant_only_loss": "remove it; preprocess_data --loss-mask chat writes labels of the assistant's "
    "parts, which train-label-data-paths names",
    "completion_only_loss": "remove it; preprocess_data --loss-mask prompt-response writes labels of the "
    "responses, which train-label-data-paths names",
    **dict.fromkeys(
        ("model_name_or_path", "pretrained_model_name_or_path"),
        "import the model with neox-convert from-hf DIR --output OUT; OUT/model.yml is its configuration",
    ),
    **dict.fromkeys(
        ("dataset_name", "dataset_path", "dataset_text_field", "train_file", "validation_file"),
        "write the texts as a dataset with preprocess_data; data-path names its prefix",
    ),
    **dict.fromkeys(
        ("tokenizer_name", "tokenizer_name_or_path"),
        "set tokenizer-type: HFTokenizer and vocab-file: FOLDER/tokenizer.json",
    ),
    "overwrite_output_dir": "remove it: a training starts anew with another save, and without load",
    "trust_remote_code": "remove it: no code of a model is run",
    "task_type": "remove it: adapters are those of the model in this configuration",
    "init_lora_weights": "remove it: at the start A is random and B is zero, or both are those in load",
    "modules_to_save": "remove it: with lora-rank, only adapters are trained",
    "bias": "set use-bias-in-mlp, use-bias-in-attn-linear and use-bias-in-norms; adapters train no biases",
    **dict.fromkeys(
        ("lora", "lora_config", "peft", "peft_config"),
        "remove it: adapters are set by lora-rank, lora-alpha, lora-dropout and lora-target-modules",
    ),
    "peft_type": "remove it: of adapters, only LoRA is supported (lora-rank)",
    "base_model_name_or_path": "use lora-base: FOLDER, which neox-convert from-hf wrote",
    "inference_mode": "remove it: neox-launch generate, serve and evaluate train nothing",
    "fan_in_fan_out": "remove it: it follows from the model",
    "use_peft": "set lora-rank, which trains adapters, and lora-base",
    "do_eval": "remove it: validation data are evaluated every eval-interval iterations",
    "do_predict": "remove it: test data are evaluated at the end; neox-launch generate continues texts",
    "do_sample": "set temperature above 0, which samples; 0 takes the most likely token",
    "attn_implementation": "remove it; attention is computed by the fastest implementation that can",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_token"),
        "remove it: nothing is uploaded; neox-convert to-hf writes a folder for transformers, which hf "
        "upload publishes",
    ),
    **dict.fromkeys(
        ("use_cpu", "no_cuda"),
        "remove it: the CPU is used where no GPU is visible, as with CUDA_VISIBLE_DEVICES= in the "
        "environment",
    ),
    "use_cache": "remove it: generation caches keys and values unless recompute is true",
    **dict.fromkeys(
        ("eos_token", "eos_token_id", "bos_token", "bos_token_id", "pad_token", "pad_token_id", "unk_token"),
        "remove it: the tokenizer's files define the special tokens; stop-tokens: [ID, ...] are further "
        "tokens that end a generated text",
    ),
    **dict.fromkeys(
        ("min_p", "typical_p"),
        "remove it: it is not supported; top-p and top-k limit the tokens to choose from",
    ),
    "tf32": "remove it: float32 matrices are multiplied without TF32; precision: bf16 is faster",
    "adafactor": "use optimizer: {type: Adafactor}",
    **dict.fromkeys(
        ("neftune", "neftune_noise_alpha"), "remove it: noise on embeddings (NEFTune) is not supported"
    ),
    "beta": "remove it: training on preferences (DPO) is not supported; Adam's betas are "
    "optimizer.params.betas: [0.9, 0.95]",
    "per_device_eval_batch_size": "remove it: evaluations have train-micro-batch-size-per-gpu",
    "deepspeed_config": "remove it: the settings of DeepSpeed are parameters here; give their file as a "
    "further configuration file: neox-launch model.yml ds.json",
    "max_length": "use maximum-tokens for the tokens to generate, or seq-length for those of a sample",
    **dict.fromkeys(("nproc_per_node", "num_processes"), "use num-gpus for the processes of each host"),
}

_DEEPSCALE = "is the old name of the deepspeed switch, which is always on"

_LOSS_SCALING = (
    "loss_scale",
    "loss_scale_window",
    "initial_scale_power",
    "hysteresis",
    "min_loss_scale",
)

RETIRED: Mapping[str, str] = {
    "deepscale": _DEEPSCALE,
    "deepscale_config": _DEEPSCALE,
    "deepspeed_activation_checkpointing": "selects a kind of activation checkpointing; there is only one",
    "DDP_impl": "selects how gradients are averaged; DeepSpeed's engine always does it",
    "amp.verbosity": "chooses what apex prints, and torch.autocast prints nothing",
    "amp.num_losses": "counts the loss scales of apex, and a model has one loss here",
    "attention_type": "follows from num-kv-heads, which selects grouped-query attention",
    "use_shared_fs": "is about shared disks; index files are built once per directory, shared or not",
    "use_flashattn_swiglu": "selects a kernel of flash-attn; glu-fusion selects that of this project",
    "rotary_save_freqs_buffer": "adds a buffer to checkpoints, which contain weights and states only",
    "fused_kernels_build_path": "is a build directory; neox-kernels has a cache (see neox-kernels status)",
    "wandb_init_all_ranks": "opens a run per rank; metrics are those of the whole job, written by one rank",
    "peak_theoretical_tflops": "is used for utilization figures, which neox-config estimate prints",
    "force_multi": "starts a launch backend for a single host; launcher and hostfile determine that",
    "no_ssh_check": "turns off a check of DeepSpeed's launcher, which is not used",
    **dict.fromkeys((f"bf16.{name}" for name in _LOSS_SCALING), "scales the loss, which only fp16 requires"),
}


@dataclass(frozen=True, slots=True)
class OlderSpelling:
    """A name whose value is translated.

    Args:
        targets: parameters that it sets.
        doc: description of the translation.
        translate: function from the value and all given values to {parameter: value}; it raises ValueError
            with the reason if the value is not valid.
    """

    targets: tuple[str, ...]
    doc: str
    translate: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Unfolded:
    """Result of replacing all aliases: values under the names of their parameters, errors and notes."""

    leaves: list[Leaf]
    problems: list[Problem]
    notices: list[Problem]


# Values of an empty block.
_EMPTY: tuple[Any, ...] = (None, {})


def _switch(target: str, chosen: Any) -> OlderSpelling:
    """Describe an old switch that selects a value when it is on and has no effect when it is off."""

    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {target: chosen} if _boolean(value) else {}

    return OlderSpelling((target,), f"true is {target}: {in_words(chosen)}", translate)


def _only(accepted: Any, target: str, doc: str, why_no_other: str) -> OlderSpelling:
    """Describe a name with one possible value, which has no effect."""

    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if value not in (*_EMPTY, accepted):
            raise ValueError(why_no_other)
        return {}

    return OlderSpelling((target,), doc, translate)


def _beta(place: int) -> OlderSpelling:
    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if "optimizer.params.betas" in given:
            betas = given["optimizer.params.betas"]
            if isinstance(betas, list) and len(betas) == 2 and betas[place] == value:
                return {}
            raise ValueError(f"differs from optimizer.params.betas: {in_words(betas)}")
        return {"optimizer.params.betas": [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]}

    return OlderSpelling(("optimizer.params.betas",), f"element {place} of optimizer.params.betas", translate)


def _sparsity(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    patterns = {"none": ["global"], "all": ["sparse_fixed"], "interspersed": ["global", "sparse_fixed"]}
    if not isinstance(value, str) or value not in patterns:
        raise ValueError("must be one of none, all, interspersed")
    layers = given.get("num_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or not 0 < layers <= 10_000:
        raise ValueError("requires num-layers")
    return {"attention_config": [patterns[value][i % len(patterns[value])] for i in range(layers)]}


def _zero_switch(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {} if value in _EMPTY else {"zero_optimization.stage": 1 if _boolean(value) else 0}


def _fp16_type(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate `fp16: {enabled: true, type: bfloat16}`, which published configurations use for bf16."""
    name = str(value).lower()
    if name in ("fp16", "float16", "half"):
        return {}
    if name not in ("bf16", "bfloat16"):
        raise ValueError("must be fp16 or bfloat16")
    enabled = given.get("fp16.enabled", given.get("fp16.fp16", False))
    return {"bf16.enabled": True, "fp16.enabled": False} if _boolean(enabled) else {}


# Arguments of apex's levels O2 and O3, which cast the weights; under O1 apex refuses them, too.
_FOR_CAST_WEIGHTS = {
    "cast_model_type": None,
    "cast_model_outputs": None,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    # What O1 is.
    "patch_torch_functions": True,
}


def _checkpoint_factor(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the spacing of checkpoints: a number of iterations, or with `log` a factor between them."""
    if value is None:
        return {}
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("must be a number")
    if _is_log(given.get("checkpoint_scale")):
        return {"save_growth": value}
    if value != int(value):
        raise ValueError("must be a whole number of iterations unless checkpoint-scale is log")
    return {"save_interval": int(value)}


def _checkpoint_scale(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the scale; `_checkpoint_factor` uses it."""
    if value is not None and str(value).lower() not in ("linear", "log"):
        raise ValueError("must be linear or log")
    if _is_log(value) and given.get("checkpoint_factor") is None:
        raise ValueError("requires checkpoint-factor in the same configuration")
    return {}


def _is_log(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "log"


OLDER_SPELLINGS: Mapping[str, OlderSpelling] = {
    "geglu": _switch("activation", "geglu"),
    "rms_norm": _switch("norm", "rmsnorm"),
    "sinusoidal_pos_emb": _switch("pos_emb", "sinusoidal"),
    "rpe": _switch("pos_emb", "rpe"),
    "onebitadam": _switch("optimizer.type", "OneBitAdam"),
    "cpu_optimizer": _switch("optimizer.type", "CPU_Adam"),
    "cpu_torch_adam": _switch("optimizer.type", "CPU_torch_adam"),
    "adam_beta1": _beta(0),
    "adam_beta2": _beta(1),
    "sparsity": OlderSpelling(
        ("attention_config",), "none, all or interspersed layers are sparse_fixed", _sparsity
    ),
    "zero_optimization": OlderSpelling(
        ("zero_optimization.stage",), "true is stage 1, false is stage 0", _zero_switch
    ),
    "zero_optimization.cpu_offload": _switch("zero_optimization.offload_optimizer.device", "cpu"),
    **{
        f"zero_optimization.{name}": _only(
            False,
            f"zero_optimization.{name}.device",
            f"false is zero_optimization.{name}.device: none",
            f"requires a device; write {name}: {{device: cpu}}",
        )
        for name in ("offload_param", "offload_optimizer")
    },
    "fp32_allreduce": _switch("communication_data_type", "fp32"),
    "disable_allgather": _switch("zero_optimization.allgather_partitions", False),
    "activation_checkpointing": _only(
        None,
        "partition_activations",
        "a block whose entries are the parameters of those names outside it",
        "must be a block of parameters",
    ),
    "checkpoint_factor": OlderSpelling(
        ("save_interval", "save_growth"),
        "save_interval; with checkpoint_scale: log, save_growth",
        _checkpoint_factor,
    ),
    "checkpoint_scale": OlderSpelling(
        ("save_growth",), "log makes checkpoint_factor a save_growth", _checkpoint_scale
    ),
    "deepspeed_slurm": _switch("launcher", "slurm"),
    **{
        f"amp.{name}": _only(
            accepted,
            "amp.opt_level",
            "only the value of O1 is accepted",
            "belongs to apex's levels O2 and O3, which cast the weights, and amp here is O1 "
            "(torch.autocast); remove it, or use the fp16 block in place of amp",
        )
        for name, accepted in _FOR_CAST_WEIGHTS.items()
    },
    "fp16.type": OlderSpelling(
        ("bf16.enabled",), "bfloat16 is bf16.enabled instead of fp16.enabled", _fp16_type
    ),
}

# Other spellings of the choices of parameters.
_VALUE_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "precision": {"bf16": "bfloat16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"},
    "tokenizer_type": {"gpt2tokenizer": "GPT2BPETokenizer", "spmtokenizer": "SentencePieceTokenizer"},
    "scheduler.type": {"1cycle": "OneCycle"},
    "amp.loss_scale": {"dynamic": "0"},
}

# Types of attention with the same result as another one.
_SAME_ATTENTION = {"flash": "global"}
# A block whose entries are parameters outside it, whatever their names.
EXTRA_BLOCK = "deepspeed_extra_args"

# Names for which null means dynamic loss scaling, like 0.
_NULL_MEANS_ZERO = ("loss_scale", "fp16.loss_scale", "amp.loss_scale")


def shorthand_of(name: str) -> str | None:
    """Return the parameter or block that a shorthand stands for, or None for other names."""
    if name.startswith(f"{EXTRA_BLOCK}."):
        inner = name.removeprefix(f"{EXTRA_BLOCK}.")
        return SHORTHANDS.get(inner, inner)
    return SHORTHANDS.get(name)


def has_no_effect(leaf: Leaf, given: Mapping[str, Any]) -> Problem | None:
    """Return the note for a name whose value is not used; None for other names.

    Args:
        leaf: one value.
        given: all values by name.
    """
    if leaf.path == (EXTRA_BLOCK,) and leaf.value in _EMPTY:
        return _note(leaf, "has no effect: it is empty")
    for name in (leaf.path[0], leaf.name):
        if name in COMPUTED:
            return _note(leaf, f"is computed: {COMPUTED[name]}; the given value is not used")
        if name in RETIRED:
            return _note(leaf, f"has no effect: it {RETIRED[name]}")
    return features_off(leaf, given)


def fold_aliases(leaves: Sequence[Leaf]) -> Unfolded:
    """Replace aliases by the names of their parameters, and collect errors and notes."""
    leaves = [
        replace(leaf, path=leaf.path[1:]) if leaf.path[0] == EXTRA_BLOCK and len(leaf.path) > 1 else leaf
        for leaf in leaves
    ]
    given = {leaf.name: leaf.value for leaf in leaves}
    result = Unfolded([], [], [])
    replaced: set[str] = set()
    for leaf in leaves:
        unused = has_no_effect(leaf, given)
        if leaf.path == (_ITERATION,) and leaf.value:
            what = "chooses the checkpoint that GPT-NeoX loads; here, load may name one checkpoint"
            remedy = f"remove it, and set load: CHECKPOINTS/{checkpoint_name(leaf.value)}"
            result.problems.append(replace(_note(leaf, what), remedy=remedy))
        elif unused is not None:
            result.notices.append(unused)
        elif leaf.path == (EXTRA_BLOCK,):
            result.problems.append(_note(leaf, "must be a block of parameters"))
        elif leaf.name in OLDER_SPELLINGS:
            replaced.update(_translate(leaf, given, result))
        else:
            result.leaves.append(_own_name(leaf))
    # fp16.type replaces fp16.enabled by bf16.enabled, so the given fp16.enabled is dropped.
    if "fp16.enabled" in replaced:
        result.leaves[:] = [
            leaf for leaf in result.leaves if leaf.name != "fp16.enabled" or leaf.value is False
        ]
    return result


def _translate(leaf: Leaf, given: Mapping[str, Any], result: Unfolded) -> Mapping[str, Any]:
    older = OLDER_SPELLINGS[leaf.name]
    try:
        found = older.translate(leaf.value, given)
    except ValueError as error:
        target = older.targets[0]
        remedy = f"write {as_block(target) if '.' in target else target} instead"
        result.problems.append(replace(_note(leaf, str(error)), remedy=remedy))
        return {}
    for name, value in found.items():
        result.leaves.append(Leaf(tuple(name.split(".")), value, leaf.place))
    return found


def _own_name(leaf: Leaf) -> Leaf:
    """Return the leaf under the name of its parameter; a shorthand of a block renames everything in it."""
    for length in range(len(leaf.path), 0, -1):
        target = shorthand_of(".".join(leaf.path[:length]))
        if target is not None:
            leaf = replace(leaf, path=(*target.split("."), *leaf.path[length:]))
            break
    if leaf.value is None and leaf.name in _NULL_MEANS_ZERO:
        return replace(leaf, value=0.0)
    return replace(leaf, value=usual_value(leaf.name, leaf.value))


def usual_value(name: str, value: Any) -> Any:
    """Return a value of a parameter with other spellings of its choices replaced."""
    if name == "attention_config":
        return _usual_attention(value)
    spellings = _VALUE_SPELLINGS.get(name, {})
    return spellings.get(value.lower(), value) if isinstance(value, str) else value


def _usual_attention(value: Any) -> Any:
    if isinstance(value, list):
        return [_usual_attention(item) for item in value]
    return _SAME_ATTENTION.get(value.lower(), value) if isinstance(value, str) else value


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("must be true or false")


def _note(leaf: Leaf, what: str) -> Problem:
    return Problem(leaf.name, what, value=in_words(leaf.value), place=leaf.place)
