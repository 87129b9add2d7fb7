"""`python -m neox_model.doctor`: one worker that examines its host, then the connections to other hosts."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.doctor.examine:examine", "Examine this host, as one worker of a job.", joins=False
)

if __name__ == "__main__":
    main()
