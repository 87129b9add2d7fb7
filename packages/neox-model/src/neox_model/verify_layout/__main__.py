"""`python -m neox_model.verify_layout`: one worker of `neox-launch verify-layout`."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Train on a layout, and compare with one process, as the launcher asks."""
    program = "neox_model.verify_layout.run:verify_in"
    exit_worker(run_worker(program, resolved=resolved, paths=paths, overrides=overrides))


if __name__ == "__main__":
    main()
