"""Every optimizer trains, is saved and resumes to the last bit on a layout of each kind in every precision.

`make test` runs a part in which every optimizer, layout and precision occurs; `make test-optimizers` runs all
of it. What does not train is refused by a rule, with its reason.
"""

import logging
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.schema.sections.optimizer import KNOWN_OPTIMIZERS, TORCH_OPTIMIZERS
from neox_model.checkpoint import CheckpointError
from support.distributed import run_ranks
from support.optimizers import (
    LAYOUTS,
    OPTIMIZERS,
    OVERFLOWING,
    PRECISIONS,
    Cell,
    all_cells,
    sample,
    updates_apart,
)

# Cells of one launch: engines of DeepSpeed are never freed, and gloo's threads in their groups do not rest.
AT_ONCE = 24

# Where a checkpoint of one process is loaded; and from where a last one is loaded by one process.
MOVES = ("tensor 2", "pipeline 2", "data 2", "ZeRO 1", "ZeRO 2", "ZeRO 3")


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
    others = {*facts.numbers, *facts.other_shapes, *facts.matrix_states}
    others |= {*facts.replica_states, *facts.local_states}
    is_local = "local" in cell.optimizer and cell.precision != OVERFLOWING
    if set(facts.local_states) & states != set(facts.local_states if is_local else ()):
        found.append(f"has the states {sorted(states)}")
    # While replicas differ, `local_exp_avg` takes the place of `exp_avg`.
    tensors = len(states - others) + is_local
    compresses = "compressed" in cell.optimizer and cell.layout == "data 2" and cell.precision != OVERFLOWING
    if (set(facts.replica_states) <= states) != (compresses or not facts.replica_states):
        found.append(f"has the states {sorted(states)}")
    if tensors != facts.values_per_element(given):
        found.append(f"{tensors} values per element, {facts.values_per_element(given)} in the table")
    return found


def in_worlds(cells, folder, check):
    """Return what `check` finds in each of this rank's cells, in a world of the cell's size."""
    from support.worlds import world_of

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    found: dict[str, list[str]] = {}
    for size in (1, 2):
        sized = [cell for cell in cells if cell.ranks == size]
        for turn in range(0, len(sized), 2 // size):
            with world_of(size, folder, name=f"of-{size}-{turn}") as number:
                for cell in sized[turn : turn + 2 // size][number : number + 1]:
                    found[cell.name] = check(cell, folder / cell.folder)
    return found


def check(cells, folder: Path, *, function=run_cells, timeout_seconds: float = 900) -> None:
    """Every cell ran on all its ranks, without a finding."""
    folder.mkdir(exist_ok=True)
    results = run_ranks(
        function, size=2, cells=names(cells), folder=str(folder), timeout_seconds=timeout_seconds
    )
    assert sum(len(result) for result in results) == sum(cell.ranks for cell in cells)
    wrong = [
        f"{name}: {finding}" for result in results for name, found in result.items() for finding in found
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_and_the_matrix_have_every_optimizer():
    assert {facts.name for facts in OPTIMIZER_FACTS.values()} == {*KNOWN_OPTIMIZERS, *TORCH_OPTIMIZERS}
    assert {name.split(",")[0] for name in OPTIMIZERS} == {*KNOWN_OPTIMIZERS, *TORCH_OPTIMIZERS}


# Layouts on which a rank holds the whole of each weight that it updates.
WHOLE_WEIGHTS = ("one process", "pipeline 2", "data 2")


def layouts_of(optimizer: str) -> tuple[str, ...]:
    """Return the layouts on which an optimizer trains."""
    facts = OPTIMIZER_FACTS[optimizer.split(",")[0].lower()]
    if facts.is_elementwise and not facts.replica_states:
        return tuple(LAYOUTS)
    joins = facts.joins_split_weights or facts.is_elementwise
    return (*WHOLE_WEIGHTS, "tensor 2") if joins else WHOLE_WEIGHTS


def test_the_sample_has_every_optimizer_that_trains_every_layout_and_every_precision():
    assert {cell.optimizer for cell in sample()} == set(OPTIMIZERS)
    assert {cell.layout for cell in sample()} == set(LAYOUTS)
    assert {cell.precision for cell in sample()} == set(PRECISIONS)


def test_only_optimizers_that_require_whole_weights_or_whole_states_are_refused():
    for cell in (cell for cell in all_cells() if cell.precision == "bf16"):
        refusal = cell.refusal
        if cell.layout not in layouts_of(cell.optimizer):
            reason = r"whole weights for its update|with one bit per element"
            assert re.search(reason, str(refusal)), cell.name
        else:
            assert refusal is None, cell.name


@pytest.mark.slow
def test_every_optimizer_resumes_to_the_last_bit_and_adagrad_is_the_same_under_zero(tmp_path):
    """DeepSpeed replaces torch's Adagrad by one without our weight decay and learning rates."""
    adagrad = [Cell("Adagrad", layout, "fp32") for layout in ("one process", "ZeRO 1", "ZeRO 3")]
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


def move_cells(cells: list[list[str]], folder: str) -> dict[str, list[str]]:
    """Load what one process saved on the cells' layouts, and what each of these saves on one process."""
    from support.optimizers import moved, resumed
    from support.worlds import world_of

    here, found = Path(folder), {}
    for number, cell in enumerate(Cell(*each) for each in cells):
        own = here / str(number)
        alone = Cell(cell.optimizer, "one process", cell.precision)
        with world_of(1, here, name=f"before-{number}") as rank:
            if rank == 0:
                resumed(alone, own / "alone")
        with world_of(2, here, name=f"there-{number}"):
            found[cell.name] = moved(cell, own / "alone/through", own / "there")
        with world_of(1, here, name=f"back-{number}") as rank:
            if rank == 0:
                found[cell.name] += moved(alone, own / "there", own / "back")
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("layout", MOVES)
def test_states_move_from_one_process_to_any_layout_and_back(tmp_path, layout):
    cells = [Cell(optimizer, layout, "bf16") for optimizer in OPTIMIZERS]
    cells = [cell for cell in cells if cell.refusal is None]
    for start in range(0, len(cells), AT_ONCE):
        check(cells[start : start + AT_ONCE], tmp_path / str(start), function=move_cells, timeout_seconds=600)


@contextmanager
def faulty(fault: str):
    """Within, loading a checkpoint forgets one state, or counts one update too many."""
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


def run_faults(cells: list[list[str]], folder: str) -> dict[str, list[str]]:
    """For every state of every cell: whether a training that resumes without it is found out."""
    from support.optimizers import resumed

    def find_fault(cell: Cell, own: Path, state: str) -> bool:
        try:
            with faulty(state):
                findings = resumed(cell, own / state).findings
        except CheckpointError as error:
            # Without the squares that it divides by, an optimizer makes weights that are not finite.
            return "not finite" in str(error)
        return any(f"/{state}" in finding for finding in findings)

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
