"""`python -m neox_model.extras.retrieval.index_blocks`: run one worker that embeds the blocks of the data."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.extras.retrieval.index:index_in",
    "Embed the blocks of the data in an index, as one worker of a job.",
    preflight="index-blocks",
)

if __name__ == "__main__":
    main()
