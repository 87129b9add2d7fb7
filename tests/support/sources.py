"""The packages' source files as syntax trees, for the tests of the repository's own shape."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

__all__ = ["DISTRIBUTIONS", "PACKAGES", "ROOT", "Import", "Source", "sources"]

ROOT = Path(__file__).parents[2]
# Import packages, each with the folder of its distribution.
DISTRIBUTIONS = {
    "neox_config": "neox-launcher",
    "neox_launcher": "neox-launcher",
    "neox_data": "neox-data",
    "neox_kernels": "neox-kernels",
    "neox_model": "neox-model",
}
PACKAGES = tuple(DISTRIBUTIONS)


@dataclass(frozen=True)
class Import:
    """One imported module: `from a.b import c` is `a.b.c` where that is a module of ours, else `a.b`."""

    module: str
    line: int
    in_function: str | None


@dataclass(frozen=True)
class Source:
    """A source file: its path from the root of the repository, dotted module name and syntax tree."""

    path: Path
    module: str
    tree: ast.Module

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import of the file, those inside functions too."""
        return tuple(self._imports(self.tree, None))

    def _imports(self, node: ast.AST, function: str | None) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, function)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    inner = f"{child.module}.{alias.name}"
                    known = inner in _module_names()
                    yield Import(inner if known else child.module or ".", child.lineno, function)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from self._imports(child, child.name if is_function else function)


def _paths(package: str) -> Iterator[tuple[Path, str]]:
    folder = ROOT / "packages" / DISTRIBUTIONS[package] / "src"
    for path in sorted((folder / package).rglob("*.py")):
        yield path, ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


@cache
def _module_names() -> frozenset[str]:
    return frozenset(module for package in PACKAGES for _, module in _paths(package))


@cache
def sources(package: str | None = None) -> tuple[Source, ...]:
    """Return the source files of one package, or of all."""
    if package is None:
        return tuple(source for name in PACKAGES for source in sources(name))
    return tuple(
        Source(path.relative_to(ROOT), module, ast.parse(path.read_text(), str(path)))
        for path, module in _paths(package)
    )
