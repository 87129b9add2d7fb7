"""`python -m neox_data` is `neox-data`."""

from neox_data.interrupts import Importing

with Importing():
    from neox_data.cli import main

if __name__ == "__main__":
    main(prog_name="neox-data")
