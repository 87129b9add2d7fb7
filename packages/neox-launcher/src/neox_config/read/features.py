"""Features of GPT-NeoX that this project does not have, by the names that configure them.

A name with its usual value, which leaves the feature off, is accepted with a note. Any other value is
refused; all names of one feature are refused together, by one sentence.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neox_config.problems import Problem, in_words
from neox_config.read.reading import Leaf

__all__ = ["FEATURES", "Feature", "feature_of", "features_off", "missing_features", "names_of_features"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature.

    Args:
        title: what it is, as the object of "requires".
        names: top-level names that configure it, and the value of each that leaves it off.
        values: values of other parameters that select it, by parameter.
        instead: what to do without it.
        always: what is so here in every training, if the usual value describes that.
        outcome: what becomes of other values.
    """

    title: str
    names: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    instead: str = "remove it"
    always: str = ""
    outcome: str = "is not supported"


def _without(*names: str) -> Mapping[str, Any]:
    """Return names that must be absent, null or empty."""
    return dict.fromkeys(names)


_PARTS = ("train", "valid", "test")

FEATURES: tuple[Feature, ...] = (
    Feature(
        title="mixture-of-experts layers (MoE)",
        names={
            "moe_num_experts": 1,
            "moe_expert_interval": 1,
            "moe_top_k": 1,
            "moe_router_type": "sinkhorn",
            "moe_lbl_in_fp32": False,
            "moe_jitter_eps": None,
        },
    ),
    Feature(
        title="Mamba layers",
        names={
            "mamba_selective_scan_fusion": False,
            "mamba_causal_conv_fusion": False,
            "mamba_inner_func_fusion": False,
            "mamba_selective_fp32_params": True,
            "mamba_use_bias_in_conv": True,
            "mamba_use_bias_in_linears": False,
        },
        values={"attention_config": ("mamba",)},
        instead="use another architecture",
    ),
    Feature(
        title="RWKV layers",
        names=_without("dim_att", "head_size", "ffn_dim"),
        values={"attention_config": ("rwkv",)},
        instead="use another architecture",
    ),
    Feature(
        title="TransformerEngine",
        names={
            "te_columnparallel": False,
            "te_rowparallel": False,
            "te_layernorm_mlp": False,
            "te_mha": False,
            "te_fp8_format": "hybrid",
            "te_fp8_wgrad": True,
            "te_fp8_amax_history_len": 1,
            "te_fp8_amax_compute_algo": "most_recent",
            "te_fp8_margin": 0,
            "te_fp8_mha": False,
        },
        values={"norm": ("te_rmsnorm", "te_layernorm")},
    ),
    Feature(title="the optimizers of bitsandbytes", names={"use_bnb_optimizer": False}),
    Feature(
        title="training on preferences or rewards (DPO, KTO, reward models, REINFORCE)",
        names={
            "train_impl": "normal",
            "dpo_fp32": True,
            "dpo_reference_free": False,
            "dpo_beta": 0.1,
            "kto_fp32": True,
            "kto_desirable_weight": 1.0,
            "kto_undesirable_weight": 1.0,
            "kto_beta": 0.1,
            "z_loss": 0.0,
            "fp32_reinforce": True,
            "kl_impl": "mse",
            "kl_div_beta": 0.1,
            "reinforce_leave_one_out": False,
            **_without(
                *(f"{part}_reward_data_paths" for part in _PARTS),
                *(f"{sign}_{part}_data_paths" for part in _PARTS for sign in ("pos", "neg")),
                *(f"{sign}_{part}_label_data_paths" for part in _PARTS for sign in ("pos", "neg")),
            ),
        },
        always="training is on the next token",
    ),
    Feature(
        title="data or weights served to and from other programs during training",
        names={
            "serve_model_weights": False,
            "weight_server_port": 6000,
            "online_dataserver_ips": "localhost",
            "online_dataserver_ports": 10000,
        },
    ),
    Feature(
        title="a dataset other than one stream of documents",
        names={"dataset_impl": "gpt2"},
        instead="use dataset-impl: gpt2",
        always="samples are windows of one stream of documents",
    ),
    Feature(
        title="maximal update parametrization (muP)",
        names={
            "use_mup": False,
            "coord_check": False,
            "save_base_shapes": False,
            "base_shapes_file": None,
            "mup_init_scale": 1.0,
            "mup_attn_temp": 1.0,
            "mup_output_temp": 1.0,
            "mup_embedding_mult": 1.0,
            "mup_rp_embedding_mult": 1.0,
            "mup_width_scale": 2,
        },
    ),
    Feature(title="soft prompt tuning", names=_without("soft_prompt_tuning")),
    Feature(title="norms of queries and keys", names={"use_qk_layernorm": False}),
    Feature(title="a norm without weights", values={"norm": ("non_parametric_layernorm",)}),
    Feature(title="learned positions with an offset (OPT)", names={"opt_pos_emb_offset": 0}),
    Feature(
        title="one norm for both sublayers of a parallel residual",
        names={"gpt_j_tied": False},
        always="each sublayer has its own norm",
    ),
    Feature(
        title="an output projection that is split over the hidden size",
        names={"output_layer_parallelism": "column"},
        instead="use output-layer-parallelism: column",
        always="the output projection is split over the vocabulary",
    ),
    Feature(title="shares of zeros in gradients in the log", names={"log_grad_pct_zeros": False}),
    Feature(title="log probabilities of prompts (precompute)", names=_without("precompute_model_name")),
    Feature(title="logits in the output of generation", names={"return_logits": False}),
    Feature(
        title="prompts of several lines",
        names={"prompt_end": "\n"},
        instead="put one prompt on each line",
        always="a prompt is one line",
    ),
    Feature(
        title="DeepSpeed's autotuner",
        names=_without("autotuning_run"),
        instead="remove it, and set autotuning: {enabled: true}",
    ),
)

