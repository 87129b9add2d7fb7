"""`python -m neox_kernels` is `neox-kernels`."""

import sys

try:
    from neox_kernels.cli import main
except KeyboardInterrupt:
    # Ctrl-C before the command could handle it.
    sys.exit(130)

if __name__ == "__main__":
    main(prog_name="neox-kernels")
