"""The layers that the GPU gate compiles: one of each architecture, in bf16, at the sizes of a 1B model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neox_config import Resolved
from neox_config.estimate.operations import flops_per_token
from neox_model.assembly.operators import Operators
from neox_model.assembly.transformer import build_layer
from neox_model.layers.experts import grouped_product
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.groups import SINGLE_RANK
from support.settings import resolved_from

__all__ = ["ARCHITECTURES", "Architecture", "build_layer_of", "expected_flops", "inputs_of"]

_VOCABULARY = 1024
_SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "train_micro_batch_size_per_gpu": 2,
}
_NEOX: dict[str, Any] = {"pos_emb": "rotary", "rotary_pct": 0.25, "gpt_j_residual": True}


@dataclass(frozen=True)
class Architecture:
    """Settings of a model of one layer, and whether its attention stays within documents."""

    settings: dict[str, Any]

    def resolved(self, **sizes: Any) -> Resolved:
        """Return its configuration."""
        return resolved_from(_SIZES | self.settings | sizes)

    @property
    def has_documents(self) -> bool:
        """Attention stays within documents."""
        return bool(self.settings.get("reset_attention_mask", False))


ARCHITECTURES = {
    "GPT-NeoX": Architecture(_NEOX),
    "Llama": Architecture(
        {
            "pos_emb": "rotary",
            "norm": "rmsnorm",
            "activation": "swiglu",
            "mlp_width": 5504,
            "num_kv_heads": 4,
            "use_bias_in_attn_linear": False,
            "use_bias_in_mlp": False,
        }
    ),
    "experts": Architecture(
        {
            "pos_emb": "rotary",
            "norm": "rmsnorm",
            "activation": "swiglu",
            "use_bias_in_attn_linear": False,
            "use_bias_in_mlp": False,
            "moe_num_experts": 64,
            "moe_top_k": 8,
            "moe_expert_width": 1024,
            "moe_router_type": "topk",
            "moe_balance_loss": 0.01,
            "moe_router_z_loss": 0.001,
        }
    ),
    "gMLP": Architecture({"pos_emb": "none", "attention_config": [[["gmlp"], 1]]}),
    "sparse attention": Architecture(
        _NEOX
        | {
            "attention_config": [[["local"], 1]],
            "sparsity_config": {"block": 128, "num_sliding_window_blocks": 4},
        }
    ),
    "documents": Architecture(_NEOX | {"reset_attention_mask": True}),
}


def build_layer_of(resolved: Resolved) -> ResidualLayer:
    """Build the layer, with weights that are not initialized, and torch's operators."""
    operators = Operators(expert_product=grouped_product)
    cls, kwargs = build_layer(resolved.model, 0, resolved.run, group=SINGLE_RANK, operators=operators)
    layer: ResidualLayer = cls(**kwargs)
    return layer.train()


def inputs_of(
    resolved: Resolved, device: str, dtype: torch.dtype, *, has_documents: bool
) -> list[Tensor | None]:
    """Return the arguments of a layer's `block`: hidden_SBD, and document ids or None."""
    length, batch = resolved.config.model.seq_length, resolved.run.batch.micro
    hidden_SBD = torch.empty(length, batch, resolved.config.model.hidden_size, device=device, dtype=dtype)
    ids = torch.zeros(batch, length, dtype=torch.long, device=device) if has_documents else None
    return [hidden_SBD.requires_grad_(), ids]


def expected_flops(resolved: Resolved) -> int:
    """Return what `neox-config estimate` counts for the layer: forward and backward, one micro-batch."""
    model, batch = resolved.model, resolved.run.batch
    entries = model.embedding.entries(_VOCABULARY)
    layer = flops_per_token(model, entries=entries, length=batch.length) - 6 * entries * model.width
    return layer * batch.length * batch.micro
