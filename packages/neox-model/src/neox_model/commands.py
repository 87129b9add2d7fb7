"""The commands of programs of this package: errors are reported in one message, with their exit codes."""

from typing import Any

import click

from neox_config.command_line import Command, Group
from neox_config.limits import allow_more_files

__all__ = ["ModelCommand", "ModelCommands"]


class ModelCommand(Command):
    """A command that opens many files, such as the shards of a checkpoint."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        allow_more_files()
        return super().invoke(ctx)


class ModelCommands(Group):
    """A program with such commands."""

    command_class = ModelCommand
