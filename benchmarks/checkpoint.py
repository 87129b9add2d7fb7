"""Measure how long saving stops a run: asynchronously, synchronously, and with PyTorch's async_save.

    python benchmarks/checkpoint.py [--megabytes 1000] [--steps 200] [--tokens 128] [--rounds 2]

One process trains weights of a third of the size with AdamW, whose two states are the rest. The first table
is the time until a save returns to the run, of the first save, which reserves the memory, and of later
ones. The second is the time of the steps with one asynchronous save in their middle, divided by the time of
as many steps without: how much longer the steps during the save are than the median of the others. A step is
a forward and a backward pass of square matrices on --tokens vectors, and an update. Each table is followed by
the goal and whether it is reached. All saves go to a temporary folder in the working directory, or in
--folder.
"""

import argparse
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from neox_model.checkpoint.background import BackgroundSaves
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.torch_compat import init_process_group
from support.checkpoint_runs import Run

_LAYERS = 16
_BYTES_PER_WEIGHT = 12
_STALL_GOAL, _STEPS_GOAL = 0.10, 1.03


class Peer:
    """PyTorch's asynchronous save of the same tensors."""

    def __init__(self, run: Run, folder: Path) -> None:
        init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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

    @property
    def is_saving(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def finish(self) -> None:
        if self._pending is not None:
            self._pending.result()


class Ours:
    """This project's asynchronous save."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._saves = BackgroundSaves(SINGLE_PROCESS, torch.device("cpu"), patience=None)
        self.proceed, self.finish = self._saves.proceed, self._saves.finish
        # As the run does after its first iteration.
        self._saves.prepare(run._parts())

    @property
    def is_saving(self) -> bool:
        return self._saves.iteration is not None

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
    print(f"{'the run stops for':42} first save   later, median   ratio   processor time   ratio")
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


def compute_gradients(weights: Iterable[torch.Tensor], tokens: int) -> None:
    """Run a forward and a backward pass through the largest square matrix that each weight can hold."""
    hidden: torch.Tensor | None = None
    for weight in weights:
        weight.grad = None
        width = math.isqrt(weight.numel())
        hidden = torch.ones(tokens, width) if hidden is None else hidden
        hidden = torch.tanh(hidden @ weight.flatten()[: width * width].view(width, width))
    assert hidden is not None
    hidden.mean().backward()


def extra_time(run: Run, steps: int, tokens: int, saves: Ours | Peer) -> tuple[list[float], list[float]]:
    """Train with one save in the middle of the steps.

    Returns:
        The medians of the steps before and after the save, and how much longer the steps from its start to
        its end took in sum than as many such medians: elapsed and processor time each.
    """
    usual: list[tuple[float, float]] = []
    during: list[tuple[float, float]] = []

    def step() -> None:
        compute_gradients(run.model.layers, tokens)
        run.engine.update.mixed.step()
        saves.proceed()

    def step_and_start() -> None:
        step()
        saves.start()

    for index in range(steps):
        starts = index == steps // 2
        # Before the step: the one in which the save ends completes it.
        belongs = starts or saves.is_saving
        found = seconds_of(step_and_start if starts else step)
        (during if belongs else usual).append(found)
    if saves.is_saving or not usual:
        sys.exit(f"the save did not end within {steps // 2} steps; run with more --steps")
    saves.finish()
    medians = [statistics.median(each) for each in zip(*usual, strict=True)]
    sums = [sum(each) for each in zip(*during, strict=True)]
    return medians, [total - len(during) * median for total, median in zip(sums, medians, strict=True)]


def measure_steps(run: Run, ours: Ours, peer: Peer, steps: int, tokens: int, rounds: int) -> None:
    """Print the time of steps with one save, divided by that of steps without."""
    kinds = {"ours, asynchronous": ours, "torch.distributed.checkpoint.async_save": peer}
    ratios: dict[str, list[list[float]]] = {name: [] for name in kinds}
    print(f"\n{f'{steps} steps with one save':42} one step  the save adds   ratio   processor time   ratio")
    for _ in range(rounds):
        for name, saves in kinds.items():
            run.iteration += 1
            medians, extra = extra_time(run, steps, tokens, saves)
            found = [1 + more / (steps * usual) for more, usual in zip(extra, medians, strict=True)]
            ratios[name].append(found)
            print(
                f"{name:42} {medians[0]:6.3f} s   {extra[0]:10.2f} s   {found[0]:.3f}   "
                f"{extra[1]:12.2f} s   {found[1]:.3f}",
                flush=True,
            )
    elapsed, used = (statistics.median(each) for each in zip(*ratios["ours, asynchronous"], strict=True))
    _judge(f"{steps} steps with one save", elapsed, used, _STEPS_GOAL)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="size of weights and states")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128, help="of each step")
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
        measure_steps(run, ours, peer, arguments.steps, arguments.tokens, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
