"""Recognize what a path contains that a command line names, and the command that reads it; without torch."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from neox_config.facts.checkpoints import gpt_neox_checkpoint
from neox_config.spec.recorded import latest_checkpoint

__all__ = ["ADAPTERS", "CHECKPOINT", "GPT_NEOX", "MODEL", "PEFT", "is_model", "why_another"]

ADAPTERS = "adapter_config.json"
"""File that describes adapters of PEFT."""
CHECKPOINT = "a checkpoint of this project"
MODEL = "a model of transformers"
GPT_NEOX = "a checkpoint of GPT-NeoX"
PEFT = "adapters of PEFT"


def is_model(folder: Path) -> bool:
    """Return whether a folder contains a model of transformers."""
    return (folder / "config.json").is_file()


def _is_checkpoint(folder: Path) -> bool:
    return latest_checkpoint(folder) is not None


def _is_gpt_neox(folder: Path) -> bool:
    return gpt_neox_checkpoint(folder) is not None


def _is_peft(folder: Path) -> bool:
    return (folder / ADAPTERS).is_file()


# What a folder can contain, how it is recognized, and the command for it.
_KINDS: Mapping[str, tuple[Callable[[Path], bool], str]] = {
    CHECKPOINT: (
        _is_checkpoint,
        "it can be loaded as it is, and neox-convert to-hf --load {} --output DIR exports it to transformers",
    ),
    GPT_NEOX: (_is_gpt_neox, "convert it with neox-convert from-neox {} --output DIR"),
    PEFT: (_is_peft, "convert them with neox-convert from-peft {} --base DIR --output DIR"),
    MODEL: (is_model, "convert it with neox-convert from-hf {} --output DIR"),
}


def why_another(path: Path, wanted: str) -> str | None:
    """Return what a path contains in place of what a command reads, and what to do; None if that is unknown.

    Args:
        path: folder, or a file in it.
        wanted: what the command reads; a key of the table above.
    """
    folder = path.parent if path.is_file() else path
    if _KINDS[wanted][0](folder):
        return None if folder == path else f"{path} is a file; pass its folder, {folder}"
    for kind, (is_kind, remedy) in _KINDS.items():
        if is_kind(folder):
            return f"{folder} contains {kind}, not {wanted}; {remedy.format(shlex.quote(str(folder)))}"
    return None
