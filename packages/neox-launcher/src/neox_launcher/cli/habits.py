"""What users of other launchers type: configuration files without `--config`, options with other names."""

import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from neox_config.command_line import PATH, Command, Group, option
from neox_config.files import configuration_in, nearest_folder
from neox_config.problems import did_you_mean
from neox_config.read.aliases import (
    COMPUTED,
    FOREIGN_CHOICES,
    FOREIGN_NAMES,
    FOREIGN_REMEDIES,
    OLDER_SPELLINGS,
    RETIRED,
    SHORTHANDS,
    foreign_remedy,
)
from neox_config.read.load import is_valid_setting
from neox_config.read.reading import about_folder, import_of_model, text_as_yaml
from neox_config.schema.config import all_parameters, parameter_named
from neox_config.schema.scalars import number_from

__all__ = [
    "DRY_RUN",
    "ConfigurationCommand",
    "LaunchCommand",
    "LaunchGroup",
    "literal_text",
    "parameter_options",
    "take_overrides",
    "without_files",
]

_CONFIG, _DIRECTORY, _TASKS = "--config", ("-d", "--directory"), ("--tasks", "--eval_tasks", "--eval-tasks")
_SET = "--set"
_SETTINGS = (_SET, "--resume-set")
_SETTING = re.compile(r"[\w.][\w.-]*=")
DRY_RUN = "--dry-run"
"""Option whose value is optional."""
# Option of a 16-bit precision -> the precision.
_SWITCHES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
# What other programs accept for true and false.
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), "true"),
    **dict.fromkeys(("false", "no", "off", "0"), "false"),
}
_ENDINGS = (".yml", ".yaml", ".json")

# Parameters that are also options, as for the launcher of DeepSpeed; name -> placeholder of the value.
_PARAMETERS = {
    "hostfile": "FILE",
    "include": "HOSTS",
    "exclude": "HOSTS",
    "num_nodes": "N",
    "num_gpus": "N",
    "master_addr": "ADDRESS",
    "master_port": "PORT",
    "launcher": "NAME",
    "hf_export": "DIR",
}
_OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = {"hf_export": ("--hf-export-at-end",)}

_NUMBERS = ("N", "PORT")
_PATHS = ("FILE", "DIR")

