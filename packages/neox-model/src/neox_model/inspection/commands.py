"""The commands of `neox-checkpoint` and `neox-convert`: errors, output and limits."""

import logging
from typing import Any

import click

from neox_config.errors import NeoXError
from neox_config.limits import allow_more_files
from neox_config.output import checked_output
from neox_model.inspection.finding import RequestError

__all__ = ["CONTEXT", "Command", "Commands"]

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _BadRequest(click.ClickException):
    exit_code = RequestError.exit_code


class Commands(click.Group):
    """Command group that reports a standard output that cannot be written to, such as a full disk."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        with checked_output():
            return super().main(*args, **kwargs)


class Command(click.Command):
    """A command that reports errors in one message, with exit code 2 if it names no checkpoint, else 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        allow_more_files()
        try:
            return super().invoke(ctx)
        except RequestError as error:
            raise _BadRequest(str(error)) from error
        except NeoXError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{place}{error.strerror or error}") from error
