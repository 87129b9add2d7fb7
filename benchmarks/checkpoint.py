"""Measure how long saving stops a training: asynchronously, synchronously, and with PyTorch's async_save.

    python benchmarks/checkpoint.py [--megabytes 1000] [--steps 200] [--rounds 2]

One process trains weights of a third of the size with AdamW, whose two states are the rest. The first table
is the time until a save returns to the training, of the first save, which reserves the memory, and of later
ones. The second is the time of the steps with one asynchronous save in their middle, divided by the time of
the same steps without, in turns. Each table is followed by the goal and whether it is reached. All saves go
to a temporary folder in the working directory, or in --folder.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from neox_model.checkpoint.background import BackgroundSaves
from neox_model.parallel.groups import SINGLE_PROCESS
from support.checkpoint_runs import Run

_LAYERS = 16
_BYTES_PER_WEIGHT = 12
_STALL_GOAL, _STEPS_GOAL = 0.10, 1.03


class Peer:
    """PyTorch's asynchronous save of the same tensors."""

    def __init__(self, run: Run, folder: Path) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._run, self._folder, self._count, self._pending = run, folder, 0, None

    def start(self) -> None:
        states = self._run.engine.update.optimizer.state
        tensors = {
            f"{index}/{name}": value
            for index, weight in enumerate(self._run.model.layers)
            for name, value in {"weight": weight.data, **states[weight]}.items()
        }
        self._count += 1
        self._pending = dcp.async_save(tensors, checkpoint_id=str(self._folder / str(self._count)))

    def proceed(self) -> None:
        """Do nothing: PyTorch's threads finish the save."""

    def finish(self) -> None:
        if self._pending is not None:
            self._pending.result()


class Ours:
    """This project's asynchronous save."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._saves = BackgroundSaves(SINGLE_PROCESS, torch.device("cpu"), patience=None)
        self.proceed, self.finish = self._saves.proceed, self._saves.finish
        # As the training does after its first iteration.
        self._saves.prepare(run._parts())

    def start(self) -> None:
        run = self._run
        self._saves.start(self._folder, run._parts(), iteration=run.iteration, config=run.config, keep_last=1)


def seconds_of(action: Callable[[], object]) -> tuple[float, float]:
    """Return the elapsed time of an action, and this process's processor time."""
    start, used = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - used


def measure_stalls(run: Run, ours: Ours, peer: Peer, folder: Path, rounds: int) -> None:
    """Print the time until each kind of save returns, and its part of a synchronous save."""
    kinds: dict[str, Callable[[], object]] = {
        "synchronous": partial(run.save, folder / "synchronous", keep_last=1),
        "ours, asynchronous": ours.start,
        "torch.distributed.checkpoint.async_save": peer.start,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        run.iteration += 1
        for name, save in kinds.items():
            times[name].append(seconds_of(save))
            ours.finish()
            peer.finish()
    usual = {
        name: [statistics.median(each) for each in zip(*found[1:], strict=True)]
        for name, found in times.items()
    }
    elapsed, used = usual["synchronous"]
    print(f"{'the training stops for':42} first save   later, median   ratio   processor time   ratio")
    for name, found in times.items():
        later, processor = usual[name]
        print(
            f"{name:42} {found[0][0]:8.3f} s   {later:11.3f} s   {later / elapsed:5.1%}   "
            f"{processor:12.3f} s   {processor / used:5.1%}",
            flush=True,
        )
    stall = usual["ours, asynchronous"]
    _judge("a later save", stall[0] / elapsed, stall[1] / used, _STALL_GOAL)


def _judge(what: str, elapsed: float, processor: float, goal: float) -> None:
    """Print whether a ratio reaches the goal, by elapsed and by processor time."""
    words = {True: "reached", False: "missed"}
    print(
        f"goal for {what}: ratio below {goal:g}: {words[elapsed < goal]} by elapsed time, "
        f"{words[processor < goal]} by processor time"
    )


def steps_with(run: Run, steps: int, saves: Ours | Peer | None) -> tuple[float, float]:
    """Return the elapsed and the processor time of the steps, and of one save in their middle."""
    gradients = [torch.full_like(weight, 1e-3) for weight in run.model.layers]
    start, used = time.perf_counter(), time.process_time()
    for step in range(steps):
        for weight, gradient in zip(run.model.layers, gradients, strict=True):
            weight.grad = gradient
        run.engine.update.mixed.step()
        if saves is not None:
            saves.start() if step == steps // 2 else saves.proceed()
    elapsed = time.perf_counter() - start, time.process_time() - used
    if saves is not None:
        saves.finish()
    return elapsed


def measure_steps(run: Run, ours: Ours, peer: Peer, steps: int, rounds: int) -> None:
    """Print the time of steps with one save, divided by that of steps without."""
    kinds = {"without": None, "ours, asynchronous": ours, "torch.distributed.checkpoint.async_save": peer}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, saves in kinds.items():
            run.iteration += 1
            times[name].append(steps_with(run, steps, saves))
    best = {name: [min(each) for each in zip(*found, strict=True)] for name, found in times.items()}
    print(f"\n{f'{steps} steps with one save':42} elapsed   ratio    processor time   ratio")
    for name, (elapsed, used) in best.items():
        ratios = elapsed / best["without"][0], used / best["without"][1]
        print(
            f"{name:42} {elapsed:6.2f} s   {ratios[0]:.3f}    {used:8.2f} s      {ratios[1]:.3f}", flush=True
        )
    ours_elapsed, ours_used = best["ours, asynchronous"]
    elapsed, used = best["without"]
    _judge(f"{steps} steps with one save", ours_elapsed / elapsed, ours_used / used, _STEPS_GOAL)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="size of weights and states")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the temporary folder is made")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    width = arguments.megabytes * 10**6 // (_BYTES_PER_WEIGHT * 3 * _LAYERS)
    run = Run(width=width, layers=_LAYERS)
    run.train()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        ours, peer = Ours(run, folder / "ours"), Peer(run, folder / "peer")
        measure_stalls(run, ours, peer, folder, arguments.rounds)
        measure_steps(run, ours, peer, arguments.steps, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
