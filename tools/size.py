"""Measure the sources, and compare them with the numbers that CONTRIBUTING.md states.

    python3 tools/size.py                    print tables; standard library alone, seconds
    python3 tools/size.py --check            fail if a number is larger than stated; print nothing otherwise
    .venv/bin/python tools/size.py --trace   also train a small GPT, and print which files that goes through

`--trace --check` compares all numbers.
"""

import argparse
import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from size_count import LANGUAGES, LONG, Counts, count_takers, count_text
from size_holders import Program

__all__ = ["File", "compare", "main", "measure"]

ROOT = Path(__file__).parents[1]
DOCUMENT = "CONTRIBUTING.md"
AREAS = {
    "sources": ("packages/*/src",),
    "tests": ("packages/*/tests", "tests", "conftest.py"),
    "tools": ("tools", "benchmarks"),
}


@dataclass(frozen=True)
class File:
    """A measured file.

    Args:
        area: its key in AREAS.
        path: relative to the folder `src` of its package; outside the packages, to the root.
        language: its name in LANGUAGES.
        counts: of this file.
    """

    area: str
    path: Path
    language: str
    counts: Counts

    @property
    def room(self) -> str:
        """Return package and folder, as in `neox_model/layers`."""
        return "/".join(self.path.parts[:-1][:2])


def _of_model(files: Iterable[File]) -> Counts:
    return total(file for file in files if file.path.parts[0] == "neox_model")


# The numbers that CONTRIBUTING.md states, by their names there.
NUMBERS: Mapping[str, Callable[[Sequence[File]], int]] = {
    "statements": lambda files: total(files).statements,
    "tokens": lambda files: total(files).tokens,
    f"files over {LONG} lines": lambda files: total(files).long,
    "functions of neox_model that take the configuration": lambda files: _of_model(files).configuration,
    "functions of neox_model that take a specification, or a holder": lambda files: (
        _of_model(files).spec + _of_model(files).holder
    ),
    "methods of holders in neox_model": lambda files: _of_model(files).methods,
}
TRACED: Mapping[str, Callable[[Any], int]] = {
    "steps of the configuration through `build_model`": lambda traces: len(traces.steps),
    "files of a forward pass": lambda traces: len(traces.forward),
    "files from `Loop.run` to `train_batch`": lambda traces: len(traces.stack),
}


def measure(root: Path, areas: Iterable[str] = AREAS) -> tuple[list[File], Program]:
    """Measure the files of a checkout; return also the classes of its packages."""
    texts = [
        (area, path.relative_to(start if area == "sources" else root), path.read_text(encoding="utf-8"))
        for area in areas
        for pattern in AREAS[area]
        for start in sorted(root.glob(pattern))
        for path in _files_in(start)
    ]
    trees = {path: ast.parse(text) for _, path, text in texts if path.suffix == ".py"}
    modules = {path: _module(path) for area, path, _ in texts if area == "sources" and path in trees}
    program = Program({module: trees[path] for path, module in modules.items()})
    found = []
    for area, path, text in texts:
        language, pattern = LANGUAGES[path.suffix]
        counts = count_text(text, trees.get(path), pattern)
        if path in modules:
            counts += count_takers(program, modules[path], trees[path])
        found.append(File(area, path, language, counts))
    return found, program


def _files_in(start: Path) -> Iterator[Path]:
    for path in [start] if start.is_file() else sorted(start.rglob("*")):
        if path.suffix in LANGUAGES and path.is_file():
            yield path


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def total(files: Iterable[File]) -> Counts:
    """Return the sum."""
    return sum((file.counts for file in files), Counts())


def compare(found: Mapping[str, int], document: str) -> list[str]:
    """Compare numbers with the rows `| name | number |` of the document.

    Returns:
        A sentence for each number that is larger than stated, or not stated.
    """
    stated = {}
    for line_number, line in enumerate(document.splitlines(), 1):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 4 and cells[1] in found:
            stated[cells[1]] = (line_number, int(cells[2].replace(",", "")))
    missing = [name for name in found if name not in stated]
    problems = [f"{DOCUMENT} has no row '{name}'; add it, with {found[name]:,}" for name in missing]
    return problems + [
        f"{DOCUMENT}:{line_number}: {name}: {found[name]:,}, but {limit:,} are stated; make the change "
        "smaller, or raise the number in this line, and state the reason in the commit message"
        for name, (line_number, limit) in stated.items()
        if found[name] > limit
    ]


def _table(rows: Mapping[str, Counts]) -> str:
    """Return a table with a row for each sum, and columns for what is not zero everywhere."""
    values = {name: asdict(counts) for name, counts in rows.items()}
    titles = [title for title in asdict(Counts()) if any(row[title] for row in values.values())]
    shown = {"configuration": "config", "long": f">{LONG} lines"}
    lines = [("", *(shown.get(title, title) for title in titles))]
    lines += [(name, *(f"{row[title]:,}" for title in titles)) for name, row in values.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        line[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def _sums(files: Iterable[File], key: Callable[[File], str]) -> dict[str, Counts]:
    ordered = sorted(files, key=key)
    return {name: total(group) for name, group in groupby(ordered, key)}


def _tables(files: Sequence[File]) -> str:
    sources = [file for file in files if file.area == "sources"]
    packages = _sums(sources, lambda file: file.path.parts[0])
    long = [f"{file.path} {file.counts.lines:,}" for file in sources if file.counts.long]
    return "\n\n".join(
        [
            _table(_sums(sources, lambda file: file.room)),
            _table(packages | {"all sources": total(sources)}),
            _table(_sums(files, lambda file: f"{file.area}, {file.language}")),
            "\n".join([f"files over {LONG} lines:", *long]),
        ]
    )


def _traced(traces: Any) -> str:
    lists = {
        "steps of the configuration through build_model": [f"{a} -> {b}" for a, b in sorted(traces.steps)],
        "files of a forward pass": sorted(traces.forward),
        "files from Loop.run to train_batch": traces.stack,
        "also entered in between": sorted(traces.between - set(traces.stack)),
    }
    return "\n\n".join("\n  ".join([f"{name}: {len(rows)}", *rows]) for name, rows in lists.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the stated numbers")
    parser.add_argument("--trace", action="store_true", help="also train a small GPT; requires the packages")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="another checkout to measure, without --trace"
    )
    chosen = parser.parse_args(arguments)
    files, program = measure(chosen.root, ["sources"] if chosen.check else AREAS)
    sources = [file for file in files if file.area == "sources"]
    found = {name: number(sources) for name, number in NUMBERS.items()}
    traces = None
    if chosen.trace:
        # Its imports take seconds.
        traces = import_module("size_trace").trace(chosen.root / "packages", program.holders)
        found |= {name: number(traces) for name, number in TRACED.items()}
    if chosen.check:
        problems = compare(found, (chosen.root / DOCUMENT).read_text(encoding="utf-8"))
        sys.stderr.writelines(f"{problem}\n" for problem in problems)
        return int(bool(problems))
    numbers = "\n".join(f"{number:>9,}  {name}" for name, number in found.items())
    shown = [_tables(files), *([] if traces is None else [_traced(traces)]), numbers]
    sys.stdout.write("\n\n".join(shown) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
