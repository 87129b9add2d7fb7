"""`neox-launch`: options -> checked plan -> running workers, or the plan in print."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from neox_launcher.backends import BACKENDS
from neox_launcher.config.problems import list_problems
from neox_launcher.config_estimate_cli import estimate_resolved, render_estimate
from neox_launcher.errors import NeoXError
from neox_launcher.launch import Request, find_hindrances, plan_launch, refuse_what_cannot_run, run_plan
from neox_launcher.plan import LaunchPlan
from neox_launcher.supervision import Outcome

__all__ = ["main"]


def request_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every launch has."""
    options = (
        click.option(
            "--config", "paths", multiple=True, metavar="FILE", help="YAML file; several are merged."
        ),
        click.option("-d", "--directory", metavar="DIR", help="Folder of the files."),
        click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Set one parameter."),
        click.option("--dry-run", is_flag=True, help="Print what would run, and the command; start nothing."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@request_options
@click.pass_context
def main(
    context: click.Context,
    paths: tuple[str, ...],
    directory: str | None,
    overrides: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Train a model: neox-launch --config FILE [--config FILE ...].

    Exit codes: 0 done; 1 the work failed; 2 the request was wrong and nothing was started; 130, 143 or 129
    stopped by Ctrl-C, SIGTERM or a lost connection; else that of the worker that failed first.
    """
    request = Request(program="train", paths=paths, overrides=overrides, directory=directory)
    context.obj = (request, dry_run)
    if context.invoked_subcommand is None:
        _launch(request, dry_run=dry_run)


@main.command()
@request_options
@click.pass_obj
def generate(common: tuple[Request, bool], /, **options: Any) -> None:
    """Generate text with the checkpoint in `load`."""
    _launch(*_merged(common, "generate", **options))


@main.command()
@request_options
@click.pass_obj
def evaluate(common: tuple[Request, bool], /, **options: Any) -> None:
    """Print the validation and test loss of the checkpoint in `load`."""
    _launch(*_merged(common, "evaluate", **options))


def _merged(
    common: tuple[Request, bool],
    program: str,
    *,
    paths: tuple[str, ...],
    directory: str | None,
    overrides: tuple[str, ...],
    dry_run: bool,
) -> tuple[Request, bool]:
    """Options before the subcommand count as well as those after it."""
    request, dry = common
    merged = replace(
        request,
        program=program,
        paths=request.paths + paths,
        overrides=request.overrides + overrides,
        directory=directory or request.directory,
    )
    return merged, dry or dry_run


def _launch(request: Request, dry_run: bool) -> None:
    if not request.paths:
        raise click.UsageError("nothing says what to do: give at least one --config FILE")
    try:
        plan = plan_launch(request)
        _tell_notices(plan)
        if dry_run:
            _show(plan)
            return
        refuse_what_cannot_run(plan)
        outcome = run_plan(plan)
    except NeoXError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    _tell_failure(outcome)
    sys.exit(outcome.exit_code)


def _tell_notices(plan: LaunchPlan) -> None:
    config = plan.resolved.config
    if config.notices:
        click.echo(list_problems(config.notices, config.files, called="note") + "\n", err=True)


def _show(plan: LaunchPlan) -> None:
    config = plan.resolved.config
    click.echo(plan.describe())
    if plan.program == "train":
        costs, origin = estimate_resolved(plan.resolved)
        click.echo("\n" + render_estimate(costs, device_memory=None, vocabulary_origin=origin))
    click.echo("\n" + shlex.join(BACKENDS["local"].command(plan)))
    hindrances = find_hindrances(plan)
    if hindrances:
        click.echo("\nthis would not start yet:\n" + list_problems(hindrances, config.files), err=True)


def _tell_failure(outcome: Outcome) -> None:
    """The first error last and whole, so that it is what the terminal shows."""
    if outcome.first_failure is None:
        return
    others = outcome.num_failures - 1
    if others:
        click.echo(f"\n{others} more worker{'s' if others > 1 else ''} failed after the first", err=True)
    click.echo(f"\n{outcome.first_failure}", err=True)
