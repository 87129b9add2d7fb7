"""Choose the model of `make quickstart` by what it has learned after some minutes.

Each variant changes configs/quickstart.yml. It is trained for the same time on this machine: a first training
of a few iterations measures the speed, from which the number of iterations follows. Reported are

- bits per byte of the corpus's validation files, by `neox-launch evaluate --data`;
- of 100 samples of 200 tokens at temperature 0.8, which continue the quickstart's prompts and are cut to
  complete lines: the number with at least five statements that parse.

    python benchmarks/quickstart.py --minutes 4 before "wide=hidden-size=512 lr=0.002"

A variant is a name, then settings separated by spaces; `vocab-size` and `processes` are also settings.
Without settings it is the file itself. A variant in WORK/results.jsonl with the same settings, minutes and
number of samples is not repeated.
"""

import argparse
import ast
import json
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from itertools import cycle, islice
from pathlib import Path

from neox_config import load_config, resolve

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/quickstart.yml"
PROMPTS = ROOT / "configs/quickstart-prompts.txt"
MEASURED = 30
TOKENS, STATEMENTS = 200, 5
# Proportions of configs/quickstart.yml.
TRAINING, VALIDATION = 0.8, 0.9


def main() -> None:
    """Train the variants and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", metavar="NAME[=SETTINGS]")
    parser.add_argument("--minutes", type=float, default=4.0, help="time of each run (default: 4)")
    parser.add_argument("--samples", type=int, default=100, help="number of samples (default: 100)")
    parser.add_argument("--work", type=Path, default=Path("quickstart-variants"), help="folder for all files")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    output = work / "results.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    for variant in arguments.variants:
        name, _, settings = variant.partition("=")
        identity = {
            "name": name,
            "settings": settings,
            "minutes": arguments.minutes,
            "samples": arguments.samples,
        }
        row = next((row for row in rows if identity.items() <= row.items()), None)
        if row is None:
            row = identity | measure(name, settings.split(), work, arguments)
            rows.append(row)
            with output.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        print(shown(row), flush=True)
    print("\n".join(["", HEADER, *map(shown, rows)]))


HEADER = (
    "| variant | settings | iterations | tokens | seconds | bits per byte | samples with code |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
)


def shown(row: dict) -> str:
    """Return a row of the table."""
    return (
        f"| {row['name']} | {row['settings']} | {row['iterations']:,} | {row['tokens']:,} "
        f"| {row['seconds']:.0f} | {row['bits_per_byte']:.3f} | {row['code']} of {row['samples']} |"
    )


def measure(name: str, settings: list[str], work: Path, chosen: argparse.Namespace) -> dict:
    """Train a variant for some minutes, then evaluate it."""
    given = dict(setting.split("=", 1) for setting in settings)
    entries = int(given.pop("vocab-size", 8192))
    processes = int(given.pop("processes", 2))
    heldout = prepare(work, entries)
    folder = work / f"{name}-{chosen.minutes:g}"
    common = {
        "data-path": work / f"data-{entries}/stdlib_text_document",
        "vocab-file": work / f"tokenizer-{entries}.json",
        "num-gpus": processes,
        "tensorboard-dir": "null",
        **given,
    }

    def run(what: str, **extra: object) -> None:
        changed = common | {key.replace("_", "-"): value for key, value in extra.items()}
        values = "".join(f" --set {shlex.quote(each)}" for each in overrides(changed))
        call(f"neox-launch {what} --config {CONFIG}{values}", folder)

    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted measurement
    folder.mkdir()
    trial, real = folder / "trial", folder / "run"
    run("", train_iters=MEASURED, eval_iters=0, save="null", load="null", log_dir=trial, log_interval=1)
    per_second = speed(trial / "metrics.jsonl")
    iterations = int(chosen.minutes * 60 * per_second)
    start = time.monotonic()
    run("", train_iters=iterations, save=real / "checkpoints", load=real / "checkpoints", log_dir=real)
    seconds = time.monotonic() - start
    run(
        f"evaluate --data {heldout}",
        load=real / "checkpoints",
        log_dir=real,
        eval_results_prefix=real / "results",
    )
    (results,) = real.glob("results*.json")
    texts = []
    if chosen.samples:
        samples = real / "samples.jsonl"
        run(
            "generate",
            load=real / "checkpoints",
            sample_input_file=prompts(work, chosen.samples),
            maximum_tokens=TOKENS,
            sample_output_file=samples,
        )
        rows = [json.loads(line) for line in samples.read_text().split("\n") if line]
        texts = [row["prompt"] + row["text"] for row in rows if row["text"] is not None]
    resolved = resolve(load_config([CONFIG], overrides=overrides(common)), devices=processes)
    per_iteration = resolved.run.batch.whole * resolved.config.model.seq_length
    return {
        "iterations": iterations,
        "tokens": iterations * per_iteration,
        "seconds": seconds,
        "bits_per_byte": bits_per_byte(json.loads(results.read_text())),
        "code": sum(map(has_statements, texts)),
    }


def prompts(work: Path, number: int) -> Path:
    """Write a file with this number of prompts, those of the quickstart in turn; return its path."""
    path = work / f"prompts-{number}.txt"
    path.write_text("".join(islice(cycle(PROMPTS.read_text().splitlines(keepends=True)), number)))
    return path


def overrides(settings: dict) -> list[str]:
    """Return settings as `neox-launch --set` takes them."""
    return [f"{name}={value}" for name, value in settings.items()]


def prepare(work: Path, entries: int) -> Path:
    """Write corpus, tokenizer and dataset, unless they exist; return the file with the validation texts."""
    corpus, heldout = work / "stdlib.jsonl", work / "validation.jsonl"
    tokenizer, data = work / f"tokenizer-{entries}.json", work / f"data-{entries}"
    if not heldout.exists():
        call(f"neox-data stdlib-corpus {corpus}", work)
        lines = corpus.read_text().splitlines(keepends=True)
        first, last = round(TRAINING * len(lines)), round(VALIDATION * len(lines))
        unfinished = heldout.with_suffix(".new")
        unfinished.write_text("".join(lines[first:last]))
        unfinished.replace(heldout)
    if not data.exists():
        unfinished = data.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        call(f"neox-data train-tokenizer --input {corpus} --vocab-size {entries} --output {tokenizer}", work)
        call(
            f"preprocess_data --input {corpus} --tokenizer-type HFTokenizer --vocab-file {tokenizer} "
            f"--append-eod --output-prefix {unfinished / 'stdlib'}",
            work,
        )
        unfinished.replace(data)
    return heldout


def call(command: str, folder: Path) -> None:
    """Run a command in the repository; its output goes to output.log in a folder."""
    program, *words = shlex.split(command)
    with (folder / "output.log").open("a") as log:
        log.write(f"$ {command}\n")
        log.flush()
        path = Path(sys.executable).with_name(program)
        done = subprocess.run([path, *words], cwd=ROOT, stdout=log, stderr=log, check=False)
    if done.returncode != 0:
        sys.exit(f"{command} failed; see {folder / 'output.log'}")


def speed(metrics: Path) -> float:
    """Return iterations per second, without the first ten."""
    times = [
        line["time"]
        for line in map(json.loads, metrics.read_text().splitlines())
        if "loss/train" in line and line["iteration"] > 10
    ]
    return (len(times) - 1) / (times[-1] - times[0])


def bits_per_byte(results: dict) -> float:
    """Return the value in a results file of an evaluation."""
    return results["perplexity"]["bits_per_byte"]["value"]


def has_statements(text: str) -> bool:
    """Return whether enough statements in the complete lines of a text parse."""
    return statements(text[: text.rfind("\n") + 1].splitlines()) >= STATEMENTS


def statements(lines: list[str]) -> int:
    """Return the number of statements in the longest runs of lines that parse, from the first line on.

    Lines are unindented together. Strings, names and other expressions that do nothing do not count.
    """
    count = first = 0
    while first < len(lines):
        trees = ((stop, parsed(lines[first:stop])) for stop in range(len(lines), first, -1))
        stop, tree = next(((stop, tree) for stop, tree in trees if tree is not None), (first + 1, None))
        count += sum(map(does_something, ast.walk(tree))) if tree is not None else 0
        first = stop
    return count


def parsed(lines: list[str]) -> ast.Module | None:
    """Return the syntax tree of lines; None if they are no program."""
    try:
        return ast.parse(textwrap.dedent("\n".join(lines)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # The last two: too deeply nested.
        return None


def does_something(node: ast.AST) -> bool:
    """Return whether a node is a statement, and not only a value."""
    return isinstance(node, ast.stmt) and not (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Await | ast.Yield)
    )


if __name__ == "__main__":
    main()
