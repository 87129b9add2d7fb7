"""`python -m neox_model.convert`: the command neox-convert, as a training runs it at its end."""

import os

from neox_launcher.worker.reporting import die_with_parent
from neox_model.convert import PARENT
from neox_model.convert.cli import main

if PARENT in os.environ:
    die_with_parent(int(os.environ[PARENT]))
main()
