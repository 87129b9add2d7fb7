"""Names of the files in a log folder (`log_dir`)."""

__all__ = ["AVERAGED", "FAILURES", "OUTPUT", "RECORD", "output_name"]

RECORD = "metrics.jsonl"
"""Metrics and events of a run. One that starts from the beginning renames an earlier record to
`metrics.1.jsonl`, or the next free number."""
AVERAGED = "_ema"
"""Ending of the name of an evaluation of averaged weights (ema_decay)."""
FAILURES = "failures.jsonl"
"""Failures of workers and hosts, which agents and the launcher append."""
OUTPUT = "output"
"""Folder with what workers print, one file for each rank (`output_name`), to which agents append."""


def output_name(rank: int) -> str:
    """Return the name of the file with the output of a rank."""
    return f"rank-{rank:05d}.log"