_BY_NAME: Mapping[str, Feature] = {name: feature for feature in FEATURES for name in feature.names}
_BY_VALUE: Mapping[tuple[str, str], Feature] = {
    (name, value): feature
    for feature in FEATURES
    for name, values in feature.values.items()
    for value in values
}


def names_of_features() -> Iterable[str]:
    """Return every name that configures a feature."""
    return _BY_NAME


def feature_of(name: str) -> Feature:
    """Return the feature that a name configures."""
    return _BY_NAME[name]


def features_off(leaf: Leaf, given: Mapping[str, Any]) -> Problem | None:
    """Return the note for a name of a feature that is off; None for other names and values.

    Args:
        leaf: one value.
        given: all values by name.
    """
    feature = _BY_NAME.get(leaf.path[0])
    if feature is None or not _is_off(leaf, feature, given):
        return None
    why = feature.always or f"{feature.title}: not supported, and off"
    return Problem(leaf.name, f"has no effect: {why}", value=in_words(leaf.value), place=leaf.place)


def missing_features(leaves: Sequence[Leaf]) -> tuple[list[Leaf], list[Problem]]:
    """Return the leaves that request no missing feature, and one problem for each feature."""
    given = {leaf.name: leaf.value for leaf in leaves}
    rest: list[Leaf] = []
    requested: dict[int, list[Leaf]] = {}
    for leaf in leaves:
        feature = _requested(leaf, given)
        if feature is None:
            rest.append(leaf)
        else:
            requested.setdefault(FEATURES.index(feature), []).append(leaf)
    return rest, [_refusal(FEATURES[index], found) for index, found in requested.items()]


def _requested(leaf: Leaf, given: Mapping[str, Any]) -> Feature | None:
    feature = _BY_NAME.get(leaf.path[0])
    if feature is not None:
        return None if _is_off(leaf, feature, given) else feature
    found = (_BY_VALUE.get((leaf.name, text.lower())) for text in _texts(leaf.value))
    return next((each for each in found if each is not None), None)


def _is_off(leaf: Leaf, feature: Feature, given: Mapping[str, Any]) -> bool:
    """Return True for the usual value, and for everything in a block with `enabled: false`."""
    if len(leaf.path) > 1:
        return given.get(f"{leaf.path[0]}.enabled") is False
    usual = feature.names[leaf.name]
    if isinstance(leaf.value, str) and isinstance(usual, str):
        return leaf.value.lower() == usual.lower()
    return leaf.value in (None, [], {}) or bool(leaf.value == usual)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _refusal(feature: Feature, leaves: Sequence[Leaf]) -> Problem:
    first, *others = leaves
    also = dict.fromkeys(leaf.place.spelling or leaf.name for leaf in others)
    remedy = f"{feature.instead}; the same applies to {', '.join(also)}" if also else feature.instead
    what = f"{feature.outcome}: it requires {feature.title}"
    return Problem(first.name, what, remedy, value=in_words(first.value), place=first.place)
