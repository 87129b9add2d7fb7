"""The command `neox-launch init`: from files and folders with texts to a configuration."""

import math
import os
import shlex
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import click

from neox_config import Text, load_config
from neox_config.atomic import atomic_write
from neox_config.command_line import INTERRUPTED, Command, GivenPath, option
from neox_config.errors import LaunchError
from neox_config.facts.corpora import ENDINGS, FEWEST_ENTRIES, MOST_ENTRIES
from neox_config.pluralize import pluralize
from neox_config.problems import config_error
from neox_launcher.cli.cluster import resolve_for
from neox_launcher.cli.estimate import read_bytes
from neox_launcher.cli.options import complete_models
from neox_launcher.init.configuration import configuration_text
from neox_launcher.init.duration import (
    FEWEST_ITERATIONS,
    Measure,
    cpu_speed,
    describe_duration,
    parse_duration,
    within,
)
from neox_launcher.init.sizes import SIZES, of_catalogue, of_size
from neox_launcher.init.texts import PreparationError, Prepared, prepare_texts
from neox_launcher.init.training import Devices, Training, choose_training
from neox_launcher.plan.planning import Request
from neox_launcher.plan.preflight import check_files
from neox_launcher.resources.local_gpus import count_gpus, smallest_gpu_memory

__all__ = ["init"]

# Headings of options.
_TEXTS, _MODEL, _DEVICES, _WRITTEN = "Texts and tokenizer", "Model", "Devices", "Result"
_AUTO = "auto"
_SIZE = click.Choice([_AUTO, *SIZES], case_sensitive=False)
_CONFIGURATION = "config.yml"
_MOST_DEVICES = 1024


class _Time(click.types.StringParamType):
    """A time such as 20m, or auto; the value stays a text."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the value."""
        try:
            if value != _AUTO:
                parse_duration(value)
        except ValueError as error:
            self.fail(f"{error}, or auto", param, ctx)
        return value


