"""`python -m neox_model.doctor`: one worker that examines its host, then the connections to other hosts."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Examine this host, as one worker of a job."""
    program = "neox_model.doctor.examine:examine"
    exit_worker(run_worker(program, resolved=resolved, paths=paths, overrides=overrides, joins=False))


if __name__ == "__main__":
    main()
