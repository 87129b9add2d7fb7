"""`python -m neox_model.retrieve.find_blocks`: run one worker that searches an index of blocks."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Find the blocks of an index that are best for a query, as one worker of a job."""
    program = "neox_model.retrieve.find:find_in"
    code = run_worker(program, resolved=resolved, paths=paths, overrides=overrides, preflight="find-blocks")
    exit_worker(code)


if __name__ == "__main__":
    main()
