"""`python -m neox_model.verify`: the worker that compares runs for `neox-launch verify-resume`."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.verify.run:compare_from", "Compare the runs given by the launcher.", joins=False
)

if __name__ == "__main__":
    main()
