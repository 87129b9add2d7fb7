"""Write adapters of PEFT as a checkpoint of ours, with a configuration."""

import logging
import shlex
from pathlib import Path
from typing import Any

from neox_config import load_config, resolve
from neox_model.checkpoint.adapters import Adapters
from neox_model.checkpoint.base import BASE, base_record
from neox_model.convert.checkpoints import model_parameters
from neox_model.convert.lora.exported import WEIGHTS, Exported, matrices_of
from neox_model.convert.lora.imported import Imported
from neox_model.convert.lora.options import read_options
from neox_model.convert.lora.packing import PEFT
from neox_model.convert.lora.proof import compared_base, prove_adapters
from neox_model.convert.output import folder_written_aside
from neox_model.convert.proof import provenance
from neox_model.convert.requests import named_model
from neox_model.convert.tokenizer_files import write_json
from neox_model.convert.written_checkpoint import recorded_config, write_checkpoint
from neox_model.convert.yaml_file import CONFIGURATION, write_settings
from neox_model.inspection.finding import ADAPTERS

__all__ = ["from_peft"]

logger = logging.getLogger(__name__)


def from_peft(
    folder: Path,
    output: Path,
    *,
    base: Path,
    model: Path | None = None,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
) -> dict[str, Any]:
    """Write adapters of PEFT as a checkpoint, and prove that they change a model in the same way.

    Args:
        folder: with `adapter_config.json` and `adapter_model.safetensors`.
        output: the folder to create: `latest`, `global_step0` and `model.yml`.
        base: the checkpoint of the base.
        model: the same base as a model of transformers; None: the folder that the adapters name.
        vocab_file: the tokenizer's file, if it is not where the base records it.
        merge_file: its second file.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: ours cannot have these adapters, they are of another base, peft is not installed, or the
            results differ.
    """
    model, record = model or named_model(folder), base_record(base)
    logger.info("reading %s, %s and %s", folder, base, model)
    compared = compared_base(
        base,
        model,
        remedy="pass as --base what "
        f"neox-convert from-hf {shlex.quote(str(model))} --output NEW_FOLDER writes",
        vocab_file=vocab_file,
        merge_file=merge_file,
    )
    checkpoint, family = compared.checkpoint, compared.sides.family
    matrices, config = matrices_of(family, checkpoint), checkpoint.resolved.config
    is_transposed = any(matrix.weight.form.is_transposed for matrix in matrices)
    options = read_options(folder, is_transposed=is_transposed)
    imported = Imported(folder, options, matrices)
    settings = {
        **model_parameters(config.model, config.attention),
        "precision": checkpoint.precision,
        "lora-rank": imported.packing.our_rank,
        "lora-alpha": imported.packing.our_alpha,
        "lora-dropout": options.dropout,
        "lora-target-modules": imported.kinds,
        **checkpoint.tokenizer_settings(vocab_file, merge_file),
        **({"stop-tokens": checkpoint.stop_tokens} if checkpoint.stop_tokens else {}),
        "lora-base": record["folder"],
    }
    with folder_written_aside(output) as aside:
        write_settings(
            aside / CONFIGURATION, settings, source=folder, output=output.absolute(), command="from-peft"
        )
        resolved = resolve(load_config([aside / CONFIGURATION]), devices=1)
        recorded = recorded_config(resolved, compared.sides.tokenizer) | {BASE: record}
        if imported.packing.stacked:
            recorded[PEFT] = imported.packing.recorded()
        written = write_checkpoint(aside, imported.planned(), imported.values, recorded)
        exported = Exported(Adapters(written), checkpoint, family, matrices)
        result = prove_adapters(exported, compared, folder)
        read = [folder / name for name in (ADAPTERS, WEIGHTS)]
        result |= provenance(folder, written, packages=("transformers", "peft"), read=read)
        write_json(aside / "verification.json", result)
    return result
