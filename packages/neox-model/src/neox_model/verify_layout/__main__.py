"""`python -m neox_model.verify_layout`: one worker of `neox-launch verify-layout`."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command(
    "neox_model.verify_layout.run:verify_in", "Train on a layout, and compare with one process."
)

if __name__ == "__main__":
    main()
