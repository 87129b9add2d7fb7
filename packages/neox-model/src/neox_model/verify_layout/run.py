"""Train in one process and on the layout, and compare both."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from neox_config import Resolved, decode_resolved
from neox_launcher.protocol.layout_verification import LayoutRequest
from neox_launcher.worker.reporting import report_facts
from neox_model.assembly.choices import DTYPES
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.parallel.control import gather_object
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.train.loop import Loop
from neox_model.train.open_run import open_run
from neox_model.train.run import Run
from neox_model.verify_layout.corpus import write_corpus
from neox_model.verify_layout.diagnosis import Sizes, answer_of
from neox_model.verify_layout.observer import Comparer, Recorder, Values
from neox_model.verify_layout.rows import LIMITS, Place
from neox_model.verify_layout.streams import DropoutWatch, with_draws

__all__ = ["verify_in"]

_VALUES = "reference.pt"


def verify_in(groups: Groups, resolved: Resolved) -> None:
    """Compare a run on this layout with one process. Collective over all ranks.

    The answer of rank 0 goes to the launcher.
    """
    # What a run logs is not of interest here.
    for package in ("neox_data", "neox_model"):
        logging.getLogger(package).setLevel(logging.WARNING)
    request = LayoutRequest.from_environment()
    if request.in_float64:
        resolved = resolved.in_float64()
    computes_in = resolved.run.precision.computes_in
    with shared_outcome(groups.control, "compute the reference"):
        if groups.world.rank == 0:
            write_corpus(Path())
            recorder = Recorder(Values(), rounded_to=DTYPES[computes_in])
            plain = decode_resolved(request.reference).in_float64()
            with _default_dtype(torch.float64):
                _train(open_run(SINGLE_PROCESS, plain, recorder.extensions), recorder, computes_in)
            torch.save(recorder.values.tensors, _VALUES)
    values = Values(torch.load(_VALUES, map_location="cpu", weights_only=True))
    place = Place(
        rank=groups.world.rank, data=groups.data.rank, tensor=groups.model.rank, stage=groups.pipe.rank
    )
    limit = LIMITS[computes_in]
    comparer = Comparer(values, place, limit=limit, compares_initial=request.in_float64)
    with _default_dtype(torch.float64 if request.in_float64 else torch.float32):
        _train(open_run(groups, resolved, comparer.extensions), comparer, computes_in)
    watch = DropoutWatch()
    if request.dropping is not None:
        with open_run(groups, decode_resolved(request.dropping)) as (_, loop), watch:
            loop.run()
    found = gather_object(
        groups.control, (comparer.rows, comparer.pieces, comparer.missing, [(place, watch.draws)])
    )
    if groups.world.rank == 0:
        rows, pieces, missing, drawn = (
            [each for part in parts for each in part] for parts in zip(*found, strict=True)
        )
        sizes = Sizes(
            data=groups.data.size,
            tensor=groups.model.size,
            stages=groups.pipe.size,
            accumulation=resolved.run.batch.accumulation,
        )
        answer = answer_of(rows, pieces, missing, values, sizes, limit=limit)
        report_facts(0, with_draws(answer, dict(drawn)).as_facts())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _train(
    opened: AbstractContextManager[tuple[Run, Loop]], observer: Recorder | Comparer, computes_in: str
) -> None:
    """Train and evaluate; `computes_in` is the data type of the layout."""
    with opened as (run, loop):
        routers: list[Any] = [module for module in run.model.modules() if hasattr(module, "by_position")]
        for router in routers:
            # In 16 bit, some tokens would have other experts, and the gradients of these differ.
            router.by_position = computes_in in ("fp16", "bf16")
        loop.run()
        observer.take_number("evaluation loss", run.evaluator.results["valid"].loss)
