"""`neox-convert`: models from and to other programs' formats."""

import logging
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

from neox_config import finite_json
from neox_config.facts.hugging_face import CLASSES
from neox_config.pluralize import pluralize
from neox_model.commands import ModelCommands
from neox_model.convert.neox.folder import find_folder
from neox_model.convert.output import refuse_existing
from neox_model.inspection.finding import find_checkpoint

__all__ = ["main"]

logger = logging.getLogger(__name__)

# What may be given -> name in this package.
_DTYPES = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}
_FOLDER = click.Path(path_type=Path)
_OUTPUT = click.option("--output", required=True, type=_FOLDER, metavar="DIR", help="Folder to create.")
_VOCAB_FILE = click.option(
    "--vocab-file",
    type=_FOLDER,
    metavar="FILE",
    help="Tokenizer's file, if it is not where the run read it.",
)
_MERGE_FILE = click.option(
    "--merge-file", type=_FOLDER, metavar="FILE", help="Tokenizer's second file, likewise."
)


def _takes_checkpoint(command: Callable[..., None]) -> Callable[..., None]:
    """Add the folder of a checkpoint, as an option or as an argument; the command receives it as `load`."""

    @wraps(command)
    def run(*, load: Path | None, folder: Path | None, **options: Any) -> None:
        if (load is None) == (folder is None):
            raise click.UsageError("give the folder of the checkpoint once: --load DIR, or DIR")
        command(load=load or folder, **options)

    of_load = click.option(
        "--load",
        type=_FOLDER,
        metavar="DIR",
        help="Checkpoint (SAVE/global_step200), or the folder of all (SAVE), which means the latest; may be "
        "given without --load.",
    )
    return of_load(click.argument("folder", required=False, metavar="[DIR]", type=_FOLDER)(run))


@click.group(
    cls=ModelCommands,
    examples=(
        "neox-convert to-hf --load checkpoints --output exported",
        "neox-convert from-hf pythia-160m --output imported",
    ),
)
@click.version_option(package_name="neox-model")
def main() -> None:
    """Convert models, and prove that the result is the same model.

    A folder that was written contains verification.json, which states what was compared. If the models
    differ, nothing is written.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for room in ("convert", "extras"):
        logging.getLogger(f"neox_model.{room}").setLevel(logging.INFO)


@main.command(
    "to-hf",
    examples=(
        "neox-convert to-hf --load checkpoints --output exported",
        "neox-convert to-hf --load checkpoints/global_step2000 --output exported --dtype bf16 --trim-vocab",
    ),
)
@_takes_checkpoint
@_OUTPUT
@click.option(
    "--dtype",
    type=click.Choice([*_DTYPES]),
    callback=lambda context, parameter, value: _DTYPES.get(value),
    help="Data type of the weights; default: as stored.",
)
@click.option(
    "--family",
    type=click.Choice([*CLASSES]),
    help="Class to write; default: the one that from-hf read (hf-family), else the first that computes this "
    "model.",
)
@click.option("--trim-vocab", is_flag=True, help="Leave out the padding of the vocabulary.")
@click.option("--ema", is_flag=True, help="Write the averages of the weights (ema-decay) instead.")
@_VOCAB_FILE
@_MERGE_FILE
def write_hugging_face(load: Path, output: Path, **options: Any) -> None:
    """Write a checkpoint as a model of Hugging Face's transformers."""
    _convert("convert.to_hf:to_hf", find_checkpoint(load), output, **options)


@main.command(
    "from-hf",
    examples=(
        "neox-convert from-hf pythia-160m --output imported",
        "neox-convert from-hf pythia-160m --output imported --trim-vocab",
    ),
)
@click.argument("folder", metavar="DIR", type=_FOLDER)
@_OUTPUT
@click.option(
    "--trim-vocab", is_flag=True, help="Leave out rows of the embedding that the tokenizer does not use."
)
@click.option(
    "--tokenizer-as-stored",
    is_flag=True,
    help="Use tokenizer.json even if transformers replaces parts of it: for a model trained with it.",
)
def read_hugging_face(folder: Path, output: Path, **options: Any) -> None:
    """Write a model of Hugging Face's transformers as a checkpoint, with a configuration."""
    _request("check_model", folder)
    _convert("convert.from_hf:from_hf", folder, output, **options)


