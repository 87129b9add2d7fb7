"""`neox-launch verify-resume`: verifies that a resumed run equals an uninterrupted one.

`phases.py` builds the runs from the configuration, `verify.py` runs and compares them, and `report.py`
renders the result. What launcher and workers share is in the room `protocol`.
"""
