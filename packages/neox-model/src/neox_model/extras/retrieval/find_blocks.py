"""`python -m neox_model.extras.retrieval.find_blocks`: run one worker that searches an index of blocks."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.extras.retrieval.find:find_in",
    "Find the blocks of an index that are best for a query, as one worker of a job.",
    preflight="find-blocks",
)

if __name__ == "__main__":
    main()