def _tokenizer_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the tokenizer.json of the folder of a model, and a file as it is."""
    if path is None or not path.is_dir():
        return path
    if not (path / "tokenizer.json").is_file():
        raise click.BadParameter(
            f"{path} is a folder without a tokenizer.json; give the file, or another folder",
            context,
            parameter,
        )
    return path / "tokenizer.json"


@click.command(
    "init",
    cls=Command,
    examples=(
        "neox-launch init --data texts --output run --time 20m",
        "neox-launch init --data books.jsonl --model pythia-160m --devices 8 --device-memory 80GiB",
    ),
)
@option(
    "--data",
    heading=_TEXTS,
    multiple=True,
    type=GivenPath(path_type=Path),
    metavar="PATH",
    help=f"Folder or file with texts: {ENDINGS}. May be given several times.",
)
@option(
    "--output",
    heading=_WRITTEN,
    type=GivenPath(path_type=Path, file_okay=False),
    help="Folder to write to. Default: run.",
)
@option(
    "--size",
    heading=_MODEL,
    type=_SIZE,
    help="Parameters in the layers of the model. auto, the default: by the number of tokens and the devices.",
)
@option(
    "--model",
    heading=_MODEL,
    metavar="NAME",
    shell_complete=complete_models,
    help="A model of the catalogue instead; see neox-config models.",
)
@option(
    "--time",
    "duration",
    heading=_MODEL,
    type=_Time(),
    metavar="TIME",
    help="Longest time of the run by its estimate, such as 90s, 20m or 2h: it chooses train-iters, and "
    "with --size auto also the size. auto, the default: by the number of tokens and the devices; on a CPU up "
    "to many hours.",
)
@option(
    "--devices",
    heading=_DEVICES,
    type=click.IntRange(1, _MOST_DEVICES),
    help="GPUs to use; without GPUs, processes. Default: all GPUs of this machine, or one process.",
)
@option(
    "--device-memory",
    heading=_DEVICES,
    metavar="SIZE",
    callback=read_bytes,
    help="Memory of one GPU, such as 80GiB, for another machine than this one.",
)
@option(
    "--tokenizer",
    heading=_TEXTS,
    type=GivenPath(path_type=Path, exists=True),
    callback=_tokenizer_file,
    metavar="FILE",
    help="A tokenizer.json to use, or the folder that has it. Default: train one on the texts.",
)
@option(
    "--vocab-size",
    heading=_TEXTS,
    type=click.IntRange(FEWEST_ENTRIES, MOST_ENTRIES),
    help="Entries of the tokenizer that is trained. Default: 512 to 32,768, by the size of the texts.",
)
@option(
    "--jsonl-key",
    heading=_TEXTS,
    default="text",
    show_default=True,
    help="Key of the text in each JSON line, or column of a table.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress; notes and errors are printed.")
@click.pass_obj
def init(
    common: tuple[Request, object],
    /,
    data: tuple[Path, ...],
    output: Path | None,
    size: str | None,
    model: str | None,
    duration: str | None,
    devices: int | None,
    device_memory: int | None,
    tokenizer: Path | None,
    vocab_size: int | None,
    jsonl_key: str,
    quiet: bool,
) -> None:
    """Write the configuration of a first training on your own texts.

    Finds the texts, trains a tokenizer, writes a dataset, chooses a model and its training, and prints the
    command that starts it. On a terminal it asks for what is not given; if its output is redirected, it
    uses the defaults. No configuration is overwritten. After an interruption, the same command continues.
    """
    if common != (Request(program="train", paths=()), None):
        raise click.UsageError("init takes only its own options, after the word init")
    _refuse_together(("--size", size), ("--model", model), "give one of them")
    _refuse_together(
        ("--vocab-size", vocab_size),
        ("--tokenizer", tokenizer),
        "only a tokenizer that is trained has a size",
    )
    has_begun = False
    try:
        named = None if model is None else of_catalogue(model)
        found = _devices(devices, device_memory)
        # Once per shape, so that all figures follow from one measurement.
        measure = cache(cpu_speed)
        if sys.stdin.isatty() and sys.stdout.isatty():
            data, output, size, duration = _ask(data, output, size, model, duration)
        if not data:
            raise click.UsageError("no texts given; give --data FOLDER")
        path = _path_of_configuration(output or Path("run"))
        if path.exists():
            raise LaunchError(
                f"{path} exists; train with neox-launch --config {shlex.quote(str(path))}, or delete it to "
                "choose again"
            )
        sizes = SIZES if size in (None, _AUTO) else (size,)
        candidates = [named] if named else list(map(of_size, sizes))
        has_begun = True
        prepared = prepare_texts(
            data, path.parent, key=jsonl_key, tokenizer=tokenizer, vocab_size=vocab_size, quiet=quiet
        )
        shorten: Callable[[Training], Training] | None = None
        if duration not in (None, _AUTO):
            shorten = partial(within, seconds=parse_duration(duration), measure=measure)
        training = choose_training(candidates, prepared, found, shorten=shorten)
        text = configuration_text(path, training, prepared, found)
        _check(text, path, found)
        # Before the configuration is written, because it may fail, and takes time on a CPU.
        report = _report(path, training, prepared, found, measure)
        with atomic_write(path) as file:
            file.write(text)
    except PreparationError as error:
        if not error.is_reported:
            raise
        if error.exit_code == INTERRUPTED:
            click.echo("the same command continues", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        # Where the configuration is written, nothing is left to continue, and the same command is refused.
        remedy = "; the same command continues" if has_begun and not path.exists() else ""
        click.echo(f"\ninterrupted{remedy}", err=True)
        sys.exit(INTERRUPTED)
    click.echo(report)


def _refuse_together(one: tuple[str, object], other: tuple[str, object], remedy: str) -> None:
    """Refuse two options that exclude each other, if both are given."""
    if None not in (one[1], other[1]):
        raise click.UsageError(f"{one[0]} and {other[0]} exclude each other; {remedy}")


def _devices(count: int | None, memory: int | None) -> Devices:
    """Return the devices: those of this machine, unless the memory of others is given."""
    present = count_gpus()
    if memory is not None:
        return Devices(count=count or max(1, present), memory=memory, are_gpus=True)
    if not present:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Devices(count=count or 1, memory=whole, are_gpus=False)
    found = smallest_gpu_memory()
    if found is None:
        raise LaunchError(
            "the memory of the GPUs is not known (nvidia-smi failed); give --device-memory SIZE"
        )
    if count is not None and count > present:
        raise LaunchError(
            f"--devices {count:,}, but this machine has {pluralize(present, 'GPU')}; reduce it, or give "
            "--device-memory for a run on another machine"
        )
    return Devices(count=count or present, memory=found, are_gpus=True)


class _TypedPath(click.Path):
    """A path as a person types it: no shell has expanded `~`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Expand the home folder."""
        return super().convert(os.path.expanduser(str(value)), param, ctx)


def _ask(
    data: tuple[Path, ...], output: Path | None, size: str | None, model: str | None, duration: str | None
) -> tuple[tuple[Path, ...], Path, str | None, str]:
    """Ask for what is not given."""
    if not data:
        data = (Path(os.fsdecode(click.prompt("Folder or file with texts", type=_TypedPath(exists=True)))),)
    if output is None:
        output = Path(os.fsdecode(click.prompt("Folder to write to", default="run", type=_TypedPath())))
    if size is None and model is None:
        size = click.prompt("Size of the model, in parameters", default=_AUTO, type=_SIZE)
    if duration is None:
        question = "Longest time of the run, such as 20m or 2h (auto: by the size of the texts)"
        duration = click.prompt(question, default=_AUTO, type=_Time())
    return data, output, size, duration


def _path_of_configuration(folder: Path) -> Path:
    """Return the path of the configuration.

    Raises:
        LaunchError: the folder is a file, or its name cannot be written to a file of text.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise LaunchError(f"{folder} is a file, not a folder; give another --output")
    path = folder.absolute() / _CONFIGURATION
    if not str(path).isprintable():
        raise LaunchError(
            f"--output {str(folder)!r} contains characters that YAML cannot contain; give another folder"
        )
    return path


