"""The engines by name.

Their modules are imported when a configuration asks for one, because some libraries take seconds to import. A
module has `build` (see `build_engine`), and for pipelines `build_stages` and `build_forward`. It may have
`prepare`, `partitioned_as_built`, `gathered` (a parameter that it partitions) and `forget_process_group`.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from neox_config.facts.engines import EngineName
from neox_config.spec.run import RunSpec

__all__ = ["ENGINES", "engine_module", "functions_of_engines"]

# name, and whether the model is a pipeline -> module
ENGINES: Mapping[tuple[EngineName, bool], str] = {
    ("torch", False): "neox_model.engine.torch_engine",
    ("torch", True): "neox_model.engine.torch_pipeline",
    ("deepspeed", False): "neox_model.engine.deepspeed.build",
    ("deepspeed", True): "neox_model.engine.deepspeed.build",
}


def engine_module(run: RunSpec) -> Any:
    """Import and return the module of the engine that a run has."""
    return importlib.import_module(ENGINES[run.engine.name, run.layout.is_pipeline])


def functions_of_engines(name: str) -> list[Callable[..., Any]]:
    """Return the function of this name of each engine that this process has imported and that has it."""
    modules = (sys.modules.get(module) for module in dict.fromkeys(ENGINES.values()))
    return [getattr(module, name) for module in modules if hasattr(module, name)]
