"""`python -m neox_data` is `neox-data`."""

from neox_data.interrupts import importing

with importing():
    from neox_data.cli import main

if __name__ == "__main__":
    main(prog_name="neox-data")