_FILE = "--config FILE"
_TRAINS = f"neox-launch trains without a command: neox-launch {_FILE}"
# Words that users of GPT-NeoX and other programs write where a command stands.
_ADVICE_ON_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "train.py", "deepy.py", "pretrain", "run", "launch"), _TRAINS),
    **dict.fromkeys(
        ("eval", "eval.py", "evaluate.py"), f"use the command evaluate: neox-launch evaluate {_FILE}"
    ),
    **dict.fromkeys(
        ("generate.py", "inference", "sample"),
        f"use the command generate: neox-launch generate {_FILE}",
    ),
    "chat": f"for conversations, use neox-launch serve {_FILE}, and its page in a browser; generate "
    "continues plain text, without the chat template",
    **dict.fromkeys(
        ("resume", "continue"), f"the same command continues a training from load: neox-launch {_FILE}"
    ),
    "help": "use neox-launch --help",
    **dict.fromkeys(("text", "json"), "the form of a plan follows an equals sign: --dry-run=json"),
    **{
        word: f"{word} is a command of neox-config: neox-config {word} FILE"
        for word in ("check", "show", "estimate", "suggest", "migrate", "schedule")
    },
    **dict.fromkeys(
        ("preprocess_data", "preprocess_data.py"),
        "preprocess_data is a separate program: preprocess_data --input FILE --output-prefix PREFIX",
    ),
    "preprocess_data_with_mask.py": "use preprocess_data --loss-mask prompt-response",
    "preprocess_data_with_chat_template.py": "use preprocess_data --loss-mask chat",
    "merge_datasets.py": "use neox-data merge",
    "dataset_token_count.py": "use neox-data inspect",
    **dict.fromkeys(
        ("merge20b.py", "merge_mp_partitions.py"),
        "checkpoints here are independent of the layout; neox-convert from-neox reads those of GPT-NeoX",
    ),
    "corpora.py": "nothing is downloaded; for your own texts use neox-launch init --data FOLDER",
    "prepare_data.py": "nothing is downloaded; for your own texts use neox-launch init --data FOLDER",
    "prepare": "prepare is a command of neox-data: neox-data prepare --input FOLDER --output FOLDER",
    "convert_neox_to_hf.py": "use neox-convert to-hf, after neox-convert from-neox for GPT-NeoX checkpoints",
    "convert_hf_llama_to_neox.py": "use neox-convert from-hf",
    "inspect_checkpoints.py": "use neox-checkpoint inspect",
    "diff": "diff is a command of neox-config: neox-config diff FILE FILE",
    "explain": "explain is a command of neox-config: neox-config explain WORD",
}
_SET_PARAMETERS = "parameters are set with --set"
# Options of GPT-NeoX's scripts -> ours with the same values.
_SAME_OPTIONS = {"--conf_dir": "-d", "--conf-dir": "-d", "-H": "--hostfile"}
_ITERATION = ("--iteration", "-it")
_TAKES_DIRECTORY = dict.fromkeys(_DIRECTORY, True)
# Settings that together mean an option; VALUE stands for what was given.
_SETTINGS_FOR_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "resume_from_checkpoint": ("load=VALUE", "finetune=false"),
    **{name: (f"precision={precision}",) for name, precision in _SWITCHES.items()},
    "adam_beta1": ("optimizer.params.betas=[VALUE,0.999]",),
    "adam_beta2": ("optimizer.params.betas=[0.9,VALUE]",),
}
_ADVICE_ON_OPTIONS: Mapping[str, str] = {
    "eval_tasks": "use neox-launch evaluate --tasks NAME,..., or --set eval-tasks=[NAME,...] for evaluations "
    "during a training",
    "iteration": "name the folder of that checkpoint: --set load=CHECKPOINTS/global_step1000",
    "model": "the configuration file names the checkpoint (load); neox-convert from-hf DIR --output OUT "
    "imports a model of transformers, and OUT/model.yml is its configuration",
    "conf_dir": "use -d DIR",
    **dict.fromkeys(("conf_file", "config", "c"), "give the name of the file alone"),
    "H": "use --hostfile FILE",
    "i": "use --include HOSTS to choose hosts and devices; for prompts, use neox-launch generate -i FILE",
    "e": "use --exclude HOSTS",
    "deepspeed_slurm": "use --launcher slurm",
    **dict.fromkeys(
        ("no_python", "no_local_rank", "module"),
        "neox-launch always starts its own training program; leave it out",
    ),
    "o": "use neox-launch generate -o FILE",
    **dict.fromkeys(
        ("q", "quiet", "v", "verbose"),
        "what a training shows is set by --set log-interval=N, --set terminal=plain and --output",
    ),
    "deepspeed": "leave it out: --set engine=deepspeed chooses DeepSpeed, which is used anyway if a setting "
    "requires it; give a file with its settings as a further configuration file: --config ds.json",
    "deepspeed_config": "the settings of DeepSpeed are parameters; give its file as a further configuration "
    "file: --config ds.json",
    **dict.fromkeys(("nproc_per_node", "num_processes"), "use --num_gpus N for the processes of each host"),
    "resume": "leave it out: the same command continues a training if load is its save folder, and finetune "
    "is false: --set load=SAVE --set finetune=false",
    "config_file": "use --config FILE",
    "check": "use neox-config check --files FILE, or neox-launch --dry-run for the plan of a launch",
}
# Options of other programs for parameters of ours, which would mean something else in a configuration file.
_FOREIGN_OPTIONS = {
    **SHORTHANDS,
    **FOREIGN_NAMES,
    "max_tokens": "maximum_tokens",
    "num_return_sequences": "num_samples",
    "batch_size": "train_micro_batch_size_per_gpu",
    "host": "serve.host",
    "port": "serve.port",
}


