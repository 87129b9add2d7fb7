"""What users of other launchers type: configuration files without `--config`, parameters as options."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import cloup
from click.shell_completion import CompletionItem

from neox_config.command_line import PATH, Command, Group, option
from neox_config.problems import did_you_mean
from neox_config.read.aliases import FOREIGN_NAMES, FOREIGN_REMEDIES, SHORTHANDS
from neox_config.read.reading import as_yaml, normal_name
from neox_config.schema.config import parameter_named

__all__ = [
    "DRY_RUN",
    "ConfigurationCommand",
    "LaunchCommand",
    "LaunchGroup",
    "parameter_option",
    "parameter_options",
    "take_overrides",
]

_CONFIG, _DIRECTORY = "--config", ("-d", "--directory")
DRY_RUN = "--dry-run"
"""Option whose value is optional."""

# Parameters that are options of all commands, as for the launcher of DeepSpeed.
_LAUNCHER: dict[str, dict[str, Any]] = {
    "hostfile": {"metavar": "FILE", "type": PATH},
    "include": {"metavar": "HOSTS"},
    "exclude": {"metavar": "HOSTS"},
    "num_nodes": {"metavar": "N", "type": int},
    "num_gpus": {"metavar": "N", "type": int},
    "master_addr": {"metavar": "ADDRESS"},
    "master_port": {"metavar": "PORT", "type": int},
    "launcher": {"metavar": "NAME"},
    "hf_export": {"metavar": "DIR", "type": PATH},
}
# Words that users of GPT-NeoX write where a command stands, without the folder of a script.
_OTHER_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("train", "train.py", "deepy.py"), "neox-launch trains without a command: neox-launch --config FILE"
    ),
    "generate.py": "use neox-launch generate --config FILE",
    **dict.fromkeys(("eval.py", "evaluate.py"), "use neox-launch evaluate --config FILE"),
    "preprocess_data.py": "use preprocess_data --input FILE --output-prefix PREFIX",
    "merge20b.py": "neox-convert from-neox reads the checkpoints of GPT-NeoX",
    **{
        word: f"{word} is a command of neox-config: neox-config {word} --help"
        for word in ("check", "show", "diff", "explain", "estimate", "suggest", "migrate", "schedule")
    },
}
# Options of other launchers that are not parameters.
_OTHER_OPTIONS: Mapping[str, str] = {
    "conf_dir": "use -d DIR",
    **dict.fromkeys(("config", "conf_file"), "give the name of the file alone"),
    "eval_tasks": "use neox-launch evaluate --tasks NAME,..., or --set eval-tasks=[NAME,...] for evaluations "
    "during a training",
    "iteration": "name the folder of that checkpoint: --set load=CHECKPOINTS/global_step1000",
    "H": "use --hostfile FILE",
    "i": "use --include HOSTS to choose hosts and devices; for prompts, use neox-launch generate -i FILE",
    "e": "use --exclude HOSTS",
    "deepspeed_config": "the settings of DeepSpeed are parameters; give its file as a further configuration "
    "file: --config ds.json",
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
    """A command of `neox-launch`."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return options and commands, and let the shell add files, which need no `--config`."""
        found = super().shell_complete(ctx, incomplete)
        return found if incomplete.startswith("-") else [CompletionItem(incomplete, type="file"), *found]


