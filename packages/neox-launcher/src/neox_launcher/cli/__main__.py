"""`python -m neox_launcher.cli` is `neox-config`."""

from neox_config.interrupts import importing

with importing():
    from neox_launcher.cli.config import main

if __name__ == "__main__":
    main(prog_name="neox-config")
