"""Habits that ruff does not check; docstrings, prints, relative imports and complexity are ruff's part."""

import ast
import re

import pytest

from support.sources import PACKAGES, ROOT, sources

# Imported inside a function because they are optional, or (pybind11) only needed when something is compiled.
OPTIONAL = {"apex", "matplotlib", "pyarrow", "pybind11", "torch.utils.tensorboard", "wandb"}
# Where an error of any kind is carried on: the edges of processes, and from one rank to all the others.
MAY_CATCH_EVERYTHING = {
    "neox_launcher.seat",
    "neox_launcher.torch_agent",
    "neox_model.worker",
    "neox_model.checkpoint.outcome",
}
# Words that promise work; spelt apart so that this file passes its own test.
OPEN_ENDS = re.compile("TO" + "DO|FIX" + "ME|XX" + "X|HA" + "CK")
SWITCHED_OFF = re.compile(
    "# no" + r"qa(?!: [A-Z])|# no" + r"qa: .*\b(D\d|T20|TID|C90)|# type: " + r"ignore(?!\[)"
)
NAMELESS = {"utils", "helpers", "common", "misc", "util", "helper"}


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    files = [
        path for folder in ("packages", "tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*")
    ]
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        if path.suffix in (".py", ".sh", ".yml", ".cpp", ".cu")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_open_ends_are_issues_not_comments():
    assert lines_matching(OPEN_ENDS) == []


def test_no_rule_about_prints_docstrings_imports_or_complexity_is_switched_off_in_place():
    assert lines_matching(SWITCHED_OFF) == []


def test_only_optional_packages_are_imported_inside_functions():
    wrong = [
        f"{source.path}:{imported.line} imports {imported.module}"
        for source in sources()
        for imported in source.imports()
        if imported.in_function
        and not any(imported.module == name or imported.module.startswith(name + ".") for name in OPTIONAL)
    ]
    assert wrong == []


def test_state_lives_in_objects_not_in_globals():
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    assert wrong == []


def test_nothing_swallows_every_error():
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in sources()
        if source.module not in MAY_CATCH_EVERYTHING
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and catches_everything(node) and not raises_again(node)
    ]
    assert wrong == []


def catches_everything(handler: ast.ExceptHandler) -> bool:
    names = [node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)] if handler.type else []
    return handler.type is None or "Exception" in names or "BaseException" in names


def raises_again(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def test_every_package_folder_lists_its_public_names():
    def lists(tree: ast.Module) -> bool:
        return any(
            isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]) for node in tree.body
        )

    wrong = [
        str(source.path)
        for source in sources()
        if source.path.name == "__init__.py" and len(source.tree.body) > 1 and not lists(source.tree)
    ]
    assert wrong == []


def test_module_names_say_what_is_inside():
    assert [str(source.path) for source in sources() if source.path.stem in NAMELESS] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_test_file_name_occurs_once_in_its_package(package):
    folder = ROOT / "packages" / package.replace("_", "-") / "tests"
    names = [path.name for path in folder.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
    assert list(folder.rglob("__init__.py")) == []
