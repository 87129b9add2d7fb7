"""How workers are started: one file per way, chosen by name."""

from collections.abc import Mapping

from neox_launcher.backends.base import Backend
from neox_launcher.backends.local import LocalBackend

__all__ = ["BACKENDS", "Backend"]

BACKENDS: Mapping[str, Backend] = {"local": LocalBackend()}
