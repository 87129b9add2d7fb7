"""One model on every layout: the losses and the weights after 20 clipped updates are those of one rank.

Real processes over gloo, float32. `make test` trains every architecture, and on every kind of layout;
`make test-all` trains on every layout; `make sweep NAME=layouts` every architecture on every layout, with and
without recomputed activations.
"""

import logging
from itertools import cycle
from pathlib import Path

import pytest

from precision.kinds import KINDS, kind_of
from support.architectures import ARCHITECTURES as DENSE
from support.architectures import EXPERTS
from support.distributed import run_ranks
from support.layouts import ARCHITECTURES, LAYOUTS, trains

# Sums of float32 in another order, over 20 updates; a wrong scale, sum or norm shows at 1e-3 and more.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 2e-5, 2e-5

Case = tuple[str, str, bool]

# Layers of this architecture communicate in another way.
ONCE = "half rotary, parallel residual, untied"
ENTERS_ONCE = [
    (ONCE, "tensor 2", False),
    (ONCE, "sequence 2", True),
    (ONCE, "tensor 2 x pipeline 2", False),
    (ONCE, "torch, ZeRO 1 x tensor 2", False),
    (ONCE, "torch, pipeline 2 x sequence 2, ZBV", False),
]


def chosen() -> list[Case]:
    """Each layout once, the architectures in turn, every second one with recomputed activations."""
    names = list(DENSE)
    in_turn = [(names[number % len(names)], layout, number % 2 == 0) for number, layout in enumerate(LAYOUTS)]
    return list(dict.fromkeys(in_turn + ENTERS_ONCE + of_experts()))


def of_experts() -> list[Case]:
    """Each layout on which experts train, the architectures that have some in turn."""
    layouts = [name for name, layout in LAYOUTS.items() if all(trains(each, layout) for each in EXPERTS)]
    pairs = enumerate(zip(cycle(EXPERTS), layouts, strict=False))
    return [(architecture, layout, number % 2 == 0) for number, (architecture, layout) in pairs]


def of_each_kind() -> list[Case]:
    """Each kind of layout and each architecture at least once."""
    layouts = [
        next(name for name in names if name in LAYOUTS)
        for names in KINDS.values()
        if set(names) & set(LAYOUTS)
    ]
    pairs = zip(cycle(DENSE), cycle(layouts), range(max(len(DENSE), len(layouts))), strict=False)
    dense = [(name, layout, number % 2 == 0) for name, layout, number in pairs]
    return dense + of_experts()[: len(EXPERTS)]


def run_cases(cases: list[Case], folder: str, iterations: int) -> dict[str, dict[str, float]]:
    """Differences by case, of this rank; runs in four processes."""
    from support.layouts import differences, micro_batch_of_reference, reference
    from support.worlds import world_of

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    here, found = Path(folder), {}
    wanted = sorted(
        {
            (architecture, LAYOUTS[layout].is_wide, micro_batch_of_reference(architecture, LAYOUTS[layout]))
            for architecture, layout, _ in cases
        }
    )
    with world_of(1, here, name="one") as number:
        for architecture, is_wide, micro_batch in wanted[number::4]:
            reference(
                architecture, is_wide=is_wide, micro_batch=micro_batch, folder=here, iterations=iterations
            )
    for size in (2, 4):
        sized = [case for case in cases if LAYOUTS[case[1]].ranks == size]
        # A separate world for each case: its groups, with gloo's threads, end with it.
        for turn in range(0, len(sized), 4 // size):
            with world_of(size, here, name=f"of-{size}-{turn}") as number:
                for architecture, layout, recomputes in sized[turn : turn + 4 // size][number : number + 1]:
                    case = f"{architecture} / {layout} / {recomputes}"
                    found[case] = differences(
                        architecture,
                        LAYOUTS[layout],
                        recomputes=recomputes,
                        folder=here,
                        iterations=iterations,
                    )
    return found


def check(cases: list[Case], folder: Path, *, iterations: int, timeout_seconds: float) -> None:
    results = run_ranks(
        run_cases,
        size=4,
        cases=cases,
        folder=str(folder),
        iterations=iterations,
        timeout_seconds=timeout_seconds,
    )
    assert sum(len(result) for result in results) == sum(LAYOUTS[layout].ranks for _, layout, _ in cases)
    wrong = {
        f"{case}, rank {rank}": found
        for rank, result in enumerate(results)
        for case, found in result.items()
        if not (found["loss"] <= LOSS_TOLERANCE and found["weight"] <= WEIGHT_TOLERANCE)
    }
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


def test_the_chosen_part_has_every_layout_and_every_architecture():
    assert {layout for _, layout, _ in chosen()} == set(LAYOUTS)
    assert {architecture for architecture, _, _ in chosen()} == set(ARCHITECTURES)


def test_every_architecture_and_every_kind_of_layout_train_the_model_of_one_rank(tmp_path):
    cases = of_each_kind()
    assert {architecture for architecture, _, _ in cases} == set(ARCHITECTURES)
    assert {kind_of(layout) for _, layout, _ in cases} == set(KINDS) - {"one process"}
    check(cases, tmp_path, iterations=2, timeout_seconds=600)


@pytest.mark.slow
def test_layouts_and_architectures_chosen_in_turn_train_the_model_of_one_rank(tmp_path):
    check(chosen(), tmp_path, iterations=8, timeout_seconds=1200)


# A launch for each: engines of DeepSpeed are never freed, and gloo's threads in their groups do not rest.
@pytest.mark.sweep
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layout_trains_the_model_of_one_rank(tmp_path, architecture, recomputes):
    cases = [
        (architecture, name, recomputes) for name, layout in LAYOUTS.items() if trains(architecture, layout)
    ]
    check(cases, tmp_path, iterations=20, timeout_seconds=600)
