"""The specification of the model from the parameters."""

from neox_config.derive.adapters import adapted_matrices
from neox_config.derive.attention_layers import attention_names, of_kind
from neox_config.derive.experts import expert_layers
from neox_config.derive.layer_sharing import weight_owners
from neox_config.derive.objective import is_retrieval
from neox_config.facts.attention import GMLP_TYPES
from neox_config.facts.norms import NORM_FACTS
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.model import ModelSection
from neox_config.spec.mixers import MLP, Experts, read_mixer
from neox_config.spec.model import Adapters, Embedding, Layer, ModelSpec, Norm, Retrieval, Vocabulary
from neox_config.spec.mup import with_factors
from neox_config.spec.positions import AddedPosition, read_position

__all__ = ["read_model"]


def read_model(config: NeoXConfig) -> ModelSpec:
    """Return the model of a configuration whose rules hold."""
    model, kinds = config.model, attention_names(config)
    configs = {kind: of_kind(config, kind) for kind in kinds}
    owners = weight_owners(model.num_layers, model.num_unique_layers, model.param_sharing_style)
    norm = _norm(model)
    position, with_experts = read_position(config), expert_layers(config)
    dense, experts = MLP.read(config), Experts.read(config)
    spec = ModelSpec(
        width=model.hidden_size,
        max_positions=model.max_position_embeddings,
        objective=model.objective,
        embedding=Embedding(
            multiple=model.make_vocab_size_divisible_by,
            scale=model.embedding_scale,
            position=position if isinstance(position, AddedPosition) else None,
        ),
        layers=tuple(
            Layer(
                mixer=read_mixer(configs[kind], kind, index),
                channel=None if kind in GMLP_TYPES else experts if index in with_experts else dense,
                norm=norm,
                residual="parallel" if model.gpt_j_residual else "serial",
                residual_after_norm=model.apply_residual_connection_post_layernorm,
                norm_placement=model.norm_placement,
                shares_norm=model.gpt_j_residual and model.gpt_j_tied,
                owner=None if owners is None else owners[index],
            )
            for index, kind in enumerate(kinds)
        ),
        norm=norm,
        head=_head(config),
        adapters=_adapters(config),
    )
    return with_factors(spec, config)


def _norm(model: ModelSection) -> Norm:
    facts = NORM_FACTS[model.norm]
    return Norm(
        kind="layernorm" if model.norm == "apexlayernorm" else model.norm,
        epsilon=getattr(model, facts.epsilon),
        bias=facts.has_bias and model.use_bias_in_norms,
        zero_centered=model.norm_zero_centered and bool(facts.vectors or facts.scalars),
    )


def _head(config: NeoXConfig) -> Vocabulary | Retrieval:
    if is_retrieval(config):
        size = config.objective.ict_head_size
        assert size is not None, "a rule requires ict_head_size"
        return Retrieval(size=size, shared=config.objective.ict_shared_towers)
    model = config.model
    return Vocabulary(tied=not model.no_weight_tying, scale=model.logit_scale, softcap=model.logit_softcap)


def _adapters(config: NeoXConfig) -> Adapters | None:
    section = config.adapters
    if not section.lora_rank:
        return None
    return Adapters(
        rank=section.lora_rank, alpha=section.lora_alpha, matrices=tuple(adapted_matrices(config))
    )
