"""The group of commands of a program of this package."""

from typing import Any

import click

from neox_config.output import checked_output

__all__ = ["Commands"]


class Commands(click.Group):
    """Command group that reports a standard output that cannot be written to, such as a full disk."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        with checked_output():
            return super().main(*args, **kwargs)
