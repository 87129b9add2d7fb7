"""Names that are not parameters: what they stand for, or why they are not used.

Four kinds, one table each, which the documentation lists too: *shorthands* (another name of a parameter),
*older spellings* (names whose value has to be translated), *computed* (set by the system, a given value is
not used) and *retired* (of tasks that are no part of this system).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neox_launcher.config.problems import Problem, as_block, in_words
from neox_launcher.config.reading import Leaf

__all__ = [
    "COMPUTED",
    "FOREIGN_NAMES",
    "FOREIGN_REMEDIES",
    "OLDER_SPELLINGS",
    "RETIRED",
    "SHORTHANDS",
    "OlderSpelling",
    "Unfolded",
    "fold_aliases",
]

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
    "elasticity.prefer_larger_batch": "elasticity.prefer_large_batch",
}

COMPUTED: Mapping[str, str] = {
    "world_size": "the number of devices of the job",
    "is_pipe_parallel": "whether pipe-parallel-size is at least 1",
    "rank": "each worker's number",
    "local_rank": "each worker's number on its host",
    "iteration": "read from the checkpoint",
    "do_train": "whether there are training data",
    "do_valid": "whether there are validation data",
    "do_test": "whether there are test data",
    "padded_vocab_size": "the tokenizer's size, rounded up by make-vocab-size-divisible-by",
    "dynamic_loss_scale": "whether fp16.loss_scale is 0",
    "git_hash": "read from the repository",
    "user_script": "the training program",
}

# What other programs call a parameter: not accepted, for their values may mean something else, but known.
FOREIGN_NAMES: Mapping[str, str] = {
    "learning_rate": "optimizer.params.lr",
    "max_lr": "optimizer.params.lr",
    "lr_warmup_fraction": "warmup",
    "warmup_ratio": "warmup",
    "warmup_iters": "warmup",
    "warmup_steps": "warmup",
    "lr_scheduler_type": "lr_decay_style",
    "n_layer": "num_layers",
    "num_hidden_layers": "num_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_positions": "max_position_embeddings",
    "ffn_hidden_size": "intermediate_size",
    "sequence_length": "seq_length",
    "max_seq_length": "seq_length",
    "max_steps": "train_iters",
    "train_steps": "train_iters",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size",
    "tensor_model_parallel_size": "model_parallel_size",
    "tensor_parallel_size": "model_parallel_size",
    "pipeline_model_parallel_size": "pipe_parallel_size",
    "pipeline_parallel_size": "pipe_parallel_size",
    "max_grad_norm": "gradient_clipping",
    "checkpoint_factor": "save_interval",
    "max_checkpoint_keep": "keep_last_n_checkpoints",
    "save_total_limit": "keep_last_n_checkpoints",
    "save_steps": "save_interval",
    "logging_steps": "log_interval",
    "eval_steps": "eval_interval",
    "output_dir": "save",
    "hidden_act": "activation",
}

# Names of later GPT-NeoX that stand for what is always so here, or is said in another way.
FOREIGN_REMEDIES: Mapping[str, str] = {
    "checkpoint_scale": "leave it out: checkpoints are save-interval iterations apart",
    "comet_project": "write comet: {enabled: true, project: ...}",
    "comet_workspace": "write comet: {enabled: true, workspace: ...}",
    "deepspeed_slurm": "write launcher: slurm",
    "mlp_type": "leave it out: activation says it, and swiglu is Llama's",
    "output_layer_parallelism": "leave it out: the output projection is split over the vocabulary",
    "pack_impl": "leave it out: documents stand one behind the other in a sample",
    "use_bias_in_norms": "leave it out: layernorm has a bias, rmsnorm and scalenorm have none",
    "use_shared_fs": "leave it out: index files are built once in a folder, shared or not",
}

_RETRIEVAL = "belongs to the retrieval models of Megatron, which are no part of this system"
_DEEPSCALE = "is the old name of the switch for DeepSpeed, which is always on"

RETIRED: Mapping[str, str] = {
    "deepscale": _DEEPSCALE,
    "deepscale_config": _DEEPSCALE,
    "deepspeed_activation_checkpointing": "chose an implementation of activation checkpointing; there is one",
    "DDP_impl": "chose how gradients are averaged; DeepSpeed's engine does it",
    "rpe_causal": "says nothing: the relative bias of a decoder is always causal",
    "mask_prob": _RETRIEVAL,
    "ict_head_size": _RETRIEVAL,
    "ict_load": _RETRIEVAL,
    "bert_load": _RETRIEVAL,
    "titles_data_path": _RETRIEVAL,
    "query_in_block_prob": _RETRIEVAL,
    "use_one_sent_docs": _RETRIEVAL,
    "report_topk_accuracies": _RETRIEVAL,
    "faiss_use_gpu": _RETRIEVAL,
    "block_data_path": _RETRIEVAL,
    "indexer_batch_size": _RETRIEVAL,
    "indexer_log_interval": _RETRIEVAL,
}


@dataclass(frozen=True, slots=True)
class OlderSpelling:
    """A name whose value is translated.

    Args:
        targets: the parameters that it sets.
        doc: the translation, in words.
        translate: from the value and all values given to {parameter: value}; a ValueError says why not.
    """

    targets: tuple[str, ...]
    doc: str
    translate: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Unfolded:
    """What is left when all aliases are replaced: values under their parameters' names, and findings."""

    leaves: list[Leaf]
    problems: list[Problem]
    notices: list[Problem]


# A block in which nothing is written.
_EMPTY: tuple[Any, ...] = (None, {})


