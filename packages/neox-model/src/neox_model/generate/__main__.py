"""`python -m neox_model.generate`: run one worker that generates text with the latest checkpoint."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.generate.run:generate_in",
    "Generate text with the latest checkpoint in `load`, as one worker of a job.",
    preflight="generate",
)

if __name__ == "__main__":
    main()
