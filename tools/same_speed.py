"""Compare speed, memory and start-up of two checkouts: alternating runs, and medians of their ratios."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from same_checkouts import Checkout
from same_run import environment_of
from same_training import SETTINGS

__all__ = ["Ratio", "measure"]

PAIRS = 7
# Larger than the cases, so that a step is not only Python.
TRAINING = SETTINGS | {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "train_iters": 30,
    "data_path": "data/corpus_text_document",
    "tokenizer_type": "GPT2BPETokenizer",
    "vocab_file": "data/gpt2-vocab.json",
    "merge_file": "data/gpt2-merges.txt",
    "eval_iters": 0,
}
_WARMUP = 5
# Commands that are started often, in the folder of inputs.
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("neox-config", "check", "configs/19M.yml"),
    ("neox-launch", "configs/19M.yml", "configs/local-data.yml", "--launcher", "local", "--dry-run"),
    ("neox-data", "inspect", "data/corpus_text_document"),
    ("neox-checkpoint", "inspect", "imported"),
    ("neox-convert", "to-hf", "--help"),
)


Measured = Mapping[str, float]


class Ratio(NamedTuple):
    """A measured ratio of the new checkout to the base.

    Args:
        name: what was measured.
        value: the median of the pairs.
        limit: the largest that is allowed.
    """

    name: str
    value: float
    limit: float

    def __str__(self) -> str:
        verdict = "" if self.value <= self.limit else ": TOO MUCH"
        return f"{self.name}: new / base {self.value:.3f} (at most {self.limit:.3f}){verdict}"


def measure(base: Checkout, new: Checkout, inputs: Path) -> Iterator[Ratio]:
    """Yield the ratios; every measurement runs in a new process, with one thread."""
    trainings = _alternating((base, new), lambda checkout: _train(checkout, inputs))
    # At least 0.98 of the base's speed.
    yield Ratio("time of a step", _ratio(trainings, "seconds"), 1 / 0.98)
    yield Ratio("memory of a run", _ratio(trainings, "kilobytes"), 1.02)
    for command in COMMANDS:
        starts = _alternating((base, new), partial(_start, inputs=inputs, command=command))
        yield Ratio(f"start of {' '.join(command[:2])}", _ratio(starts, "seconds"), 1.05)


def _alternating(
    checkouts: Sequence[Checkout], run: Callable[[Checkout], Measured]
) -> list[dict[str, Measured]]:
    """Run both PAIRS times, after one run that reads and compiles the files; return the pairs by label."""
    for checkout in checkouts:
        run(checkout)
    pairs = []
    for number in range(PAIRS):
        order = checkouts if number % 2 else checkouts[::-1]
        pairs.append({checkout.label: run(checkout) for checkout in order})
    return pairs


def _ratio(pairs: Sequence[Mapping[str, Measured]], name: str) -> float:
    return median(pair["new"][name] / pair["base"][name] for pair in pairs)


def _environment(checkout: Checkout) -> dict[str, str]:
    variables = environment_of(checkout)
    # Compiled modules are kept, as those of users are.
    del variables["PYTHONDONTWRITEBYTECODE"]
    return variables


def _train(checkout: Checkout, inputs: Path) -> Measured:
    with tempfile.TemporaryDirectory(dir=checkout.store) as name:
        folder = Path(name)
        shutil.copytree(inputs / "data", folder / "data")
        (folder / "settings.yml").write_text(json.dumps(TRAINING))
        arguments = ("-m", "neox_model.train", "--config", "settings.yml")
        measured = _timed([str(checkout.python), *arguments], checkout, folder)
        records = [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]
    times = [record["time/iteration"] for record in records if "time/iteration" in record]
    return {**measured, "seconds": median(times[_WARMUP:])}


def _start(checkout: Checkout, *, inputs: Path, command: Sequence[str]) -> Measured:
    arguments = [str(checkout.python), str(checkout.scripts / command[0]), *command[1:]]
    return _timed(arguments, checkout, inputs)


def _timed(arguments: Sequence[str], checkout: Checkout, folder: Path) -> Measured:
    """Run a command; return its seconds, and the largest memory of the process."""
    begin = time.perf_counter()
    output = subprocess.DEVNULL
    process = subprocess.Popen(
        arguments, cwd=folder, env=_environment(checkout), stdout=output, stderr=subprocess.STDOUT
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(arguments)} failed in {folder}; nothing can be measured")
    return {"seconds": seconds, "kilobytes": usage.ru_maxrss}
