"""Compare with lm_dataformat, which GPT-NeoX reads its corpora with; see lm_dataformat/make.py."""

import json
from pathlib import Path

import pytest

from neox_data.preprocess.read import CorpusReader

FOLDER = Path(__file__).with_name("lm_dataformat")
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED["texts"])
def test_texts_are_those_of_lm_dataformat(name: str) -> None:
    reader = CorpusReader([FOLDER / name], ("text",))
    assert [document.texts[0] for document in reader] == EXPECTED["texts"][name]
    assert (reader.num_skipped, reader.num_too_long, reader.passed_over.count) == (0, 0, 0)


def test_answers_are_those_of_a_known_version() -> None:
    assert EXPECTED["lm_dataformat"] == "0.0.20"
    assert sum(map(len, EXPECTED["texts"].values())) == 41
