"""`python -m neox_launcher` is `neox-launch`."""

from neox_config.interrupts import importing

with importing():
    from neox_launcher.cli.launch import main

if __name__ == "__main__":
    main(prog_name="neox-launch")
