"""Checkpoints in GPT-NeoX's layouts, written by hand from models of transformers.

Nothing here uses the conversion: names, orders and divisions are written out from GPT-NeoX's documents.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
import yaml
from torch import Tensor

from support.hf_models import ENTRIES, write_tokenizer

__all__ = ["Source", "gpt2", "llama", "pythia", "write_neox"]

Layers = dict[int, dict[str, Tensor]]


@dataclass
class Source:
    """A model of transformers, and the same weights for GPT-NeoX.

    Args:
        model: the model.
        config: GPT-NeoX's configuration.
        layers: number of a layer -> name -> whole tensor.
        by_rank: names whose division is special -> function of (tensor, rank, ranks).
        qkv_order: the option that the conversion requires.
    """

    model: Any
    config: dict[str, Any]
    layers: Layers
    by_rank: dict[str, Any] = field(default_factory=dict)
    qkv_order: str | None = None


BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 100,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "tokenizer_type": "HFTokenizer",
    "vocab_file": "/nowhere/tokenizer.json",
    "make_vocab_size_divisible_by": 16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def _random(model: Any) -> Any:
    """Give every parameter random values: those of norms and biases are constant at first."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(values + 1 if "norm" in name and name.endswith("weight") else values)
    return model.eval()


def _rope(base: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": float(base)}


def pythia(*, parallel: bool = True, tied: bool = False, pct: float = 0.25) -> Source:
    """GPT-NeoX's own architecture: rotary positions and biases."""
    import transformers

    settings = transformers.GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, vocab_size=ENTRIES + 8, use_parallel_residual=parallel, hidden_act="gelu",
        rope_parameters=_rope(10000) | {"partial_rotary_factor": pct}, tie_word_embeddings=tied,
    )  # fmt: skip
    model = _random(transformers.GPTNeoXForCausalLM(settings))
    theirs = model.state_dict()
    layers: Layers = {0: {"word_embeddings.weight": theirs["gpt_neox.embed_in.weight"]}}
    for index in range(2):
        prefix = f"gpt_neox.layers.{index}."
        layers[2 + index] = {
            name.removeprefix(prefix): tensor for name, tensor in theirs.items() if name.startswith(prefix)
        }
    layers[5] = {f"norm.{kind}": theirs[f"gpt_neox.final_layer_norm.{kind}"] for kind in ("weight", "bias")}
    if not tied:
        layers[6] = {"final_linear.weight": model.get_output_embeddings().weight.detach()}
    config = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32,
        "max_position_embeddings": 32, "pos_emb": "rotary", "rotary_pct": pct, "no_weight_tying": not tied,
        "gpt_j_residual": parallel, "norm": "layernorm",
    }  # fmt: skip
    return Source(model, BASE | config, layers)


