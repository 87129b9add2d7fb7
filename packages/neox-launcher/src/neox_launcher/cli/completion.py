"""The command `neox-config completion`: what a shell runs to complete the commands of all our programs."""

from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

import click
from click.shell_completion import get_completion_class

from neox_config.command_line import Command

__all__ = ["completion"]

# Lines of click's scripts, and what replaces them: behind `num-layers=` comes a value, not a space.
_WITHOUT_SPACE = {
    "bash": ("    return 0\n", "    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace\n    return 0\n"),
    "zsh": (
        "        compadd -U -V unsorted -a completions\n",
        "        local -a ending=()\n"
        "        [[ ${completions[1]} == *= ]] && ending=(-S '')\n"
        '        compadd -U "${ending[@]}" -V unsorted -a completions\n',
    ),
    # It puts no space behind an equals sign.
    "fish": ("", ""),
}
_DISTRIBUTIONS = ("neox-launcher", "neox-data", "neox-kernels", "neox-model")


@click.command(
    cls=Command,
    examples=(
        'eval "$(neox-config completion bash)"',
        "neox-config completion fish > ~/.config/fish/conf.d/neox.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what SHELL runs to complete our programs: commands, options, parameters and files.

    Add the first example to ~/.bashrc; for zsh, write zsh instead of bash and add it to ~/.zshrc, after
    compinit. Programs that are installed later require a new shell.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    before, after = _WITHOUT_SPACE[shell]
    for name in _programs():
        variable = f"_{name.replace('-', '_')}_COMPLETE".upper()
        script = kind(context.command, {}, name, variable).source()
        click.echo(script.replace(before, after))


def _programs() -> Iterator[str]:
    """Yield the names of our programs that are installed."""
    for distribution in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            for entry in metadata.distribution(distribution).entry_points:
                if entry.group == "console_scripts":
                    yield entry.name
