"""The parameters that give a specification of a model: the inverse of `read_model`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from neox_config.facts.attention import ATTENTION_FACTS, attention_type
from neox_config.facts.norms import NORM_FACTS
from neox_config.spec.model import (
    Attention,
    Experts,
    Layer,
    ModelSpec,
    Retrieval,
    Rotary,
    SpatialMLP,
    Vocabulary,
    Window,
)
from neox_config.spec.positions import settings_of_position

__all__ = ["settings_of"]

Settings = dict[str, Any]
_FIRST = (
    *("num-layers", "hidden-size", "num-attention-heads", "mlp-width"),
    *("max-position-embeddings", "seq-length", "activation", "norm"),
    *("layernorm-epsilon", "rms-norm-epsilon", "scalenorm-epsilon", "pos-emb", "no-weight-tying"),
    *("use-bias-in-attn-linear", "use-bias-in-mlp", "use-bias-in-qkv", "openai-gelu", "use-bias-in-norms"),
    *("num-kv-heads", "head-dim", "gpt-j-residual", "rotary-pct", "rotary-emb-base", "rotary-scaling"),
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
        **_joined(layer.mixer.settings() for layer in spec.layers),
        **_joined(layer.channel.settings() for layer in spec.layers if layer.channel is not None),
        "max-position-embeddings": spec.max_positions,
        "seq-length": next(
            (layer.mixer.length for layer in spec.layers if isinstance(layer.mixer, SpatialMLP)),
            spec.max_positions,
        ),
        "norm": spec.norm.kind,
        norm.epsilon.replace("_", "-"): spec.norm.epsilon,
        **_joined(map(settings_of_position, _positions(spec))),
        "no-weight-tying": not isinstance(spec.head, Retrieval) and not spec.head.tied,
    }
    if settings.get("head-dim", 0) * settings["num-attention-heads"] == spec.width:
        del settings["head-dim"]
    if norm.has_bias:
        settings["use-bias-in-norms"] = spec.norm.bias
    others = {
        "gpt-j-residual": (first.residual == "parallel", False),
        "apply-residual-connection-post-layernorm": (first.residual_after_norm, False),
        "gpt-j-tied": (first.shares_norm, False),
        "norm-placement": (first.norm_placement, "before"),
        "norm-zero-centered": (spec.norm.zero_centered, False),
        "objective": (spec.objective, "causal"),
        "embedding-scale": (spec.embedding.scale, 1.0),
        **_of_head(spec.head),
    }
    settings |= {name: value for name, (value, usual) in others.items() if value != usual}
    if spec.adapters is not None:
        settings |= {
            "lora-rank": spec.adapters.rank,
            "lora-alpha": spec.adapters.alpha,
            "lora-target-modules": list(spec.adapters.matrices),
        }
    settings |= _layers_with_experts(spec.layers)
    settings |= _owners(spec.layers) | _patterns(spec.layers, is_encoder=spec.is_encoder)
    settings["make-vocab-size-divisible-by"] = spec.embedding.multiple
    return {name: settings[name] for name in dict.fromkeys((*_FIRST, *settings)) if name in settings}


def _of_head(head: Vocabulary | Retrieval) -> dict[str, tuple[Any, Any]]:
    """Return the parameters of a head, each with the value that is not written."""
    if isinstance(head, Retrieval):
        return {"ict-head-size": (head.size, None), "ict-shared-towers": (head.shared, None)}
    return {"logit-scale": (head.scale, 1.0), "logit-softcap": (head.softcap, None)}


def _joined(each: Iterable[Settings]) -> Settings:
    """Return the parameters of all layers."""
    found: Settings = {}
    for settings in each:
        for name, value in settings.items():
            if found.setdefault(name, value) != value:
                raise ValueError(f"layers differ in {name}: {found[name]} and {value}")
    return found


def _positions(spec: ModelSpec) -> list[Any]:
    """Return the position embeddings of the input and of layers, without those of kinds; or None."""
    fixed = [each.position for each in _attentions(spec.layers) if attention_type(each.kind) != "global"]
    found = [spec.embedding.position, _usual_position(spec.layers), *fixed]
    return [each for each in found if each is not None] or [None]


def _attentions(layers: Iterable[Layer]) -> list[Attention]:
    return [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]


def _usual_position(layers: Iterable[Layer]) -> Any:
    """Return the position embedding of the model, from which those of kinds differ."""
    mixers = [mixer for mixer in _attentions(layers) if mixer.position is not None]
    if any(isinstance(mixer.position, Rotary) for mixer in mixers):
        return _usual(mixers, "position")
    # They differ in the number of the layer alone.
    return max((each.position for each in mixers), key=lambda each: getattr(each, "times", 1), default=None)


def _usual_window(layers: Iterable[Layer]) -> Any:
    """Return the window of the model, from which those of kinds differ; a kind cannot see more."""
    mixers = [mixer for mixer in _attentions(layers) if attention_type(mixer.kind) == "global"]
    return _usual(mixers, "pattern") if all(mixer.pattern for mixer in mixers) else None


def _usual(mixers: Sequence[Attention], name: str) -> Any:
    """Return the most common value of a field in layers that are of no kind, if there are some."""
    of_no_kind = [mixer for mixer in mixers if mixer.kind in ATTENTION_FACTS]
    found = Counter(getattr(mixer, name) for mixer in of_no_kind or mixers).most_common(1)
    return found[0][0] if found else None


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


def _layers_with_experts(layers: Sequence[Layer]) -> Settings:
    found = [index for index, layer in enumerate(layers) if isinstance(layer.channel, Experts)]
    if len(found) in (0, len(layers)):
        return {}
    interval = found[1] if len(found) > 1 else len(layers)
    if found == list(range(0, len(layers), interval)):
        return {"moe-expert-interval": interval}
    return {"moe-layers": found}


def _patterns(layers: Sequence[Layer], *, is_encoder: bool) -> Settings:
    """Return the attention types and kinds of the layers, and the settings of their windows and blocks."""
    kinds = {layer.mixer.kind: layer.mixer for layer in layers}
    window, position = _usual_window(layers), _usual_position(layers)
    settings: Settings = {}
    if isinstance(window, Window):
        settings["sliding-window-width"] = window.before
    names, named = [], dict[str, Settings]()
    for layer in layers:
        name, mixer = layer.mixer.kind, layer.mixer
        if isinstance(mixer, Attention) and attention_type(name) == "global":
            overrides = _overrides(mixer, window, position)
            name = _name_of_kind(mixer, overrides, named)
        names.append(name)
    if len(set(names)) > 1:
        settings["attention-config"] = names
    elif names[0] != "global":
        settings["attention-config"] = [[names[:1], "all"]]
    if named:
        settings["attention-kinds"] = named
    patterns = [
        mixer.pattern
        for kind, mixer in kinds.items()
        if isinstance(mixer, Attention) and attention_type(kind) != "global"
    ]
    sparsity = _joined(pattern.settings() for pattern in patterns if pattern is not None)
    if "seed" in sparsity:
        settings["seed"] = sparsity.pop("seed")
    # Layers in blocks are the only ones of an encoder that can be causal.
    if is_encoder and not all(mixer.both_ways for mixer in kinds.values()):
        sparsity["attention"] = "unidirectional"
    return settings | ({"sparsity-config": sparsity} if sparsity else {})


def _overrides(mixer: Attention, window: Any, position: Any) -> Settings:
    """Return the parameters of a kind: what differs from the window and the position of the model."""
    found: Settings = {}
    if isinstance(mixer.pattern, Window) and mixer.pattern != window:
        found["sliding-window-width"] = mixer.pattern.before
    own = mixer.position
    if own is None and isinstance(position, Rotary):
        found["pos-emb"] = "none"
    elif isinstance(own, Rotary) and own != position:
        ours, theirs = ({"rotary-scaling": {"type": "none"}, **each.settings()} for each in (own, position))
        found |= {name: value for name, value in ours.items() if value != theirs[name]}
        if "rotary-pct" in found:
            raise ValueError(f"layers differ in rotary-pct: {theirs['rotary-pct']} and {own.fraction}")
    return found


def _name_of_kind(mixer: Attention, overrides: Settings, named: dict[str, Settings]) -> str:
    """Return the name of a kind with these overrides, which is added to the named ones."""
    name = mixer.kind
    if name in ATTENTION_FACTS:
        if not overrides:
            return name
        name = "sliding" if isinstance(mixer.pattern, Window) else "full"
        name = "nope" if "pos-emb" in overrides else name
    plain, number = name, 1
    while named.setdefault(name, overrides) != overrides:
        number += 1
        name = f"{plain}_{number}"
    return name