def _check(text: str, path: Path, devices: Devices) -> None:
    """Check the configuration as `neox-config check --files` does, before it is written.

    Raises:
        ConfigError: a launch would refuse it.
    """
    config = load_config([], texts=(Text(text, str(path), has_lines=True),))
    resolve_for(config, devices=devices.count, hostfile=None)
    problems = check_files(config, program="train")
    if problems:
        raise config_error(problems, config.files)


def _report(
    path: Path,
    training: Training,
    prepared: Prepared,
    devices: Devices,
    measure: Measure,
) -> str:
    """Return what is printed when the configuration is written."""
    passes = training.tokens / prepared.training_tokens
    lines = [
        f"\nmodel {training.candidate.name}: {training.parameters:,} parameters with a vocabulary of "
        f"{prepared.entries:,} entries",
        f"training: {pluralize(training.iterations, 'iteration')} of "
        f"{pluralize(training.setup.samples, 'sample')} of {training.seq_length:,} tokens: "
        f"{training.tokens:,} tokens, {passes:.2f} passes over "
        f"{prepared.training_tokens:,} (limit: {training.limit})",
        f"{devices.count:,} {devices.kind}: estimated memory {training.memory / 2**30:.2f} GiB each; "
        f"{training.operations:.1e} floating-point operations in all",
        f"the loss begins near {math.log(prepared.entries):.2f}, that of a uniform guess",
        f"estimated time with evaluations: {describe_duration(training, devices, measure=measure)}",
    ]
    if training.planned_seconds is None:
        lines.append(f"for a shorter run, delete {path} and add --time, such as --time 20m")
    elif training.iterations < FEWEST_ITERATIONS:
        lines.append(
            f"warning: a model learns nothing useful in {pluralize(training.iterations, 'iteration')}; "
            f"delete {path} and give a longer --time or a smaller model"
        )
    if prepared.training_tokens < training.setup.samples * training.seq_length:
        lines.append("the texts are shorter than one iteration, which therefore reads them more than once")
    command = f"neox-launch --config {shlex.quote(os.path.relpath(path))}"
    return "\n".join([*lines, f"\nwrote {path}; start the run with\n\n  {command}"])
