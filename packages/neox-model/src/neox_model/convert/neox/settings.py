"""The configuration of a checkpoint of GPT-NeoX: what it records, or the files that it was trained with."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from neox_config import NeoXConfig, Resolved, load_config
from neox_config.derive.widths import MLP_SIZES, mlp_width
from neox_config.errors import ConfigError
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.attention import BIASED_SCORES
from neox_config.facts.norms import NORM_FACTS
from neox_config.problems import in_words
from neox_config.schema.config import sections
from neox_config.schema.sections.attention import AttentionSection
from neox_config.schema.sections.model import ModelSection
from neox_config.spec.model import MLP, Attention, Experts, ModelSpec, Rotary
from neox_config.spec.recorded import MODEL_SECTIONS, model_of
from neox_config.spec.resume import flat_values
from neox_config.spec.values import flat, parameters_of
from neox_model.convert.checkpoints import model_parameters
from neox_model.convert.errors import ConversionError
from neox_model.convert.neox.files import FIRST_BLOCK, Key, NeoXFiles

__all__ = ["Settings", "read_settings"]

logger = logging.getLogger(__name__)

_CONFIGS = "configs"
# Recorded arguments that follow from others and from the number of ranks.
_DERIVED = ("padded_vocab_size", "model_parallel_size")
# What it determines, the rows of the embedding, is checked with the tokenizer (`check_padding`).
_PADDING = "make_vocab_size_divisible_by"
# Without these, recorded arguments do not determine the model.
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "pos_emb", "norm", "no_weight_tying")
_EMBEDDING = Key(0, "word_embeddings.weight")
# Values by path in the model of all that GPT-NeoX trains.
_WITHOUT: Mapping[str, Any] = {
    "embedding.scale": 1.0,
    "head.scale": 1.0,
    "head.softcap": None,
    "layers.channel.limit": None,
    "layers.channel.alpha": 1.0,
    "layers.channel.up_offset": 0.0,
}
_FORMER_NAMES = {"SPMTokenizer": "SentencePieceTokenizer"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What is known about a model and its training.

    Args:
        config: the configuration that it was trained with.
        resolved: the model alone, with plain operators.
        rows: stored entries of the vocabulary.
        read: the configuration files; none if it was read from recorded arguments.
    """

    config: NeoXConfig
    resolved: Resolved
    rows: int
    read: tuple[Path, ...]

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the model that have not their default, with their names in files."""
        here = self.resolved.config
        return model_parameters(here.model, here.attention) | {"seq-length": self.config.model.seq_length}


def read_settings(files: NeoXFiles, given: Sequence[Path]) -> Settings:
    """Return the settings of a checkpoint.

    Args:
        files: the checkpoint.
        given: configuration files; empty: those that it records.
    """
    arguments = files.state.get("args")
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    recorded_files = (files.folder / _CONFIGS).glob("*")
    read = tuple(given) or tuple(sorted(path for path in recorded_files if path.is_file()))
    if not read and not all(name in arguments for name in _NEEDED):
        raise ConversionError(
            f"{files.folder} records no configuration ({_CONFIGS}/*.yml, or all arguments); pass the files "
            "that the model was trained with as --config FILE --config FILE ..."
        )
    try:
        config = load_config(read) if read else _of_arguments(arguments)
    except ConfigError as error:
        where = "" if given else " that it records; correct a copy and pass it as --config"
        raise ConversionError(f"{files.folder}: the configuration{where}: {error}") from error
    if _EMBEDDING not in files.parts:
        raise ConversionError(f"{files.folder} does not contain {_EMBEDDING}; copy the checkpoint again")
    rows = sum(shape[0] for shape in files.shapes(_EMBEDDING))
    known = flat_values(config)
    _compare_recorded(files, known, arguments, rows)
    stored = _stored(files, config.model)
    width, stated = stored.get("mlp_width"), mlp_width(config)
    if width not in (None, stated) and any(getattr(config.model, name) for name in ("mlp_width", *MLP_SIZES)):
        text = "%s stores a feed-forward block of width %d, which counts; the configuration gives %d"
        logger.warning(text, files.folder, width, stated)
    recorded = known | stored
    try:
        resolved = model_of(recorded)
    except (ConfigError, ValidationError) as error:
        raise ConversionError(f"the model of {files.folder} cannot be built: {error}") from error
    if config.mup.use_mup:
        raise ConversionError(
            f"{files.folder}: use-mup: what GPT-NeoX computes with muP depends on base shapes in files and "
            "on its version; only a model without it can be converted"
        )
    _refuse_options(files, config.attention, resolved.model)
    return Settings(config, resolved, rows, read)


def _of_arguments(arguments: Mapping[str, Any]) -> NeoXConfig:
    """Return the configuration of recorded arguments; a name that is not known is an error that names it."""
    plain = {name: value for name, value in arguments.items() if value is not None and name not in _DERIVED}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "arguments.yml"
        path.write_text(json.dumps(plain, allow_nan=False))
        return load_config([path])


def _compare_recorded(
    files: NeoXFiles, known: Mapping[str, Any], arguments: Mapping[str, Any], rows: int
) -> None:
    """Compare the recorded arguments with the values of the configuration, and with the files."""
    shaping = {name for section in MODEL_SECTIONS for name in sections()[section].model_fields}
    here = {name: value for name, value in known.items() if name in shaping - {_PADDING}}
    here |= {"padded_vocab_size": rows, "model_parallel_size": files.ranks}
    for name, value in arguments.items():
        if name not in known.keys() | here.keys():
            raise ConversionError(
                f"{files.folder} records {name}: {in_words(value)}, which is not known; only checkpoints of "
                "GPT-NeoX itself are read"
            )
        if name in here and value is not None and _FORMER_NAMES.get(str(value), value) != here[name]:
            what = "the files have" if name in _DERIVED else "the configuration has"
            raise ConversionError(
                f"{files.folder} records {name}: {in_words(value)}, but {what} {in_words(here[name])}; pass "
                "the configuration that it was trained with as --config, and all files of the checkpoint"
            )


def _stored(files: NeoXFiles, model: ModelSection) -> dict[str, Any]:
    """Return the parameters that follow from the stored tensors, and not from the configuration alone."""
    has_bias = model.use_bias_in_norms or Key(FIRST_BLOCK, "input_layernorm.bias") in files.parts
    # GPT-NeoX ignores the first, so that every layer has its own weights. It reads the second, and builds the
    # biases of layer norms anyway.
    found: dict[str, Any] = {"num_unique_layers": None, "use_bias_in_norms": has_bias}
    parts = 2 if ACTIVATION_FACTS[model.activation].is_gated else 1
    stems = {"mlp.linear1": parts, "mlp.dense_h_to_4h": parts, "mlp.w1": 1}
    for key, count in ((Key(FIRST_BLOCK, f"{stem}.weight"), count) for stem, count in stems.items()):
        if key in files.parts:
            # Not that of the configuration: versions of GPT-NeoX computed it differently.
            width = sum(shape[0] for shape in files.shapes(key)) // count
            found |= {"mlp_width": width, "intermediate_size": None, "expansion_factor": None}
            return found | {"mlp_multiple_of": 1}
    return found


def _refuse_options(files: NeoXFiles, section: AttentionSection, model: ModelSpec) -> None:
    """Refuse options that GPT-NeoX does not have, or whose meaning depends on its version."""
    layers, first = model.layers, model.layers[0]
    refused = ["apply-residual-connection-post-layernorm: true"] if first.residual_after_norm else []
    kinds = (layer.mixer.kind for layer in layers if not isinstance(layer.mixer, Attention))
    refused += [f"attention-config: {kind}" for kind in dict.fromkeys(kinds)]
    if section.apply_query_key_layer_scaling and section.pos_emb in BIASED_SCORES:
        refused.append(f"apply-query-key-layer-scaling with pos-emb: {section.pos_emb}")
    # Scale, softcap, sinks and gate.
    names = dict.fromkeys(name for layer in layers for name in layer.mixer.settings())
    refused += [f"{each}, which GPT-NeoX does not have" for each in names if each.startswith("attention-")]
    position = getattr(first.mixer, "position", None)
    if isinstance(position, Rotary) and position.scaling:
        refused.append("rotary-scaling, which GPT-NeoX does not have")
    values = flat(model)
    refused += [
        f"{parameters_of(ModelSpec, path)[0].replace('_', '-')}, which GPT-NeoX does not have"
        for path, neutral in _WITHOUT.items()
        if values.get(path, neutral) != neutral
    ]
    if any(isinstance(layer.channel, Experts) for layer in layers):
        refused.append("moe-num-experts, whose matrices are divided in another way there")
    if section.attention_kinds:
        refused.append("attention-kinds, which GPT-NeoX does not have")
    if first.residual == "parallel" and isinstance(first.channel, MLP) and not first.channel.bias:
        refused.append("gpt-j-residual and use-bias-in-mlp: false, where GPT-NeoX leaves out attention")
    if first.norm_placement != "before" or first.norm.zero_centered:
        refused.append("norm-placement or norm-zero-centered, which GPT-NeoX does not have")
    form = getattr(first.mixer, "qk_norm", None)
    if form in ("head", "width"):
        refused.append("qk-norm, which GPT-NeoX does not have")
    if form == "shared" and files.ranks > 1 and NORM_FACTS[first.norm.kind].subtracts_mean:
        refused.append(
            f"use-qk-layernorm, which each of {files.ranks} tensor-parallel ranks computes over its own heads"
        )
    if refused:
        raise ConversionError(
            f"{files.folder}: a model with {'; '.join(refused)} cannot be read: what it computes depends on "
            "the version of GPT-NeoX, or differs from neox-model; only a model without it can be converted"
        )