class ConfigurationCommand(Command):
    """A command on configuration files.

    Answers unknown options, and settings written with spaces, with what to type instead.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, and add advice to the error about an unknown option."""
        options = {name for param in self.params for name in param.opts}
        if ctx.resilient_parsing or _DIRECTORY[0] not in options:
            return super().parse_args(ctx, args)
        directory = _directory_of(args, _options(_with_commands(self)))
        if _SET in options:
            _refuse_settings_with_spaces(args, directory)
        if any(param.name == "files" for param in self.params):
            _refuse_rest_of_value(args, self, directory)
            if _SET in options:
                _refuse_bare_settings(args, self)
        try:
            return super().parse_args(ctx, list(args))
        except click.MissingParameter as error:
            if directory == Path() or error.param is None or error.param.name != "files":
                raise
            raise click.UsageError(without_files(directory), ctx=ctx) from error
        except click.NoSuchOption as error:
            advice = _advice_on_option(error.option_name, args, directory) if _SET in options else None
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
            takes_value = _options(_with_commands(self))
            directory = _directory_of(args, takes_value)
            _refuse_settings_with_spaces(args, directory, self.commands)
            args = _with_values(args, self, directory, takes_value)
        except click.UsageError:
            # A shell that completes a line shows no errors.
            if not ctx.resilient_parsing:
                raise
        return super().parse_args(ctx, args)


def parameter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the parameters that are also options."""
    for name, metavar in reversed(_PARAMETERS.items()):
        dashed = f"--{name.replace('_', '-')}"
        spellings = dict.fromkeys((dashed, f"--{name}", *_OTHER_SPELLINGS.get(name, ())))
        help_text = f"Same as --set {dashed[2:]}={metavar}."
        command = option(
            *spellings,
            name,
            heading="Parameters that are also options",
            metavar=metavar,
            type=PATH if metavar in _PATHS else str,
            help=help_text,
        )(command)
    return command


def take_overrides(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a command with the parameters among them as settings, after those of `--set`."""
    others = {name: value for name, value in options.items() if name not in _PARAMETERS}
    given = [(name, options[name]) for name in _PARAMETERS if options[name] is not None]
    settings = tuple(f"{name}={_as_yaml(name, value)}" for name, value in given)
    return others | {"overrides": (*options["overrides"], *settings)}


def _as_yaml(name: str, value: str) -> str:
    """Return an option's value as YAML: text is taken literally."""
    return value if _PARAMETERS[name] in _NUMBERS else text_as_yaml(value)


def literal_text(text: str) -> str:
    """Return text as a YAML scalar that means exactly this text, with any characters."""
    quoted = json.dumps(text, ensure_ascii=False, allow_nan=False)
    # Characters that YAML changes or refuses unless they are escaped.
    return "".join(char if char.isprintable() else _escaped(char) for char in quoted)


def _escaped(char: str) -> str:
    return f"\\U{ord(char):08x}"


def without_files(directory: str | Path | None) -> str:
    """Return what to write for a command without a configuration file.

    Args:
        directory: folder of the configuration files, if it is given.
    """
    if directory is None:
        return (
            "no configuration file given; give at least one --config FILE (neox-launch init --data FOLDER "
            "writes one)"
        )
    if os.path.isfile(directory):
        return f"no configuration file given: {_no_folder(directory)}"
    if not os.path.isdir(directory):
        return f"no configuration file given, and {directory} is not a folder; give -d DIR FILE ..."
    what, remedy = about_folder(Path(directory))
    return f"no configuration file given: {directory} {what}; {remedy}"


def _no_folder(file: str | Path) -> str:
    """Return what to write for a file after `-d`."""
    return f"{file} is a file, not a folder; give it without -d"


