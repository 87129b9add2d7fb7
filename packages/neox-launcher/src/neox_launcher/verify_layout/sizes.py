"""The parallel sizes of `verify-layout`: those of a configuration, each degree above 1 as 2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neox_config import NeoXConfig
from neox_config.derive.experts import expert_ranks
from neox_config.derive.optimizer_arguments import optimizer_facts
from neox_config.errors import LaunchError

__all__ = ["MOST_PROCESSES", "Sizes", "parse_layout", "sizes_of"]

MOST_PROCESSES = 8
_SHORT = {
    "tp": "model-parallel-size",
    "pp": "pipe-parallel-size",
    "ep": "expert-parallel-size",
    "sp": "sequence-parallel",
    "zero": "zero-optimization.stage",
    "schedule": "pipeline-schedule",
}
"""Short names of `--layout`; the others are parameters. `dp` is the number of copies of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The processes of a run.

    Args:
        tensor: tensor-parallel size.
        stages: pipeline stages.
        data: data-parallel size.
        experts: expert-parallel size, a divisor of the data-parallel size.
    """

    tensor: int = 1
    stages: int = 1
    data: int = 1
    experts: int = 1

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.tensor * self.stages * self.data


def parse_layout(text: str) -> dict[str, str]:
    """Return the settings of a `--layout`, such as `tp=2,pp=2,zero=3`, by name.

    Raises:
        LaunchError: a part is not `name=value`.
    """
    found = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise LaunchError(
                f"--layout {text}: {part} is not name=value; write for example --layout tp=2,pp=2,zero=1 "
                f"(names: dp, {', '.join(_SHORT)}, or a parameter)",
                code="no-pair",
            )
        found[_SHORT.get(name, name)] = value
    return found


def sizes_of(config: NeoXConfig, given: Mapping[str, Any], *, is_cut: bool) -> Sizes:
    """Return the sizes of a configuration.

    Args:
        config: with the settings of `--layout`.
        given: these settings; `dp` is the number of copies.
        is_cut: a degree above 1 becomes 2.

    Raises:
        LaunchError: the layout requires too many processes, or `dp` is not a number.
    """
    parallel = config.parallelism
    tensor, stages = max(1, parallel.model_parallel_size), max(1, parallel.pipe_parallel_size)
    experts = expert_ranks(config)
    if is_cut:
        tensor, stages, experts = min(tensor, 2), min(stages, 2), min(experts, 2)
    copies = str(given.get("dp", _copies(config, experts)))
    if not copies.isdecimal() or not int(copies):
        raise LaunchError(
            f"--layout dp={copies}: must be a number of copies of the model; use dp=2", code="invalid-size"
        )
    sizes = Sizes(tensor=tensor, stages=stages, data=int(copies), experts=experts)
    if sizes.data > 1 and optimizer_facts(config).replica_states:
        raise LaunchError(
            f"--layout dp={copies}: {config.optimizer.optimizer.type} compresses what each replica sends, so "
            "that its updates depend on the number of replicas; use dp=1, or another optimizer"
        )
    if sizes.processes > MOST_PROCESSES:
        raise LaunchError(
            f"the layout tp={tensor},pp={stages},dp={copies} takes {sizes.processes} processes, but "
            f"verify-layout runs at most {MOST_PROCESSES}; use smaller sizes, which have the same mechanisms",
            code="too-many-processes",
        )
    return sizes


def _copies(config: NeoXConfig, experts: int) -> int:
    """Return the least number of copies of the model on which data parallelism does all that it does."""
    if optimizer_facts(config).replica_states:
        return 1
    if experts > 1:
        # Experts have copies, too.
        return 2 * experts
    return 4 if config.zero.zero_optimization.zero_hpz_partition_size > 1 else 2
