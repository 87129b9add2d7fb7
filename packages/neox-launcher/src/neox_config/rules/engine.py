"""Rules about the engine."""

from collections.abc import Iterator

from neox_config.derive.engine import chosen_engine, only_deepspeeds
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def the_torch_engine_carries_out_all_settings(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse settings that DeepSpeed alone carries out if the torch engine is requested."""
    if chosen_engine(c).name == "torch":
        for problem in only_deepspeeds(c):
            yield Problem(problem.name, problem.what, f"{problem.remedy}, or {_for_deepspeed(c)}")


def one_engine_is_requested(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse deepspeed: false with engine: deepspeed."""
    if not c.engine.deepspeed and c.engine.engine == "deepspeed":
        yield Problem("deepspeed", "contradicts engine: deepspeed", "remove one of them")


def _for_deepspeed(c: NeoXConfig) -> str:
    """Return the change with which DeepSpeed's engine trains."""
    if not c.engine.deepspeed:
        return "remove deepspeed: false"
    # `auto` has chosen the torch engine for its pipeline schedule.
    return "set pipeline-schedule: 1f1b" if c.engine.engine == "auto" else "set engine: auto"