def llama(*, shared: int = 2, apart: bool = False, order: str = "separate", has_bias: bool = False) -> Source:
    """Llama, with keys and values shared by query heads, or none shared.

    Args:
        shared: query heads that share a key.
        apart: the input matrices of the feed-forward block are stored apart, as before September 2024.
        order: of the rows of query_key_value with shared keys.
        has_bias: the projections of attention have biases.
    """
    import transformers

    settings = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4 // shared,
        intermediate_size=40, max_position_embeddings=32, vocab_size=ENTRIES + 8, rms_norm_eps=1e-6,
        rope_parameters=_rope(777), tie_word_embeddings=False, attention_bias=has_bias,
    )  # fmt: skip
    model = _random(transformers.LlamaForCausalLM(settings))
    theirs = model.state_dict()
    layers: Layers = {0: {"word_embeddings.weight": theirs["model.embed_tokens.weight"]}}
    for index in range(2):
        one = {
            name.removeprefix(f"model.layers.{index}.").removesuffix(".weight"): tensor
            for name, tensor in theirs.items()
            if name.startswith(f"model.layers.{index}.")
        }
        layers[2 + index] = {
            "input_layernorm.scale": one["input_layernorm"],
            "post_attention_layernorm.scale": one["post_attention_layernorm"],
        }
        for kind, ending in {"weight": "", "bias": ".bias"}.items() if has_bias else (("weight", ""),):
            parts = [one[f"self_attn.{each}_proj{ending}"] for each in "qkv"]
            fused = torch.cat(parts) if shared > 1 and order == "separate" else _by_head(parts)
            layers[2 + index][f"attention.query_key_value.{kind}"] = fused
            layers[2 + index][f"attention.dense.{kind}"] = one[f"self_attn.o_proj{ending}"]
        gate, up, down = (one[f"mlp.{each}_proj"] for each in ("gate", "up", "down"))
        if apart:
            layers[2 + index] |= {"mlp.w1.weight": gate, "mlp.w3.weight": up, "mlp.w2.weight": down}
        else:  # The input first, the gate last.
            layers[2 + index] |= {"mlp.linear1.weight": torch.cat([up, gate]), "mlp.linear2.weight": down}
    layers[5] = {"norm.scale": theirs["model.norm.weight"]}
    layers[6] = {"final_linear.weight": theirs["lm_head.weight"]}
    config = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32,
        "max_position_embeddings": 32, "pos_emb": "rotary", "rotary_pct": 1.0, "rotary_emb_base": 777,
        "no_weight_tying": True, "norm": "rmsnorm", "rms_norm_epsilon": 1e-6, "activation": "swiglu",
        "mlp_width": 40, "use_bias_in_attn_linear": has_bias, "use_bias_in_mlp": False,
    }  # fmt: skip
    if shared > 1:
        config["num_kv_heads"] = 4 // shared
    counts = [32, 8 * (4 // shared), 8 * (4 // shared)]

    def queries_keys_values(tensor: Tensor, rank: int, ranks: int) -> Tensor:
        return torch.cat([part.chunk(ranks)[rank] for part in tensor.split(counts)])

    def both_halves(tensor: Tensor, rank: int, ranks: int) -> Tensor:
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])

    special = {"mlp.linear1.weight": both_halves}
    if shared > 1 and order == "separate":
        special |= {f"attention.query_key_value.{kind}": queries_keys_values for kind in ("weight", "bias")}
    return Source(model, BASE | config, layers, special, order if shared > 1 and not apart else None)


def _by_head(parts: list[Tensor]) -> Tensor:
    """Return rows of queries, keys and values as GPT-NeoX before 14 November 2024 reads them.

    Four query heads follow each other, each with its query and a quarter of all keys and of all values.
    """
    return torch.cat([part.chunk(4)[head] for head in range(4) for part in parts])


def gpt2() -> Source:
    """GPT-2: learned positions, a tied output projection, and projections that are stored transposed."""
    import transformers

    settings = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=ENTRIES + 8, activation_function="gelu",
        tie_word_embeddings=True,
    )  # fmt: skip
    model = _random(transformers.GPT2LMHeadModel(settings))
    theirs = {name.removeprefix("transformer."): each for name, each in model.state_dict().items()}
    names = {"wte": "word_embeddings", "wpe": "position_embeddings"}
    layers: Layers = {0: {f"{new}.weight": theirs[f"{old}.weight"] for old, new in names.items()}}
    for index in range(2):
        layers[2 + index] = {}
        for old, new in {
            "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "attention.dense",
            "attn.c_attn": "attention.query_key_value", "mlp.c_fc": "mlp.dense_h_to_4h",
            "mlp.c_proj": "mlp.dense_4h_to_h",
        }.items():  # fmt: skip
            for kind in ("weight", "bias"):
                tensor = theirs[f"h.{index}.{old}.{kind}"]
                tensor = tensor.t() if tensor.dim() == 2 else tensor
                if old == "attn.c_attn":  # From all queries, keys, values to one head after the other.
                    tensor = tensor.reshape(3, 4, 8, -1).transpose(0, 1).reshape(tensor.shape)
                layers[2 + index][f"{new}.{kind}"] = tensor
    layers[5] = {f"norm.{kind}": theirs[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    config = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32,
        "max_position_embeddings": 32, "pos_emb": "learned", "no_weight_tying": False, "norm": "layernorm",
    }  # fmt: skip
    return Source(model, BASE | config, layers)


# Beginnings of names whose tensors are divided over the rows, and over the columns.
_ROWS = ("word_embeddings.", "final_linear.", "attention.query_key_value.", "mlp.dense_h_to_4h.",
         "mlp.linear1.", "mlp.w1.", "mlp.w3.")  # fmt: skip
_COLUMNS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight", "mlp.linear2.weight", "mlp.w2.weight",
            "attention.rpe.weight")  # fmt: skip
