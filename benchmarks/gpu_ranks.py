"""Train on two ranks that share one GPU, over NCCL if it allows that, and compare with one rank.

    PYTHONPATH=tests:tools python benchmarks/gpu_ranks.py [--json FILE]
    PYTHONPATH=tests:tools python benchmarks/gpu_ranks.py --rehearse       # over gloo on the CPU

NCCL refuses two ranks on one GPU unless they name different hosts, which NCCL_HOSTID does; messages then pass
through sockets. NVIDIA does not support this, so a probe comes first; if it fails, the layouts run over gloo
with tensors on the GPU, which shows streams, the allocator and partitioned weights, but not NCCL. What is
compared is the run, not its speed.
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from gpu_rows import Rows, parse

from gpu_training import COMPARED, LAYOUT_LIMIT, add_ranks, compare_layout
from support.distributed import DistributedFailure, run_ranks

PROBE_SECONDS, LAYOUT_SECONDS = 20.0, 40.0
# One that every layout can split; two ranks have one head of keys each.
ARCHITECTURE = COMPARED[2]
LAYOUTS = ("tensor 2", "torch, ZeRO 1", "torch, ZeRO 2", "torch, ZeRO 3", "torch, pipeline 2")
# The first version of PyTorch with which a layout works.
SINCE = {"torch, pipeline 2": (2, 13)}
# Importing torch takes most of the time of a tiny training.
AT_A_TIME = 2


def probe(rows: Rows) -> Literal["nccl", "gloo"]:
    """Return the backend over which two ranks on one GPU can add numbers."""
    began = time.monotonic()
    try:
        sums = run_ranks(add_ranks, size=2, backend="nccl", shares_gpu=True, timeout_seconds=PROBE_SECONDS)
    except DistributedFailure as error:
        rows.add(
            "two ranks on one GPU", "gloo", note=f"NCCL refuses it: {' '.join(str(error).split())[-200:]}"
        )
        return "gloo"
    if sums != [3.0, 3.0]:
        rows.fail("two ranks on one GPU", f"NCCL adds 1 and 2 to {sums}")
        return "gloo"
    rows.add("two ranks on one GPU", "NCCL", note=f"{time.monotonic() - began:.0f} s")
    return "nccl"


def compare(run: Any, folder: Path, rows: Rows) -> None:
    """Add a row for each layout."""
    references: dict[tuple[str, bool], list[float]] = {}

    def one(layout: str) -> tuple[float, float] | DistributedFailure:
        try:
            return compare_layout(ARCHITECTURE, layout, run, folder, references)
        except DistributedFailure as error:
            return error

    layouts = [name for name in LAYOUTS if torch.__version__ >= SINCE.get(name, (0,))]
    for name in set(LAYOUTS) - set(layouts):
        rows.skip(
            name, f"it needs PyTorch {'.'.join(map(str, SINCE[name]))}, and this is {torch.__version__}"
        )
    first, *others = layouts
    # The first also trains on one rank, with which all are compared.
    add(rows, first, one(first))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        running = {pool.submit(one, layout): layout for layout in others}
        for ended in as_completed(running):
            add(rows, running[ended], ended.result())


def add(rows: Rows, layout: str, found: tuple[float, float] | DistributedFailure) -> None:
    """Add the row of a layout: its largest difference from one rank, or why it has none."""
    if isinstance(found, DistributedFailure):
        rows.fail(layout, found)
    elif not (found[0] <= LAYOUT_LIMIT and found[1] <= LAYOUT_LIMIT):  # NaN does not agree.
        rows.fail(layout, f"differs from one rank: losses by {found[0]:.1e}, weights by {found[1]:.1e}")
    else:
        rows.add(
            layout,
            max(found),
            "largest difference of a loss or weight from one rank",
            expected=f"at most {LAYOUT_LIMIT:g}",
        )


def main() -> int:
    options, _, rows = parse(__doc__)
    if options.rehearse:
        run = partial(run_ranks, backend="gloo", timeout_seconds=LAYOUT_SECONDS)
        rows.skip("two ranks on one GPU", "a rehearsal has no GPU; the layouts run over gloo on the CPU")
    else:
        run = partial(run_ranks, backend=probe(rows), shares_gpu=True, timeout_seconds=LAYOUT_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        compare(run, Path(folder), rows)
    return 1 if rows.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
