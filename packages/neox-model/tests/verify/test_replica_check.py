"""Copies of weights that differ between ranks, and what is said about them."""

import pytest

from neox_model.verify.findings import Findings
from neox_model.verify.records import Record
from neox_model.verify.run import compare_copies
from support.refusals import shows

ADVICE = {2: "restored", 4: "step"}
EXPLAINED = {
    2: "the checkpoint, loading it, or the configuration has changed it",
    4: "everything before this is equal, including the restored state",
}


@pytest.mark.parametrize("iteration", ADVICE)
def test_differing_copies_are_reported_with_the_advice_of_their_state(iteration):
    record = Record()
    for each in ADVICE:
        for rank in range(2):
            values = f"digest {rank if each == iteration else 0}"
            record.states[each][rank] = {"used": {"embedding.weight": values}}
    findings = Findings()
    compare_copies(record, findings, row="copies of weights", advice=ADVICE)
    answer = findings.answer()
    assert shows(answer.first, "embedding.weight", "ranks 0", "1 differ", f"iteration {iteration}")
    assert answer.explanation == EXPLAINED[iteration]
    (check,) = answer.checks
    assert (check.compared, check.differing) == ("4 pieces", "1 of them")
