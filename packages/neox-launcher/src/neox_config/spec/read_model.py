"""The specification of the model from the parameters."""

from neox_config.derive.adapters import adapted_matrices
from neox_config.derive.attention_layers import expand_attention, has_qkv_bias
from neox_config.derive.layer_sharing import weight_owners
from neox_config.derive.objective import is_encoder, is_retrieval, sees_later_tokens
from neox_config.derive.widths import mlp_width
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.norms import NORM_FACTS
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.model import ModelSection
from neox_config.spec.model import (
    MLP,
    Adapters,
    Alibi,
    Attention,
    Blocks,
    Embedding,
    Layer,
    Learned,
    Mixer,
    ModelSpec,
    Norm,
    Retrieval,
    Rotary,
    Rpe,
    Sinusoidal,
    SpatialMLP,
    Vocabulary,
    Window,
)

__all__ = ["read_model"]


def read_model(config: NeoXConfig) -> ModelSpec:
    """Return the model of a configuration whose rules hold."""
    model, kinds = config.model, expand_attention(config.attention.attention_config, config.model.num_layers)
    owners = weight_owners(model.num_layers, model.num_unique_layers, model.param_sharing_style)
    norm = _norm(model)
    channel = MLP(width=mlp_width(config), activation=_activation(model), bias=model.use_bias_in_mlp)
    return ModelSpec(
        width=model.hidden_size,
        max_positions=model.max_position_embeddings,
        objective=model.objective,
        embedding=Embedding(multiple=model.make_vocab_size_divisible_by, position=_added_position(config)),
        layers=tuple(
            Layer(
                mixer=_mixer(config, kind, index),
                channel=None if ATTENTION_FACTS[kind].is_gmlp else channel,
                norm=norm,
                residual="parallel" if model.gpt_j_residual else "serial",
                residual_after_norm=model.apply_residual_connection_post_layernorm,
                owner=None if owners is None else owners[index],
            )
            for index, kind in enumerate(kinds)
        ),
        norm=norm,
        head=_head(config),
        adapters=_adapters(config),
    )


def _norm(model: ModelSection) -> Norm:
    facts = NORM_FACTS[model.norm]
    return Norm(
        kind="layernorm" if model.norm == "apexlayernorm" else model.norm,
        epsilon=getattr(model, facts.epsilon),
        bias=facts.has_bias and model.use_bias_in_norms,
    )


def _activation(model: ModelSection) -> str:
    # bias_gelu_fusion implies the tanh form, even if "auto" does not choose the fused operator.
    is_tanh = model.activation == "gelu" and (model.openai_gelu or bool(model.bias_gelu_fusion))
    return "gelu_tanh" if is_tanh else model.activation


def _added_position(config: NeoXConfig) -> Learned | Sinusoidal | None:
    kinds: dict[str, Learned | Sinusoidal] = {
        "learned": Learned(count=config.model.max_position_embeddings),
        "sinusoidal": Sinusoidal(),
    }
    return kinds.get(config.attention.pos_emb)


def _mixer(config: NeoXConfig, kind: str, index: int) -> Mixer:
    model = config.model
    if ATTENTION_FACTS[kind].is_gmlp:
        return _spatial(config, kind)
    return Attention(
        kind=kind,
        heads=model.num_attention_heads,
        kv_heads=model.num_kv_heads or model.num_attention_heads,
        head_width=model.hidden_size // model.num_attention_heads,
        pattern=_pattern(config, kind),
        both_ways=sees_later_tokens(config, kind),
        position=_position(config, index),
        qkv_bias=has_qkv_bias(config),
        output_bias=model.use_bias_in_attn_linear,
    )


def _position(config: NeoXConfig, index: int) -> Rotary | Rpe | Alibi | None:
    attention = config.attention
    times = max(1, index) if attention.apply_query_key_layer_scaling else 1
    scaling = attention.rotary_scaling.in_use(config.model.max_position_embeddings)
    kinds: dict[str, Rotary | Rpe | Alibi] = {
        "rotary": Rotary(
            fraction=attention.rotary_pct,
            base=attention.rotary_emb_base,
            scaling=tuple(scaling.items()),
        ),
        "rpe": Rpe(
            buckets=attention.rpe_num_buckets,
            max_distance=attention.rpe_max_distance,
            both_ways=is_encoder(config) and not attention.rpe_causal,
            times=times,
        ),
        "alibi": Alibi(times=times),
    }
    return kinds.get(attention.pos_emb)


def _pattern(config: NeoXConfig, kind: str) -> Window | Blocks | None:
    sparsity, window = config.attention.sparsity_config, config.attention.sliding_window_width
    if kind == "local":
        return Window(block=sparsity.block, before=sparsity.local_attention_blocks // 2)
    if kind == "global":
        # A window that every sequence fits into hides nothing.
        if window is None or window >= config.model.max_position_embeddings - 1:
            return None
        return Window(block=1, before=window)
    has = set(ATTENTION_FACTS[kind].settings)
    draws = "num_random_blocks" in has and sparsity.num_random_blocks > 0
    return Blocks(
        kind=kind,
        block=sparsity.block,
        local_blocks=sparsity.num_local_blocks if "num_local_blocks" in has else 0,
        global_blocks=sparsity.num_global_blocks if "num_global_blocks" in has else 0,
        patterns=sparsity.num_different_global_patterns if "num_different_global_patterns" in has else 1,
        sliding_blocks=sparsity.num_sliding_window_blocks if "num_sliding_window_blocks" in has else 0,
        random_blocks=sparsity.num_random_blocks if draws else 0,
        windows=sparsity.local_window_blocks if "local_window_blocks" in has else (),
        global_ranges=sparsity.global_ranges if "global_block_indices" in has else (),
        has_global_rows=(
            "horizontal_global_attention" in has
            and sparsity.horizontal_global_attention
            and sees_later_tokens(config, kind)
        ),
        is_per_head=sparsity.different_layout_per_head and sparsity.can_differ_per_head(kind),
        seed=config.training.seed if draws else 0,
    )


def _spatial(config: NeoXConfig, kind: str) -> SpatialMLP:
    model = config.model
    return SpatialMLP(
        kind=kind,
        width=4 * model.hidden_size,
        length=model.seq_length,
        attention_width=model.gmlp_attn_dim if ATTENTION_FACTS[kind].has_inner_attention else None,
        both_ways=sees_later_tokens(config, kind),
        activation=_activation(model),
        bias=model.use_bias_in_mlp,
        attention_bias=model.use_bias_in_attn_linear,
    )


def _head(config: NeoXConfig) -> Vocabulary | Retrieval:
    if is_retrieval(config):
        size = config.objective.ict_head_size
        assert size is not None, "a rule requires ict_head_size"
        return Retrieval(size=size, shared=config.objective.ict_shared_towers)
    return Vocabulary(tied=not config.model.no_weight_tying)


def _adapters(config: NeoXConfig) -> Adapters | None:
    section = config.adapters
    if not section.lora_rank:
        return None
    return Adapters(
        rank=section.lora_rank, alpha=section.lora_alpha, matrices=tuple(adapted_matrices(config))
    )
