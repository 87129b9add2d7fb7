"""The figures of the precision sweep: kept in a file, a table of docs/reports/compatibility-matrix.md."""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from precision.kinds import KINDS, PRECISION_NAMES
from support.sources import ROOT

__all__ = ["PATH", "record", "section"]

PATH = ROOT / "tools/precision/results.jsonl"

Row = dict[str, Any]


def record(path: Path, cells: Iterable[Any], judgements: Iterable[Any]) -> None:
    """Put the cells' figures into the file, a line for each; they replace those of the same cells."""
    kept = {_key(row): row for row in _read(path)}
    for cell, judgement in zip(cells, judgements, strict=True):
        row = {
            "precision": cell.precision,
            "layout": cell.layout,
            "architecture": cell.architecture,
            "ratio": round(judgement.ratio, 4),
            "own_ratio": round(judgement.own_ratio, 4),
            "cosine": round(judgement.cosine, 5),
            "difference": float(f"{judgement.difference:.1g}"),
            "tensors": judgement.tensors,
            "underflows": judgement.underflows,
        }
        kept[_key(row)] = row
    aside = path.with_suffix(".new")
    aside.write_text("".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)))
    os.replace(aside, path)


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key(row: Row) -> tuple[str, ...]:
    return row["precision"], row["layout"], row["architecture"]


def section(path: Path = PATH) -> Iterator[str]:
    """Return the lines of the document: what was compared, and the table."""
    kept = _read(path)
    yield from ("## Precision", "", *_EXPLANATION, "")
    yield "| precision | layouts | cells | ratio | plain ratio | cosine | difference |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for precision, (kind, layouts) in product(PRECISION_NAMES, KINDS.items()):
        rows = [row for row in kept if row["precision"] == precision and row["layout"] in layouts]
        if rows:
            yield f"| {precision} | {kind} | {len(rows)} | {_worst(rows)} |"
    rows = [row for row in kept if row["precision"] == "fp16"]
    tensors, underflows = (sum(int(row[name]) for row in rows) for name in ("tensors", "underflows"))
    yield ""
    lost = f"{underflows:,} of them lose" if underflows else "None of them loses"
    yield (
        f"In fp16 {tensors:,} updates of tensors were compared. {lost} gradients to underflow at a loss "
        "scale of 1. The others are the same at all scales."
    )
    names = sorted({row["architecture"] for row in kept})
    yield ""
    yield f"The figures cover {len(names)} architectures: {'; '.join(names)}."


_EXPLANATION = (
    "`make sweep NAME=precision` applies one SGD update to the architectures of `tests/support/layouts.py` "
    "on every layout in fp32, bf16 and fp16, then three of Adam, and writes these figures of the first:"
    " the worst of all tensors whose update is above 1e-3 of the largest one. Clipping, accumulation, "
    "tied weights and recomputed activations vary; fp16 runs with loss scales of 1, 128 and 65,536.",
    "",
    "- *Ratio* and *cosine* compare the update with that of plain PyTorch in fp32 on one process: its "
    "projection on it, and the angle. *Plain ratio* is the ratio of plain PyTorch in the same "
    "precision, which rounding alone moves from 1, farthest for tensors of one element (scalenorm's "
    "weight).",
    "- *Difference* is the relative distance from plain PyTorch in the same precision on one process, "
    "with the same micro-batches. It is 0 where the same operations run in the same order. ZeRO divides"
    " and sends gradients in 16 bit, which rounds them again; the stages of a pipeline add the "
    "gradients of a shared weight in fp32. Tensor parallelism adds partial products that are rounded "
    "already, so that all activations are rounded otherwise: the difference is as large there as plain "
    "PyTorch's own distance from fp32.",
)


def _worst(rows: list[Row]) -> str:
    ratio, own_ratio = (
        max((row[name] for row in rows), key=lambda ratio: abs(ratio - 1)) for name in ("ratio", "own_ratio")
    )
    cosine = min(row["cosine"] for row in rows)
    return f"{ratio:.4f} | {own_ratio:.4f} | {cosine:.5f} | {max(row['difference'] for row in rows):.0e}"
