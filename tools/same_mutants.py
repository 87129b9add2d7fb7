"""Change core code of a checkout by a little, one place at a time, and count how often its tests notice."""

import ast
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from same_checkouts import Checkout
from same_run import environment_of

__all__ = ["Mutant", "mutants_of", "share_killed"]

SECONDS = 60
# The rooms whose mistakes change numbers.
CORE = {
    "packages/neox-launcher/src/neox_config": ("derive", "estimate", "facts", "read", "rules", "spec"),
    "packages/neox-data/src/neox_data": ("indexed", "samples"),
    "packages/neox-model/src/neox_model": (
        *("assembly", "checkpoint", "convert", "engine", "generate", "layers", "optim", "parallel", "train"),
        "initialization.py",
    ),
}
_FAST = "not slow and not sweep and not cluster and not recipe"
_OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OTHER_OPERATION: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


class Mutant(NamedTuple):
    """A change of one file.

    Args:
        path: the file, relative to the checkout.
        line: where.
        text: the changed file.
    """

    path: Path
    line: int
    text: str


def _comparison(node: ast.Compare) -> ast.AST:
    return ast.Compare(node.left, [_OTHER_COMPARISON[type(node.ops[0])](), *node.ops[1:]], node.comparators)


def _operation(node: ast.BinOp) -> ast.AST | None:
    other = _OTHER_OPERATION.get(type(node.op))
    return None if other is None else ast.BinOp(node.left, other(), node.right)


def _constant(node: ast.Constant) -> ast.AST | None:
    if isinstance(node.value, bool):
        return ast.Constant(not node.value)
    return ast.Constant(node.value + 1) if isinstance(node.value, int | float) else None


def _negation(node: ast.UnaryOp) -> ast.AST | None:
    return node.operand if isinstance(node.op, ast.Not) else None


def _condition(node: ast.BoolOp) -> ast.AST:
    return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _call(node: ast.Call) -> ast.AST | None:
    first, second, *rest = [*node.args, None, None]
    if first is None or second is None or ast.dump(first) == ast.dump(second):
        return None
    return ast.Call(node.func, [second, first, *rest[:-2]], node.keywords)


_CHANGES: dict[type[ast.AST], Callable[..., ast.AST | None]] = {
    ast.Compare: _comparison,
    ast.BinOp: _operation,
    ast.Constant: _constant,
    ast.UnaryOp: _negation,
    ast.BoolOp: _condition,
    ast.Call: _call,
}


class _Changer(ast.NodeTransformer):
    """Changes one place in functions, counted in the order of the text; counts the places that it visits."""

    def __init__(self, place: int | None) -> None:
        self.place, self.count, self.line, self.depth = place, 0, 0, 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.depth += 1
            node.body = [self.visit(each) for each in node.body]
            self.depth -= 1
            return node
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return node
        change = _CHANGES.get(type(node)) if self.depth else None
        changed = change(node) if change is not None else None
        if changed is not None:
            self.count += 1
            if self.count - 1 == self.place:
                self.line = node.lineno
                return ast.copy_location(changed, node)
        return self.generic_visit(node)


def mutants_of(path: Path, text: str) -> list[Callable[[], Mutant]]:
    """Return what makes each mutant of a file: one per place in its functions."""
    counter = _Changer(None)
    counter.visit(ast.parse(text))

    def make(place: int) -> Mutant:
        changer = _Changer(place)
        tree = ast.fix_missing_locations(changer.visit(ast.parse(text)))
        return Mutant(path, changer.line, ast.unparse(tree))

    return [lambda place=place: make(place) for place in range(counter.count)]


def _drawn(sources: Path) -> Iterator[Mutant]:
    """Yield mutants of core code in an order that depends only on the sources."""
    found = []
    for package, rooms in CORE.items():
        for room in rooms:
            start = sources / package / room
            for path in sorted(start.rglob("*.py")) if start.is_dir() else [start]:
                if path.exists():
                    found += mutants_of(path.relative_to(sources), path.read_text())
    random.Random(0).shuffle(found)
    return (make() for make in found)


def _tests(sources: Path, path: Path) -> Path | None:
    """Return the file of tests that mirrors a file."""
    tests = sources / path.parts[0] / path.parts[1] / "tests"
    # neox-launcher's tests of neox_config are in a folder.
    tests = tests / "config" if path.parts[3] == "neox_config" else tests
    found = tests.joinpath(*path.parts[4:-1], f"test_{path.stem}.py")
    return found.relative_to(sources) if found.exists() else None


class _Copy:
    """A copy of a checkout, in which files are changed."""

    def __init__(self, checkout: Checkout, number: int) -> None:
        self._checkout = checkout
        self.folder = checkout.store / "mutants" / str(number)
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("packages", "tests", "tools", "configs", "docs"):
            ignored = shutil.ignore_patterns("__pycache__", "build")
            shutil.copytree(checkout.sources / name, self.folder / name, symlinks=True, ignore=ignored)
        for path in checkout.sources.iterdir():
            if path.is_file():
                shutil.copy2(path, self.folder / path.name)

    def passes(self, tests: Path) -> bool:
        """Return whether tests pass in time."""
        paths = [str(path) for path in sorted(self.folder.glob("packages/*/src"))]
        variables = environment_of(self._checkout) | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [
            self._checkout.python,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            _FAST,
            tests,
        ]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def kills(self, mutant: Mutant, tests: Path) -> bool:
        """Return whether tests, which pass, fail with a mutant."""
        path = self.folder / mutant.path
        before = path.read_text()
        path.write_text(mutant.text)
        try:
            return not self.passes(tests)
        finally:
            path.write_text(before)


class _Kept:
    """Results of tests by what was run, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.results: dict[str, bool] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, run: Callable[[], bool]) -> bool:
        """Return a result, run for it if it is not there."""
        if key not in self.results:
            result = run()
            with self._lock:
                self.results[key] = result
                aside = self._path.with_suffix(".new")
                aside.write_text(json.dumps(self.results))
                aside.replace(self._path)
        return self.results[key]


def share_killed(checkout: Checkout, number: int, jobs: int) -> float:
    """Return which share of so many drawn mutants the tests that mirror their files notice.

    Mutants whose tests are missing, fail without it, or take longer than SECONDS are not drawn.
    """
    copies: SimpleQueue[_Copy] = SimpleQueue()
    for place in range(jobs):
        copies.put(_Copy(checkout, place))
    kept = _Kept(checkout.store / "mutants.json")
    drawn, source = _drawn(checkout.sources), checkout.digest()

    def killed(mutant: Mutant) -> bool | None:
        tests = _tests(checkout.sources, mutant.path)
        if tests is None:
            return None
        copy = copies.get()
        try:
            if not kept.get(f"{source} {tests}", lambda: copy.passes(tests)):
                return None
            key = hashlib.sha256(mutant.text.encode()).hexdigest()
            found = kept.get(f"{source} {tests} {key}", lambda: copy.kills(mutant, tests))
        finally:
            copies.put(copy)
        sys.stderr.write(f"{'killed' if found else 'SURVIVED'}: {mutant.path}:{mutant.line}\n")
        return found

    results: list[bool] = []
    with ThreadPoolExecutor(jobs) as pool:
        while len(results) < number:
            several = [mutant for mutant, _ in zip(drawn, range(number - len(results)), strict=False)]
            if not several:
                sys.exit(f"{checkout.sources} has only {len(results)} mutants with tests; ask for fewer")
            results += [result for result in pool.map(killed, several) if result is not None]
    shutil.rmtree(checkout.store / "mutants")
    return sum(results) / len(results)
