"""`python -m neox_data.preprocess` is `preprocess_data`."""

from neox_data.interrupts import importing

with importing():
    from neox_data.preprocess.cli import main

if __name__ == "__main__":
    main(prog_name="preprocess_data")
