"""`neox-checkpoint`: show, verify, compare and rewrite checkpoints, and merge adapters."""

import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from neox_config import finite_json
from neox_config.facts.checkpoints import LATEST
from neox_config.pluralize import pluralize
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.directory import find_latest, offer_earlier
from neox_model.checkpoint.errors import CheckpointError
from neox_model.commands import ModelCommands
from neox_model.inspection.finding import RequestError, all_checkpoints, find_checkpoint, is_latest
from neox_model.inspection.summary import describe, summary

__all__ = ["main"]

logger = logging.getLogger(__name__)

_FOLDER = click.Path(path_type=Path)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_RESTORE = "restore the damaged files from a copy, if there is one"


@click.group(
    cls=ModelCommands,
    examples=("neox-checkpoint inspect checkpoints", "neox-checkpoint verify checkpoints --all"),
)
@click.version_option(package_name="neox-model")
def main() -> None:
    """Show, verify, compare and rewrite checkpoints, and merge adapters; no checkpoint is ever changed.

    A checkpoint is named by its folder (SAVE/global_step200), or by the folder of all (SAVE), which means the
    latest. Every layout loads every checkpoint.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)


@main.command(
    examples=("neox-checkpoint inspect checkpoints", "neox-checkpoint inspect checkpoints 2000 --tensors"),
    exit_codes={1: "the manifest is damaged, or a failure"},
)
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.argument("iteration", required=False, type=click.IntRange(min=0))
@click.option("--tensors", "with_tensors", is_flag=True, help="List all tensors.")
@_JSON
def inspect(folder: Path, iteration: int | None, with_tensors: bool, as_json: bool) -> None:
    """Show what a checkpoint contains, without reading its tensors."""
    found = find_checkpoint(folder, iteration)
    shown = summary(found, Manifest.read(found), with_tensors=with_tensors)
    _print(shown, list(describe(shown)), as_json=as_json)


@main.command(
    examples=("neox-checkpoint verify checkpoints --all", "neox-checkpoint verify checkpoints 2000 --json"),
    exit_codes={1: "a checkpoint is not sound, or a failure"},
)
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.argument("iteration", required=False, type=click.IntRange(min=0))
@click.option("--all", "every", is_flag=True, help="Verify all checkpoints in the folder.")
@_JSON
def verify(folder: Path, iteration: int | None, every: bool, as_json: bool) -> None:
    """Verify a checkpoint: files, checksums, counters, and that values are finite."""
    if every and iteration is not None:
        raise RequestError("--all verifies every iteration; leave out one of the two")
    folders = all_checkpoints(folder) if every else [find_checkpoint(folder, iteration)]
    soundness = _with_torch("inspection.soundness")
    results = []
    for each in folders:
        results.append(soundness.examine(each))
        if not as_json:
            _show(results[-1])
    latest = None
    if every and (folder / LATEST).exists():
        try:
            find_latest(folder)
        except CheckpointError as error:
            # The remedy follows from what is sound.
            latest = str(error).removesuffix(offer_earlier(folder, None))
    remedy = _remedy(folder, results, every=every, is_lost=latest is not None)
    if as_json:
        plain = {"checkpoints": [result.plain() for result in results], "latest": latest, "remedy": remedy}
        click.echo(finite_json.dumps(plain, indent=2))
    else:
        click.echo("".join(f"{text}\n" for text in (latest, remedy) if text is not None), nl=False)
    if latest is not None or not all(result.is_sound for result in results):
        sys.exit(1)


@main.command(
    examples=(
        "neox-checkpoint diff a/global_step100 b/global_step100",
        "neox-checkpoint diff a b --all --json",
    ),
    exit_codes={0: "no difference", 1: "they differ, one is damaged, or a failure"},
)
@click.argument("one", metavar="A", type=_FOLDER)
@click.argument("other", metavar="B", type=_FOLDER)
@click.option("--all", "every", is_flag=True, help="List every tensor, also equal ones.")
@_JSON
def diff(one: Path, other: Path, every: bool, as_json: bool) -> None:
    """Compare two checkpoints, of any layouts, tensor by tensor.

    They differ if weights, states, counters, or parameters of the model or of training do. Other parameters,
    layouts and versions are shown and do not count.
    """
    folders = find_checkpoint(one), find_checkpoint(other)
    difference = _with_torch("inspection.difference")
    found = difference.compare(*folders)
    lines = [f"A  {folders[0]}", f"B  {folders[1]}", f"{found.verdict}:"]
    plain = {"a": str(folders[0]), "b": str(folders[1]), **found.plain()}
    _print(plain, [*lines, *difference.lines(found, all_tensors=every)], as_json=as_json)
    if not found.is_equal:
        sys.exit(1)


@main.command(
    examples=(
        "neox-checkpoint convert-layout checkpoints --output copy",
        "neox-checkpoint convert-layout checkpoints 2000 --output copy",
    )
)
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.argument("iteration", required=False, type=click.IntRange(min=0))
@click.option("--output", required=True, type=_FOLDER, help="Folder of checkpoints to write to.")
def convert_layout(folder: Path, iteration: int | None, output: Path) -> None:
    """Write a checkpoint again with whole tensors in few files, whatever layout wrote it.

    A run does not require it, because every layout loads every checkpoint. It makes one file per 4 GB of
    the files of all ranks, for a copy or an upload. All values stay the same to the last bit, also those of
    the optimizer and the random generators: `diff` finds no difference.
    """
    found = find_checkpoint(folder, iteration)
    final = _with_torch("checkpoint.convert_layout").convert_layout(found, output)
    click.echo(f"wrote {final}: {found} with whole tensors")


@main.command(
    examples=(
        "neox-checkpoint merge adapters --output merged",
        "neox-checkpoint merge adapters 500 --output merged --base base",
    )
)
@click.argument("adapters", metavar="ADAPTERS", type=_FOLDER)
@click.argument("iteration", required=False, type=click.IntRange(min=0))
@click.option("--output", required=True, type=_FOLDER, help="Folder of checkpoints to write to.")
@click.option("--base", type=_FOLDER, help="Folder of the base's checkpoints.  [default: as recorded]")
def merge(adapters: Path, iteration: int | None, output: Path, base: Path | None) -> None:
    """Merge adapters (LoRA) into the weights of their base, and write a checkpoint of the whole model."""
    found = find_checkpoint(adapters, iteration)
    final = _with_torch("checkpoint.adapters").merge_adapters(found, output, base=base)
    click.echo(f"wrote {final}: the base of {found} with its adapters merged")


def _with_torch(name: str) -> Any:
    """Import a module of this package by name: torch takes seconds, and `inspect` does not use it."""
    logger.info("importing torch")
    return importlib.import_module(f"neox_model.{name}")


def _show(result: Any) -> None:
    size = f"{pluralize(result.tensors, 'tensor')}, {result.num_bytes:,} bytes"
    click.echo(f"{result.folder}: " + (f"sound ({size})" if result.is_sound else "NOT SOUND"))
    for text in (*result.problems, *(f"note: {text}" for text in result.notes)):
        click.echo(f"  {text}")


def _remedy(given: Path, results: Sequence[Any], *, every: bool, is_lost: bool) -> str | None:
    """Return what to do; None if nothing is wrong.

    Args:
        given: the folder.
        results: of the checkpoints, lowest iteration first.
        every: they are all of a folder.
        is_lost: the file `latest` names no complete checkpoint.
    """
    sound = [result.folder for result in results if result.is_sound]
    found = [] if len(sound) == len(results) else [_RESTORE]
    if not every:
        if found and is_latest(results[0].folder):
            above = results[0].folder.absolute().parent
            found.append(f"neox-checkpoint verify {above} --all names the newest sound one")
    elif not sound:
        found.append("this folder contains no sound checkpoint")
    elif is_lost or not any(map(is_latest, sound)):
        command = f"echo {sound[-1].name} > {given / LATEST}"
        found.append(f"to resume from the newest sound one, run: {command}")
    return "; ".join(found) or None


def _print(plain: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    click.echo(finite_json.dumps(plain, indent=2) if as_json else "\n".join(lines))