@main.command(
    "to-peft",
    examples=(
        "neox-convert to-peft --load adapters --model exported --output exported-adapters",
        "neox-convert to-peft --load adapters --model exported --output exported-adapters --base base",
    ),
)
@_takes_checkpoint
@click.option(
    "--model",
    required=True,
    type=_FOLDER,
    metavar="DIR",
    help="Base of the adapters as a model of transformers, such as one that to-hf wrote.",
)
@_OUTPUT
@click.option(
    "--base",
    type=_FOLDER,
    metavar="DIR",
    help="Folder of the base's checkpoints, if it is not where the adapters were trained.",
)
@_VOCAB_FILE
@_MERGE_FILE
def write_peft(load: Path, model: Path, output: Path, **options: Any) -> None:
    """Write adapters (LoRA) for Hugging Face's peft."""
    checkpoint = find_checkpoint(load)
    _request("read_config", model)
    _convert("convert.to_peft:to_peft", checkpoint, output, model=model, **options)


@main.command(
    "from-peft",
    examples=(
        "neox-convert from-peft adapters --base imported --output imported-adapters",
        "neox-convert from-peft adapters --base imported --model pythia-160m --output imported-adapters",
    ),
)
@click.argument("folder", metavar="DIR", type=_FOLDER)
@_OUTPUT
@click.option(
    "--base",
    required=True,
    type=_FOLDER,
    metavar="DIR",
    help="Checkpoint of the base, such as one that from-hf wrote, or the folder of all, which means the "
    "latest.",
)
@click.option(
    "--model",
    type=_FOLDER,
    metavar="DIR",
    help="The same base as a model of transformers; default: the folder that the adapters name.",
)
@_VOCAB_FILE
@_MERGE_FILE
def read_peft(folder: Path, output: Path, base: Path, model: Path | None, **options: Any) -> None:
    """Write adapters (LoRA) of Hugging Face's peft as a checkpoint, with a configuration."""
    checkpoint = find_checkpoint(base)
    _request("check_adapters", folder, model)
    _convert("convert.from_peft:from_peft", folder, output, base=checkpoint, model=model, **options)


@main.command(
    "from-neox",
    examples=(
        "neox-convert from-neox global_step143000 --output imported",
        "neox-convert from-neox checkpoints --output imported --config 125M.yml --vocab-file tokenizer.json",
    ),
)
@click.argument("folder", metavar="DIR", type=_FOLDER)
@_OUTPUT
@click.option(
    "--config",
    multiple=True,
    type=_FOLDER,
    metavar="FILE",
    help="Configuration that the model was trained with, if DIR does not record it; may be repeated.",
)
@click.option(
    "--qkv-order",
    type=click.Choice(["separate", "per-head"]),
    help="With num_kv_heads: rows of query_key_value as GPT-NeoX stores them since 13 November 2024 (commit "
    "96c242e), all queries, keys, values, or as before, by query head. Required where both are possible.",
)
@click.option(
    "--average-copies",
    is_flag=True,
    help="Average what all tensor-parallel ranks store of one tensor (norms, biases), where it differs.",
)
@click.option(
    "--trim-vocab", is_flag=True, help="Leave out rows of the embedding that the tokenizer does not use."
)
@_VOCAB_FILE
@_MERGE_FILE
def read_gpt_neox(folder: Path, output: Path, **options: Any) -> None:
    """Write a checkpoint of GPT-NeoX as a checkpoint of ours, with a configuration.

    DIR is global_stepN with the files layer_*-model_*-model_states.pt or mp_rank_*_model_states.pt, or the
    folder with the file latest. Optimizer states are not converted.
    """
    find_folder(folder)
    _convert("convert.from_neox:from_neox", folder, output, **options)


