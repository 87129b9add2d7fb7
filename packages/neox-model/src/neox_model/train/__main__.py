"""`python -m neox_model.train`: run one training worker."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.train.open_run:train_in",
    "Train the configured model as one worker of a job.",
    preflight="train",
    saves_when_warned=True,
)

if __name__ == "__main__":
    main()
