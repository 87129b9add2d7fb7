"""Autotuning: short trial runs that find the fastest ZeRO stage and micro-batch size.

`space.py` lists the candidates with their estimates, `search.py` selects the next trial, `trials.py` runs one
trial, `results.py` stores the results, `report.py` renders them, and `tune.py` combines these.
"""

from neox_launcher.autotuning.tune import is_tuned, tune

__all__ = ["is_tuned", "tune"]
