"""`python -m neox_model.serve`: run one worker that serves the latest checkpoint over HTTP."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.serve.run:serve_in",
    "Serve the latest checkpoint in `load` over HTTP, as one worker of a job.",
    preflight="serve",
    saves_when_warned=True,
)

if __name__ == "__main__":
    main()
