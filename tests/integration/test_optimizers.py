"""Every optimizer trains, is saved and resumes to the last bit on a layout of each kind in every precision.

`make test` runs a part in which every optimizer, layout and precision occurs; `make sweep NAME=optimizers`
runs all of it. What does not train is refused by a rule, with its reason.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import chain, combinations, pairwise, permutations
from pathlib import Path

import pytest

from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.schema.sections.optimizer import KNOWN_OPTIMIZERS, TORCH_OPTIMIZERS
from neox_model.checkpoint.errors import CheckpointError
from support.distributed import run_ranks
from support.optimizers import (
    LAYOUTS,
    LAYOUTS_OF_FOUR,
    OPTIMIZERS,
    OVERFLOWING,
    PRECISIONS,
    Cell,
    all_cells,
    sample,
    updates_apart,
)


def names(cells):
    return [(cell.optimizer, cell.layout, cell.precision) for cell in cells]


def run_cells(cells: list[list[str]], folder: str) -> dict[str, list[str]]:
    """Return this rank's findings by cell; runs in two processes."""
    from support.optimizers import resumed

    def check(cell: Cell, own: Path) -> list[str]:
        result = resumed(cell, own)
        return result.findings + unknown_states(cell, result.saved.states)

    return in_worlds([Cell(*cell) for cell in cells], Path(folder), check)


def unknown_states(cell: Cell, states: set[str]) -> list[str]:
    """Return where the states differ from what the table of optimizers says."""
    facts, given = OPTIMIZER_FACTS[cell.type.lower()], OPTIMIZERS[cell.optimizer]
    found = [f"the table does not know the state {name}" for name in sorted(states - set(facts.kept))]
    others = {*facts.numbers, *facts.other_shapes, *facts.matrix_states, *facts.row_states}
    others |= {*facts.replica_states, *facts.local_states}
    is_local = "local" in cell.optimizer and cell.precision != OVERFLOWING
    if set(facts.local_states) & states != set(facts.local_states if is_local else ()):
        found.append(f"has the states {sorted(states)}")
    # While replicas differ, `local_exp_avg` takes the place of `exp_avg`.
    tensors = len(states - others) + is_local
    compresses = "compressed" in cell.optimizer and cell.layout == "data 2" and cell.precision != OVERFLOWING
    if (set(facts.replica_states) <= states) != (compresses or not facts.replica_states):
        found.append(f"has the states {sorted(states)}")
    if len(states & set(facts.row_states)) != facts.values_per_row(given):
        found.append(f"has the states {sorted(states)}")
    if tensors != facts.values_per_element(given):
        found.append(f"{tensors} values per element, {facts.values_per_element(given)} in the table")
    return found


