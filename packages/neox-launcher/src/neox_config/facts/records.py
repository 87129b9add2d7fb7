"""Names of the files in a log folder (`log_dir`)."""

__all__ = ["FAILURES", "RECORD"]

RECORD = "metrics.jsonl"
"""Metrics and events of a training. One that starts from the beginning renames an earlier record to
`metrics.1.jsonl`, or the next free number."""
FAILURES = "failures.jsonl"
"""Failures of workers and hosts, which agents and the launcher append."""
