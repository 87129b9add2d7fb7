"""The parameters that give a specification of a model: the inverse of `read_model`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.norms import NORM_FACTS
from neox_config.spec.model import (
    Alibi,
    Attention,
    Blocks,
    Layer,
    ModelSpec,
    Retrieval,
    Rotary,
    Rpe,
    SpatialMLP,
    Window,
)

__all__ = ["settings_of"]

Settings = dict[str, Any]
_FIRST = (
    *("num-layers", "hidden-size", "num-attention-heads", "mlp-width"),
    *("max-position-embeddings", "seq-length", "activation", "norm"),
    *("layernorm-epsilon", "rms-norm-epsilon", "scalenorm-epsilon", "pos-emb", "no-weight-tying"),
    *("use-bias-in-attn-linear", "use-bias-in-mlp", "use-bias-in-qkv", "openai-gelu", "use-bias-in-norms"),
    *("num-kv-heads", "gpt-j-residual", "rotary-pct", "rotary-emb-base", "rotary-scaling"),
)
"""What a file lists first, in this order."""


def settings_of(spec: ModelSpec) -> Settings:
    """Return the parameters of a configuration with this model, as in a file; mostly without defaults.

    Raises:
        ValueError: layers differ in something for which there is one parameter; the message names it.
    """
    first, norm = spec.layers[0], NORM_FACTS[spec.norm.kind]
    settings: Settings = {
        "num-layers": len(spec.layers),
        "hidden-size": spec.width,
        "num-attention-heads": 1,
        **_joined(_of_layer(layer) for layer in spec.layers),
        "max-position-embeddings": spec.max_positions,
        "seq-length": next(
            (layer.mixer.length for layer in spec.layers if isinstance(layer.mixer, SpatialMLP)),
            spec.max_positions,
        ),
        "norm": spec.norm.kind,
        norm.epsilon.replace("_", "-"): spec.norm.epsilon,
        **_position(spec),
        "no-weight-tying": not isinstance(spec.head, Retrieval) and not spec.head.tied,
    }
    if norm.has_bias:
        settings["use-bias-in-norms"] = spec.norm.bias
    if first.residual == "parallel":
        settings["gpt-j-residual"] = True
    if first.residual_after_norm:
        settings["apply-residual-connection-post-layernorm"] = True
    if spec.objective != "causal":
        settings["objective"] = spec.objective
    if isinstance(spec.head, Retrieval):
        settings |= {"ict-head-size": spec.head.size, "ict-shared-towers": spec.head.shared}
    if spec.adapters is not None:
        settings |= {
            "lora-rank": spec.adapters.rank,
            "lora-alpha": spec.adapters.alpha,
            "lora-target-modules": list(spec.adapters.matrices),
        }
    settings |= _owners(spec.layers) | _patterns(spec.layers, is_encoder=spec.is_encoder)
    settings["make-vocab-size-divisible-by"] = spec.embedding.multiple
    return {name: settings[name] for name in dict.fromkeys((*_FIRST, *settings)) if name in settings}


def _joined(each: Iterable[Settings]) -> Settings:
    """Return the parameters of all layers."""
    found: Settings = {}
    for settings in each:
        for name, value in settings.items():
            if found.setdefault(name, value) != value:
                raise ValueError(f"layers differ in {name}: {found[name]} and {value}")
    return found


def _of_layer(layer: Layer) -> Settings:
    found = _MIXERS[type(layer.mixer)](layer.mixer)
    if layer.channel is not None:
        found |= {
            "mlp-width": layer.channel.width,
            **_activation(layer.channel.activation),
            "use-bias-in-mlp": layer.channel.bias,
        }
    return found


def _attention(mixer: Attention) -> Settings:
    settings: Settings = {"num-attention-heads": mixer.heads, "use-bias-in-attn-linear": mixer.output_bias}
    if mixer.qkv_bias != mixer.output_bias:
        settings["use-bias-in-qkv"] = mixer.qkv_bias
    if mixer.kv_heads != mixer.heads:
        settings["num-kv-heads"] = mixer.kv_heads
    position = mixer.position
    if isinstance(position, Rotary):
        settings |= {"rotary-pct": position.fraction, "rotary-emb-base": _whole(position.base)}
        if position.scaling:
            settings["rotary-scaling"] = dict(position.scaling)
    if isinstance(position, Rpe):
        settings |= {"rpe-num-buckets": position.buckets, "rpe-max-distance": position.max_distance}
        if mixer.both_ways and not position.both_ways:
            settings["rpe-causal"] = True
    return settings


def _spatial(mixer: SpatialMLP) -> Settings:
    return {
        **_activation(mixer.activation),
        "use-bias-in-mlp": mixer.bias,
        "use-bias-in-attn-linear": mixer.attention_bias,
        **(
            {"gmlp-attn-dim": mixer.attention_width}
            if ATTENTION_FACTS[mixer.kind].has_inner_attention
            else {}
        ),
    }


_MIXERS: Mapping[type[Any], Callable[[Any], Settings]] = {Attention: _attention, SpatialMLP: _spatial}


def _activation(name: str) -> Settings:
    plain = name.removesuffix("_tanh")
    return {"activation": plain} | ({} if plain == name else {"openai-gelu": True})


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _position(spec: ModelSpec) -> Settings:
    """Return `pos-emb`, and whether layers multiply a bias on their scores by their number."""
    of_layers = [layer.mixer.position for layer in spec.layers if isinstance(layer.mixer, Attention)]
    position = spec.embedding.position or next(iter(of_layers), None)
    settings: Settings = {"pos-emb": "none" if position is None else type(position).__name__.lower()}
    if any(isinstance(each, Rpe | Alibi) and each.times > 1 for each in of_layers):
        settings["apply-query-key-layer-scaling"] = True
    return settings


def _owners(layers: Sequence[Layer]) -> Settings:
    owners = [layer.owner for layer in layers]
    if None in owners:
        return {}
    unique = len(set(owners))
    grouped = [index % unique for index in range(len(owners))]
    return {
        "num-unique-layers": unique,
        "param-sharing-style": "grouped" if owners == grouped else "spaced",
    }


def _patterns(layers: Sequence[Layer], *, is_encoder: bool) -> Settings:
    """Return the attention types of the layers, and the settings of their windows and blocks."""
    kinds = {layer.mixer.kind: layer.mixer for layer in layers}
    settings: Settings = {}
    if len(kinds) > 1:
        settings["attention-config"] = [layer.mixer.kind for layer in layers]
    elif "global" not in kinds:
        settings["attention-config"] = [[list(kinds), "all"]]
    patterns = {kind: mixer.pattern for kind, mixer in kinds.items() if isinstance(mixer, Attention)}
    window = patterns.pop("global", None)
    if isinstance(window, Window):
        settings["sliding-window-width"] = window.before
    sparsity = _joined(_PATTERNS[type(pattern)](pattern) for pattern in patterns.values())
    if "seed" in sparsity:
        settings["seed"] = sparsity.pop("seed")
    # Layers in blocks are the only ones of an encoder that can be causal.
    if is_encoder and not all(mixer.both_ways for mixer in kinds.values()):
        sparsity["attention"] = "unidirectional"
    return settings | ({"sparsity-config": sparsity} if sparsity else {})


def _window(pattern: Window) -> Settings:
    # The window of local layers is the block of the query, and half of this number of blocks before it.
    return {"block": pattern.block, "num-local-blocks": max(1, 2 * pattern.before)}


def _blocks(pattern: Blocks) -> Settings:
    names = {
        "num-local-blocks": pattern.local_blocks,
        "num-global-blocks": pattern.global_blocks,
        "num-different-global-patterns": pattern.patterns,
        "num-sliding-window-blocks": pattern.sliding_blocks,
        "num-random-blocks": pattern.random_blocks,
        "local-window-blocks": list(pattern.windows),
        "different-layout-per-head": pattern.is_per_head,
        "horizontal-global-attention": pattern.has_global_rows,
        "global-block-indices": [start for start, _ in pattern.global_ranges],
        "global-block-end-indices": [stop for _, stop in pattern.global_ranges],
    }
    used = ATTENTION_FACTS[pattern.kind].settings
    settings = {
        name: value for name, value in names.items() if name.replace("-", "_") in used and value is not False
    }
    return {"block": pattern.block, **settings, **({"seed": pattern.seed} if pattern.random_blocks else {})}


_PATTERNS: Mapping[type[Any], Callable[[Any], Settings]] = {Window: _window, Blocks: _blocks}
