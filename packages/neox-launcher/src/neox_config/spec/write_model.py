"""The parameters that give a specification of a model: the inverse of `read_model`."""

from collections.abc import Iterable, Sequence
from typing import Any

from neox_config.facts.norms import NORM_FACTS
from neox_config.spec.model import Attention, Layer, ModelSpec, Retrieval, SpatialMLP, Vocabulary, Window
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
    if first.residual == "parallel":
        settings["gpt-j-residual"] = True
    if first.residual_after_norm:
        settings["apply-residual-connection-post-layernorm"] = True
    if spec.objective != "causal":
        settings["objective"] = spec.objective
    if isinstance(spec.head, Retrieval):
        settings |= {"ict-head-size": spec.head.size, "ict-shared-towers": spec.head.shared}
    elif spec.head.scale != 1.0:
        settings["logit-scale"] = spec.head.scale
    if isinstance(spec.head, Vocabulary) and spec.head.softcap is not None:
        settings["logit-softcap"] = spec.head.softcap
    if spec.embedding.scale != 1.0:
        settings["embedding-scale"] = spec.embedding.scale
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


def _positions(spec: ModelSpec) -> list[Any]:
    """Return the position embeddings of the input and of layers, or None if there are none."""
    of_layers = [layer.mixer.position for layer in spec.layers if isinstance(layer.mixer, Attention)]
    found = [each for each in (spec.embedding.position, *of_layers) if each is not None]
    return found or [None]


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
    sparsity = _joined(pattern.settings() for pattern in patterns.values() if pattern is not None)
    if "seed" in sparsity:
        settings["seed"] = sparsity.pop("seed")
    # Layers in blocks are the only ones of an encoder that can be causal.
    if is_encoder and not all(mixer.both_ways for mixer in kinds.values()):
        sparsity["attention"] = "unidirectional"
    return settings | ({"sparsity-config": sparsity} if sparsity else {})