class LaunchGroup(LaunchCommand, Group):
    """`neox-launch` itself, in which configuration files may be given without `--config`.

    Its option `--dry-run` may be given without a value, also before a command.
    """

    command_class = LaunchCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace `--dry-run` by `--dry-run=text`, and `FILE` by `--config FILE`."""
        try:
            args = self._named(args)
        except click.UsageError:
            # A shell that completes a line shows no errors.
            if not ctx.resilient_parsing:
                raise
        return super().parse_args(ctx, args)

    def _named(self, words: Sequence[str]) -> list[str]:
        """Return the words with `--config` before each configuration file, and a value of `--dry-run`.

        After `--` there are no options, only configuration files and a command.

        Raises:
            UsageError: a word is neither a command nor a configuration file.
        """
        takes_value = self._options()
        named: list[str] = []
        files: list[str] = []
        directory, option, command, may_be_option = Path(), "", "", True
        for number, word in enumerate(words):
            if option:
                directory = Path(word) if option in _DIRECTORY else directory
                option = ""
                named.append(word)
            elif word == "--" and may_be_option:
                may_be_option = False
            elif word.startswith("-") and may_be_option:
                name, value = word.partition("=")[::2] if word.startswith("--") else (word[:2], word[2:])
                if name not in takes_value:
                    return [*named, *words[number:]]  # click reports the unknown option.
                directory = Path(value) if name in _DIRECTORY and value else directory
                option = name if takes_value[name] and name == word else ""
                # click would take the word after --dry-run as its value.
                named.append(f"{DRY_RUN}=text" if word == DRY_RUN else word)
            elif not command and word in self.commands:
                # A command also takes its own options after `--`.
                command, may_be_option = word, True
                named.append(word)
            elif command == "init":
                named.append(word)  # click reports it: init takes no configuration.
            else:
                files.append(word)
                named += [_CONFIG, word]
        for file in files:
            self._refuse_others(file, directory)
        return named

    def _options(self) -> dict[str, bool]:
        """Return for each option of the group and its commands whether the next word is its value."""
        params = [param for command in (self, *self.commands.values()) for param in command.params]
        options = [param for param in params if isinstance(param, click.Option)]
        known = {name: not option.is_flag for option in options for name in option.opts}
        return known | dict.fromkeys((DRY_RUN, "-h", "--help"), False)

    def _refuse_others(self, word: str, directory: Path) -> None:
        """Refuse a word that is neither a command nor the name of a file or folder."""
        script = os.path.basename(word) if word.endswith(".py") else word
        if script in _OTHER_COMMANDS:
            raise click.UsageError(f"{word} is not a command of neox-launch; {_OTHER_COMMANDS[script]}")
        if "=" in word and not os.path.exists(directory / word):
            raise click.UsageError(
                f"{word} is not a file; parameters are set with --set: --set {shlex.quote(word)}"
            )
        found = any(os.path.exists(directory / f"{word}{ending}") for ending in ("", ".yml", ".yaml"))
        if not found and "." not in word and "/" not in word:
            listed = f"the commands are {', '.join(sorted(self.commands))}"
            meant = did_you_mean(word, self.commands) or listed
            raise click.UsageError(f"No such command or file: {word}; {meant}")


class _ParameterOption(cloup.Option):
    """An option that sets the parameter of its name."""


def parameter_option(*names: str, **settings: Any) -> Callable[..., Any]:
    """Add an option that sets the parameter of its name; otherwise like `option`."""
    return option(*names, cls=_ParameterOption, **settings)


def parameter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the parameters that are options of all commands."""
    for name, settings in reversed(_LAUNCHER.items()):
        dashed = f"--{name.replace('_', '-')}"
        others = ["--hf-export-at-end"] if name == "hf_export" else []
        command = parameter_option(
            *dict.fromkeys((dashed, f"--{name}", *others)),
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
    others = {name: value for name, value in options.items() if name not in names}
    settings = [
        f"{name}={as_yaml(value)}" for name, value in options.items() if name in names and value is not None
    ]
    return others | {"overrides": (*options["overrides"], *settings)}


def _advice_on_option(option: str) -> str | None:
    """Return what to write in place of an unknown option; None if it is not known anywhere."""
    name = normal_name(option.lstrip("-"))
    if name in _OTHER_OPTIONS:
        return _OTHER_OPTIONS[name]
    if name in FOREIGN_REMEDIES:
        remedy = FOREIGN_REMEDIES[name]
        return f"in the configuration: {remedy}" if remedy.startswith(("use ", "set ")) else remedy
    name = SHORTHANDS.get(name) or FOREIGN_NAMES.get(name, name)
    try:
        is_block = parameter_named(name).is_block
    except KeyError:
        return None
    return f"parameters are set with --set: --set {name.replace('_', '-')}{'.NAME' if is_block else ''}=VALUE"
