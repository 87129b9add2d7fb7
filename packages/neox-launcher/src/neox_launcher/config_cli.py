"""`neox-config`: check, show and explain configurations; write their reference."""

import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from neox_launcher.config import Resolved, engine_json, load_config
from neox_launcher.config.aliases import COMPUTED, FOREIGN_NAMES, OLDER_SPELLINGS, RETIRED, SHORTHANDS
from neox_launcher.config.display import show_config, show_derived, show_difference
from neox_launcher.config.json_schema import json_schema
from neox_launcher.config.learning_rate import learning_rate, learning_rates
from neox_launcher.config.migrate import migrate_file, replace_file
from neox_launcher.config.not_yet import not_built_yet
from neox_launcher.config.problems import config_error, did_you_mean, list_problems
from neox_launcher.config.reference import describe_parameter, reference
from neox_launcher.config.schema import all_parameters, parameter_named
from neox_launcher.config_cluster import cluster_options, resolve_for
from neox_launcher.config_estimate_cli import register
from neox_launcher.errors import ConfigError, NeoXError
from neox_launcher.file_checks import check_files

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Check, show and explain configurations, and estimate what they cost."""


register(main)


def _file_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.argument("files", nargs=-1, required=True),
        click.option("-d", "--directory", metavar="DIR", help="Folder of the files."),
        click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Set one parameter."),
        cluster_options,
    )
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@_file_options
@click.option("--files", "with_files", is_flag=True, help="Also: do the files that it names exist and fit?")
def check(with_files: bool, **options: Any) -> None:
    """Say all that is wrong with the files taken together; exit code 2 when something is."""
    resolved = _resolved(**options)
    config = resolved.config
    notes = [*config.notices, *not_built_yet(config)]
    if notes:
        click.echo(list_problems(notes, config.files, called="note") + "\n", err=True)
    missing = check_files(config, program="train") if with_files else []
    if missing:
        _fail(config_error(missing, config.files))
    click.echo(f"{' + '.join(config.files)}: valid, {len(config.sources)} parameters given")


@main.command()
@_file_options
@click.option("--engine", is_flag=True, help="Print what DeepSpeed gets, as JSON.")
def show(engine: bool, **options: Any) -> None:
    """Print every value, where it comes from, and what follows from it."""
    resolved = _resolved(**options)
    if engine:
        click.echo(json.dumps(engine_json(resolved), indent=2))
        return
    click.echo(show_config(resolved.config))
    click.echo(f"\n# On {resolved.derived.world_size} devices:\n{show_derived(resolved)}")


@main.command()
@click.argument("one")
@click.argument("other")
@click.option("-d", "--directory", metavar="DIR", help="Folder of the files.")
@cluster_options
def diff(one: str, other: str, directory: str | None, devices: int | None, hostfile: str | None) -> None:
    """Print what differs between two resolved configurations; exit code 1 when something does."""
    sides = [_resolved((path,), directory, (), devices, hostfile) for path in (one, other)]
    text = show_difference(*sides)
    if text:
        click.echo(f"--- {one}\n+++ {other}\n{text}")
        sys.exit(1)


@main.command()
@_file_options
@click.option(
    "--points", type=click.IntRange(2, 10_000), default=11, show_default=True, help="Iterations to show."
)
@click.option("--at", type=click.IntRange(min=0), multiple=True, help="Show this iteration (from 0) alone.")
def schedule(points: int, at: tuple[int, ...], **options: Any) -> None:
    """Print the learning rate over the training."""
    resolved = _resolved(**options)
    rows = [(each, learning_rate(resolved, each)) for each in at] or [*learning_rates(resolved, points)]
    width = max(len("iteration"), *(len(f"{update:,}") for update, _ in rows))
    click.echo(f"{'iteration':>{width}}  learning rate")
    for update, rate in rows:
        click.echo(f"{update:>{width},}  {rate:.6g}")


@main.command()
@click.argument("file")
@click.option("--in-place", is_flag=True, help="Replace the file; else the new text is printed.")
def migrate(file: str, in_place: bool) -> None:
    """Rewrite shorthands and older spellings in a file; comments, order and formatting stay."""
    try:
        migrated = migrate_file(file)
        if in_place and migrated.changes:
            replace_file(migrated)
    except NeoXError as error:
        _fail(error)
    if not in_place:
        click.echo(migrated.text, nl=False)
    for change in migrated.changes or (f"{file}: nothing to do",):
        click.echo(change, err=True)


@main.command()
@click.argument("name")
def explain(name: str) -> None:
    """Print everything about one parameter."""
    try:
        click.echo(_explanation(name.replace("-", "_")))
    except ConfigError as error:
        _fail(error)


@main.command()
def docs() -> None:
    """Print the reference of all parameters (docs/configuration.md)."""
    click.echo(reference(), nl=False)


@main.command()
def schema() -> None:
    """Print a JSON schema of configuration files, for editors."""
    click.echo(json.dumps(json_schema(), indent=1))


def _resolved(
    files: tuple[str, ...],
    directory: str | None,
    overrides: tuple[str, ...],
    devices: int | None,
    hostfile: str | None,
) -> Resolved:
    try:
        config = load_config(files, overrides=overrides, directory=directory)
        return resolve_for(config, devices=devices, hostfile=hostfile)
    except NeoXError as error:
        _fail(error)


def _explanation(name: str) -> str:
    if name in SHORTHANDS:
        return f"{name} stands for {SHORTHANDS[name]}\n\n" + _explanation(SHORTHANDS[name])
    if name in OLDER_SPELLINGS and name not in {parameter.name for parameter in all_parameters()}:
        older = OLDER_SPELLINGS[name]
        return f"{name} is an older spelling: {older.doc}\n\n" + _explanation(older.targets[0])
    if name in FOREIGN_NAMES:
        return f"{name} is called {FOREIGN_NAMES[name]} here\n\n" + _explanation(FOREIGN_NAMES[name])
    if name in COMPUTED:
        return f"{name} is computed: {COMPUTED[name]}; a given value is not used"
    if name in RETIRED:
        return f"{name} has no effect: it {RETIRED[name]}"
    names = [parameter.name for parameter in all_parameters()]
    if name in names:
        return describe_parameter(parameter_named(name))
    inside = [known for known in names if known.endswith(f".{name}")]
    if inside:
        return "\n\n".join(describe_parameter(parameter_named(known)) for known in inside)
    known = [*names, *SHORTHANDS, *OLDER_SPELLINGS, *COMPUTED, *RETIRED]
    raise ConfigError(f"{name} is not a parameter; {did_you_mean(name, known) or 'see neox-config docs'}")


def _fail(error: NeoXError) -> NoReturn:
    click.echo(str(error), err=True)
    sys.exit(error.exit_code)