def _with_values(
    words: Sequence[str], group: click.Group, directory: Path, takes_value: Mapping[str, bool]
) -> list[str]:
    """Return the words with `--config` before each configuration file without it, and a value of `--dry-run`.

    After `--` there are no options, only configuration files and a command.

    Raises:
        UsageError: a word is neither a command nor a configuration file.
    """
    named: list[str] = []
    command, is_value, may_be_option = None, False, True
    for number, word in enumerate(words):
        if is_value:
            is_value = False
            named.append(word)
        elif word == "--" and may_be_option:
            may_be_option = False
        elif word.startswith("-") and may_be_option:
            if word.partition("=")[0] not in takes_value and word[:2] not in _DIRECTORY:
                return [*named, *words[number:]]  # click reports the unknown option.
            is_value = takes_value.get(word, False)
            # click would take the word after --dry-run as its value.
            named.append(f"{DRY_RUN}=text" if word == DRY_RUN else word)
        elif command is None and word in group.commands:
            # A command has options of its own, also after `--`.
            command, may_be_option = word, True
            named.append(word)
        elif _is_configuration(word, directory):
            named += [_CONFIG, word]
        else:
            tasks = _separated_tasks(words, number, directory)
            advice = (
                f"the names of tasks are separated by commas: {_TASKS[0]} {','.join(tasks)}"
                if tasks
                else _advice_on_argument(words, number, command, group, directory)
            )
            raise click.UsageError(advice)
    return named


def _refuse_settings_with_spaces(
    words: Sequence[str], directory: Path, commands: Collection[str] = ()
) -> None:
    """Refuse several settings after one `--set`, and a name and value that are separate words.

    Raises:
        UsageError: names the options to write instead.
    """
    for number, word in enumerate(words):
        option, sign, value = word.partition("=")
        if option not in _SETTINGS:
            continue
        after = takewhile(lambda other: not other.startswith("-"), words[number + 1 :])
        first, *others = [value, *after] if sign else [*after, ""]
        rest = [
            other
            for other in others
            if other not in ("", *commands)
            and not _is_configuration(other, directory)
            and not os.path.exists(other)
        ]
        if rest and ("=" not in first or any(map(_SETTING.match, rest))):
            meant = " ".join(f"{option} {shlex.quote(setting)}" for setting in _settings_in([first, *rest]))
            raise click.UsageError(f"{option} takes one NAME=VALUE without spaces; write {meant}")


def _refuse_rest_of_value(words: Sequence[str], command: click.Command, directory: Path) -> None:
    """Refuse a word after the value of an option that is no file, as in `--set prompt=Once upon`.

    Raises:
        UsageError: names the whole value.
    """
    for number, word in enumerate(words):
        is_file = _is_configuration(word, directory) or os.path.exists(directory / word)
        if not word.startswith("-") and not is_file:
            quoted = _quoted_value(words, number, [command], directory)
            if quoted:
                raise click.UsageError(f"No such configuration file: {word}; {quoted}")


def _refuse_bare_settings(words: Sequence[str], command: click.Command) -> None:
    """Refuse `NAME=VALUE` without `--set` before it.

    Raises:
        UsageError: names the option to write.
    """
    takes_value = _options([command])
    for before, word in pairwise(["", *words]):
        if not takes_value.get(before, False) and _SETTING.match(word) and not os.path.exists(word):
            raise click.UsageError(_not_a_setting(word))


def _settings_in(words: Sequence[str]) -> list[str]:
    """Return the settings that words mean: `a`, `1` and `b=2` mean `a=1` and `b=2`."""
    settings: list[str] = []
    for word in words:
        if not settings or _SETTING.match(word):
            settings.append(word)
        elif "=" not in settings[-1]:
            settings[-1] += f"={word.removeprefix('=')}"
        else:
            settings[-1] += word if settings[-1].endswith("=") else f" {word}"
    return settings


