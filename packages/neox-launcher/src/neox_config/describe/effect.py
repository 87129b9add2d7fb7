"""Where a parameter is declared and read, and the reason if it has no effect."""

from neox_config.schema.config import section_of, sections
from neox_config.schema.parameter import Parameter, why_not_used
from neox_config.schema.refused import REFUSED

__all__ = ["READERS", "declared_in", "read_by", "reason_without_effect"]

# Section or block -> the module that reads it; the longest matching name is used.
READERS = {
    "activation_checkpointing": "neox_config.spec.read_run",
    "attention": "neox_config.spec.mixers",
    "adapters": "neox_config.spec.read_model",
    "autotuning": "neox_launcher.autotuning.tune",
    "checkpoint": "neox_model.train.saving",
    "compression": "neox_config.spec.read_run",
    "data": "neox_model.train.data.datasets",
    "data_efficiency": "neox_model.train.data.datasets",
    "data_efficiency.data_routing": "neox_model.extras.token_dropping.layer",
    "elasticity": "neox_config.derive.elasticity",
    "engine": "neox_config.derive.engine",
    "experts": "neox_config.derive.experts",
    "generation": "neox_model.generate.run",
    "launch": "neox_launcher.plan.planning",
    "logging": "neox_model.train.writers",
    "lr_schedule": "neox_config.derive.learning_rate",
    "model": "neox_config.spec.read_model",
    "monitors": "neox_model.train.writers",
    "mup": "neox_config.spec.mup",
    "objective": "neox_model.train.data.objective",
    "optimizer": "neox_config.spec.read_run",
    "scheduler": "neox_config.derive.learning_rate",
    "parallelism": "neox_config.spec.resolve",
    "precision": "neox_config.spec.read_run",
    "tokenizer": "neox_model.processes",
    "train_epochs": "neox_launcher.plan.epochs",
    "training": "neox_model.train.open_run",
    "serving": "neox_model.serve.run",
    "zero": "neox_config.spec.read_run",
}
# Suffixes of parameters that enable the block around them.
_SWITCHES = (".shared_parameters.enabled", ".enabled", ".device")


def declared_in(parameter: Parameter) -> str:
    """Return the file that declares a parameter, below `src`."""
    section = sections()[section_of(parameter.name.partition(".")[0])]
    return f"{section.__module__.replace('.', '/')}.py"


def read_by(parameter: Parameter) -> str:
    """Return the module that reads the section or block of a parameter."""
    keys = [key for key in READERS if f"{parameter.name}.".startswith(f"{key}.")]
    return READERS[max(keys, key=len, default=section_of(parameter.name.partition(".")[0]))]


def reason_without_effect(parameter: Parameter) -> str | None:
    """Return why a parameter has no effect, or None if it has one."""
    why = why_not_used(parameter.doc)
    if why is not None:
        return why
    refused = next((switch for switch in REFUSED if _is_switched_on_by(switch, parameter)), None)
    return None if refused is None else f"{refused} {REFUSED[refused]}"


def _is_switched_on_by(switch: str, parameter: Parameter) -> bool:
    """Return True if a parameter, which may be `switch` itself, has an effect only if `switch` is on."""
    if parameter.name == switch:
        return True
    if parameter.used_when in (f"{switch} is true", f"{switch} is set"):
        return True
    block = next((switch.removesuffix(end) for end in _SWITCHES if switch.endswith(end)), None)
    return parameter.name.startswith(f"{block}.") if block is not None else False
