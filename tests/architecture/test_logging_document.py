"""docs/logging.md names every event with its fields, and every phase that is measured."""

import re

from neox_model.metrics.events import EVENT_FIELDS
from neox_model.metrics.timers import DOCUMENTED_PHASES
from support.sources import ROOT

TEXT = (ROOT / "docs/logging.md").read_text()


def test_every_event_is_documented_with_its_fields():
    section = TEXT[TEXT.index("### Events") : TEXT.index("### Failures")]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert rows.keys() == EVENT_FIELDS.keys()
    for kind, fields in EVENT_FIELDS.items():
        assert set(fields) - set(re.findall(r"`(\w+)`", rows[kind])) == set(), kind


def test_every_phase_is_documented():
    assert [phase for phase in DOCUMENTED_PHASES if f"| `time/{phase}` |" not in TEXT] == []
