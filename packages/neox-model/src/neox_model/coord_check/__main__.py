"""`python -m neox_model.coord_check`: the worker of `neox-launch coord-check`."""

from neox_model.worker import worker_command

__all__ = ["main"]

main = worker_command("neox_model.coord_check.run:check_in", "Compare activations of copies of a model.")

if __name__ == "__main__":
    main()
