"""`python -m neox_model.serve`: run one worker that serves the latest checkpoint over HTTP."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Serve the latest checkpoint in `load` over HTTP, as one worker of a job."""
    program = "neox_model.serve.run:serve_in"
    code = run_worker(
        program,
        resolved=resolved,
        paths=paths,
        overrides=overrides,
        preflight="serve",
        saves_when_warned=True,
    )
    exit_worker(code)


if __name__ == "__main__":
    main()