def _switch(target: str, chosen: Any) -> OlderSpelling:
    """An old switch that chooses a value when it is on and says nothing when it is off."""

    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {target: chosen} if _boolean(value) else {}

    return OlderSpelling((target,), f"true is {target}: {chosen}", translate)


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
        raise ValueError("needs num-layers")
    return {"attention_config": [patterns[value][i % len(patterns[value])] for i in range(layers)]}


def _zero_switch(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if value in _EMPTY:
        return {}
    if isinstance(value, list):
        raise ValueError("is a list here: a dash, or a bracket, begins one")
    return {"zero_optimization.stage": 1 if _boolean(value) else 0}


def _cpu_offload(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"zero_optimization.offload_optimizer.device": "cpu"} if _boolean(value) else {}


def _offload_switch(name: str) -> OlderSpelling:
    """`offload_param: false`, the documented default of a block."""

    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if value not in _EMPTY and _boolean(value):
            raise ValueError(f"needs to say where to; write {name}: {{device: cpu}}")
        return {}

    target = f"zero_optimization.{name}.device"
    return OlderSpelling((target,), f"false is {target}: none", translate)


def _fp32_allreduce(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"communication_data_type": "fp32"} if _boolean(value) else {}


def _disable_allgather(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"zero_optimization.allgather_partitions": False} if _boolean(value) else {}


def _activation_checkpointing(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if value in _EMPTY:
        return {}
    raise ValueError("is a block of parameters")


def _fp16_type(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`fp16: {enabled: true, type: bfloat16}` is how shipped configurations ask for bf16."""
    name = str(value).lower()
    if name in ("fp16", "float16", "half"):
        return {}
    if name not in ("bf16", "bfloat16"):
        raise ValueError("must be fp16 or bfloat16")
    enabled = given.get("fp16.enabled", given.get("fp16.fp16", False))
    return {"bf16.enabled": True, "fp16.enabled": False} if _boolean(enabled) else {}


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
    "zero_optimization.cpu_offload": OlderSpelling(
        ("zero_optimization.offload_optimizer.device",), "true is device: cpu", _cpu_offload
    ),
    "zero_optimization.offload_param": _offload_switch("offload_param"),
    "zero_optimization.offload_optimizer": _offload_switch("offload_optimizer"),
    "fp32_allreduce": OlderSpelling(
        ("communication_data_type",), "true is communication_data_type: fp32", _fp32_allreduce
    ),
    "disable_allgather": OlderSpelling(
        ("zero_optimization.allgather_partitions",), "true is allgather_partitions: false", _disable_allgather
    ),
    "activation_checkpointing": OlderSpelling(
        ("partition_activations",),
        "a block; what is in it is the parameter of that name outside it",
        _activation_checkpointing,
    ),
    "fp16.type": OlderSpelling(
        ("bf16.enabled",), "bfloat16 is bf16.enabled instead of fp16.enabled", _fp16_type
    ),
}

# Values under other names than the parameter's own choices.
_VALUE_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "precision": {"bf16": "bfloat16", "float16": "fp16", "half": "fp16", "float32": "fp32"},
    "tokenizer_type": {"gpt2tokenizer": "GPT2BPETokenizer"},
    "scheduler.type": {"1cycle": "OneCycle"},
}

# Spellings that mean the same dynamic loss scaling: null outside the block, 0 inside it.
_NULL_MEANS_ZERO = ("loss_scale", "fp16.loss_scale")


def fold_aliases(leaves: Sequence[Leaf]) -> Unfolded:
    """Every value under its parameter's own name, and what there is to say about the others."""
    given = {leaf.name: leaf.value for leaf in leaves}
    result = Unfolded([], [], [])
    replaced: set[str] = set()
    for leaf in leaves:
        if leaf.name in COMPUTED:
            result.notices.append(
                _note(leaf, f"is computed ({COMPUTED[leaf.name]}); the given value is not used")
            )
        elif leaf.name in RETIRED:
            result.notices.append(_note(leaf, f"has no effect: it {RETIRED[leaf.name]}"))
        elif leaf.name in OLDER_SPELLINGS:
            replaced.update(_translate(leaf, given, result))
        else:
            result.leaves.append(_own_name(leaf))
    # fp16.type turns fp16.enabled into bf16.enabled: what stood there is replaced, not contradicted.
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
        result.problems.append(replace(_note(leaf, str(error)), remedy=_instead(older.targets[0])))
        return {}
    for name, value in found.items():
        result.leaves.append(Leaf(tuple(name.split(".")), value, leaf.place))
    return found


def _own_name(leaf: Leaf) -> Leaf:
    """The leaf under its parameter's name; a shorthand of a block renames everything in it."""
    for length in range(len(leaf.path), 0, -1):
        target = SHORTHANDS.get(".".join(leaf.path[:length]))
        if target is not None:
            leaf = Leaf((*target.split("."), *leaf.path[length:]), leaf.value, leaf.place)
            break
    if leaf.value is None and leaf.name in _NULL_MEANS_ZERO:
        return replace(leaf, value=0.0)
    spellings = _VALUE_SPELLINGS.get(leaf.name, {})
    if isinstance(leaf.value, str) and leaf.value.lower() in spellings:
        return replace(leaf, value=spellings[leaf.value.lower()])
    return leaf


def _instead(target: str) -> str:
    return f"write {as_block(target) if '.' in target else target} instead"


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("must be true or false")


def _note(leaf: Leaf, what: str) -> Problem:
    return Problem(leaf.name, what, value=in_words(leaf.value), place=leaf.place)
