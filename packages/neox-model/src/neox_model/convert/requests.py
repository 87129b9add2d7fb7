"""What the command line names, checked without torch, which takes seconds to import."""

from pathlib import Path
from typing import Any

from neox_config.files import names_in
from neox_model.convert.classes import model_type_of
from neox_model.convert.errors import ConversionError
from neox_model.convert.tokenizer_files import read_json, tokenizer_names
from neox_model.inspection.finding import ADAPTERS, MODEL, PEFT, find_checkpoint, is_model, why_another

__all__ = [
    "check_adapters",
    "check_model",
    "check_side",
    "named_model",
    "read_config",
]

_CONFIG = "config.json"
# Files that Git LFS stores, and the first bytes of what a clone without it has instead.
_LARGE = (".safetensors", ".bin", ".json", ".model")
_POINTER = b"version https://git-lfs.github.com/spec/v1"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the `config.json` of a model of transformers, whose class can be converted."""
    reason = why_another(folder, MODEL)
    if reason is not None:
        raise ConversionError(reason)
    if not is_model(folder):
        raise ConversionError(
            f"{folder} has no {_CONFIG}, so it is not a model of transformers; nothing is downloaded, so "
            "pass the folder of a model, such as that of: hf download NAME --local-dir FOLDER"
        )
    _refuse_pointers(folder)
    config = read_json(folder / _CONFIG)
    model_type_of(config, folder / _CONFIG)
    return config


def _refuse_pointers(folder: Path) -> None:
    """Refuse the folder of a `git clone` without Git LFS, in which large files are descriptions of them."""
    for name in names_in(folder, lambda entry: entry.is_file() and entry.name.endswith(_LARGE)):
        with (folder / name).open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise ConversionError(
                    f"{folder / name} is a pointer of Git LFS, not the file itself; run git lfs pull in "
                    f"{folder}, or: hf download NAME --local-dir FOLDER"
                )


def check_model(folder: Path) -> dict[str, Any]:
    """Return the `config.json` of a model of transformers with a tokenizer."""
    config = read_config(folder)
    tokenizer_names(folder)
    return config


def check_side(folder: Path) -> None:
    """Check that a folder contains a checkpoint of ours, or a model of transformers that can be converted.

    Raises:
        NeoXError: it contains neither.
    """
    if is_model(folder.parent if folder.is_file() else folder):
        read_config(folder)
    else:
        find_checkpoint(folder)


def check_adapters(folder: Path, model: Path | None) -> None:
    """Check adapters of PEFT, and their base of transformers (None: the one that they name)."""
    reason = why_another(folder, PEFT)
    if reason is not None:
        raise ConversionError(reason)
    read_json(folder / ADAPTERS)
    read_config(model or named_model(folder))


def named_model(folder: Path) -> Path:
    """Return the folder of the base that PEFT's adapters name."""
    named = read_json(folder / ADAPTERS).get("base_model_name_or_path")
    if isinstance(named, str) and is_model(Path(named)):
        return Path(named)
    raise ConversionError(
        f"{folder / ADAPTERS} names the base {named!r}, which is not the folder of a model here; pass the "
        "folder with --model"
    )
