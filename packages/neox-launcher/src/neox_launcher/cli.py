"""`neox-launch`: options -> checked plan -> running workers, or the plan in print."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import click

from neox_launcher.backends import BACKENDS, Command, Contact
from neox_launcher.config.problems import list_problems
from neox_launcher.config_estimate_cli import estimate_resolved, render_estimate
from neox_launcher.environment import shown_value
from neox_launcher.errors import NeoXError
from neox_launcher.launch import Request, find_hindrances, plan_launch, refuse_what_cannot_run, run_plan
from neox_launcher.plan import LaunchPlan
from neox_launcher.supervision import Outcome

__all__ = ["main"]

_DRY_RUN = "--dry-run"
_SHOWN_COMMANDS = 32
DryRun = Literal["text", "json"] | None


class _Launch(click.Group):
    """A group whose `--dry-run` may stand alone, before a subcommand too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell out what a bare `--dry-run` means; click would take the next word for its value."""
        return super().parse_args(ctx, [f"{_DRY_RUN}=text" if word == _DRY_RUN else word for word in args])


def request_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every launch has."""
    options = (
        click.option(
            "--config", "paths", multiple=True, metavar="FILE", help="YAML file; several are merged."
        ),
        click.option("-d", "--directory", metavar="DIR", help="Folder of the files."),
        click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Set one parameter."),
        click.option(
            _DRY_RUN,
            type=click.Choice(["text", "json"]),
            help="Print what would run where, and the commands; start nothing and touch no host. "
            "Alone it means text.",
        ),
        click.option("--bind-cores", is_flag=True, help="Tie each worker to its share of its host's cores."),
        click.option(
            "--max-restarts",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Begin again so often from the newest checkpoint after a failure.",
        ),
        click.option(
            "--output",
            type=click.Choice(["rank0", "all"]),
            default="rank0",
            show_default=True,
            help="Whose output the terminal shows.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(
    cls=_Launch, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@request_options
@click.pass_context
def main(context: click.Context, /, dry_run: DryRun, **options: Any) -> None:
    """Train a model: neox-launch --config FILE [--config FILE ...].

    Exit codes: 0 done; 1 the work failed; 2 the request was wrong and nothing was started; 130, 143 or 129
    stopped by Ctrl-C, SIGTERM or a lost connection; else that of the worker that failed first.
    """
    request = Request(program="train", **options)
    context.obj = (request, dry_run)
    if context.invoked_subcommand is None:
        _launch(request, dry_run)


@main.command()
@request_options
@click.pass_obj
def generate(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Generate text with the checkpoint in `load`."""
    _launch(*_merged(common, "generate", **options))


@main.command()
@request_options
@click.pass_obj
def evaluate(common: tuple[Request, DryRun], /, **options: Any) -> None:
    """Print the validation and test loss of the checkpoint in `load`."""
    _launch(*_merged(common, "evaluate", **options))


def _merged(
    common: tuple[Request, DryRun], program: str, *, dry_run: DryRun, **options: Any
) -> tuple[Request, DryRun]:
    """Options before the subcommand count as well as those after it."""
    before, dry = common
    after = Request(program=program, **options)
    merged = replace(
        after,
        paths=before.paths + after.paths,
        overrides=before.overrides + after.overrides,
        directory=after.directory or before.directory,
        bind_cores=after.bind_cores or before.bind_cores,
        max_restarts=after.max_restarts or before.max_restarts,
        output=before.output if after.output == "rank0" else after.output,
    )
    return merged, dry_run or dry


def _launch(request: Request, dry_run: DryRun) -> None:
    if not request.paths:
        raise click.UsageError("nothing says what to do: give at least one --config FILE")
    try:
        plan = plan_launch(request)
        _tell_notices(plan)
        if dry_run is not None:
            _SHOW[dry_run](plan)
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


def _show_as_text(plan: LaunchPlan) -> None:
    click.echo(plan.describe())
    if plan.program == "train":
        costs, origin = estimate_resolved(plan.resolved)
        click.echo("\n" + render_estimate(costs, device_memory=None, vocabulary_origin=origin))
    commands = _planned_commands(plan)
    for command in commands[:_SHOWN_COMMANDS]:
        click.echo("\n" + _in_a_shell(command))
    if len(commands) > _SHOWN_COMMANDS:
        more = len(commands) - _SHOWN_COMMANDS
        click.echo(f"\n... and {more:,} more of the same; all of them: --dry-run=json")
    hindrances = _hindrances(plan)
    if hindrances:
        click.echo("\nthis would not start yet:\n" + "\n".join(hindrances), err=True)


def _show_as_json(plan: LaunchPlan) -> None:
    commands = [
        {"argv": list(command.argv), "environment": _shown_environment(command), "node": command.node}
        for command in _planned_commands(plan)
    ]
    click.echo(
        json.dumps({**plan.as_json(), "commands": commands, "hindrances": _hindrances(plan)}, indent=2)
    )


_SHOW: dict[str, Callable[[LaunchPlan], None]] = {"text": _show_as_text, "json": _show_as_json}


def _planned_commands(plan: LaunchPlan) -> list[Command]:
    """The commands, with words in angle brackets for what only the start will tell."""
    address = "127.0.0.1" if plan.launcher == "local" else "<addresses of this machine>"
    contact = Contact(addresses=(address,), port="<a free port>", token="", folder="<a private folder>")
    return BACKENDS[plan.launcher].commands(plan, contact)


def _in_a_shell(command: Command) -> str:
    """A command as one would type it."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in _shown_environment(command).items()]
    files = [
        f"# {path}:\n" + "".join(f"#   {line}\n" for line in _shown_file(path, text))
        for path, text in command.files.items()
    ]
    return "".join(files) + " ".join([*variables, shlex.join(command.argv)])


def _shown_file(path: str, text: str) -> list[str]:
    return [shown_value(path, line) for line in text.splitlines()[:_SHOWN_COMMANDS]]


def _shown_environment(command: Command) -> dict[str, str]:
    return {name: shown_value(name, value) for name, value in command.environment.items()}


def _hindrances(plan: LaunchPlan) -> list[str]:
    """Why this would not start, each in a paragraph."""
    config, backend = plan.resolved.config, BACKENDS[plan.launcher]
    problems = find_hindrances(plan)
    listed = [list_problems(problems, config.files)] if problems else []
    return [*listed, *(reason for reason in (backend.missing(), backend.refuses(plan)) if reason)]


def _tell_failure(outcome: Outcome) -> None:
    """The first error last and whole, so that it is what the terminal shows."""
    if outcome.first_failure is None:
        return
    others = outcome.num_failures - 1
    if others:
        click.echo(f"\n{others} more worker{'s' if others > 1 else ''} failed after the first", err=True)
    click.echo(f"\n{outcome.first_failure}", err=True)
