"""The figures of the precision sweep: kept in a file, shown as a table in docs/compatibility-matrix.md."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.sources import ROOT

__all__ = ["PATH", "record"]

PATH = ROOT / "tests/support/precision_results.json"


def record(path: Path, cells: Iterable[Any], judgements: Iterable[Any]) -> None:
    """Put the cells' figures into the file, in place of those that it has of the same cells."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    for cell, judgement in zip(cells, judgements, strict=True):
        row = {
            "ratio": round(judgement.ratio, 4),
            "own_ratio": round(judgement.own_ratio, 4),
            "cosine": round(judgement.cosine, 5),
            "difference": float(f"{judgement.difference:.1g}"),
            "tensors": judgement.tensors,
            "underflows": judgement.underflows,
        }
        kept.setdefault(cell.precision, {}).setdefault(cell.layout, {})[cell.architecture] = row
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    os.replace(aside, path)
