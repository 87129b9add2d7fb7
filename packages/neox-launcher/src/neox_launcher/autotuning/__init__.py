"""Autotuning: short trial trainings that find the fastest ZeRO stage and micro-batch.

`space.py` lists what may be tried and what an estimate says of it, `search.py` decides what is tried next,
`trials.py` carries one trial out, `results.py` keeps what was found, `report.py` says it, and `tune.py` joins
them.
"""

from neox_launcher.autotuning.tune import is_tuned, tune

__all__ = ["is_tuned", "tune"]
