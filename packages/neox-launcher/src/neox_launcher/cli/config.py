"""The command `neox-config`: checks, shows and explains configurations, and writes their reference."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from neox_config import NeoXConfig, Resolved, engine_json, load_config
from neox_config.catalogue import find_model, model_names
from neox_config.command_line import PATH, Group, NamedPath
from neox_config.describe import explain as explanations
from neox_config.describe.display import show_config, show_derived, show_difference
from neox_config.describe.json_schema import json_schema_text
from neox_config.describe.models import render_model, render_models
from neox_config.describe.reference import reference
from neox_config.errors import ConfigError, HostfileError, NeoXError
from neox_config.estimate.setup import read_vocabulary_size
from neox_config.estimate.widths import notes_on_widths
from neox_config.pluralize import pluralize
from neox_config.problems import Problem, config_error
from neox_launcher.cli.cluster import cluster_options, hosts_for, resolve_for, show_notes
from neox_launcher.cli.completion import completion
from neox_launcher.cli.estimate import estimate, suggest
from neox_launcher.cli.habits import ConfigurationCommand
from neox_launcher.cli.options import (
    complete_models,
    complete_parameters,
    configuration_options,
    directory_option,
)
from neox_launcher.cli.schedule import show_course
from neox_launcher.plan.epochs import note_on_iterations
from neox_launcher.plan.notes import notes_on_data
from neox_launcher.plan.planning import refuse_hosts
from neox_launcher.plan.preflight import check_files, check_loaded
from neox_launcher.resources.hosts import missing_hostfile

__all__ = ["main"]

_NOT_CHECKED = "not checked: files (neox-config check --files) and devices (neox-launch --dry-run)"


class _ConfigGroup(Group):
    error_prefix = ""
    command_class = ConfigurationCommand


@click.group(
    cls=_ConfigGroup,
    examples=("neox-config check small.yml --files", "neox-config explain rotary-pct"),
)
@click.version_option(package_name="neox-launcher")
def main() -> None:
    """Check, show and explain configurations, and estimate memory and time.

    No command starts a run; neox-launch does.
    """


for command in (estimate, suggest, completion):
    main.add_command(command)


@main.command(
    examples=("neox-config check small.yml", "neox-config check small.yml cluster.yml --files --devices 16"),
    exit_codes={2: "there are problems"},
)
@configuration_options
@cluster_options
@click.option(
    "--files",
    "with_files",
    is_flag=True,
    help="Also check the files that the configuration names (datasets, tokenizer, checkpoint, hostfile, "
    "prompts). neox-launch --dry-run checks the devices of this machine, too.",
)
def check(
    files: tuple[str, ...],
    directory: str | None,
    overrides: tuple[str, ...],
    devices: int | None,
    hostfile: str | None,
    with_files: bool,
) -> None:
    """Report all problems of the merged files."""
    config = load_config(files, overrides=overrides, directory=directory)
    problems, resolved = _on_devices(config, devices, hostfile, with_files=with_files)
    notes = [*config.notices, *notes_on_data(config)]
    if with_files:
        problems += [*check_files(config, program="train"), *_other_files(config)]
    else:
        missing = missing_hostfile(config)
        if missing is not None:
            notes.append(replace(missing, what=f"{missing.what} on this machine; neox-launch refuses that"))
        notes += note_on_iterations(config)
    if resolved is not None and not problems:
        try:
            vocab_size = read_vocabulary_size(config.tokenizer) if with_files else None
            notes += notes_on_widths(resolved, vocab_size=vocab_size)
        except ConfigError as error:
            problems += [found.located(config.sources.get(found.name), None) for found in error.problems]
    show_notes(notes, config)
    if problems:
        raise config_error(list(dict.fromkeys(problems)), config.files)
    click.echo(f"{' + '.join(config.files)}: valid, {pluralize(len(config.sources), 'parameter')} given")
    if not with_files:
        click.echo(_NOT_CHECKED)


def _on_devices(
    config: NeoXConfig, devices: int | None, hostfile: str | None, *, with_files: bool
) -> tuple[list[Problem], Resolved | None]:
    """Resolve the configuration on its devices and hosts.

    Returns:
        Its problems there, and with the checkpoint to load, and the resolved configuration, unless it is
        refused.
    """
    problems: list[Problem] = []
    resolved: Resolved | None = None
    try:
        hosts = hosts_for(config, devices=devices, hostfile=hostfile)
        if hosts is not None:
            refuse_hosts(config, hosts)
    except NeoXError as error:
        problems += _problems_of(error, config)
    try:
        resolved = resolve_for(config, devices=devices, hostfile=hostfile)
        if with_files:
            problems += check_loaded(resolved, program="train")
    except NeoXError as error:
        problems += _problems_of(error, config)
    return problems, resolved


def _problems_of(error: NeoXError, config: NeoXConfig) -> Sequence[Problem]:
    if isinstance(error, ConfigError):
        return error.problems
    name = "hostfile" if isinstance(error, HostfileError) else ""
    return [Problem(name, str(error), place=config.sources.get(name))]


def _other_files(config: NeoXConfig) -> list[Problem]:
    """Return the problems of the hostfile and, if given, of the prompts, which a run does not read."""
    missing = missing_hostfile(config)
    problems = [] if missing is None else [missing]
    if not {"text_gen_type", "sample_input_file"}.isdisjoint(config.sources):
        problems += check_files(config, program="prompts")
    return problems


@main.command(
    examples=(
        "neox-config show small.yml --changed",
        "neox-config show small.yml --set precision=bfloat16 --engine",
    )
)
@configuration_options
@cluster_options
@click.option("--engine", is_flag=True, help="Print the configuration that is passed to DeepSpeed, as JSON.")
@click.option(
    "--changed", is_flag=True, help="Print only the parameters whose value differs from the default."
)
def show(engine: bool, changed: bool, **options: Any) -> None:
    """Print every value with its origin, and the derived values."""
    if engine and changed:
        raise click.UsageError("--engine and --changed exclude each other; give one of them.")
    resolved = _resolved(**options)
    if changed:
        click.echo(show_config(resolved.config, changed=True))
        return
    if engine:
        click.echo(json.dumps(engine_json(resolved), indent=2, allow_nan=False))
        return
    click.echo(show_config(resolved.config))
    click.echo(f"\n# On {pluralize(resolved.run.layout.world, 'device')}:\n{show_derived(resolved)}")


@main.command(
    examples=(
        "neox-config diff small.yml large.yml",
        "neox-config diff -d configs 125M.yml 1-3B.yml --devices 8",
    ),
    exit_codes={0: "no difference", 1: "differences, or a failure"},
)
@click.argument("one", type=PATH)
@click.argument("other", type=PATH)
@directory_option
@cluster_options
def diff(one: str, other: str, directory: str | None, devices: int | None, hostfile: str | None) -> None:
    """Print the differences between two resolved configurations."""
    sides = [_resolved((path,), directory, (), devices, hostfile) for path in (one, other)]
    text = show_difference(*sides)
    if text:
        click.echo(f"--- {one}\n+++ {other}\n{text}")
        sys.exit(1)


@main.command(
    examples=(
        "neox-config schedule small.yml --output schedule.png",
        "neox-config schedule small.yml --at 0 --at 2000 --set lr-decay-style=linear",
    )
)
@configuration_options
@cluster_options
@click.option(
    "--points",
    type=click.IntRange(2, 10_000),
    default=11,
    show_default=True,
    help="Number of iterations to print.",
)
@click.option(
    "--at",
    type=click.IntRange(0, 10**9),
    multiple=True,
    help="Print only this iteration, counted from 0. May be given several times.",
)
@click.option(
    "--output",
    "--plot",
    "plot",
    type=NamedPath(".png"),
    metavar="FILE.png",
    help="Also draw the values to this PNG file.",
)
def schedule(points: int, at: tuple[int, ...], plot: Path | None, **options: Any) -> None:
    """Print and draw the learning rate, batch size, sequence length, a changing momentum and curricula."""
    resolved = _resolved(**options, requires_data=True)
    show_course(resolved, points=points, at=at, plot=plot)


@main.command(
    examples=("neox-config explain num-layers", "neox-config explain batch size"),
    exit_codes={2: "nothing was found"},
)
@click.argument("words", nargs=-1, required=True, metavar="WORD...", shell_complete=complete_parameters)
def explain(words: tuple[str, ...]) -> None:
    """Print the documentation of one parameter, or find parameters.

    WORD is a name of a parameter here or in other programs (num-layers, n_layer), or any words: rope, batch
    size, checkpointing.
    """
    click.echo(explanations.explain(" ".join(words)))


@main.command(examples=("neox-config models", "neox-config models pythia-160m > architecture.yml"))
@click.argument("name", required=False, shell_complete=complete_models)
def models(name: str | None) -> None:
    """List published models, or print the parameters of one as a configuration file.

    Parameters, and rows of the token embedding, are those of the published weights. The file contains the
    architecture only: merge it with a file of data and training, or write one with neox-launch init.
    """
    if name is None:
        click.echo(render_models([find_model(each) for each in model_names()]))
    else:
        click.echo(render_model(find_model(name)), nl=False)


@main.command(examples=("neox-config docs > configuration.md", "neox-config docs | less"))
def docs() -> None:
    """Print the reference of all parameters (docs/configuration.md)."""
    click.echo(reference(), nl=False)


@main.command(
    examples=("neox-config schema > configuration.schema.json", "neox-config schema | python -m json.tool")
)
def schema() -> None:
    """Print the JSON schema of configuration files, for editors."""
    click.echo(json_schema_text())


def _resolved(
    files: tuple[str, ...],
    directory: str | None,
    overrides: tuple[str, ...],
    devices: int | None,
    hostfile: str | None,
    *,
    requires_data: bool = False,
) -> Resolved:
    config = load_config(files, overrides=overrides, directory=directory)
    found = resolve_for(config, devices=devices, hostfile=hostfile, requires_data=requires_data)
    show_notes(note_on_iterations(found.config), found.config)
    return found