_BIASES = ("attention.dense.bias", "mlp.dense_4h_to_h.bias", "mlp.linear2.bias")


def _of_rank(source: Source, name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    if name in source.by_rank:
        return source.by_rank[name](tensor, rank, ranks)
    if name.startswith(_ROWS):
        return tensor.chunk(ranks)[rank]
    if name in _COLUMNS:
        return tensor.chunk(ranks, dim=1)[rank]
    if name in _BIASES and source.config["gpt_j_residual"] if "gpt_j_residual" in source.config else False:
        # With a parallel residual each rank adds its own.
        return tensor * 0.25 if rank else tensor - 0.25 * (ranks - 1) * tensor
    return tensor


def write_neox(
    folder: Path,
    source: Source,
    *,
    ranks: int = 1,
    layout: str = "2.0",
    iteration: int = 30,
    dtype: torch.dtype = torch.float32,
    configs: bool = True,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint, `latest` and a tokenizer, and return the folder with `latest`.

    Args:
        folder: to create.
        source: the model.
        ranks: tensor-parallel ranks.
        layout: "1.0" or "2.0" (files of layers), or "sequential".
        iteration: recorded.
        dtype: of the weights.
        configs: record the configuration.
        changes: entries of the file of each rank to replace.
    """
    step = folder / f"global_step{iteration}"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    write_tokenizer(folder)
    parts = [
        {
            number: {
                name: _of_rank(source, name, tensor, rank, ranks).to(dtype).clone()
                for name, tensor in layer.items()
            }
            for number, layer in source.layers.items()
        }
        for rank in range(ranks)
    ]
    for rank, layers in enumerate(parts):
        module = {
            f"sequential.{number}.{name}": each
            for number, layer in layers.items()
            for name, each in layer.items()
        }
        state = _state(source, ranks, iteration, layout) | {
            "module": module if layout == "sequential" else None
        }
        torch.save(state | dict(changes or {}), step / f"mp_rank_{rank:02d}_model_states.pt")
        if layout != "sequential":
            for number, layer in layers.items():
                torch.save(layer, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    if configs:
        (step / "configs").mkdir()
        (step / "configs" / "model.yml").write_text(
            yaml.safe_dump(source.config | {"model_parallel_size": ranks})
        )
    return folder


def _state(source: Source, ranks: int, iteration: int, layout: str) -> dict[str, Any]:
    """Return what DeepSpeed and GPT-NeoX record: arguments, counts, and states of random generators."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings",
             "make_vocab_size_divisible_by", "tokenizer_type")  # fmt: skip
    state: dict[str, Any] = {
        "optimizer": None,
        "lr_scheduler": {"num_iters": iteration},
        "skipped_steps": 0,
        "global_steps": iteration,
        "global_samples": iteration * 4,
        "dp_world_size": 2,
        "mp_world_size": ranks,
        "iteration": iteration,
        "args": {name: source.config[name] for name in names}
        | {"padded_vocab_size": ENTRIES + 8, "model_parallel_size": ranks},
        "np_rng_state": numpy.random.RandomState(1).get_state(),
        "random_rng_state": (3, (1, 2, 3), None),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    if layout == "1.0":
        return state | {"csr_tensor_module_names": set()}
    shapes = [{"sequential.0.word_embeddings.weight": torch.Size((ENTRIES + 8, 32))}]
    return state | {"ds_config": {"fp16": {"enabled": True}}, "ds_version": "0.9.3", "param_shapes": shapes}


@contextmanager
def argument_objects() -> Iterator[Any]:
    """Provide a class that pickles itself as GPT-NeoX's argument object."""
    name = "megatron.neox_arguments.arguments"
    kind = type("NeoXArgs", (), {"__module__": name})
    modules = {part: ModuleType(part) for part in ("megatron", "megatron.neox_arguments", name)}
    modules[name].NeoXArgs = kind  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield kind
    finally:
        for part in modules:
            del sys.modules[part]
