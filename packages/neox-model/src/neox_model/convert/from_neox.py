"""Write a checkpoint of GPT-NeoX as a checkpoint of ours, with a configuration."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from neox_config import load_config, resolve
from neox_config.pluralize import pluralize
from neox_config.spec.model import Norm
from neox_config.spec.read_run import read_update
from neox_config.spec.refusals import CURVE_CLASS
from neox_config.spec.resume import SAMPLES_PER_ITERATION
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.checkpoints import Checkpoint, tensor_shapes
from neox_model.convert.differences import attention_of
from neox_model.convert.errors import ConversionError
from neox_model.convert.neox.files import NeoXFiles
from neox_model.convert.neox.folder import find_folder
from neox_model.convert.neox.proof import compare_blocks, compare_rows
from neox_model.convert.neox.settings import Settings, read_settings
from neox_model.convert.neox.tensors import Joined, joined_tensors, order_of
from neox_model.convert.neox.tokenizer import check_padding, find_named_tokenizer
from neox_model.convert.output import folder_written_aside
from neox_model.convert.proof import provenance
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.tokenizer_files import padding_multiple, rows_to_keep, write_json
from neox_model.convert.weights import PRECISIONS
from neox_model.convert.written_checkpoint import recorded_config, write_checkpoint
from neox_model.convert.yaml_file import CONFIGURATION, write_settings

__all__ = ["from_neox"]

logger = logging.getLogger(__name__)

_NOTES = (
    "",
    "Optimizer states were not converted. To continue at the recorded iteration with new ones, instead of",
    "starting at iteration 0, also pass",
    "  --set finetune=false --set no-load-optim=true --set no-load-rng=true --set override-lr-scheduler=true",
)


def from_neox(
    folder: Path,
    output: Path,
    *,
    config: Sequence[Path] = (),
    qkv_order: str | None = None,
    average_copies: bool = False,
    trim_vocab: bool = False,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
) -> dict[str, Any]:
    """Write a checkpoint of GPT-NeoX as one of ours, and prove that it is the same model.

    Args:
        folder: `global_stepN`, or the folder with `latest`.
        output: the folder to create: `latest`, `global_stepN`, `model.yml` and the tokenizer's files.
        config: the files that the model was trained with; empty: those that it records.
        qkv_order: "separate" or "per-head", the order of shared keys and values; required where names and
            shapes do not show it.
        average_copies: average what all ranks store of one tensor of the model, if it differs.
        trim_vocab: leave out rows of the embedding without an entry in the tokenizer.
        vocab_file: the tokenizer's file, if it is not where the configuration says.
        merge_file: its second file.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: the checkpoint cannot be read or built, or the written one differs.
    """
    logger.info("reading %s", folder)
    files = NeoXFiles(find_folder(folder), average_copies=average_copies)
    iteration = files.state.get("iteration")
    if type(iteration) is not int or iteration < 0:
        raise ConversionError(
            f"{files.folder}/mp_rank_00_model_states.pt records no iteration; only checkpoints of GPT-NeoX "
            "itself are read"
        )
    settings = read_settings(files, config)
    model = settings.resolved.model
    order = order_of(files, attention_of(model.layers[0]), qkv_order)
    tokenizer = find_named_tokenizer(
        settings.config.tokenizer, files.folder, vocab_file=vocab_file, merge_file=merge_file
    )
    rows = rows_to_keep(tokenizer.tokenizer, settings.rows, trim_vocab=trim_vocab)
    check_padding(
        files, tokenizer, rows=settings.rows, multiple=settings.config.model.make_vocab_size_divisible_by
    )
    multiple = padding_multiple(tokenizer.tokenizer.vocab_size, rows)
    shapes = tensor_shapes(model, settings.resolved.run, rows)
    plan = joined_tensors(files, model, shapes, settings.rows, order=order)
    parameters = settings.parameters() | {
        "make-vocab-size-divisible-by": multiple,
        "precision": PRECISIONS.get(files.dtype(plan[-1].key), "fp32"),
        **tokenizer.settings(output.absolute()),
    }
    with folder_written_aside(output) as aside:
        write_settings(
            aside / CONFIGURATION,
            parameters,
            source=folder,
            output=output.absolute(),
            command="from-neox",
            notes=_NOTES,
        )
        tokenizer.copy(aside)
        recorded = recorded_config(
            resolve(load_config([aside / CONFIGURATION]), devices=1), tokenizer.tokenizer
        )
        del recorded[SAMPLES_PER_ITERATION]  # That of model.yml is not that of the run.
        joined = {each.ours: each for each in plan}
        written = write_checkpoint(
            aside,
            [StreamedTensor(each.ours, each.shape, files.dtype(each.key)) for each in plan],
            lambda name: joined[name].chunks(files),
            recorded,
            iteration=iteration,
            progress=_progress(files, settings, iteration),
        )
        read = [*files.read, *settings.read, *tokenizer.read]
        result = _prove(files, Checkpoint(written), plan, order)
        result |= provenance(files.folder, written, packages=(), read=read)
        write_json(aside / "verification.json", result)
    _warn(files, iteration, model.norm, output)
    return result


def _progress(files: NeoXFiles, settings: Settings, iteration: int) -> dict[str, Any]:
    """Return the entries of a manifest that describe a run.

    Samples are counted as DeepSpeed recorded them. Without them, or without a learning rate (that of
    train_epochs follows from data that is not read here), a run can start from the weights, but not continue.
    """
    counts = [files.state.get(name) for name in ("global_samples", "skipped_steps")]
    samples, skipped = (each if type(each) is int and each >= 0 else None for each in counts)
    config = settings.config
    curve = read_update(config).curve
    if curve is None or samples is None or (samples == 0) != (iteration == 0):
        return {}
    evaluations = iteration // config.training.eval_interval
    batch = samples // iteration if iteration else 0
    return {
        "training": {
            "iteration": iteration,
            "samples": samples,
            "tokens": samples * config.model.seq_length,
            "skipped_iterations": skipped or 0,
            "validation_samples": evaluations * config.training.eval_iters * batch,
            "batch_sizes": [[0, batch]] if iteration and samples % iteration == 0 else [],
        },
        "engine": {"global_steps": iteration, "global_samples": samples},
        "schedule": {
            CURVE_CLASS: type(curve).__name__,
            "curve": asdict(curve),
            "applied_updates": iteration - (skipped or 0),
        },
    }


def _warn(files: NeoXFiles, iteration: int, norm: Norm, output: Path) -> None:
    """Log what the result does not contain, or computes differently from some versions of GPT-NeoX."""
    logger.warning(
        "%s is of iteration %s; its optimizer states were not converted: a run from %s starts at "
        "iteration 0 with new ones, and can be continued at that iteration as the file describes",
        *(files.folder, f"{iteration:,}", output / CONFIGURATION),
    )
    if files.differences:
        worst = max(files.differences, key=lambda key: files.differences[key])
        logger.warning(
            "averaged the copies of %s, which differ by up to %.3g between ranks (%s)",
            *(pluralize(len(files.differences), "tensor"), files.differences[worst], worst),
        )
    if norm.kind == "rmsnorm":
        logger.warning(
            "rmsnorm adds its epsilon (%g) to the mean square, as GPT-NeoX does since commit 4c9f108 "
            "(9 May 2025); before, it added it to the root: if %s was trained with an older version, its "
            "results differ where hidden states are small; compare its loss with neox-launch evaluate",
            *(norm.epsilon, files.folder),
        )


def _prove(
    files: NeoXFiles, checkpoint: Checkpoint, plan: Sequence[Joined], order: str | None
) -> dict[str, Any]:
    """Compare the written checkpoint with the files, and return what was seen."""
    checkpoint.check_shapes()
    figures = Figures(other="the ranks of GPT-NeoX's checkpoint")
    compare_rows(files, checkpoint, figures, num_layers=len(checkpoint.model.layers))
    compare_blocks(files, checkpoint, figures, order=order)
    read, apart = {each.key for each in plan}, files.differences
    averaged = {
        "tensors": len(apart),
        "largest_difference": max(apart.values(), default=0.0),
        "largest_difference_by_tensor": {str(key): each for key, each in sorted(apart.items())},
    }
    return {
        "verdict": "equal",
        "class": "a checkpoint of GPT-NeoX",
        "iteration": checkpoint.manifest.iteration,
        "tensor_parallel_ranks": files.ranks,
        "qkv_order": order,
        "tensors": len(checkpoint.shapes),
        "parameters": sum(prod(shape) for shape in checkpoint.shapes.values()),
        "tensors_read": len(read) * files.ranks,
        "averaged_copies": averaged if files.average_copies else None,
        "constants_compared": sorted(str(key) for key in files.parts.keys() - read),
        "largest_differences": figures.plain(),
        "limit": figures.limit,
        "optimizer_states": "not converted",
    }
