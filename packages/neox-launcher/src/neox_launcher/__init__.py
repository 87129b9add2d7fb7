"""From YAML files to running workers: configuration, checks, plans and launches, without torch."""

from neox_launcher.config import NeoXConfig, load_config
from neox_launcher.errors import ConfigError, NeoXError

__all__ = ["ConfigError", "NeoXConfig", "NeoXError", "load_config"]