@main.command(
    "compress",
    examples=(
        "neox-convert compress --load compressed --output plain",
        "neox-convert compress --load compressed/global_step2000 --output packed --packed",
    ),
)
@_takes_checkpoint
@_OUTPUT
@click.option("--exact-inputs", is_flag=True, help="Leave out the quantization of inputs of matrices.")
@click.option("--packed", is_flag=True, help="Write packed whole numbers in a model of transformers.")
@click.option(
    "--family",
    type=click.Choice(["gpt_neox", "llama", "mistral", "qwen2"]),
    help="Class of the packed model; default: the one that from-hf read (hf-family), else the first that "
    "computes it.",
)
@_VOCAB_FILE
@_MERGE_FILE
def make_plain(load: Path, output: Path, exact_inputs: bool, packed: bool, **of_transformers: Any) -> None:
    """Write a model that compression_training compressed as a plain one that computes the same.

    Quantized and pruned weights have the values with which the run computes; pruned rows of the MLP are
    removed where that is possible. With --packed, the output is a model of transformers, whose quantized
    matrices are whole numbers of as many bits as in training (compressed-tensors).
    """
    given = [name for name, value in of_transformers.items() if value is not None]
    if given and not packed:
        option = given[0].replace("_", "-")
        raise click.UsageError(f"--{option} is used only with --packed; leave it out")
    function = f"extras.compression.{'packed:write_packed' if packed else 'compress:compress'}"
    options = of_transformers if packed else {}
    result = _convert(function, find_checkpoint(load), output, exact_inputs=exact_inputs, **options)
    click.echo(
        f"weights: {result['bytes_before']:,} bytes before, {result['bytes_after']:,} after; "
        f"{result['sparsity_of_compressed_matrices']:.1%} of the compressed matrices are zeros"
    )


@main.command(
    "upcycle",
    examples=(
        "neox-convert upcycle --load checkpoints --output upcycled --experts 8 --top-k 2",
        "neox-convert upcycle --load checkpoints --output upcycled --experts 32 --top-k 8 --granularity 4",
    ),
)
@_takes_checkpoint
@_OUTPUT
@click.option("--experts", required=True, type=int, metavar="N", help="Experts of a layer.")
@click.option("--top-k", required=True, type=int, metavar="K", help="Experts of a token, at least 2.")
@click.option(
    "--granularity",
    type=click.IntRange(min=1),
    default=1,
    metavar="G",
    help="Slices of a block, each of which is an expert of 1 / G of its width: a power of two that divides N "
    "and K; default: 1.",
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    type=int,
    metavar="INDEX",
    help="Layer that gets experts, from 0; may be repeated; default: all.",
)
@_VOCAB_FILE
@_MERGE_FILE
def add_experts(load: Path, output: Path, **options: Any) -> None:
    """Write a dense checkpoint as one of a model with experts that computes the same.

    Each expert is a copy, or a slice, of the layer's feed-forward block. A token passes K / G copies, whose
    weights add up to 1. The output contains a configuration with which the model is trained.
    """
    _convert("convert.upcycle:upcycle", find_checkpoint(load), output, **options)


@main.command(
    examples=("neox-convert verify checkpoints exported", "neox-convert verify exported imported --json"),
    exit_codes={0: "equal, or rounded to another data type", 1: "they differ, or a failure"},
)
@click.argument("one", metavar="A", type=_FOLDER)
@click.argument("other", metavar="B", type=_FOLDER)
@_VOCAB_FILE
@_MERGE_FILE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(one: Path, other: Path, vocab_file: Path | None, merge_file: Path | None, as_json: bool) -> None:
    """Compare two folders: checkpoints, models of transformers, or one of each.

    Weights that were only rounded to another data type count as equal, and are reported.
    """
    for folder in (one, other):
        _request("check_side", folder)
    result = _with_torch("convert.verify:verify")(one, other, vocab_file=vocab_file, merge_file=merge_file)
    lines = [
        f"{result['verdict']}: {pluralize(result['tensors'], 'tensor')}",
        *result.get("differences", []),
        *result["rounded"],
    ]
    click.echo(finite_json.dumps(result, indent=2) if as_json else "\n".join(lines))
    if result["verdict"] == "different":
        sys.exit(1)


def _request(name: str, *folders: Path | None) -> None:
    """Call a function of `requests`, which imports tokenizers, for which `--help` must not wait."""
    resolve_name(f"neox_model.convert.requests:{name}")(*folders)


def _with_torch(name: str) -> Any:
    """Return a function of neox_model by name: torch takes seconds to import, and `--help` needs none."""
    logger.info("importing torch")
    return resolve_name(f"neox_model.{name}")


def _convert(function: str, folder: Path, output: Path, **options: Any) -> dict[str, Any]:
    """Call a function of neox_model, and report what it returns."""
    refuse_existing(output)
    result: dict[str, Any] = _with_torch(function)(folder, output=output, **options)
    worst = max(result["largest_differences"].values(), default=0.0)
    click.echo(
        f"wrote {output}: {result['class']}, {result['parameters']:,} parameters in {result['tensors']:,} "
        f"tensors; results differ by at most {worst:.1e} of the largest (limit {result['limit']:g})"
    )
    return result
