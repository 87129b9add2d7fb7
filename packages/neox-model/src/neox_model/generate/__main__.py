"""`python -m neox_model.generate`: one worker that makes text with the newest checkpoint."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Generate text as configured, as one worker of a job."""
    program = "neox_model.generate.run:generate_from"
    exit_worker(run_worker(program, resolved=resolved, paths=paths, overrides=overrides))


if __name__ == "__main__":
    main()
