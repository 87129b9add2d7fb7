"""`python -m neox_model.verify`: the worker that compares trainings for `neox-launch verify-resume`."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Compare the trainings given by the launcher."""
    program = "neox_model.verify.run:compare_from"
    exit_worker(run_worker(program, resolved=resolved, paths=paths, overrides=overrides, joins=False))


if __name__ == "__main__":
    main()
