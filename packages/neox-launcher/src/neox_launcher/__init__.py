"""From YAML files to running workers: configuration, checks, plans and launches, without torch.

The public names are loaded when they are asked for: a node that starts workers needs none of them, and the
configuration takes a quarter of a second to load.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox_launcher.config import NeoXConfig, load_config
    from neox_launcher.errors import ConfigError, NeoXError

__all__ = ["ConfigError", "NeoXConfig", "NeoXError", "load_config"]

_HOMES = {
    "ConfigError": "neox_launcher.errors",
    "NeoXConfig": "neox_launcher.config",
    "NeoXError": "neox_launcher.errors",
    "load_config": "neox_launcher.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
