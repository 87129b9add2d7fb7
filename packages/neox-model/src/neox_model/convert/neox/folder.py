"""Find the folder of a checkpoint of GPT-NeoX; without torch."""

import re
from pathlib import Path

from neox_config.facts.checkpoints import LATEST
from neox_model.convert.errors import ConversionError
from neox_model.inspection.finding import GPT_NEOX, why_another

__all__ = ["LAYER_FILE", "RANK_FILE", "find_folder"]

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
"""Name of a file with a layer's weights: number of the layer, tensor-parallel rank."""
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
"""Name of a file with the state of a tensor-parallel rank."""


def find_folder(given: Path) -> Path:
    """Return the folder of one checkpoint: `given`, or the one that its file `latest` names."""
    reason = why_another(given, GPT_NEOX)
    if reason is not None:
        raise ConversionError(reason)
    if not given.is_dir():
        raise ConversionError(f"{given} is not a folder; pass the folder of a checkpoint of GPT-NeoX")
    if any(LAYER_FILE.fullmatch(path.name) or RANK_FILE.fullmatch(path.name) for path in given.iterdir()):
        return given
    latest = given / LATEST
    if not latest.is_file():
        raise ConversionError(
            f"{given} contains neither files of a checkpoint of GPT-NeoX (layer_00-model_00-model_states.pt, "
            "mp_rank_00_model_states.pt) nor a file latest; pass the folder global_stepN"
        )
    try:
        name = latest.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"cannot read {latest}: {error}; pass the folder global_stepN") from error
    if Path(name).name != name or not (given / name).is_dir():
        raise ConversionError(f"{latest} names {name!r}, which is no folder in {given}; pass the right one")
    return given / name
