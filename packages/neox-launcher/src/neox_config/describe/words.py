"""Words that users of other programs type, and the parameters or the sentence that answer them.

`neox-config explain` reads this table. Full names of parameters of other programs, which the messages about a
configuration suggest as well, are in `FOREIGN_NAMES` (`read/aliases.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SUBJECTS", "Subject", "key_of_word", "subject_of"]

_MONITORS = ("use_wandb", "tensorboard_dir", "comet.enabled", "csv_monitor.enabled")
_UPDATE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_RESUMING = ("load", "finetune", "no_load_optim", "no_load_rng", "use_checkpoint_lr_scheduler")
_DTYPES = (
    "precision",
    "fp16.enabled",
    "bf16.enabled",
    "communication_data_type",
    "data_types.grad_accum_dtype",
)
_ZERO = ("zero_optimization.stage", "zero_optimization.offload_param.device")
_OFFLOAD = (
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "checkpoint_in_cpu",
)
_DATASETS = ("data_path", "train_data_paths", "valid_data_paths", "test_data_paths", "split")


@dataclass(frozen=True, slots=True)
class Subject:
    """What several words mean.

    Args:
        words: the words, separated by commas; case, spaces, dashes and a final s do not matter.
        parameters: parameters that the words mean.
        sentence: additional information, or the answer if there is no such parameter.
    """

    words: str
    parameters: tuple[str, ...] = ()
    sentence: str = ""


SUBJECTS: tuple[Subject, ...] = (
    # The model
    Subject(
        "rope, rotary, rotary embedding, rotary position embedding",
        ("pos_emb", "rotary_pct", "rotary_emb_base", "rope_fusion"),
    ),
    Subject(
        "rope scaling, yarn, ntk",
        ("rotary_scaling.type", "rotary_emb_base", "max_position_embeddings"),
        "rotary_scaling has the formulas linear, llama3 and yarn; the base can also be changed.",
    ),
    Subject(
        "alibi, sinusoidal, positional encoding, position embedding, positional embedding, "
        "position embedding type",
        ("pos_emb", "max_position_embeddings"),
    ),
    Subject(
        "flash, flash attention, flash attn, flash attention 2, use flash attn, use flash "
        "attention, attn implementation, sdpa",
        ("attention_config",),
        "Global attention uses PyTorch's flash attention where PyTorch has it; attention_config "
        "accepts flash as another name of global.",
    ),
    Subject(
        "gqa, mqa, grouped query attention, multi query attention, group query attention, kv heads",
        ("num_kv_heads",),
    ),
    Subject(
        "attention, attention pattern, sparse, block sparse",
        ("attention_config", "sparsity_config", "num_attention_heads", "num_kv_heads", "attention_dropout"),
    ),
    Subject(
        "sliding window attention, swa, local attention, window size",
        ("sliding_window_width", "attention_config"),
    ),
    Subject(
        "swiglu, reglu, glu, gated mlp, gated linear unit, silu, gelu, relu, nonlinearity",
        ("activation", "mlp_width", "glu_fusion", "recompute_gated_product"),
    ),
    Subject(
        "mlp, ffn, feed forward, intermediate",
        ("mlp_width", "intermediate_size", "expansion_factor", "mlp_multiple_of", "activation"),
    ),
    Subject("dropout", ("hidden_dropout", "attention_dropout")),
    Subject(
        "norm, rmsnorm, layernorm, normalization, prenorm",
        ("norm", "layernorm_epsilon", "rms_norm_epsilon", "layernorm_fusion", "rmsnorm_fusion"),
    ),
    Subject(
        "bias, use bias, add bias linear, disable bias linear",
        ("use_bias_in_attn_linear", "use_bias_in_mlp", "use_bias_in_norms"),
    ),
    Subject(
        "context, context length, context window, context size, sequence, max length, max len, "
        "max seq len, n ctx, block size",
        ("seq_length", "max_position_embeddings"),
    ),
    Subject(
        "heads, n heads, num heads, head dim, head size",
        ("num_attention_heads", "num_kv_heads", "hidden_size"),
    ),
    Subject("layers, depth, n layers, num blocks", ("num_layers",)),
    Subject("width, embedding size, embedding dim, hidden dim, dim, n embd", ("hidden_size",)),
    Subject(
        "tie embeddings, tied embeddings, tie word embeddings, weight tying, untie embeddings and "
        "output weights, lm head",
        ("no_weight_tying",),
    ),
    Subject("parallel residual, parallel attention, use parallel residual", ("gpt_j_residual",)),
    Subject(
        "init, initialization, weight init, initializer",
        ("init_method", "output_layer_init_method", "init_method_std"),
    ),
    Subject("torch compile, inductor, dynamo", ("compile",)),
    Subject(
        "fused kernels, fusion, kernels, cuda kernels, triton",
        (
            "bias_gelu_fusion",
            "bias_dropout_fusion",
            "glu_fusion",
            "layernorm_fusion",
            "loss_fusion",
            "rmsnorm_fusion",
            "rope_fusion",
            "scaled_upper_triang_masked_softmax_fusion",
            "scaled_masked_softmax_fusion",
        ),
    ),
    Subject(
        "model type, architecture, model name, model name or path, from pretrained, hub",
        ("num_layers", "hidden_size", "norm", "pos_emb", "activation"),
        "A model is described by its parameters; models of the Hugging Face Hub cannot be loaded.",
    ),
    # What is trained, and in which precision
    Subject(
        "lora, peft, adapter, low rank adaptation",
        ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_base"),
    ),
    Subject(
        "qlora, prefix tuning, prompt tuning",
        (),
        "Of adapters, only LoRA is supported (lora_rank), with weights that are not quantized.",
    ),
    Subject("fine tune, fine tuning, transfer learning, pretrained, warm start", ("finetune", "load")),
    Subject(
        "sft, instruction tuning, loss mask, label mask, prompt masking",
        ("train_label_data_paths", "eod_mask_loss", "loss_normalization"),
        "Datasets of labels mask the loss of single tokens; preprocess_data --loss-mask writes them.",
    ),
    Subject(
        "chat template, chatml",
        ("serve.chat_template",),
        "A server answers chats with it; preprocess_data --loss-mask chat --chat-template PATH writes "
        "datasets with it.",
    ),
    Subject("rlhf, ppo, grpo, preference", (), "Training on preferences or rewards is not supported."),
    Subject(
        "precision, dtype, torch dtype, data type, half, half precision, float16, float32, mixed "
        "precision, autocast, amp level, bf 16, fp32, params dtype",
        _DTYPES,
    ),
    Subject(
        "loss scaling, grad scaler, dynamic loss scale window",
        (
            "fp16.loss_scale",
            "fp16.initial_scale_power",
            "fp16.loss_scale_window",
            "fp16.hysteresis",
            "fp16.min_loss_scale",
        ),
    ),
    Subject(
        "fp8, float8, 8 bit, int8, 4 bit, int4, bitsandbytes",
        ("precision",),
        "Training in 8 bits or fewer is not supported; weights are trained in fp32, bf16 or fp16.",
    ),
    # Optimizer and learning rate
    Subject(
        "optimizer, sgd, adamw, lamb, lion, madgrad, muon, sm3, optim, optimiser, adam",
        ("optimizer.type", "optimizer.params"),
    ),
    Subject("beta, beta1, beta2, momentum", ("optimizer.params.betas",)),
    Subject(
        "epsilon", ("optimizer.params.eps", "layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon")
    ),
    Subject(
        "weight decay, wd, l2, regularization, decoupled weight decay",
        ("weight_decay", "optimizer.params.weight_decay", "optimizer.params.adam_w_mode"),
    ),
    Subject(
        "clip, clipping, grad clip, grad norm, gradient norm, max norm, clip grad norm",
        ("gradient_clipping", "log_grad_norm"),
    ),
    Subject(
        "lr schedule, lr scheduler, learning rate schedule, learning rate decay, lr decay, "
        "cosine, linear, wsd, annealing, cosine annealing",
        (
            "lr_decay_style",
            "lr_decay_iters",
            "lr_decay_fraction",
            "min_lr",
            "decay_lr_to",
            "warmup",
            "warmup_iters",
            "lr_wsd_decay_style",
            "scheduler.type",
        ),
    ),
    Subject("warmup, lr warmup, linear warmup", ("warmup", "warmup_iters")),
    Subject("lr min, final lr, end lr, lr end", ("min_lr", "decay_lr_to")),
    Subject("batch, batch sizes, bs, mbs, gbs, tokens per batch", (*_UPDATE, "elasticity.enabled")),
    Subject(
        "accumulation, gradient accumulation, grad accum, accumulate grad batches, grad accumulation",
        ("gradient_accumulation_steps", "data_types.grad_accum_dtype", "loss_normalization"),
    ),
    Subject(
        "label smoothing, focal loss",
        (),
        "It is not supported: the loss is the cross entropy of the next token.",
    ),
    Subject(
        "nan, inf, loss spike, divergence", ("nonfinite_patience", "gradient_clipping", "fp16.loss_scale")
    ),
    Subject("straggler, slow rank, slow host, slow gpu, memory by rank", ("straggler_threshold",)),
    Subject("sdc, silent data corruption, bit flip, replica check", ("sdc_check_interval",)),
    # Length of training, evaluation, checkpoints
    Subject(
        "epoch, num epochs, n epochs, num train epochs, max epochs",
        ("train_epochs", "train_iters", "train_batch_size", "seq_length"),
    ),
    Subject(
        "steps, iterations, max iters, total steps, training length, training steps, train "
        "samples, train tokens, duration",
        ("train_iters", "lr_decay_iters", "exit_interval", "planned_seconds"),
    ),
    Subject(
        "eval, evaluation, validation, eval strategy, evaluation strategy, val interval, perplexity",
        ("eval_interval", "eval_iters", "split", "valid_data_paths", "eval_tasks"),
    ),
    Subject(
        "checkpoint dir, save dir, checkpoint path, checkpoints, saving, save strategy, save every, "
        "asynchronous checkpoints, async checkpoint, background save",
        (
            *("save", "load", "save_interval", "save_growth", "extra_save_iters", "save_interval_minutes"),
            *("keep_last_n_checkpoints", "no_save_optim", "async_save", "checkpoint_store"),
        ),
    ),
    Subject(
        "resume, resume from checkpoint, continue, restart, load checkpoint, restore",
        _RESUMING,
        "Training resumes from the latest checkpoint in load; neox-launch --max-restarts resumes "
        "after failures.",
    ),
    Subject(
        "checkpointing, activation checkpointing, gradient checkpointing, recomputation, "
        "recompute granularity, remat, rematerialization",
        (
            "checkpoint_activations",
            "checkpoint_granularity",
            "checkpoint_num_layers",
            "partition_activations",
            "checkpoint_in_cpu",
        ),
    ),
    Subject(
        "convert, conversion, hf checkpoint, safetensors, export",
        ("save", "load"),
        "Checkpoints are safetensors files in the format of docs/formats.md; models of other "
        "programs cannot be loaded.",
    ),
    Subject(
        "seed, random seed, rng, manual seed, reproducibility, determinism, deterministic",
        ("seed", "deterministic", "no_save_rng", "no_load_rng"),
    ),
    # Parallelism and memory
    Subject(
        "tp, tensor parallel, tensor parallelism, model parallel, model parallelism, mp",
        ("model_parallel_size", "sequence_parallel"),
    ),
    Subject(
        "pp, pipeline, pipeline parallel, pipeline parallelism, pipeline stages",
        ("pipe_parallel_size", "pipe_partition_method"),
    ),
    Subject(
        "dp, ddp, data parallel, data parallelism, distributed data parallel, replicas",
        ("model_parallel_size", "pipe_parallel_size", "train_batch_size"),
        "Data parallelism needs no setting: its size is the number of devices / "
        "(model_parallel_size x pipe_parallel_size).",
    ),
    Subject(
        "fsdp, fully sharded, fully sharded data parallel, sharding, distributed optimizer, use "
        "distributed optimizer, zero, zero1, zero2, zero3, zero redundancy optimizer",
        _ZERO,
        "ZeRO shards the training state: stage 1 optimizer states, stage 2 also gradients, stage "
        "3 also parameters (as FSDP).",
    ),
    Subject("offload, offloading, cpu offload, nvme, cpu offloading, zero infinity", _OFFLOAD),
    Subject("sp, sequence parallelism", ("sequence_parallel",)),
    Subject(
        "cp, context parallel, context parallelism, context parallel size, ring attention, ulysses",
        ("sequence_parallel",),
        "Context parallelism is not supported: each tensor-parallel group computes attention over "
        "whole sequences.",
    ),
    Subject(
        "nccl, gloo, communication backend, process group, ddp backend, dist backend, backend",
        ("distributed_backend", "launcher"),
    ),
    Subject(
        "oom, out of memory, memory, gpu memory",
        (
            "checkpoint_activations",
            "train_micro_batch_size_per_gpu",
            "zero_optimization.stage",
            "model_parallel_size",
        ),
        "neox-config estimate computes the memory of a configuration; neox-config suggest lists "
        "layouts that fit.",
    ),
    # Data and tokenizer
    Subject(
        "data, dataset, corpus, train data, training data, data dir, train file, dataset name",
        (*_DATASETS, "train_data_weights"),
    ),
    Subject(
        "blend, data mix, mixture, mixing, dataset weights, blending, data blend",
        (
            "train_data_weights",
            "valid_data_weights",
            "test_data_weights",
            "weight_by_num_documents",
            "weighted_sampler_alpha",
        ),
    ),
    Subject("dataloader, workers, prefetch", ("num_workers", "mmap_warmup")),
    Subject("shuffle, shuffling, data order, data seed", ("sample_order", "seed")),
    Subject(
        "packing, document mask, document attention mask, attention mask, reset attention",
        ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"),
    ),
    Subject(
        "mlm, masked language modelling, masked language modeling, bert, masking, bidirectional attention",
        ("objective", "mask_prob", "mask_whole_words", "mask_token", "short_seq_prob"),
    ),
    Subject(
        "ict, inverse cloze task, retrieval, dense retrieval, dpr, two towers, biencoder, realm, orqa",
        ("objective", "ict_head_size", "ict_shared_towers", "bert_load", "query_in_block_prob"),
    ),
    Subject(
        "faiss, mips, vector search, similarity search, embeddings of blocks, block index, passage index",
        ("block_data_path", "ict_load", "indexer_batch_size", "block_query", "faiss_use_gpu"),
    ),
    Subject(
        "fim, fill in the middle, infilling, infill, spm, psm",
        ("fim_rate", "fim_spm_rate", "fim_prefix_token", "fim_middle_token", "fim_suffix_token"),
    ),
    Subject(
        "eos, eod, eos token, eos token id, end of sequence, end of text, end of document, eod "
        "token, bos, pad, pad token",
        ("stop_tokens", "eod_mask_loss", "reset_attention_mask", "reset_position_ids", "tokenizer_type"),
        "The tokenizer defines the end-of-document token; preprocess_data --append-eod writes it. "
        "Samples are not padded.",
    ),
    Subject(
        "vocabulary, vocab, vocab size, vocabulary size",
        ("vocab_file", "merge_file", "tokenizer_type", "make_vocab_size_divisible_by"),
        "The size of the vocabulary is that of the tokenizer, padded to a multiple of "
        "make_vocab_size_divisible_by.",
    ),
    Subject(
        "tokenizer, bpe, sentencepiece, tiktoken, tokenizer model, tokenizer name, tokenizer path, merges",
        ("tokenizer_type", "vocab_file", "merge_file"),
    ),
    Subject(
        "curriculum, curriculum learning, random ltd, token dropping",
        ("data_efficiency", "curriculum_learning"),
    ),
    # Reports
    Subject(
        "wandb, weights and biases, wandb logging, wandb name, run name, experiment name",
        ("use_wandb", "wandb_project", "wandb_group", "wandb_run_name", "wandb_team", "wandb_host"),
    ),
    Subject(
        "tensorboard logging, tb, logging dir, mlflow, report to, tracking, metrics, monitor",
        (*_MONITORS, "log_dir"),
    ),
    Subject(
        "logging, log, log every, log level, verbose",
        ("log_interval", "log_dir", "tensorboard_dir", "use_wandb"),
    ),
    Subject(
        "profiler, profiling, nsys, flops, mfu, tflops",
        ("flops_profiler.enabled", "wall_clock_breakdown", "profile"),
    ),
    Subject(
        "hang, timeout, watchdog, nccl timeout, ddp timeout, distributed timeout minutes",
        ("hang_timeout", "first_iteration_timeout", "start_timeout", "stop_timeout"),
    ),
    # Launching and generation
    Subject(
        "gpus, devices, nproc per node, num processes, num gpu",
        ("num_gpus", "num_nodes", "include", "exclude"),
    ),
    Subject(
        "hosts, nodes, nnodes, machines, num machines, host file, cluster",
        ("hostfile", "num_nodes", "include", "exclude", "launcher"),
    ),
    Subject(
        "port, rendezvous, rdzv endpoint, master, firewall, main process port",
        ("master_addr", "master_port", "launcher_address", "launcher_port"),
    ),
    Subject(
        "slurm, mpi, ssh, pdsh, srun, mpirun, torchrun, accelerate",
        ("launcher", "launcher_args"),
        "neox-launch starts the workers itself; docs/launching.md describes each kind of cluster.",
    ),
    Subject(
        "docker, container, apptainer, singularity, conda, virtualenv, modules, env",
        ("remote_prefix", "remote_setup"),
    ),
    Subject("autotune, autotuner, tuning, auto batch size", ("autotuning.enabled", "autotuning.fast")),
    Subject(
        "sampling, decoding, generate, generation, inference, max new tokens, do sample, greedy, nucleus",
        ("text_gen_type", "temperature", "top_p", "top_k", "maximum_tokens", "num_samples"),
    ),
    Subject(
        "beam search, num beams, repetition penalty",
        ("temperature", "top_p", "top_k"),
        "It is not supported: text is generated by sampling, or greedily with temperature: 0.",
    ),
    Subject("kv cache, use cache", ("recompute",)),
)


def key_of_word(text: str) -> str:
    """Return a word without case, spaces, punctuation and a final s."""
    letters = "".join(char for char in text.casefold() if char.isalnum())
    return letters.removesuffix("s") if len(letters) > 3 else letters


_BY_WORD: Mapping[str, Subject] = {
    key_of_word(word): subject for subject in SUBJECTS for word in subject.words.split(",")
}


def subject_of(text: str) -> Subject | None:
    """Return the row that a word belongs to, or None."""
    return _BY_WORD.get(key_of_word(text))
