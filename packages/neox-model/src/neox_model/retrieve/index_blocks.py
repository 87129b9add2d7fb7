"""`python -m neox_model.retrieve.index_blocks`: run one worker that embeds the blocks of the data."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Embed the blocks of the data in an index, as one worker of a job."""
    program = "neox_model.retrieve.index:index_in"
    code = run_worker(program, resolved=resolved, paths=paths, overrides=overrides, preflight="index-blocks")
    exit_worker(code)


if __name__ == "__main__":
    main()
