"""One update in fp32, bf16 and fp16 on every layout is that of plain autograd, and its like in float32.

Real processes over gloo. `make test` runs a part in which every kind of layout meets bf16, and a third of
them each other precision, and plants faults that must be found; `make sweep NAME=precision` runs every
architecture on every layout.
"""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from precision import results as precision_results
from precision.cells import ARCHITECTURES, FREE, all_cells, axes_of, cells_of_experts, pairs_of, sample
from precision.checks import Judgement
from precision.kinds import KINDS, PRECISION_NAMES, kind_of
from precision.run import ALL_LAYOUTS, CLIPPING, PRECISIONS, SCALES, Cell
from support.architectures import EXPERTS
from support.distributed import run_ranks

# Where `make sweep NAME=precision` writes the figures of docs/reports/compatibility-matrix.md.
RESULTS = "PRECISION_RESULTS"


def judge_cells(cells: list[dict[str, Any]], scales: list[int], folder: str) -> dict[str, Any]:
    """Judgements of cells, by their place in the list; runs in four processes."""
    from precision.cells import check
    from support.worlds import world_of

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    numbered, found = [*enumerate(Cell(**cell) for cell in cells)], {}
    for size in (1, 2, 4):
        sized = [(place, cell) for place, cell in numbered if cell.shape.ranks == size]
        for turn in range(0, len(sized), 4 // size):
            with world_of(size, Path(folder), name=f"of-{size}-{turn}") as number:
                for place, cell in sized[turn : turn + 4 // size][number : number + 1]:
                    judgement = check(cell, scales=scales)
                    if judgement is not None:
                        found[str(place)] = dataclasses.asdict(judgement)
    return found


def judge(
    cells: list[Cell], folder: Path, *, scales: tuple[int, ...], timeout_seconds: float
) -> list[Judgement]:
    results = run_ranks(
        judge_cells,
        size=4,
        timeout_seconds=timeout_seconds,
        cells=[dataclasses.asdict(cell) for cell in cells],
        scales=list(scales),
        folder=str(folder),
    )
    found = {int(place): Judgement(**values) for result in results for place, values in result.items()}
    assert sorted(found) == list(range(len(cells)))
    return [found[place] for place in range(len(cells))]


def findings_of(cells: Sequence[Cell], judgements: list[Judgement]) -> str:
    return "\n".join(
        f"{cell.name}: {finding}"
        for cell, judgement in zip(cells, judgements, strict=True)
        for finding in judgement.findings
    )


def test_the_sample_has_every_kind_of_layout_and_every_architecture():
    kinds_of = {
        precision: {kind_of(cell.layout) for cell in sample() if cell.precision == precision}
        for precision in PRECISIONS
    }
    assert kinds_of["bf16"] == set(KINDS)
    assert len(kinds_of["fp32"]) == len(kinds_of["fp16"]) == len(KINDS) // 3
    assert {cell.architecture for cell in sample()} == set(ARCHITECTURES)


def test_every_layout_belongs_to_one_kind():
    assert tuple(PRECISIONS) == PRECISION_NAMES
    assert sorted(layout for layouts in KINDS.values() for layout in layouts) == sorted(ALL_LAYOUTS)


def test_the_sweep_has_every_architecture_on_every_layout_in_every_precision():
    found = [(cell.architecture, cell.layout, cell.precision) for cell in all_cells()]
    assert sorted(found) == sorted(product(ARCHITECTURES, ALL_LAYOUTS, PRECISIONS))


def test_every_pair_occurs_in_the_sweep():
    occurring = set().union(*(pairs_of(cell) for cell in all_cells()))
    axes: dict[str, tuple[Any, ...]] = {
        "architecture": tuple(ARCHITECTURES),
        "precision": tuple(PRECISIONS),
        "pipeline": (0, 1, 2),
        "ZeRO": (0, 1, 2, 3),
        **FREE,
    }
    wanted = {
        ((one, value), (other, another))
        for one, other in combinations(axes, 2)
        for value, another in product(axes[one], axes[other])
    }
    # One stage is a pipeline for DeepSpeed alone, whose pipelines do not have these stages of ZeRO.
    wanted -= {(("pipeline", 1), ("ZeRO", stage)) for stage in (2, 3)}
    assert wanted <= occurring


def test_layouts_meet_every_free_setting():
    occurring = set().union(*(pairs_of(cell) for cell in all_cells()))
    for layout, (name, values) in product(ALL_LAYOUTS, FREE.items()):
        for value in values:
            assert (("layout", layout), (name, value)) in occurring
    assert set(CLIPPING) == {"off", "inactive", "active"}
    assert {axes_of(cell)["pipeline"] for cell in all_cells()} == {0, 1, 2}


def test_the_table_shows_the_worst_figures_of_each_kind_of_layout(tmp_path):
    path = tmp_path / "results.jsonl"
    for layout, ratio, difference in (("tensor 2", 1.004, 0.002), ("tensor 4", 0.9912, 0.0123)):
        figures = Judgement(ratio=ratio, own_ratio=1.001, cosine=0.9999, difference=difference, tensors=9)
        precision_results.record(path, [Cell("gMLP", layout, "bf16")], [figures])
    assert "| bf16 | tensor parallel | 2 | 0.9912 | 1.0010 | 0.99990 | 1e-02 |" in [
        *precision_results.section(path)
    ]
    better = Judgement(ratio=1.001, own_ratio=1.001, cosine=1.0, difference=0.001, tensors=9)
    precision_results.record(path, [Cell("gMLP", "tensor 4", "bf16")], [better])
    assert "| bf16 | tensor parallel | 2 | 1.0040 | 1.0010 | 0.99990 | 2e-03 |" in [
        *precision_results.section(path)
    ]


def test_the_recorded_figures_cover_every_cell():
    rows = [json.loads(line) for line in precision_results.PATH.read_text().splitlines()]
    recorded = [(row["precision"], row["layout"], row["architecture"]) for row in rows]
    cells = {(cell.precision, cell.layout, cell.architecture) for cell in all_cells()}
    assert sorted(recorded) == sorted(cells), "run make sweep NAME=precision, then make docs"


@pytest.mark.slow
def test_a_sample_of_the_cells_agrees_with_plain_autograd(tmp_path):
    cells = sample()
    judgements = judge(cells, tmp_path, scales=(128,), timeout_seconds=900)
    assert findings_of(cells, judgements) == ""


@pytest.mark.slow
def test_the_loss_scale_cancels_out(tmp_path):
    layouts = ("one process", "pipeline 2", "ZeRO 1")
    cells = [Cell("learned positions, layernorm, tied", layout, "fp16", accumulation=3) for layout in layouts]
    judgements = judge(cells, tmp_path, scales=SCALES, timeout_seconds=900)
    assert findings_of(cells, judgements) == ""


def judge_faults(folder: str) -> dict[str, list[str]]:
    """Return findings by fault, or by cell name where there is no fault; runs in four processes."""
    from contextlib import nullcontext

    from precision.cells import check
    from precision.faults import FAULTS
    from support.worlds import world_of

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    cases = {name: (fault.cell, fault.plant) for name, fault in FAULTS.items()}
    cases |= {fault.cell.name: (fault.cell, nullcontext) for fault in FAULTS.values()}
    found = {}
    for size in (1, 2, 4):
        sized = [(name, *case) for name, case in cases.items() if case[0].shape.ranks == size]
        for turn in range(0, len(sized), 4 // size):
            with world_of(size, Path(folder), name=f"of-{size}-{turn}") as number:
                for name, cell, plant in sized[turn : turn + 4 // size][number : number + 1]:
                    with plant():
                        judgement = check(cell, scales=(128,))
                    if judgement is not None:
                        found[name] = judgement.findings
    return found


@pytest.mark.slow
def test_only_the_planted_faults_are_found(tmp_path):
    from precision.faults import FAULTS

    results = run_ranks(judge_faults, size=4, folder=str(tmp_path), timeout_seconds=900)
    found = {name: findings for result in results for name, findings in result.items()}
    assert {name: found.pop(name) for name in {fault.cell.name for fault in FAULTS.values()}} == {
        fault.cell.name: [] for fault in FAULTS.values()
    }
    assert set(found) == set(FAULTS)
    for name, fault in FAULTS.items():
        assert any(re.search(fault.says, finding) for finding in found[name]), f"{name}: {found[name][:5]}"


# A launch for each: engines of DeepSpeed are never freed.
@pytest.mark.sweep
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layout_agrees_with_plain_autograd(tmp_path, architecture, precision):
    cells = [c for c in all_cells() if (c.architecture, c.precision) == (architecture, precision)]
    judgements = judge(cells, tmp_path, scales=SCALES, timeout_seconds=1200)
    assert findings_of(cells, judgements) == ""
    if RESULTS in os.environ:
        precision_results.record(Path(os.environ[RESULTS]), cells, judgements)


@pytest.mark.sweep
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_agree_with_plain_autograd(tmp_path, architecture, precision):
    cells = [*cells_of_experts(architecture, precision)]
    judgements = judge(cells, tmp_path, scales=SCALES, timeout_seconds=1200)
    assert findings_of(cells, judgements) == ""


@pytest.mark.slow
def test_a_sample_of_experts_agrees_with_plain_autograd(tmp_path):
    """Each architecture on every fifth layout, in 16 bit."""
    cells = [
        cell
        for number, architecture in enumerate(EXPERTS)
        for cell in cells_of_experts(architecture, ("bf16", "fp16")[number % 2])[number :: len(EXPERTS)]
    ]
    judgements = judge(cells, tmp_path, scales=(128,), timeout_seconds=900)
    assert findings_of(cells, judgements) == ""
