"""`python -m neox_model.convert` is `neox-convert`, which hf-export also starts."""

from neox_config.interrupts import importing

with importing():
    import os

    from neox_launcher.worker.reporting import die_with_parent
    from neox_model.convert import PARENT
    from neox_model.convert.cli import main

if __name__ == "__main__":
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    main(prog_name="neox-convert")
