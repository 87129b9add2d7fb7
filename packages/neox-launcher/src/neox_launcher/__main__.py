"""`python -m neox_launcher` is `neox-launch`."""

import sys

try:
    from neox_launcher.cli.launch import main
except KeyboardInterrupt:
    # Ctrl-C before the command could handle it.
    sys.exit(130)

if __name__ == "__main__":
    main(prog_name="neox-launch")
