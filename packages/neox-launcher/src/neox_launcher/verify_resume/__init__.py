"""`neox-launch verify-resume`: whether a resumed training equals one that was never interrupted.

`phases.py` makes the trainings from the configuration, `kept.py` finds kept checkpoints, `exchange.py` holds
what launcher and workers exchange, `verify.py` runs everything, and `report.py` renders the result.
"""
