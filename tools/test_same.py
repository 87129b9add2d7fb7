"""`make test-same BASE=COMMIT`: compare this checkout with another commit, by what their commands do.

    PYTHONPATH=tests .venv/bin/python tools/test_same.py COMMIT [--part k/n] [--case TEXT] [--group NAME ...]

Both run the same commands in folders with the same files: trainings (losses, norms and weights to the last
bit), resumes of the base's checkpoints, data files, conversions, generation, estimates and plans. What the
base showed is kept in .test-same, by commit, so that a later or interrupted comparison runs only the new
checkout. Our packages are never imported here. Exit code 1: something differs.
"""

import argparse
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from same_case import Case, Part, chosen
from same_checkouts import ROOT, STORE, Checkout, base_checkout, new_checkout
from same_compare import Outcome, compare, report
from same_mutants import share_killed
from same_observe import Value, flattened
from same_programs import configuration_cases, conversion_cases, data_cases
from same_run import Runner, environment_of
from same_speed import measure
from same_training import resume_cases, training_cases

__all__ = ["main"]

TENTH = "1/10"
WHOLE = Part(1, 1)
# The present place, and that in older commits.
FIGURES = ("tools/gpu_gate/figures.json", "tests/support/gpu_gate_figures.json")


def _inputs(base: Checkout) -> Path:
    """Write what the cases read, once for each base."""
    folder = base.store / "inputs"
    if folder.exists():
        return folder
    aside = folder.with_suffix(".new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    variables = environment_of(base)
    command = [ROOT / ".venv/bin/python", ROOT / "tools/same_inputs.py", aside]
    _run(command, {**variables, "PYTHONPATH": str(ROOT / "tests")}, aside)
    # The links are files in a copy: both checkouts read the base's.
    shutil.copytree(base.sources / "configs", aside / "configs")
    corpus = ["--input", "words.jsonl", "--output-prefix", "data/corpus"]
    tokenizer = ["--vocab-file", "data/gpt2-vocab.json", "--merge-file", "data/gpt2-merges.txt"]
    script = [base.python, base.scripts / "preprocess_data", "--tokenizer-type", "GPT2BPETokenizer"]
    _run([*script, *corpus, *tokenizer, "--quiet"], variables, aside)
    aside.rename(folder)
    subwords = ["--tokenizer-type", "HFTokenizer", "--vocab-file", "hf/llama-plain/tokenizer.json"]
    prefix = ["--input", "words.jsonl", "--output-prefix", "data/llama", "--quiet"]
    _run([base.python, base.scripts / "preprocess_data", *subwords, *prefix], variables, folder)
    # Its paths are absolute.
    _run(
        [base.python, base.scripts / "neox-convert", "from-hf", "hf/llama-plain", "--output", "imported"],
        variables,
        folder,
    )
    return folder


def _run(command: Sequence[str | Path], variables: dict[str, str], folder: Path) -> None:
    found = subprocess.run(command, cwd=folder, env=variables, check=False, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{found.stdout}{found.stderr}")


def _table(part: Part, inputs: Path) -> list[Case]:
    """Return all cases; of runs, those of the part."""
    return [
        *training_cases(part),
        *resume_cases(),
        *data_cases(),
        *conversion_cases(inputs),
        *configuration_cases(inputs),
    ]


@contextmanager
def _pool(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Provide threads; after an error or Ctrl-C, what has not started is left out."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _compare_all(cases: Sequence[Case], base: Runner, new: Runner, jobs: int) -> list[Outcome]:
    by_title = {case.title: case for case in training_cases(WHOLE)}
    needed = sorted(set().union(*(case.needed for case in cases)))

    def compare_one(case: Case) -> Outcome:
        expected = base.result(case, keeps_folder=case.title in needed)
        source = case.uninterrupted
        uninterrupted = None if source is None else base.result(by_title[source], keeps_folder=True)
        return compare(case, expected, new.result(case, keeps_folder=False), uninterrupted)

    outcomes, begin = {}, time.monotonic()
    with _pool(jobs) as pool:
        list(pool.map(lambda title: base.result(by_title[title], keeps_folder=True), needed))
        futures = {pool.submit(compare_one, case): case for case in cases}
        for number, future in enumerate(as_completed(futures), 1):
            case = futures[future]
            outcomes[case.title] = future.result()
            shown = f"{number}/{len(cases)}, {time.monotonic() - begin:.0f} s: {outcomes[case.title].kind}"
            sys.stderr.write(f"{shown}: {case.title}\n")
    return [outcomes[case.title] for case in cases]


def _further(given: argparse.Namespace, base: Checkout, new: Checkout, inputs: Path) -> Iterator[bool]:
    """Make the comparisons that are not of results; print each, and yield whether it is good."""
    for ratio in measure(base, new, inputs) if given.speed else ():
        sys.stdout.write(f"{ratio}\n")
        yield ratio.value <= ratio.limit
    if given.mutants:
        shares = [share_killed(checkout, given.mutants, given.jobs) for checkout in (base, new)]
        sys.stdout.write(
            f"mutants killed: base {shares[0]:.1%}, new {shares[1]:.1%} (at most 3 points lower)\n"
        )
        yield shares[1] >= shares[0] - 0.03
    if given.gate:
        figures = [_figures(checkout) for checkout in (base, new)]
        passes = subprocess.run(["make", "gpu-gate"], cwd=new.sources, check=False).returncode == 0
        changed = [
            name for name in {**figures[0], **figures[1]} if figures[0].get(name) != figures[1].get(name)
        ]
        sys.stdout.write(f"GPU gate: {'passes' if passes else 'FAILS'}, {len(changed)} figures changed\n")
        sys.stdout.writelines(f"    {name}\n" for name in changed[:10])
        yield passes and not changed


def _figures(checkout: Checkout) -> dict[str, Value]:
    """Return the figures of `make gpu-gate` that a checkout states."""
    path = next(path for path in map(checkout.sources.joinpath, FIGURES) if path.exists())
    return dict(flattened(json.loads(path.read_text()), ""))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--new", default=str(ROOT), help="a commit or a checkout in place of this one")
    parser.add_argument("--part", help=f"k/n: the k-th n-th of the runs; default: {TENTH}")
    parser.add_argument("--case", help="only cases with this text in their title, of all runs")
    parser.add_argument("--group", nargs="*", default=[], help="only cases of these groups")
    parser.add_argument("--speed", action="store_true", help="only measure speed, memory and start-up")
    parser.add_argument("--mutants", type=int, help="only count which share of so many mutants tests notice")
    parser.add_argument("--gate", action="store_true", help="only compile for GPUs, and compare the figures")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at the same time")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    given = _arguments(arguments)
    try:
        part = Part.parse(given.part) if given.part else WHOLE if given.case else Part.parse(TENTH)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    STORE.mkdir(exist_ok=True)
    with (STORE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("waiting for another comparison in this folder\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        base, new = base_checkout(given.base), new_checkout(given.new)
        inputs = _inputs(base)
        if given.speed or given.mutants or given.gate:
            return int(not all([*_further(given, base, new, inputs)]))
        cases = chosen(_table(part, inputs), name=given.case, groups=given.group)
        if not cases:
            sys.stderr.write("no case has this name; without CASE and GROUP, all run\n")
            return 2
        before = new.digest()
        runner = Runner(base, inputs)
        runners = runner, Runner(new, inputs, base=runner)
        try:
            outcomes = _compare_all(cases, *runners, given.jobs)
        finally:
            for each in runners:
                each.close()
    command = f"make test-same BASE={given.base}"
    command += "" if given.new == str(ROOT) else f" NEW={shlex.quote(given.new)}"
    sys.stdout.write(report(outcomes, command))
    if new.digest() != before:
        sys.stdout.write(
            "the sources changed during the comparison; run it again, or compare a commit (NEW=HEAD)\n"
        )
        return 1
    return int(any(outcome.kind == "different" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
