"""Whether ranks that hold copies of the same weights hold the same values."""

from neox_model.verify.findings import Findings
from neox_model.verify.records import Record

__all__ = ["compare_copies"]


def compare_copies(record: Record, findings: Findings, *, row: str, iterations: tuple[int, ...]) -> None:
    """Compare the weights in use on all ranks: replicas, tensor-parallel copies and tied weights."""
    findings.row(row, "pieces")
    for iteration in iterations:
        holders: dict[str, tuple[int, str]] = {}
        for rank, line in sorted(record.states.get(iteration, {}).items()):
            for place, values in line["used"].items():
                findings.count(row)
                first, known = holders.setdefault(place, (rank, values))
                if known != values:
                    text = (
                        f"the copies of {place} on ranks {first} and {rank} differ at iteration {iteration:,}"
                    )
                    findings.differ(row, text, iteration=iteration, advice="restored")
