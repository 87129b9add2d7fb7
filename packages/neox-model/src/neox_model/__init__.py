"""The parallel transformer: its layers, how it is trained, evaluated, saved and sampled from.

The names of this module are its interface for programs and notebooks (docs/python.md). They are loaded on
first use, so that commands that need one module of the package do not load torch.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox_config.errors import ConfigError, NeoXError
    from neox_model.api.configuration import load_config
    from neox_model.api.model import Model, load_model
    from neox_model.api.trainer import Step, Trainer
    from neox_model.generate.engine import Reply

__all__ = ["ConfigError", "Model", "NeoXError", "Reply", "Step", "Trainer", "load_config", "load_model"]

_MODULES = {
    "ConfigError": "neox_config.errors",
    "Model": "neox_model.api.model",
    "NeoXError": "neox_config.errors",
    "Reply": "neox_model.generate.engine",
    "Step": "neox_model.api.trainer",
    "Trainer": "neox_model.api.trainer",
    "load_config": "neox_model.api.configuration",
    "load_model": "neox_model.api.model",
}

# Importing deepspeed logs a warning if there is no GPU; runs log the backend.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator" not in record.getMessage())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
