"""`make sweep NAME=verify`: configurations compute on layouts what one process computes.

`PART=k/n` of the cases, in turn. Every difference is a fault of ours, or a false alarm.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from neox_config.errors import NeoXError
from neox_launcher.verify_layout.verify import Case, LayoutVerification, case_of
from pairs import OPTIONS, SETTINGS
from support.distributed import run_ranks
from support.layout_answers import answer_of_ranks, arguments_of, rank_answer
from support.settings import TINY
from support.sources import ROOT

CONFIGS = sorted(path for path in ROOT.joinpath("configs").glob("**/*.yml"))
LAYOUTS = (
    "tp=2,sp=true,pp=0,dp=2,zero=0",
    "pp=2,tp=1,zero=1,dp=2",
    "zero=3,tp=1,pp=0",
    "tp=2,pp=2,zero=1,dp=1",
    "zero=2,tp=2,pp=0",
    "pp=2,tp=1,schedule=zbv,zero=0,dp=2",
    "pp=2,tp=2,sp=true,dp=1,zero=1,schedule=interleaved,virtual-pipeline-stages=2",
)
DRAWN = 150
# What changes the model's parameters for an inference, writes files, or starts from another model.
_LEFT_OUT = {
    "layers of a teacher",
    "compiled layers",
    "eigenvalues",
    "parameters on the CPU",
    "optimizer on the CPU",
}
# For a configuration of a part, such as a dataset or a model without a run.
_TRAINING = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "train-iters": 100,
    "train-micro-batch-size-per-gpu": 4,
}


def drawn(number: int) -> dict[str, Any]:
    """Some options together; a rule may refuse them."""
    draw = random.Random(number)
    settings = TINY | SETTINGS | {"num_layers": draw.choice([2, 8])}
    for name in draw.sample(sorted(OPTIONS.keys() - _LEFT_OUT), draw.randint(3, 6)):
        settings |= OPTIONS[name]
    return settings


def first_valid(wanted: list[LayoutVerification], layout: str) -> Case | None:
    """The first that the rules accept on a layout."""
    for each in wanted:
        try:
            return case_of(each, layout)
        except NeoXError as error:
            # The rules hold for the user's, so they must for the small copy.
            if "the small configuration" in str(error):
                raise
    return None


def check(case: Case, folder: Path) -> None:
    answer = answer_of_ranks(
        run_ranks(rank_answer, timeout_seconds=600, **arguments_of(case, folder, steps=2))
    )
    assert [(part.name, part.worst) for part in answer.parts if part.differing] == []
    assert answer.findings == ()
    assert len(answer.parts) >= 5


def of_this_part(number: int) -> None:
    part, parts = map(int, os.environ.get("PART", "1/1").split("/"))
    if number % parts != part - 1:
        pytest.skip("another part")


@pytest.mark.sweep
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "other"])
@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=lambda number: CONFIGS[number].stem)
def test_a_configuration_on_its_layout_and_on_another(number: int, is_own: bool, tmp_path: Path) -> None:
    of_this_part(number)
    path = str(CONFIGS[number])
    training = tuple(f"{name}={json.dumps(value)}" for name, value in _TRAINING.items())
    wanted = [
        LayoutVerification(paths=(path,)),
        LayoutVerification(paths=(str(ROOT / "configs/125M.yml"), path)),
        LayoutVerification(paths=(path,), overrides=training),
    ]
    layouts = [""] if is_own else [LAYOUTS[(number + more) % len(LAYOUTS)] for more in range(len(LAYOUTS))]
    cases = (first_valid(wanted, layout) for layout in layouts)
    case = next((each for each in cases if each is not None), None)
    assert case is not None, "no layout is valid"
    check(case, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(DRAWN))
def test_a_drawn_configuration_on_a_layout(number: int, tmp_path: Path) -> None:
    of_this_part(number)
    path = tmp_path / "drawn.yml"
    wanted = [LayoutVerification(paths=(str(path),))]
    layout = LAYOUTS[number % len(LAYOUTS)] if number % 3 else ""
    for attempt in range(100):
        path.write_text(json.dumps(drawn(number + DRAWN * attempt)))
        case = first_valid(wanted, layout)
        if case is not None:
            break
    assert case is not None, "nothing valid was drawn"
    check(case, tmp_path)