def _with_commands(command: click.Command) -> list[click.Command]:
    """Return a command and, if it is a group, the commands in it."""
    return [command, *(command.commands.values() if isinstance(command, click.Group) else ())]


def _options(commands: Iterable[click.Command]) -> dict[str, bool]:
    """Return for each option whether the next word is its value."""
    options = [param for command in commands for param in command.params if isinstance(param, click.Option)]
    known = {name: not option.is_flag for option in options for name in option.opts}
    return known | dict.fromkeys((DRY_RUN, "-h", "--help"), False)


def _directory_of(words: Sequence[str], takes_value: Mapping[str, bool]) -> Path:
    """Return the folder of the configuration files.

    Args:
        words: of the command line.
        takes_value: for each option whether the next word is its value, which may begin with a dash.

    Raises:
        UsageError: two are given.
    """
    short, long = _DIRECTORY
    given, option = [], ""
    for word in words:
        if option:
            given += [word] if option in _DIRECTORY else []
            option = ""
        elif takes_value.get(word, False):
            option = word
        elif word.startswith(f"{long}="):
            given.append(word.removeprefix(f"{long}="))
        elif word.startswith(short) and not word.startswith("--"):
            given.append(word.removeprefix(short))
    first, *others = dict.fromkeys(given or [""])
    if others:
        raise click.UsageError(
            f"{short} is given with two folders, {first} and {others[0]}; leave it out, and give each file "
            f"with its folder: {first}/FILE {others[0]}/FILE"
        )
    return Path(first)


def _is_configuration(word: str, directory: Path) -> bool:
    """Return whether a word is a configuration file: by its ending, or because it exists without it."""
    if word.endswith(_ENDINGS):
        return True
    return word not in _ADVICE_ON_WORDS and any(
        os.path.isfile(directory / f"{word}{ending}") for ending in _ENDINGS[:2]
    )


def _separated_tasks(words: Sequence[str], number: int, directory: Path) -> list[str]:
    """Return the tasks of which `words[number]` is one, written with spaces as for GPT-NeoX; else nothing."""
    before = list(takewhile(lambda word: not word.startswith("-"), reversed(words[:number])))[::-1]
    if not before or words[number - len(before) - 1] not in _TASKS:
        return []
    after = takewhile(
        lambda word: not word.startswith("-") and not _is_configuration(word, directory), words[number:]
    )
    return [*before, *after]


def _advice_on_word(
    words: Sequence[str], number: int, command: str | None, commands: Collection[str], directory: Path
) -> str:
    """Return what to write in place of `words[number]`, with all the other words."""
    before, word, following = words[:number], words[number], words[number + 1 :]
    if _script(word) == "deepy.py" and following and _script(following[0]) in _ADVICE_ON_WORDS:
        word, *following = following
    if _script(word) in _ADVICE_ON_WORDS:
        others = _translated([other for other in before if other not in commands], following)
        has_files = any(_is_configuration(other, _directory_of(others, _TAKES_DIRECTORY)) for other in others)
        # The default folder of init has the name of such a word.
        written = None if has_files else configuration_in(word)
        if written is not None:
            run = shlex.join(["neox-launch", *([command] if command else []), str(written), *following])
            return f"{word} is a folder; to {command or 'train'}, run: {run}"
        given = shlex.join(others if has_files else [*_FILE.split(), *others])
        return (
            f"{word} is not a command of neox-launch; {_ADVICE_ON_WORDS[_script(word)].replace(_FILE, given)}"
        )
    folder = (directory / word).parent
    if os.path.isfile(folder):
        return f"{_no_folder(folder)}."
    if not os.path.isdir(folder):
        near = nearest_folder(folder)
        return f"folder {folder} does not exist; {f'did you mean {near}?' if near else 'check the path.'}"
    if os.path.isdir(word):
        what, remedy = about_folder(Path(word))
        return f"{word} {what}; {remedy}"
    if os.path.isfile(word):
        remedy = import_of_model(Path(word).parent) or f"to use it as one, give --config {word}"
        return f"{word} is a file, but not a configuration file (.yml); {remedy}."
    meant = did_you_mean(word, commands)
    listed = ", ".join(sorted(commands))
    return f"No such command or file: {word}; {meant or f'the commands are {listed}.'}"


