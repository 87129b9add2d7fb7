"""`python -m neox_model.evaluate`: run one worker that evaluates the latest checkpoint."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.evaluate.run:evaluate_in",
    "Evaluate the latest checkpoint in `load`, as one worker of a job.",
    preflight="evaluate",
)

if __name__ == "__main__":
    main()
