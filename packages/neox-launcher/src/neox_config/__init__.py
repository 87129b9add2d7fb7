"""Configuration: parameters, loading and checking of files, and the specifications that follow.

Imports neither torch nor any other package of the project. Public names are loaded on first use, so that a
process that needs only `neox_config.errors` does not spend a quarter of a second on loading the schema.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox_config.errors import ConfigError, NeoXError
    from neox_config.read.load import load_config
    from neox_config.read.reading import Text
    from neox_config.schema.config import NeoXConfig
    from neox_config.spec.resolve import (
        Resolved,
        decode_resolved,
        encode_resolved,
        engine_json,
        resolve,
    )

__all__ = [
    "ConfigError",
    "NeoXConfig",
    "NeoXError",
    "Resolved",
    "Text",
    "decode_resolved",
    "encode_resolved",
    "engine_json",
    "load_config",
    "resolve",
]

_MODULES = {
    "ConfigError": "neox_config.errors",
    "NeoXConfig": "neox_config.schema.config",
    "NeoXError": "neox_config.errors",
    "Resolved": "neox_config.spec.resolve",
    "Text": "neox_config.read.reading",
    "decode_resolved": "neox_config.spec.resolve",
    "encode_resolved": "neox_config.spec.resolve",
    "engine_json": "neox_config.spec.resolve",
    "load_config": "neox_config.read.load",
    "resolve": "neox_config.spec.resolve",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