def _translated(before: Sequence[str], following: Sequence[str]) -> list[str]:
    """Return the words around the name of a script of GPT-NeoX with our names of its options."""
    words = []
    for word in (*before, *following):
        name, sign, value = word.partition("=")
        is_ours = name not in (*_SAME_OPTIONS, *_ITERATION, *_TASKS)
        words += [word] if is_ours else [_SAME_OPTIONS.get(name, name), *([value] if sign else [])]
    directory = _directory_of(words, _TAKES_DIRECTORY)
    found: list[str] = []
    while words:
        word = words.pop(0)
        if word in _ITERATION and words:
            found += [_SET, f"load=CHECKPOINTS/global_step{words.pop(0)}"]
        elif word in _TASKS:
            tasks = list(
                takewhile(
                    lambda other: not other.startswith("-") and not _is_configuration(other, directory), words
                )
            )
            del words[: len(tasks)]
            found += [_TASKS[0], ",".join(tasks)]
        else:
            found.append(word)
    return found


def _advice_on_argument(
    words: Sequence[str], number: int, command: str | None, group: click.Group, directory: Path
) -> str:
    """Return what to write in place of `words[number]`, which may be the rest of a value with spaces."""
    word = words[number]
    if command == "init":
        what = f"init takes no argument {word!r}"
    elif _SETTING.match(word) and not os.path.exists(word):
        what = _not_a_setting(word)
    elif command is not None and _script(word) not in _ADVICE_ON_WORDS and not os.path.exists(word):
        what = f"No such configuration file: {word}"
        # A text in place of a file.
        if command == "generate" and len(word.split()) > 1:
            what += f"; a prompt is given with --prompt: --prompt {shlex.quote(word)}"
    else:
        what = _advice_on_word(words, number, command, group.commands, directory)
    quoted = _quoted_value(words, number, _with_commands(group), directory)
    return f"{what.removesuffix('.')}; {quoted}" if quoted else what


def _not_a_setting(word: str) -> str:
    return f"{word} is not a configuration file; parameters are set with --set: --set {shlex.quote(word)}"


def _quoted_value(
    words: Sequence[str], number: int, commands: Iterable[click.Command], directory: Path
) -> str:
    """Return what to write if `words[number]` belongs to the value of the option before it, or nothing."""
    before = list(takewhile(lambda word: not word.startswith("-"), reversed(words[:number])))[::-1]
    option, sign, begin = (
        words[number - len(before) - 1].partition("=") if len(before) < number else ("",) * 3
    )
    value = [*([begin] if sign else []), *before]
    if not value or option in (*_DIRECTORY, _CONFIG) or option not in _options_of_text(commands):
        return ""
    after = takewhile(
        lambda word: not word.startswith("-") and not _is_configuration(word, directory), words[number:]
    )
    whole = shlex.quote(" ".join([*value, *after]))
    return f"if it belongs to {option}, quote the whole value: {option} {whole}"


def _options_of_text(commands: Iterable[click.Command]) -> set[str]:
    """Return the options whose value may contain spaces."""
    options = [param for command in commands for param in command.params if isinstance(param, click.Option)]
    return {
        name
        for option in options
        if not option.is_flag and isinstance(option.type, click.types.StringParamType | click.Path)
        for name in option.opts
    }


def _script(word: str) -> str:
    """Return a word without its folder, if it is a Python script."""
    return os.path.basename(word) if word.endswith(".py") else word


