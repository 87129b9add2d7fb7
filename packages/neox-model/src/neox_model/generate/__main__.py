"""`python -m neox_model.generate`: run one worker that generates text with the latest checkpoint."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Generate text with the latest checkpoint in `load`, as one worker of a job."""
    program = "neox_model.generate.run:generate_in"
    code = run_worker(program, resolved=resolved, paths=paths, overrides=overrides, preflight="generate")
    exit_worker(code)


if __name__ == "__main__":
    main()
