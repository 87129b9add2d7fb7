"""`python -m neox_model.inspection` is `neox-checkpoint`."""

from neox_config.interrupts import importing

with importing():
    from neox_model.inspection.cli import main

if __name__ == "__main__":
    main(prog_name="neox-checkpoint")
