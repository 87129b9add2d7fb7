"""`python -m neox_model.train`: run one training worker."""

from pathlib import Path

import click

from neox_model.worker import exit_worker, request_options, run_worker

__all__ = ["main"]


@click.command()
@request_options
def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Train the configured model as one worker of a job."""
    program = "neox_model.train.run:train_in"
    code = run_worker(
        program,
        resolved=resolved,
        paths=paths,
        overrides=overrides,
        preflight="train",
        saves_when_warned=True,
    )
    exit_worker(code)


if __name__ == "__main__":
    main()