def in_worlds(cells, folder, check):
    """Return what `check` finds in each of this rank's cells, in a world of the cell's size."""
    from support.worlds import world_of

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    found: dict[str, list[str]] = {}
    largest = max(2, *(cell.ranks for cell in cells))
    for size in sorted({cell.ranks for cell in cells}):
        sized = [cell for cell in cells if cell.ranks == size]
        for turn in range(0, len(sized), largest // size):
            with world_of(size, folder, name=f"of-{size}-{turn}") as number:
                for cell in sized[turn : turn + largest // size][number : number + 1]:
                    found[cell.name] = check(cell, folder / cell.folder)
    return found


def check(cells, folder: Path, *, function=run_cells, timeout_seconds: float = 900) -> None:
    """Every cell ran on all its ranks, without a finding."""
    folder.mkdir(exist_ok=True)
    size = max(2, *(cell.ranks for cell in cells))
    results = run_ranks(
        function, size=size, cells=names(cells), folder=str(folder), timeout_seconds=timeout_seconds
    )
    assert sum(len(result) for result in results) == sum(cell.ranks for cell in cells)
    wrong = [
        f"{name}: {finding}" for result in results for name, found in result.items() for finding in found
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_and_the_matrix_have_every_optimizer():
    assert {facts.name for facts in OPTIMIZER_FACTS.values()} == {*KNOWN_OPTIMIZERS, *TORCH_OPTIMIZERS}
    assert {name.split(",")[0] for name in OPTIMIZERS} == {*KNOWN_OPTIMIZERS, *TORCH_OPTIMIZERS}


# The states of several replicas exist only where there are several: a tour begins there.
STARTS = ("data 2", *(layout for layout in LAYOUTS if layout != "data 2"))

# Layouts on which a rank holds the whole of each weight that it updates, and those on which it has some rows.
WHOLE_WEIGHTS = ("one process", "pipeline 2", "torch, pipeline 2", "data 2")
WHOLE_ROWS = tuple(layout for layout in LAYOUTS if layout.startswith("torch, ZeRO"))


def layouts_of(optimizer: str) -> tuple[str, ...]:
    """Return the layouts on which an optimizer trains."""
    facts = OPTIMIZER_FACTS[optimizer.split(",")[0].lower()]
    if "state_dtype" in OPTIMIZERS[optimizer]:
        return tuple(layout for layout in LAYOUTS if not layout.startswith("ZeRO"))
    if facts.is_elementwise and not facts.replica_states:
        return tuple(LAYOUTS)
    joins = facts.joins_split_weights or facts.is_elementwise
    found = (*WHOLE_WEIGHTS, *(["tensor 2"] if joins else []), *(WHOLE_ROWS if facts.gathers_rows else []))
    # DeepSpeed does not sum the gradients of routers.
    return tuple(layout for layout in found if not (optimizer.endswith("experts") and layout == "pipeline 2"))


def test_the_sample_has_every_optimizer_that_trains_every_layout_and_every_precision():
    assert {cell.optimizer for cell in sample()} == set(OPTIMIZERS)
    assert {cell.layout for cell in sample()} == set(LAYOUTS)
    assert {cell.precision for cell in sample()} == set(PRECISIONS)


@pytest.mark.slow
def test_only_optimizers_that_require_whole_weights_or_whole_states_are_refused():
    for cell in (cell for cell in all_cells() if cell.precision == "bf16"):
        refusal = cell.refusal
        if cell.layout not in layouts_of(cell.optimizer):
            reason = r"whole weights for its update|one bit per element|a state by its place|of routers"
            assert re.search(reason, str(refusal)), cell.name
        else:
            assert refusal is None, cell.name


@pytest.mark.slow
def test_every_optimizer_resumes_to_the_last_bit_and_adagrad_is_the_same_under_zero(tmp_path):
    """DeepSpeed replaces torch's Adagrad by one without our weight decay and learning rates."""
    adagrad = [
        Cell("Adagrad", layout, "fp32") for layout in ("one process", "ZeRO 1", "ZeRO 3", "torch, ZeRO 2")
    ]
    check(list(dict.fromkeys([*sample(), *adagrad])), tmp_path)
    check_equal_updates(adagrad, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_resumes_on_every_layout_in_every_precision(tmp_path, optimizer):
    cells = [cell for cell in all_cells() if cell.optimizer == optimizer and cell.refusal is None]
    assert len(cells) == len(layouts_of(optimizer)) * len(PRECISIONS)
    check(cells, tmp_path, timeout_seconds=600)
    # With one bit per element, two replicas train the model of one only approximately.
    equal = [cell for cell in cells if not ("compressed" in cell.optimizer and cell.layout == "data 2")]
    check_equal_updates([cell for cell in equal if cell.precision == "fp32"], tmp_path)


# Optimizers that join what they compute of rows.
JOINING = [name for name in OPTIMIZERS if OPTIMIZER_FACTS[name.split(",")[0].lower()].gathers_rows]


def check_joining(optimizer: str, layouts: Sequence[str], precision: str, folder: Path) -> None:
    """An optimizer that joins rows resumes on these layouts, and makes the updates of one process there."""
    cells = [Cell(optimizer, layout, precision) for layout in ("one process", *layouts)]
    check(cells, folder, timeout_seconds=600)
    if precision == "fp32":
        check_equal_updates(cells, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["Lamb", "Lamb, experts", "Muon", "Muon, rows", "Muon, rows, experts", "SM3, momentum"]
)
def test_an_optimizer_that_joins_rows_makes_the_updates_of_one_process_and_resumes(tmp_path, optimizer):
    check_joining(optimizer, ("torch, ZeRO 3", "torch, ZeRO 1, tensor 2"), "fp32", tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", JOINING)
def test_an_optimizer_that_joins_rows_resumes_on_four_ranks(tmp_path, optimizer, precision):
    check_joining(optimizer, tuple(LAYOUTS_OF_FOUR), precision, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_that_has_only_skipped_updates_yet_resumes(tmp_path, layout):
    cells = [Cell(optimizer, layout, OVERFLOWING) for optimizer in OPTIMIZERS]
    check(
        [cell for cell in cells if cell.refusal is None], tmp_path, function=run_skipped, timeout_seconds=600
    )


def run_skipped(cells: list[list[str]], folder: str) -> dict[str, list[str]]:
    """Return findings by cell where the checkpoint is written before the first applied update."""
    from support.optimizers import resumed

    def check(cell: Cell, own: Path) -> list[str]:
        return resumed(cell, own).findings

    return in_worlds([Cell(*cell) for cell in cells], Path(folder), check)


def check_equal_updates(cells, folder: Path) -> None:
    """Every layout trains the model of the first cell; no weight decay, or another rate, differs by 1e-2."""
    first, *others = cells
    wrong = {
        (cell.name, name): apart
        for cell in others
        for name, apart in updates_apart(first, cell, folder).items()
        if not apart < 2e-3
    }
    assert not wrong


def tour(layouts: Sequence[str]) -> list[str]:
    """Return a round trip that goes from each layout to each other one exactly once."""
    return [*chain.from_iterable(combinations(layouts, 2)), layouts[0]]


def move_cells(cells: list[list[str]], folder: str, fault: str = "") -> dict[str, list[str]]:
    """Train the first cell, and load its checkpoint in each next cell, from what the one before has saved.

    Args:
        cells: of one optimizer, in the order of the moves.
        folder: for the checkpoints.
        fault: state that is forgotten by every load.

    Returns:
        This rank's findings by move.
    """
    from support.optimizers import moved, resumed
    from support.worlds import world_of

    start, *others = (Cell(*each) for each in cells)
    here, found = Path(folder), {}
    with world_of(start.ranks, here, name="start") as number:
        if number == 0:
            losses = resumed(start, here / "start").losses[0]
    source, before = here / "start/through", start
    for turn, cell in enumerate(others):
        target, move = here / str(turn), f"{turn}: {before.name} to {cell.layout}"
        with world_of(cell.ranks, here, name=f"move-{turn}") as number, faulty(fault):
            if number == 0:
                found[move] = moved(cell, source, target, losses=losses)
        source, before = target, cell
    return found


def check_moves(optimizer: str, layouts: Sequence[str], folder: Path, *, fault: str = "") -> list[str]:
    """Move a checkpoint from each layout to each other one; return what differs."""
    cells = [Cell(optimizer, layout, "bf16") for layout in tour(layouts)]
    results = run_ranks(
        move_cells, size=2, cells=names(cells), folder=str(folder), fault=fault, timeout_seconds=600
    )
    assert len(results[0]) == len(layouts) * (len(layouts) - 1)
    return [f"{move}: {finding}" for result in results for move, found in result.items() for finding in found]


def test_a_tour_goes_from_each_layout_to_each_other_one_once():
    walk = tour(list(LAYOUTS))
    assert sorted(pairwise(walk)) == sorted(permutations(LAYOUTS, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "layouts"),
    [
        ("NAdam", ["ZeRO 3", "tensor 2", "ZeRO 1"]),
        ("Adam", ["ZeRO 1", "torch, ZeRO 3", "tensor 2"]),
        ("Muon", ["data 2", "torch, ZeRO 3", "tensor 2"]),
        ("Muon, rows", ["torch, ZeRO 3", "tensor 2", "torch, ZeRO 1"]),
        ("Muon, rows, experts", ["torch, ZeRO 3", "tensor 2", "one process"]),
        ("SM3, momentum", ["torch, ZeRO 1", "tensor 2", "torch, ZeRO 3"]),
        ("ZeroOneAdam, compressed, local", ["data 2", "tensor 2", "one process"]),
    ],
)
def test_states_move_between_layouts(tmp_path, optimizer, layouts):
    assert not check_moves(optimizer, layouts, tmp_path)


@pytest.mark.slow
def test_a_state_that_is_lost_on_a_move_is_found(tmp_path):
    found = check_moves("SGD, momentum", ["tensor 2", "ZeRO 2"], tmp_path, fault="momentum_buffer")
    assert any("/momentum_buffer differs" in finding for finding in found)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_move_from_any_layout_to_any_other(tmp_path, optimizer):
    layouts = [layout for layout in STARTS if Cell(optimizer, layout, "bf16").refusal is None]
    assert set(layouts) == set(layouts_of(optimizer))
    assert not check_moves(optimizer, layouts, tmp_path)


@contextmanager
def faulty(fault: str):
    """Within, loading a checkpoint forgets the state of this name, or counts one update too many."""
    from neox_model.checkpoint import load

    fill, fill_own, restore = load.state_tensor, load.replica_tensor, load.restore_scalars

    def forget(fragment, optimizer, key, shape):
        target = fill(fragment, optimizer, key, shape)
        return target.clone() if key == fault else target

    def forget_own(fragment, optimizer, key):
        target = fill_own(fragment, optimizer, key)
        return target.clone() if key == fault else target

    def count_wrong(fragments, optimizer, saved, *, same_class):
        wrong = {
            weight: {
                key: {**number, "value": number["value"] + (key == fault)} for key, number in states.items()
            }
            for weight, states in saved.items()
        }
        restore(fragments, optimizer, wrong, same_class=same_class)

    load.state_tensor, load.replica_tensor, load.restore_scalars = forget, forget_own, count_wrong
    try:
        yield
    finally:
        load.state_tensor, load.replica_tensor, load.restore_scalars = fill, fill_own, restore


# PyTorch computes these again in every update; until ASGD averages (t0 updates), no weight depends on them by
# more than rounding.
_RECOMPUTED = {"ASGD": {"ax", "eta", "mu"}}
# The next average of the replicas divides by the state and removes it; afterwards the average differs.
_SHOWN_BY = {"local_rate": "local_update"}


def run_faults(cells: list[list[str]], folder: str) -> dict[str, list[str]]:
    """For every state of every cell: whether a run that resumes without it is found out."""
    from support.optimizers import resumed

    def find_fault(cell: Cell, own: Path, state: str) -> bool:
        try:
            with faulty(state):
                findings = resumed(cell, own / state).findings
        except CheckpointError as error:
            # Without the squares that it divides by, an optimizer makes weights that are not finite.
            return "not finite" in str(error)
        return any(f"/{_SHOWN_BY.get(state, state)}" in finding for finding in findings)

    def check(cell: Cell, own: Path) -> list[str]:
        states = sorted(resumed(cell, own / "whole").saved.states - _RECOMPUTED.get(cell.optimizer, set()))
        return [f"{state} was not restored, unseen" for state in states if not find_fault(cell, own, state)]

    return in_worlds([Cell(*cell) for cell in cells], Path(folder), check)


@pytest.mark.slow
def test_a_state_that_is_not_restored_is_found(tmp_path):
    cells = [
        Cell("NAdam", "one process", "fp16"),
        Cell("Adafactor", "one process", "bf16"),
        Cell("madgrad_wd", "ZeRO 3", "bf16"),
    ]
    check(cells, tmp_path, function=run_faults)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_that_is_not_restored_is_found_in_every_optimizer_on_every_layout(tmp_path, layout):
    cells = [Cell(name, layout, "bf16") for name in OPTIMIZERS if name != "SGD"]
    cells = [cell for cell in cells if cell.refusal is None]
    for start in range(0, len(cells), 8):
        check(cells[start : start + 8], tmp_path / str(start), function=run_faults, timeout_seconds=600)
