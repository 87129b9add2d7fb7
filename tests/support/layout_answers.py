"""`verify-layout` on rank servers, in a second or two in place of the command's start of torch."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from neox_config import decode_resolved, encode_resolved
from neox_launcher.protocol.layout_verification import LayoutAnswer, LayoutRequest
from neox_launcher.verify_layout.verify import Case, plan_of
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.topology import create_groups

__all__ = ["answer_of_ranks", "arguments_of", "rank_answer"]

Plant = Callable[[], AbstractContextManager[None]]


def arguments_of(case: Case, folder: Path, *, steps: int) -> dict[str, Any]:
    """What `run_ranks` needs to call `rank_answer`."""
    plan = plan_of(case, folder, steps)
    return {
        "size": case.sizes.processes,
        "folder": str(folder),
        "resolved": encode_resolved(plan.resolved),
        "request": plan.environment[LayoutRequest.VARIABLE],
    }


def rank_answer(folder: str, resolved: str, request: str, plant: Plant = nullcontext) -> list[dict[str, Any]]:
    """The answer that this rank reports; `plant` is a mistake in the run on the layout alone."""
    from neox_model.verify_layout import run

    os.chdir(folder)
    os.environ[LayoutRequest.VARIABLE] = request
    decoded = decode_resolved(resolved)
    layout = decoded.run.layout
    groups = create_groups(layout.tensor, layout.stages, layout.experts)
    reported: list[dict[str, Any]] = []
    open_run = run.open_run

    @contextmanager
    def opened(of: Any, *given: Any) -> Iterator[Any]:
        with nullcontext() if of is SINGLE_PROCESS else plant(), open_run(of, *given) as found:
            yield found

    with (
        patch.object(run, "open_run", opened),
        patch.object(run, "report_facts", lambda number, facts: reported.append(facts)),
    ):
        run.verify_in(groups, decoded)
    # As they are sent.
    json.dumps(reported, allow_nan=False)
    return reported


def answer_of_ranks(results: list[list[dict[str, Any]]]) -> LayoutAnswer:
    """The answer, which rank 0 alone reports."""
    first, *others = results
    assert not any(others)
    return LayoutAnswer.from_facts(first[0])
