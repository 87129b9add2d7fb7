"""`python -m neox_kernels` is `neox-kernels`."""

from neox_kernels.interrupts import importing

with importing():
    from neox_kernels.cli import main

if __name__ == "__main__":
    main(prog_name="neox-kernels")
