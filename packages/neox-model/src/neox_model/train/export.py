"""Export the last checkpoint of a run to transformers (`hf_export`)."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from neox_config import Resolved
from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import checkpoint_name
from neox_data.tokenizers import Tokenizer
from neox_model.convert import PARENT
from neox_model.convert.families import fitting_family
from neox_model.convert.output import refuse_existing
from neox_model.convert.proof.tokens import compare_tokenizers
from neox_model.convert.reference import require_transformers
from neox_model.convert.to_hf import write_descriptions
from neox_model.convert.tokenizer_files import refuse_others
from neox_model.train.run import Run

__all__ = ["check_export", "export"]

logger = logging.getLogger(__name__)


def check_export(resolved: Resolved, tokenizer: Tokenizer) -> None:
    """Check at the start of a run that its model can be exported at the end.

    Raises:
        NeoXError: the folder exists, transformers is not installed or has no such model or tokenizer, or its
            tokenizer encodes texts differently.
    """
    output = resolved.config.checkpoint.hf_export
    if output is None:
        return
    require_transformers("hf-export")
    try:
        refuse_existing(Path(output))
        family = fitting_family(resolved.model, resolved.config.checkpoint.hf_family)
        refuse_others(tokenizer)
        source = resolved.config.tokenizer.vocab_file
        rows = resolved.model.embedding.entries(tokenizer.vocab_size)
        with TemporaryDirectory() as folder:
            write_descriptions(
                Path(folder),
                resolved.model,
                resolved.config.model,
                family,
                tokenizer,
                None if source is None else Path(source),
                rows=rows,
                dtype=torch.float32,
                stops=resolved.config.generation.stop_tokens,
            )
            compare_tokenizers(tokenizer, Path(folder), rows=rows)
    except NeoXError as error:
        raise NeoXError(f"hf-export: {error}; or remove hf-export") from error


def export(run: Run) -> None:
    """Export the last checkpoint in another process, on the CPU, unless the run was stopped; on rank 0.

    Raises:
        NeoXError: it failed; the checkpoint is not affected.
    """
    section, state = run.config.checkpoint, run.state
    if run.groups.world.rank != 0 or section.hf_export is None or section.save is None:
        return
    if state.stop_reason is not None:
        logger.info("nothing is exported to %s, because the run was stopped", section.hf_export)
        return
    load = Path(section.save) / checkpoint_name(state.iteration)
    command = [sys.executable, "-P", "-m", "neox_model.convert", "to-hf"]
    command += ["--load", str(load), "--output", section.hf_export]
    environment = {**os.environ, PARENT: str(os.getpid()), "CUDA_VISIBLE_DEVICES": ""}
    with run.progress.phase(f"exporting to {section.hf_export}"), run.progress.repeated(state.iteration):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = lines[-1].removeprefix("Error: ")
        raise NeoXError(
            f"hf-export: the run is complete and saved, but was not exported: {reason}; to "
            f"export it, run: neox-convert to-hf --load {load} --output {section.hf_export}"
        )
    logger.info("%s", done.stdout.strip())