def _advice_on_option(option: str, words: Sequence[str], directory: Path) -> str | None:
    """Return what to write in place of an unknown option, given all words of the command line."""
    name = option.lstrip("-").replace("-", "_")
    values = _values_of(option, words, directory)
    if name in _SWITCHES and values and _BOOLEANS.get(values[0].lower()) == "false":
        return _setting("precision=fp32")
    if name in _SETTINGS_FOR_OPTIONS:
        return _setting(*_SETTINGS_FOR_OPTIONS[name], values=values[:1])
    advice = _advice_without_setting(name, values)
    if advice is not None:
        return advice
    name = _FOREIGN_OPTIONS.get(name, name)
    if name not in OLDER_SPELLINGS:
        try:
            parameter = parameter_named(name)
        except KeyError:
            return None
        if parameter.is_block:
            return f"{name} is a block of parameters: {_setting_in_block(name)}"
    if name in FOREIGN_CHOICES:
        values = _in_our_choices(name, values)
    return _setting(f"{name.replace('_', '-')}=VALUE", values=values[:1] or ["true"])


def _advice_without_setting(name: str, values: Sequence[str]) -> str | None:
    """Return what to do about an option that is not a parameter; None for others."""
    if name in _ADVICE_ON_OPTIONS:
        return _ADVICE_ON_OPTIONS[name]
    if name in FOREIGN_REMEDIES and name not in _FOREIGN_OPTIONS:
        # An option without a value switches something on.
        remedy = foreign_remedy(name, values[0] if values else "true")
        return f"in the configuration file, {remedy}" if remedy.startswith(("use ", "set ")) else remedy
    if name in COMPUTED:
        return f"leave it out: it is computed ({COMPUTED[name]})"
    return f"leave it out: it {RETIRED[name]}" if name in RETIRED else None


def _setting(*settings: str, values: Sequence[str] = ()) -> str:
    """Return the options that set parameters.

    Args:
        settings: `NAME=VALUE`, in which VALUE stands for the first of the values that is valid there.
        values: the values as another program takes them, of which `yes` and 0 also mean true and false, and
            one may stand for a list.
    """
    # An empty value would be null.
    given = [value for value in values if value]
    switches = [_BOOLEANS[value.lower()] for value in given if value.lower() in _BOOLEANS]
    tried = [*given, *switches, *(f"[{value}]" for value in given)]
    filled = (
        next(
            (valid for value in tried if is_valid_setting(valid := setting.replace("VALUE", value))), setting
        )
        for setting in settings
    )
    return f"{_SET_PARAMETERS}: {' '.join(f'--set {shlex.quote(setting)}' for setting in filled)}"


def _setting_in_block(name: str) -> str:
    """Return how to turn a block on, or how to set its parameters if it has no switch."""
    inside = [
        each.name for each in all_parameters() if each.name.startswith(f"{name}.") and not each.is_block
    ]
    if f"{name}.enabled" in inside:
        return f"use --set {name}.enabled=true"
    return f"set them one by one, such as --set {inside[0]}=VALUE" if inside else "set them one by one"


def _in_our_choices(name: str, values: Sequence[str]) -> list[str]:
    """Return values of another program, in one word or several, as the one of a parameter; none for none."""
    given = [part for value in values for part in re.split(r"[\s,]+", value.strip("[]")) if part]
    ours = list(dict.fromkeys(FOREIGN_CHOICES[name].get(part.lower(), part) for part in given))
    return [f"[{','.join(ours)}]"] if ours and parameter_named(name).type.startswith("list") else ours[:1]


def _values_of(option: str, words: Sequence[str], directory: Path) -> list[str]:
    """Return the values that the words give to an option, up to the next option or file."""
    for number, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name == option and sign:
            return [value]
        if name == option:
            following = words[number + 1 :]
            return list(
                takewhile(
                    lambda other: (
                        (not other.startswith("-") or number_from(other) is not None)
                        and not _is_configuration(other, directory)
                    ),
                    following,
                )
            )
    return []
