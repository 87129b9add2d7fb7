"""Train in one process and on the layout, and compare both."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from neox_config import Resolved, decode_resolved
from neox_config.spec.run import in_float64
from neox_launcher.protocol.layout_verification import LayoutRequest
from neox_launcher.worker.reporting import report_facts
from neox_model.assembly.choices import DTYPES
from neox_model.checkpoint.outcome import collect, shared_outcome
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.train.run import open_training
from neox_model.train.training import Additions
from neox_model.verify_layout.corpus import write_corpus
from neox_model.verify_layout.diagnosis import Sizes, answer_of
from neox_model.verify_layout.observer import Comparer, Recorder, Values
from neox_model.verify_layout.rows import Place
from neox_model.verify_layout.streams import Draw, DropoutWatch, with_draws

__all__ = ["LIMITS", "VOCABULARY", "verify_in"]

VOCABULARY = 61
"""Entries of the vocabulary; a prime, which requires padding on every tensor-parallel size."""

# The largest relative error that is rounding, by the coarsest data type of the computation.
LIMITS = {"fp64": 1e-10, "fp32": 2e-4, "fp16": 3e-2, "bf16": 2e-1}
_VALUES = "reference.pt"


def verify_in(groups: Groups, resolved: Resolved) -> None:
    """Compare a training on this layout with one process. Collective over all ranks.

    The answer of rank 0 goes to the launcher.
    """
    request = LayoutRequest.from_environment()
    folder = Path(request.folder)
    computes_in = "fp64" if request.in_float64 else resolved.run.precision.computes_in
    with shared_outcome(groups.control, "compute the reference"):
        if groups.world.rank == 0:
            write_corpus(folder, entries=VOCABULARY)
            reference = _without_base(decode_resolved(request.reference))
            _record(_in_float64(reference), folder / _VALUES, rounded_to=DTYPES[computes_in])
    values = Values(torch.load(folder / _VALUES, weights_only=True))
    place = Place(
        rank=groups.world.rank, data=groups.data.rank, tensor=groups.model.rank, stage=groups.pipe.rank
    )
    limit = LIMITS[computes_in]
    comparer = Comparer(values, place, limit=limit, compares_initial=request.in_float64)
    own = _without_base(resolved)
    with _default_dtype(DTYPES["fp64" if request.in_float64 else "fp32"]):
        _train(_in_float64(own) if request.in_float64 else own, groups, comparer)
    draws = _draws(resolved, groups, request.dropout) if any(request.dropout.values()) else []
    found = collect(groups.control, (comparer.rows, comparer.pieces, comparer.missing, [(place, draws)]))
    if groups.world.rank == 0:
        rows, pieces, missing, drawn = (
            [each for part in parts for each in part] for parts in zip(*found, strict=True)
        )
        layout = resolved.run.layout
        sizes = Sizes(
            data=groups.data.size,
            tensor=groups.model.size,
            stages=groups.pipe.size,
            accumulation=resolved.run.batch.accumulation,
            is_sharded=layout.zero > 0,
            splits_sequence=layout.splits_sequence,
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


def _without_base(resolved: Resolved) -> Resolved:
    """Return the configuration without the checkpoint of adapters' base, whose values are drawn."""
    return resolved.replaced(adapters=resolved.config.adapters.replaced(lora_base=None))


def _in_float64(resolved: Resolved) -> Resolved:
    """Return the configuration with all numbers in float64, and a loss without a scale."""
    return replace(resolved, run=in_float64(resolved.run), update=replace(resolved.update, scaling=None))


def _record(resolved: Resolved, path: Path, *, rounded_to: torch.dtype) -> None:
    """Train in this process, in float64, and write what it computes."""
    values = Values()
    with _default_dtype(torch.float64):
        _train(resolved, SINGLE_PROCESS, Recorder(values, rounded_to=rounded_to))
    torch.save(values.tensors, path)


def _draws(resolved: Resolved, groups: Groups, dropout: Mapping[str, float]) -> list[Draw]:
    """Return what this rank draws for dropout in one update. Collective over all ranks."""
    config = resolved.config
    given = {name: dropout[name] for name in ("hidden_dropout", "attention_dropout")}
    dropping = _without_base(resolved).replaced(
        model=config.model.replaced(**given), training=config.training.replaced(exit_interval=1)
    )
    with open_training(groups, dropping) as run, DropoutWatch() as watch:
        run.loop.run()
    return watch.draws


def _train(resolved: Resolved, groups: Groups, observer: Recorder | Comparer) -> None:
    with open_training(groups, resolved, Additions(hooks=[observer], fill=observer.fill)) as run:
        observer.attach(run.training)
        run.loop.run()
