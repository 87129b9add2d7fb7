"""Write adapters of ours in the format of PEFT, for a model of transformers."""

import logging
import shlex
from pathlib import Path
from typing import Any

from neox_model.checkpoint.adapters import Adapters
from neox_model.checkpoint.base import recorded_base
from neox_model.convert.lora.exported import WEIGHTS, Exported, matrices_of
from neox_model.convert.lora.proof import compared_base, prove_adapters
from neox_model.convert.output import folder_written_aside
from neox_model.convert.proof import provenance
from neox_model.convert.reference import require_peft, require_transformers
from neox_model.convert.tokenizer_files import copy_tokenizer, write_json
from neox_model.convert.weights import write_weights
from neox_model.inspection.finding import ADAPTERS

__all__ = ["to_peft"]

logger = logging.getLogger(__name__)


def to_peft(
    folder: Path,
    model: Path,
    output: Path,
    *,
    base: Path | None = None,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
) -> dict[str, Any]:
    """Write a checkpoint of adapters for PEFT, and prove that they change a model in the same way.

    Args:
        folder: the checkpoint of adapters.
        model: the same base as a model of transformers, in a folder.
        output: the folder to create.
        base: folder of the checkpoints of the base, if it is not where the adapters record it.
        vocab_file: the tokenizer's file, if it is not where the base records it.
        merge_file: its second file.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: a checkpoint is damaged, the adapters or their base do not exist in transformers, peft is
            not installed, or the results differ.
    """
    require_transformers("neox-convert to-peft")
    require_peft("neox-convert to-peft")
    logger.info("reading %s and %s", folder, model)
    adapters = Adapters(folder)
    found = recorded_base(adapters.base, base)
    compared = compared_base(
        found,
        model,
        remedy=f"the base of these adapters is {found}; pass as --model what it was imported from, or "
        f"what neox-convert to-hf --load {shlex.quote(str(found))} --output NEW_FOLDER writes",
        vocab_file=vocab_file,
        merge_file=merge_file,
    )
    family, checkpoint = compared.sides.family, compared.checkpoint
    exported = Exported(adapters, checkpoint, family, matrices_of(family, checkpoint))
    with folder_written_aside(output) as aside:
        write_weights(aside, exported.planned(), exported.values(), single=WEIGHTS)
        write_json(aside / ADAPTERS, exported.settings(model))
        copy_tokenizer(model, aside)
        result = prove_adapters(exported, compared, aside)
        result |= provenance(folder, aside, packages=("transformers", "peft"))
        write_json(aside / "verification.json", result)
    return result
