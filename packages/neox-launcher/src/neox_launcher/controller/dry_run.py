"""Print a plan for `--dry-run`, as text or JSON."""

import json
import os
import shlex
from pathlib import PurePath
from typing import Literal

import click

from neox_config.describe.estimate_tables import render_estimate
from neox_config.estimate.resolved import estimate_resolved
from neox_config.problems import list_problems
from neox_launcher.backends import BACKENDS, Command, Contact
from neox_launcher.controller.display import refuse_terminal
from neox_launcher.plan.environment import shown_value
from neox_launcher.plan.plan import ANY_ENDPOINT, LaunchPlan
from neox_launcher.plan.preflight import preflight
from neox_launcher.resources.host import some_lines
from neox_launcher.resources.hosts import FUTURE_ALLOCATION
from neox_launcher.resources.slurm import is_inside_allocation

__all__ = ["Form", "print_refusal_reasons", "show_plan"]

Form = Literal["text", "json"]
_SHOWN_COMMANDS = 32
_SHOWN_LINES = 32
_WRONG_REQUEST = 2
_FUTURE_NOTE = (
    "note: this plan is for a future Slurm allocation; to launch it, start neox-launch inside sbatch or "
    "salloc"
)
_NAMES_NOTE = (
    "note: a dry run resolves no host name; the launch refuses names that the machine where it starts cannot "
    "resolve"
)


def show_plan(plan: LaunchPlan, form: Form) -> int:
    """Print a plan and the commands that would start it, without contacting a host or resolving a name.

    Args:
        plan: plan to print.
        form: text, which abbreviates long lists, or complete JSON.

    Returns:
        Exit code: 0, or that of a refused launch if this one would be refused, whatever its host names.
    """
    {"text": _show_as_text, "json": _show_as_json}[form](plan)
    if BACKENDS[plan.launcher].uses_names:
        click.echo(f"\n{_NAMES_NOTE}", err=True)
    if _is_for_later(plan):
        click.echo(f"\n{_FUTURE_NOTE}", err=True)
    return print_refusal_reasons(plan)


def print_refusal_reasons(plan: LaunchPlan) -> int:
    """Print to stderr why a plan would be refused; return the exit code of a refused launch, or 0."""
    reasons = _refusal_reasons(plan)
    if reasons:
        click.echo("\nthis launch would be refused:\n" + "\n".join(reasons), err=True)
    return _WRONG_REQUEST if reasons else 0


def _show_as_text(plan: LaunchPlan) -> None:
    click.echo(plan.describe())
    if plan.program == "train":
        device = "cpu" if plan.world.gpus == 0 else "cuda"
        costs, origin = estimate_resolved(plan.resolved, device=device)
        click.echo("\n" + render_estimate(costs, device_memory=None, vocabulary_origin=origin))
    commands = _planned_commands(plan)
    for command in commands[:_SHOWN_COMMANDS]:
        click.echo("\n" + _in_a_shell(command))
    more = len(commands) - _SHOWN_COMMANDS
    if more > 0:
        click.echo(f"\n... and {more:,} more commands; use --dry-run=json to list all")


def _show_as_json(plan: LaunchPlan) -> None:
    commands = [
        {
            "argv": list(command.argv),
            "environment": _shown_environment(command),
            "files": {path: shown_value(PurePath(path).name, text) for path, text in command.files.items()},
            "host_number": command.host_number,
        }
        for command in _planned_commands(plan)
    ]
    click.echo(
        json.dumps(
            {**plan.as_json(), "commands": commands, "problems": _refusal_reasons(plan)},
            indent=2,
            allow_nan=False,
        )
    )


def _planned_commands(plan: LaunchPlan) -> list[Command]:
    """Return the commands, with placeholders in angle brackets for values known only at the start."""
    endpoint = ANY_ENDPOINT if plan.is_local else plan.endpoint
    address = endpoint.address or ("127.0.0.1" if plan.launcher == "local" else "<addresses of this machine>")
    port = endpoint.port or "<a free port>"
    contact = Contact(addresses=(address,), port=port, token="", folder="<a private folder>")
    return BACKENDS[plan.launcher].commands(plan, contact)


def _in_a_shell(command: Command) -> str:
    """Return a command as shell text."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in _shown_environment(command).items()]
    comments = []
    for path, text in command.files.items():
        lines = some_lines(shown_value(PurePath(path).name, text).splitlines(), _SHOWN_LINES)
        comments += [f"# {path}:", *(f"#   {line}" for line in lines)]
    if command.stdin:
        comments.append("# reads the token of the launch from its standard input:")
    return "\n".join([*comments, " ".join([*variables, shlex.join(command.argv)])])


def _shown_environment(command: Command) -> dict[str, str]:
    return {name: shown_value(name, value) for name, value in command.environment.items()}


def _is_for_later(plan: LaunchPlan) -> bool:
    """Return whether a plan is launched later, inside a Slurm allocation, which may name the hosts."""
    is_outside = plan.launcher == "slurm" and not is_inside_allocation(os.environ)
    return is_outside or plan.hosts_from == FUTURE_ALLOCATION


def _refusal_reasons(plan: LaunchPlan) -> list[str]:
    """Return the reasons why the launch would be refused, one paragraph each."""
    config, backend = plan.resolved.config, BACKENDS[plan.launcher]
    found = preflight(plan)
    listed = [list_problems(found, config.files)] if found else []
    is_shown = plan.program == "train" and not config.autotuning.autotuning.enabled
    terminal = refuse_terminal(config.launch.terminal) if is_shown else None
    missing = None if _is_for_later(plan) else backend.missing()
    reasons = (missing, backend.refuses(plan), terminal)
    return [*listed, *(reason for reason in reasons if reason)]
