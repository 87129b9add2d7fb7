"""Where a parameter is declared and read, and the reason if it has no effect."""

import re

from neox_config.derive.implied import NO_EFFECT
from neox_config.schema.config import section_of
from neox_config.schema.not_yet import NOT_YET, REFUSED
from neox_config.schema.parameter import Parameter

__all__ = ["READERS", "declared_in", "read_by", "reason_without_effect"]

# Section or block -> the module that reads it; the longest matching name is used.
READERS = {
    "activation_checkpointing": "neox_model.assembly.activation_checkpointing",
    "attention": "neox_model.assembly.attention",
    "adapters": "neox_model.assembly.adapters",
    "autotuning": "neox_launcher.autotuning.tune",
    "checkpoint": "neox_model.train.saving",
    "compression": "neox_model.assembly.compression",
    "data": "neox_model.train.data.datasets",
    "data_efficiency": "neox_model.train.data.curriculum",
    "data_efficiency.data_routing": "neox_model.assembly.token_dropping",
    "elasticity": "neox_config.derive.elasticity",
    "engine": "neox_config.derive.engine",
    "generation": "neox_model.generate.run",
    "launch": "neox_launcher.plan.planning",
    "logging": "neox_model.train.writers",
    "lr_schedule": "neox_config.derive.learning_rate",
    "model": "neox_model.assembly.transformer",
    "monitors": "neox_model.train.writers",
    "objective": "neox_model.train.data.objective",
    "optimizer": "neox_model.assembly.optimizer",
    "scheduler": "neox_config.derive.learning_rate",
    "parallelism": "neox_config.derive.resolve",
    "precision": "neox_model.engine.loss_scaling",
    "tokenizer": "neox_model.processes",
    "train_epochs": "neox_launcher.plan.epochs",
    "training": "neox_model.train.build_hooks",
    "serving": "neox_model.serve.run",
    "zero": "neox_model.engine.build_sharded",
}
# Suffixes of parameters that enable the block around them.
_SWITCHES = (".shared_parameters.enabled", ".enabled", ".device")


def declared_in(parameter: Parameter) -> str:
    """Return the file that declares a parameter, below `src`."""
    return f"neox_config/schema/sections/{section_of(parameter.name.partition('.')[0])}.py"


def read_by(parameter: Parameter) -> str:
    """Return the module that reads the section or block of a parameter."""
    keys = [key for key in READERS if f"{parameter.name}.".startswith(f"{key}.")]
    return READERS[max(keys, key=len, default=section_of(parameter.name.partition(".")[0]))]


def reason_without_effect(parameter: Parameter) -> str | None:
    """Return why a parameter has no effect, or None if it has one."""
    if parameter.name in NO_EFFECT:
        return NO_EFFECT[parameter.name]
    refused = next((switch for switch in REFUSED if _is_switched_on_by(switch, parameter)), None)
    if refused is not None:
        return f"{refused} {REFUSED[refused]}"
    missing = next((switch for switch in NOT_YET if _is_switched_on_by(switch, parameter)), None)
    missing = missing or _optimizers_not_built(parameter)
    return None if missing is None else f"{missing} is not implemented yet"


def _is_switched_on_by(switch: str, parameter: Parameter) -> bool:
    """Return True if a parameter, which may be `switch` itself, has an effect only if `switch` is on."""
    if parameter.name == switch and switch in REFUSED:
        return True
    if parameter.used_when in (f"{switch} is true", f"{switch} is set"):
        return True
    block = next((switch.removesuffix(end) for end in _SWITCHES if switch.endswith(end)), None)
    return parameter.name.startswith(f"{block}.") if block is not None else False


def _optimizers_not_built(parameter: Parameter) -> str | None:
    """Return the optimizers that take this argument if none of them is implemented, else None."""
    kinds = (parameter.used_when or "").removeprefix("type is ")
    row = NOT_YET.get("optimizer.type")
    if not parameter.name.startswith("optimizer.params.") or row is None:
        return None
    is_built = [not row.is_asked_for(kind) for kind in re.split(r", | or ", kinds)]
    return None if any(is_built) else kinds
