"""Check that copies of the same weights on different ranks are equal."""

from collections.abc import Mapping

from neox_model.verify.findings import Findings
from neox_model.verify.records import Record

__all__ = ["compare_copies"]


def compare_copies(record: Record, findings: Findings, *, row: str, advice: Mapping[int, str]) -> None:
    """Compare the weights in use on all ranks: replicas, tensor-parallel copies and tied weights.

    Args:
        record: record of the training.
        findings: collects the differences.
        row: row of the table.
        advice: iteration to the key of the advice for a difference in its state.
    """
    findings.row(row, "pieces")
    for iteration in advice:
        holders: dict[str, tuple[int, str]] = {}
        for rank, line in sorted(record.states.get(iteration, {}).items()):
            for place, values in line["used"].items():
                findings.count(row)
                first, known = holders.setdefault(place, (rank, values))
                if known != values:
                    text = (
                        f"the copies of {place} on ranks {first} and {rank} differ at iteration {iteration:,}"
                    )
                    findings.differ(row, text, iteration=iteration, advice=advice[iteration])
