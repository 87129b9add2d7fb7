"""Measure the idle share of pipeline schedules on 4 processes, with layers that only wait.

A stage's forward pass, its gradients of activations and its gradients of weights take a given time each,
which its chunks share. So the schedule alone decides how long an update takes: no computation disturbs it,
and messages are small. The time outside the passes is idle; the mean of the stages counts, and is compared
with the formula. The schedules are those of the torch engine (`engine/torch_pipeline.py`).

    python benchmarks/pipeline_bubble.py
    python benchmarks/pipeline_bubble.py --milliseconds 200 --micro-batches 16
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neox_config.facts.pipeline_schedules import SCHEDULES, idle_share, stage_of_part

STAGES, UPDATES = 4, 2
# Name -> schedule and chunks per stage.
CASES: dict[str, tuple[Any, int]] = {
    "1f1b": ("1f1b", 1),
    "interleaved, 2 chunks": ("interleaved", 2),
    "interleaved, 4 chunks": ("interleaved", 4),
    "zero_bubble": ("zero_bubble", 1),
    "zero_bubble, 2 chunks": ("zero_bubble", 2),
    "zbv": ("zbv", 2),
}


def waiting_layer(seconds: float) -> Any:
    """Return a module each of whose three passes waits; runs in a process with torch."""
    import torch
    from torch import nn

    class OfActivations(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            time.sleep(seconds)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(seconds)
            return gradients[0]

    class OfWeights(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(seconds)
            return gradients[0]

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, value: Any) -> Any:
            return OfActivations.apply(value) + OfWeights.apply(self.weight)

    return Waiting()


def measure(rank: int, folder: Path, milliseconds: float, micro_batches: int) -> None:
    """Run each schedule and write the idle share of this stage; runs in each process."""
    import torch
    from torch import distributed

    from neox_model.engine.torch_pipeline import SCHEDULE_CLASSES
    from neox_model.pipelining_compat import PipelineChunk
    from neox_model.processes import leave_processes
    from neox_model.torch_compat import init_process_group
    from neox_model.worker import exit_worker

    store = distributed.FileStore(str(folder / "store"), STAGES)
    init_process_group("gloo", store=store, rank=rank, world_size=STAGES)
    busy = [0.0]

    @contextmanager
    def measured(phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        busy[0] += time.perf_counter() - began

    message = torch.zeros(1, 4, device="meta", requires_grad=True)
    found = {}
    for name, (schedule, chunks) in CASES.items():
        placement, parts = SCHEDULES[schedule].placement, STAGES * chunks
        own = [
            PipelineChunk(
                waiting_layer(milliseconds / 1000 / chunks),
                part,
                parts,
                inputs=[message],
                outputs=[message],
                device=torch.device("cpu"),
                group=distributed.group.WORLD,
                measure=measured,
                after_weights=lambda: None,
            )
            for part in range(parts)
            if stage_of_part(part, stages=STAGES, placement=placement) == rank
        ]
        runner = SCHEDULE_CLASSES[schedule](
            own, n_microbatches=micro_batches, loss_fn=lambda output, target: output.sum(), scale_grads=False
        )
        given = torch.zeros(micro_batches, 4, requires_grad=True)
        inputs = (given,) if rank == 0 else ()
        shares: list[float] = []
        # The first update exchanges what the stages must know.
        for _ in range(UPDATES + 1):
            distributed.barrier()
            busy[0], began = 0.0, time.perf_counter()
            runner.step(*inputs, target=torch.zeros(micro_batches), return_outputs=False)
            distributed.barrier()
            share = torch.tensor(1 - busy[0] / (time.perf_counter() - began))
            distributed.all_reduce(share)
            shares.append(float(share) / STAGES)
        found[name] = min(shares[1:])
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    leave_processes()
    # The end of a process of multiprocessing would finalize Python while threads of gloo run.
    exit_worker(0)


def main() -> None:
    """Print the measured idle share of each schedule, the formula, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=300, help="time of each of a stage's passes")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches per update")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        measure(given.rank, given.folder, given.milliseconds, given.micro_batches)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", name, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(STAGES)]
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a process failed")
        found = json.loads((Path(name) / "found.json").read_text())
    print(
        f"{STAGES} stages, {given.micro_batches} micro-batches, {given.milliseconds:g} ms for each of a "
        f"stage's three passes; least of {UPDATES} updates"
    )
    for name, (schedule, chunks) in CASES.items():
        expected = idle_share(schedule, stages=STAGES, chunks=chunks, micro_batches=given.micro_batches)
        ratio = found[name] / expected
        print(f"{name:<22} idle {found[name]:6.1%}   formula {expected:6.1%}   ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
