"""Commands on configuration files: parameters as options, and advice on unknown words."""

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import cloup
from click.shell_completion import CompletionItem

from neox_config.command_line import PATH, Command, Group, option
from neox_config.names import answer
from neox_config.problems import did_you_mean
from neox_config.read.reading import as_yaml, normal_name
from neox_config.schema.config import field_named
from neox_config.schema.parameter import inner_section

__all__ = [
    "DRY_RUN",
    "ConfigurationCommand",
    "LaunchGroup",
    "parameter_option",
    "parameter_options",
    "refuse_words",
    "take_overrides",
]

DRY_RUN = "--dry-run"
"""Option whose value is optional."""

# Parameters that are options of all commands, as for the launcher of DeepSpeed.
_LAUNCHER: dict[str, dict[str, Any]] = {
    "hostfile": {"metavar": "FILE", "type": PATH},
    **{name: {"metavar": "HOSTS"} for name in ("include", "exclude")},
    **{name: {"metavar": "N", "type": int} for name in ("num_nodes", "num_gpus")},
    "master_addr": {"metavar": "ADDRESS"},
    "master_port": {"metavar": "PORT", "type": int},
    "launcher": {"metavar": "NAME"},
    "hf_export": {"metavar": "DIR", "type": PATH},
}


class ConfigurationCommand(Command):
    """A command on configuration files, which answers an unknown option with the setting that is meant."""

    error_prefix = ""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, and add advice to the error about an unknown option."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            takes_settings = any("--set" in param.opts for param in self.params)
            advice = _advice_on_option(error.option_name) if takes_settings else None
            if advice is None:
                raise
            raise click.UsageError(f"No such option: {error.option_name}; {advice}", ctx=ctx) from error


class LaunchCommand(ConfigurationCommand):
    """A command of `neox-launch`, whose option `--dry-run` may be given without a value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give `--dry-run` its value: click would take the next word."""
        return super().parse_args(ctx, [f"{DRY_RUN}=text" if word == DRY_RUN else word for word in args])


class LaunchGroup(LaunchCommand, Group):
    """`neox-launch` itself, which trains if the first word is no command."""

    command_class = LaunchCommand

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command that the first word names, or the one that trains with the files."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["train", *args])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return options and commands, and let the shell add files."""
        found = super().shell_complete(ctx, incomplete)
        return found if incomplete.startswith("-") else [CompletionItem(incomplete, type="file"), *found]


def refuse_words(words: Sequence[str], directory: str | None, commands: Iterable[str]) -> None:
    """Raise UsageError if a word in place of a file means a command or a setting."""
    for word in words:
        if any(Path(directory or "", f"{word}{ending}").exists() for ending in ("", ".yml", ".yaml")):
            continue
        found = answer(os.path.basename(word), "command")
        if word in commands:
            remedy = f"it is a command; write it before the files: neox-launch {word}"
        elif "=" in word:
            remedy = f"set parameters with --set: --set {shlex.quote(word)}"
        elif found is not None:
            remedy = found.sentence
        else:
            remedy = "" if "." in word or "/" in word else did_you_mean(word, commands)
        if remedy:
            raise click.UsageError(f"{word} is not a configuration file; {remedy}")


class _ParameterOption(cloup.Option):
    """An option that sets the parameter of its name."""


def parameter_option(*names: str, metavar: str, help: str = "", **settings: Any) -> Callable[..., Any]:
    """Add an option that sets the parameter of its last name, whose doc is the help; else like `option`."""
    name = normal_name(names[-1].lstrip("-"))
    field = field_named(name)
    doc = "" if field is None else (field.description or "").partition(".")[0]
    text = help or f"{doc}. Same as --set {name.replace('_', '-')}={metavar}."
    return option(*names, cls=_ParameterOption, metavar=metavar, help=text, **settings)


def parameter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the parameters that are options of all commands."""
    for name, settings in reversed(_LAUNCHER.items()):
        dashed = f"--{name.replace('_', '-')}"
        command = parameter_option(
            *dict.fromkeys((dashed, f"--{name}", *(["--hf-export-at-end"] if name == "hf_export" else []))),
            name,
            heading="Parameters that are also options",
            help=f"Same as --set {dashed[2:]}={settings['metavar']}.",
            **settings,
        )(command)
    return command


def take_overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the current command, of which parameters are settings, after those of `--set`."""
    params = click.get_current_context().command.params
    names = {param.name for param in params if isinstance(param, _ParameterOption)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    settings = (f"{name}={as_yaml(value)}" for name, value in given.items())
    others = {name: value for name, value in options.items() if name not in names}
    return others | {"overrides": (*options["overrides"], *settings)}


def _advice_on_option(option: str) -> str | None:
    """Return what to write in place of an unknown option; None if it is not known anywhere."""
    name = normal_name(option.lstrip("-"))
    found = None if field_named(name) is not None else answer(name, "option")
    if found is not None and found.sentence:
        return found.sentence
    name = found.parameters[0] if found is not None else name
    declared = field_named(name)
    inside = ".NAME" if declared is not None and inner_section(declared) is not None else ""
    advice = f"parameters are set with --set: --set {name.replace('_', '-')}{inside}=VALUE"
    return None if declared is None else advice
