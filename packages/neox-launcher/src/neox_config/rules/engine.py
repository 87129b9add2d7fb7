"""Rules about the engine."""

from collections.abc import Iterator

from neox_config.derive.engine import chosen_engine, only_deepspeeds
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def the_torch_engine_carries_out_all_settings(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse settings that DeepSpeed alone carries out if the torch engine is requested."""
    engine = chosen_engine(c)
    for problem in only_deepspeeds(c) if engine.name == "torch" else ():
        remedy = f"{problem.remedy}, or change what selects the torch engine: {engine.reason}"
        yield Problem(problem.name, problem.what, remedy)


def one_engine_is_requested(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse deepspeed: false with engine: deepspeed."""
    if not c.engine.deepspeed and c.engine.engine == "deepspeed":
        yield Problem("deepspeed", "contradicts engine: deepspeed", "remove one of them")
