"""Older spellings: names of GPT-NeoX, Megatron-LM and DeepSpeed whose values are translated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neox_config.problems import in_words

__all__ = ["EXTRA_BLOCK", "OLDER_SPELLINGS", "OlderSpelling"]

# A block whose entries are parameters outside it, whatever their names.
EXTRA_BLOCK = "deepspeed_extra_args"
# Values of an empty block.
_EMPTY: tuple[Any, ...] = (None, {})


@dataclass(frozen=True, slots=True)
class OlderSpelling:
    """A name whose value is translated.

    Args:
        targets: parameters that it sets.
        doc: description of the translation.
        translate: function from the value and all given values to {parameter: value}; it raises ValueError
            with the reason if the value is not valid.
    """

    targets: tuple[str, ...]
    doc: str
    translate: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


def _switch(target: str, chosen: Any) -> OlderSpelling:
    """Describe an old switch that selects a value when it is on and has no effect when it is off."""

    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {target: chosen} if _boolean(value) else {}

    return OlderSpelling((target,), f"true is {target}: {in_words(chosen)}", translate)


def _only(accepted: Any, target: str, doc: str, why_no_other: str) -> OlderSpelling:
    """Describe a name with one possible value, which has no effect."""

    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if value not in (*_EMPTY, accepted):
            raise ValueError(why_no_other)
        return {}

    return OlderSpelling((target,), doc, translate)


def _beta(place: int) -> OlderSpelling:
    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if "optimizer.params.betas" in given:
            betas = given["optimizer.params.betas"]
            if isinstance(betas, list) and len(betas) == 2 and betas[place] == value:
                return {}
            raise ValueError(f"differs from optimizer.params.betas: {in_words(betas)}")
        return {"optimizer.params.betas": [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]}

    return OlderSpelling(("optimizer.params.betas",), f"element {place} of optimizer.params.betas", translate)


def _sparsity(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    patterns = {"none": ["global"], "all": ["sparse_fixed"], "interspersed": ["global", "sparse_fixed"]}
    if not isinstance(value, str) or value not in patterns:
        raise ValueError("must be one of none, all, interspersed")
    layers = given.get("num_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or not 0 < layers <= 10_000:
        raise ValueError("requires num-layers")
    return {"attention_config": [patterns[value][i % len(patterns[value])] for i in range(layers)]}


def _zero_switch(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {} if value in _EMPTY else {"zero_optimization.stage": 1 if _boolean(value) else 0}


def _fp16_type(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate `fp16: {enabled: true, type: bfloat16}`, which published configurations use for bf16."""
    name = str(value).lower()
    if name in ("fp16", "float16", "half"):
        return {}
    if name not in ("bf16", "bfloat16"):
        raise ValueError("must be fp16 or bfloat16")
    enabled = given.get("fp16.enabled", given.get("fp16.fp16", False))
    return {"bf16.enabled": True, "fp16.enabled": False} if _boolean(enabled) else {}


# Arguments of apex's levels O2 and O3, which cast the weights; under O1 apex refuses them, too.
_FOR_CAST_WEIGHTS = {
    "cast_model_type": None,
    "cast_model_outputs": None,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    # What O1 is.
    "patch_torch_functions": True,
}


def _checkpoint_factor(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the spacing of checkpoints: a number of iterations, or with `log` a factor between them."""
    if value is None:
        return {}
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("must be a number")
    if _is_log(given.get("checkpoint_scale")):
        return {"save_growth": value}
    if value != int(value):
        raise ValueError("must be a whole number of iterations unless checkpoint-scale is log")
    return {"save_interval": int(value)}


def _checkpoint_scale(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the scale; `_checkpoint_factor` uses it."""
    if value is not None and str(value).lower() not in ("linear", "log"):
        raise ValueError("must be linear or log")
    if _is_log(value) and given.get("checkpoint_factor") is None:
        raise ValueError("requires checkpoint-factor in the same configuration")
    return {}


def _is_log(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "log"


OLDER_SPELLINGS: Mapping[str, OlderSpelling] = {
    "geglu": _switch("activation", "geglu"),
    "rms_norm": _switch("norm", "rmsnorm"),
    "sinusoidal_pos_emb": _switch("pos_emb", "sinusoidal"),
    "rpe": _switch("pos_emb", "rpe"),
    "onebitadam": _switch("optimizer.type", "OneBitAdam"),
    "cpu_optimizer": _switch("optimizer.type", "CPU_Adam"),
    "cpu_torch_adam": _switch("optimizer.type", "CPU_torch_adam"),
    "adam_beta1": _beta(0),
    "adam_beta2": _beta(1),
    "sparsity": OlderSpelling(
        ("attention_config",), "none, all or interspersed layers are sparse_fixed", _sparsity
    ),
    "zero_optimization": OlderSpelling(
        ("zero_optimization.stage",), "true is stage 1, false is stage 0", _zero_switch
    ),
    "zero_optimization.cpu_offload": _switch("zero_optimization.offload_optimizer.device", "cpu"),
    **{
        f"zero_optimization.{name}": _only(
            False,
            f"zero_optimization.{name}.device",
            f"false is zero_optimization.{name}.device: none",
            f"requires a device; write {name}: {{device: cpu}}",
        )
        for name in ("offload_param", "offload_optimizer")
    },
    "fp32_allreduce": _switch("communication_data_type", "fp32"),
    "disable_allgather": _switch("zero_optimization.allgather_partitions", False),
    "activation_checkpointing": _only(
        None,
        "partition_activations",
        "a block whose entries are the parameters of those names outside it",
        "must be a block of parameters",
    ),
    "checkpoint_factor": OlderSpelling(
        ("save_interval", "save_growth"),
        "save_interval; with checkpoint_scale: log, save_growth",
        _checkpoint_factor,
    ),
    "checkpoint_scale": OlderSpelling(
        ("save_growth",), "log makes checkpoint_factor a save_growth", _checkpoint_scale
    ),
    "deepspeed_slurm": _switch("launcher", "slurm"),
    **{
        f"amp.{name}": _only(
            accepted,
            "amp.opt_level",
            "only the value of O1 is accepted",
            "belongs to apex's levels O2 and O3, which cast the weights, and amp here is O1 "
            "(torch.autocast); remove it, or use the fp16 block in place of amp",
        )
        for name, accepted in _FOR_CAST_WEIGHTS.items()
    },
    EXTRA_BLOCK: _only(None, "optimizer", "a block of parameters", "must be a block of parameters"),
    "fp16.type": OlderSpelling(
        ("bf16.enabled",), "bfloat16 is bf16.enabled instead of fp16.enabled", _fp16_type
    ),
}


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("must be true or false")
