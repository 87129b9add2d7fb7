"""Options that several commands have, and what shells complete in them."""

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

from neox_config.catalogue import model_names
from neox_config.command_line import PATH, option
from neox_config.schema.config import all_parameters

__all__ = [
    "CONFIGURATION",
    "complete_models",
    "complete_parameters",
    "configuration_options",
    "directory_option",
    "set_option",
]

CONFIGURATION = "Configuration"
"""Heading of the options that determine the configuration."""


def complete_parameters(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the parameters whose names begin with a text, written with its dashes or underscores."""
    is_underscored = "_" in incomplete
    begun = incomplete.replace("-", "_")
    names = (each.name for each in all_parameters() if each.name.startswith(begun))
    return [CompletionItem(name if is_underscored else name.replace("_", "-")) for name in names]


def complete_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the models of the catalogue whose names begin with a text."""
    return [CompletionItem(name) for name in model_names() if name.startswith(incomplete)]


def _complete_settings(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [
        CompletionItem(f"{found.value}=") for found in complete_parameters(context, parameter, incomplete)
    ]


set_option = option(
    "--set",
    "overrides",
    heading=CONFIGURATION,
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=_complete_settings,
    help="Override a parameter of the configuration. May be repeated; the last value wins.",
)
directory_option = option(
    "-d",
    "--directory",
    heading=CONFIGURATION,
    type=PATH,
    metavar="DIR",
    help="Directory of the configuration files.",
)


def configuration_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments `files`, `overrides` and `directory` of `load_config`."""
    files = click.argument("files", nargs=-1, required=True, type=PATH)
    return files(directory_option(set_option(command)))
