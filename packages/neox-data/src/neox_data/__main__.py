"""`python -m neox_data` is `neox-data`."""

import sys

try:
    from neox_data.cli import main
except KeyboardInterrupt:
    # Ctrl-C before the command could handle it.
    sys.exit(130)

if __name__ == "__main__":
    main(prog_name="neox-data")
