"""Who carries a parameter out: modules that read it, DeepSpeed's engine, a rule, or nothing, and why not."""

import json
import re
from functools import cache
from pathlib import Path

from neox_launcher.config.implied import NO_EFFECT
from neox_launcher.config.not_yet import NOT_YET, REFUSED
from neox_launcher.config.parameter import Parameter

__all__ = ["HANDED_ON", "carried_out_by"]

_CONFIG = "neox_launcher.config."
# Modules of the configuration that hand a value on, and to whom.
_THROUGH = {
    f"{_CONFIG}engine_json": "DeepSpeed's engine (neox-config show --engine)",
    f"{_CONFIG}resolve": "what is derived from it (neox-config show)",
    f"{_CONFIG}elasticity": "the batch sizes (neox-config show)",
    f"{_CONFIG}implied": "the parameters that it implies",
    f"{_CONFIG}learning_rate": "the learning rate (neox-config schedule)",
}
# Blocks that a module gets whole, so that nobody reads each of their parameters.
HANDED_ON = {
    "zero_optimization.": f"{_CONFIG}engine_json",
    "fp16.": f"{_CONFIG}engine_json",
    "aio.": f"{_CONFIG}engine_json",
    "flops_profiler.": f"{_CONFIG}engine_json",
    "optimizer.params.": "neox_model.optim.build",
}
# What brings a block into play: without it the rest of the block does nothing.
_SWITCHES = (".shared_parameters.enabled", ".enabled", ".device")


def carried_out_by(parameter: Parameter) -> str:
    """What makes the parameter act, or that nothing does and why, in words."""
    name = parameter.name
    if name in NO_EFFECT:
        return f"nothing: {NO_EFFECT[name]}"
    refused = next((switch for switch in REFUSED if _is_brought_in_by(switch, parameter)), None)
    if refused is not None:
        return f"nothing: {refused} {REFUSED[refused]}"
    missing = next((switch for switch in NOT_YET if _is_brought_in_by(switch, parameter)), None)
    missing = missing or _optimizer_to_come(parameter)
    if missing is not None:
        return f"nothing yet: {missing} is not built"
    who = _who(name)
    if not who and name in NOT_YET:
        return f"nothing yet: {name} is not built"
    return ", ".join(who) or "rules that check it"


def _who(name: str) -> list[str]:
    """Modules that read the parameter, and what it is handed on to."""
    readers = set(_readers().get(name, ()))
    readers |= {module for block, module in HANDED_ON.items() if name.startswith(block)}
    modules = sorted(module for module in readers if not module.startswith(_CONFIG))
    return [*modules, *(who for module, who in _THROUGH.items() if module in readers)]


def _is_brought_in_by(switch: str, parameter: Parameter) -> bool:
    """Whether a parameter acts only where `switch`, which may be itself, is on."""
    if parameter.name == switch and switch in REFUSED:
        return True
    if parameter.used_when in (f"{switch} is true", f"{switch} is set"):
        return True
    if switch == "scheduler.type":
        return parameter.name.startswith("scheduler.")
    block = next((switch.removesuffix(end) for end in _SWITCHES if switch.endswith(end)), None)
    return parameter.name.startswith(f"{block}.") if block is not None else False


def _optimizer_to_come(parameter: Parameter) -> str | None:
    """The optimizers that alone take this argument, where none of them is built."""
    kinds = (parameter.used_when or "").removeprefix("type is ")
    waits = NOT_YET.get("optimizer.type")
    if not parameter.name.startswith("optimizer.params.") or waits is None:
        return None
    is_built = [not waits.is_asked_for(kind) for kind in re.split(r", | or ", kinds)]
    return None if any(is_built) else kinds


@cache
def _readers() -> dict[str, list[str]]:
    """The modules that read each parameter, a table that `make docs` writes."""
    found: dict[str, list[str]] = json.loads(Path(__file__).with_name("readers.json").read_text())
    return found
