"""Upper limits on the hosts of a job, which bound what a mistyped number can cost."""

__all__ = ["MOST_HOSTS", "MOST_SLOTS"]

MOST_HOSTS = 100_000
"""Hosts of a job."""

MOST_SLOTS = 1024
"""Slots, and so workers, of a host."""
