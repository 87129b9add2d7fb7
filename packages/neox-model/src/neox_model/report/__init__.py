"""`neox-report RUN ...`: a page about one or several runs, and a plot of the loss, from their records."""

from neox_model.report.cli import main

__all__ = ["main"]
