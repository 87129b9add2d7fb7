"""A plan in print: what `--dry-run` shows, for people or for programs."""

import json
import shlex
from pathlib import PurePath
from typing import Literal

import click

from neox_launcher.backends import BACKENDS, Command, Contact
from neox_launcher.config.problems import list_problems
from neox_launcher.config_estimate_cli import estimate_resolved
from neox_launcher.environment import shown_value
from neox_launcher.estimate_tables import render_estimate
from neox_launcher.launch import find_hindrances
from neox_launcher.plan import LaunchPlan

__all__ = ["Form", "show_plan", "tell_hindrances"]

Form = Literal["text", "json"]
_SHOWN_COMMANDS = 32
_SHOWN_LINES = 32
_WRONG_REQUEST = 2


def show_plan(plan: LaunchPlan, form: Form) -> int:
    """Print a plan and the commands that would carry it out; touches no host.

    Args:
        plan: to show.
        form: a table, or JSON, which leaves nothing out.

    Returns:
        The exit code: that of a launch which is refused, where this one would be.
    """
    {"text": _show_as_text, "json": _show_as_json}[form](plan)
    return tell_hindrances(plan)


def tell_hindrances(plan: LaunchPlan) -> int:
    """Say on stderr why a plan would not start; gives the exit code that a launch would have then, or 0."""
    hindrances = _hindrances(plan)
    if hindrances:
        click.echo("\nthis would not start yet:\n" + "\n".join(hindrances), err=True)
    return _WRONG_REQUEST if hindrances else 0


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


def _show_as_json(plan: LaunchPlan) -> None:
    commands = [
        {
            "argv": list(command.argv),
            "environment": _shown_environment(command),
            "files": {path: _shown_file(path, text) for path, text in command.files.items()},
            "node": command.node,
        }
        for command in _planned_commands(plan)
    ]
    click.echo(
        json.dumps({**plan.as_json(), "commands": commands, "hindrances": _hindrances(plan)}, indent=2)
    )


def _planned_commands(plan: LaunchPlan) -> list[Command]:
    """The commands, with words in angle brackets for what only the start will tell."""
    address = "127.0.0.1" if plan.launcher == "local" else "<addresses of this machine>"
    contact = Contact(addresses=(address,), port="<a free port>", token="", folder="<a private folder>")
    return BACKENDS[plan.launcher].commands(plan, contact)


def _in_a_shell(command: Command) -> str:
    """A command as one would type it."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in _shown_environment(command).items()]
    comments = []
    for path, text in command.files.items():
        lines = _shown_file(path, text).splitlines()
        more = ["..."] if len(lines) > _SHOWN_LINES else []
        comments += [f"# {path}:", *(f"#   {line}" for line in [*lines[:_SHOWN_LINES], *more])]
    if command.stdin:
        comments.append("# gets the launch's secret on its standard input:")
    return "\n".join([*comments, " ".join([*variables, shlex.join(command.argv)])])


def _shown_file(path: str, text: str) -> str:
    return shown_value(PurePath(path).name, text)


def _shown_environment(command: Command) -> dict[str, str]:
    return {name: shown_value(name, value) for name, value in command.environment.items()}


def _hindrances(plan: LaunchPlan) -> list[str]:
    """Why this would not start, each in a paragraph."""
    config, backend = plan.resolved.config, BACKENDS[plan.launcher]
    problems = find_hindrances(plan)
    listed = [list_problems(problems, config.files)] if problems else []
    return [*listed, *(reason for reason in (backend.missing(), backend.refuses(plan)) if reason)]
