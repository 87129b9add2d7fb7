"""The configuration: every parameter, how it is read and checked, and what follows from it.

Nothing here imports torch or the rest of `neox_launcher` (but `errors`), so that it can be used, and moved,
alone.
"""

from neox_launcher.config.engine_json import engine_json
from neox_launcher.config.load import load_config
from neox_launcher.config.resolve import Derived, Resolved, decode_resolved, encode_resolved, resolve
from neox_launcher.config.schema import NeoXConfig

__all__ = [
    "Derived",
    "NeoXConfig",
    "Resolved",
    "decode_resolved",
    "encode_resolved",
    "engine_json",
    "load_config",
    "resolve",
]
