"""`python -m neox_model.report` is `neox-report`."""

from neox_config.interrupts import importing

with importing():
    from neox_model.report.cli import main

if __name__ == "__main__":
    main(prog_name="neox-report")
