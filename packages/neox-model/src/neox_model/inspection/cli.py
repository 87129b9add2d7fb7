"""`neox-checkpoint`: show, verify and compare checkpoints."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from neox_config import finite_json
from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import LATEST
from neox_config.output import checked_output
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.directory import find_latest, offer_earlier
from neox_model.checkpoint.errors import CheckpointError
from neox_model.inspection.finding import RequestError, all_checkpoints, find_checkpoint
from neox_model.inspection.summary import describe, summary

__all__ = ["main"]

_FOLDER = click.Path(path_type=Path)
_CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _BadRequest(click.ClickException):
    exit_code = RequestError.exit_code


class _Commands(click.Group):
    """Command group that reports a standard output that cannot be written to, such as a full disk."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        with checked_output():
            return super().main(*args, **kwargs)


class _Command(click.Command):
    """A command that reports errors in one sentence, with the error's exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RequestError as error:
            raise _BadRequest(str(error)) from error
        except NeoXError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{place}{error.strerror or error}") from error


@click.group(cls=_Commands, context_settings=_CONTEXT)
@click.version_option(package_name="neox-model")
def main() -> None:
    """Show, verify and compare checkpoints; nothing is ever changed.

    A checkpoint is named by its folder (SAVE/global_step200), or by the folder of all (SAVE), which means the
    latest. No command converts a checkpoint to another layout, because every layout loads every checkpoint.
    """


@main.command(cls=_Command)
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.argument("iteration", required=False, type=click.IntRange(min=0))
@click.option("--tensors", "with_tensors", is_flag=True, help="List all tensors.")
@_JSON
def inspect(folder: Path, iteration: int | None, with_tensors: bool, as_json: bool) -> None:
    """Show what a checkpoint contains, without reading its tensors."""
    found = find_checkpoint(folder, iteration)
    shown = summary(found, Manifest.read(found), with_tensors=with_tensors)
    _print(shown, list(describe(shown)), as_json=as_json)


@main.command(cls=_Command)
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.argument("iteration", required=False, type=click.IntRange(min=0))
@click.option("--all", "every", is_flag=True, help="Verify all checkpoints in the folder.")
@_JSON
def verify(folder: Path, iteration: int | None, every: bool, as_json: bool) -> None:
    """Verify a checkpoint: its files, checksums and manifest, and that all values are finite.

    The exit code is 1 if one is not sound.
    """
    if every and iteration is not None:
        raise RequestError("--all verifies every iteration; leave out one of the two")
    folders = all_checkpoints(folder) if every else [find_checkpoint(folder, iteration)]
    soundness = _with_torch("soundness")
    results = [soundness.examine(each) for each in folders]
    lines = [line for result in results for line in _verdict(result)]
    remedy = _remedy(folder, results, every=every)
    latest = _latest_problem(folder) if every else None
    if latest is not None:
        lines.append(latest)
    plain = {"checkpoints": [result.plain() for result in results], "latest": latest, "remedy": remedy}
    _print(plain, [*lines, *([remedy] if remedy else [])], as_json=as_json)
    if latest is not None or not all(result.is_sound for result in results):
        sys.exit(1)


@main.command(cls=_Command)
@click.argument("one", metavar="A", type=_FOLDER)
@click.argument("other", metavar="B", type=_FOLDER)
@click.option("--all", "every", is_flag=True, help="List every tensor, also equal ones.")
@_JSON
def diff(one: Path, other: Path, every: bool, as_json: bool) -> None:
    """Compare two checkpoints, of any layouts, tensor by tensor.

    The exit code is 1 if weights, states, counters, or parameters of the model or the training differ. Other
    parameters, layouts and versions are shown and do not count.
    """
    folders = find_checkpoint(one), find_checkpoint(other)
    difference = _with_torch("difference")
    found = difference.compare(*folders)
    verdict = "equal" if found.is_equal else "different"
    lines = [f"A  {folders[0]}", f"B  {folders[1]}", f"{verdict}:"]
    plain = {"a": str(folders[0]), "b": str(folders[1]), **found.plain()}
    _print(plain, [*lines, *difference.lines(found, all_tensors=every)], as_json=as_json)
    if not found.is_equal:
        sys.exit(1)


def _with_torch(name: str) -> Any:
    """Import a module of this room by name: torch takes seconds, and `inspect` does not use it."""
    return importlib.import_module(f"neox_model.inspection.{name}")


def _print(plain: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    click.echo(finite_json.dumps(plain, indent=2) if as_json else "\n".join(lines))


def _verdict(result: Any) -> list[str]:
    if result.is_sound:
        first = f"{result.folder}: sound ({result.tensors:,} tensors, {result.num_bytes:,} bytes)"
    else:
        first = f"{result.folder}: NOT SOUND"
    return [first, *(f"  {text}" for text in result.problems), *(f"  note: {text}" for text in result.notes)]


def _latest_problem(folder: Path) -> str | None:
    """Return what is wrong with the file `latest`; None if it names a complete checkpoint."""
    if not (folder / LATEST).exists():
        return None
    try:
        find_latest(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _remedy(given: Path, results: Sequence[Any], *, every: bool) -> str | None:
    """Return what to do about checkpoints that are not sound; None if all are sound."""
    broken = [result.folder for result in results if not result.is_sound]
    if not broken:
        return None
    restore = "restore the damaged files from a copy, if there is one"
    if not every:
        return f"{restore}{offer_earlier(broken[0].absolute().parent, broken[0].absolute())}"
    sound = [result.folder.name for result in results if result.is_sound]
    if not sound:
        return f"{restore}; this folder contains no sound checkpoint"
    return f"{restore}; to resume from the newest sound one, run: echo {sound[-1]} > {given / LATEST}"
