"""Habits that ruff does not check; docstrings, prints, relative imports and complexity are ruff's part."""

import ast
import re

import pytest

from support.sources import ROOT, sources

# Imported inside a function because they are optional, or only needed when something is compiled (pybind11),
# or only needed on a terminal with a live line (the modules of the launcher that import rich).
OPTIONAL = {
    "apex",
    "matplotlib",
    "pyarrow",
    "pybind11",
    "sentencepiece",
    "torch.utils.tensorboard",
    "wandb",
} | {
    "neox_launcher.controller.live_display",
    "neox_launcher.controller.screens",
}
# Where an error of any kind is carried on: the edges of processes, from one rank to all the others, from a
# thread to the one that started it, where metrics go, whose errors do not end a run, messages of
# unauthenticated processes to the launcher, and the live line, whose errors do not end a job.
MAY_CATCH_EVERYTHING = {
    "neox_launcher.controller.listener",
    "neox_launcher.controller.live_display",
    "neox_launcher.protocol.background",
    "neox_launcher.worker.bootstrap",
    "neox_model.contracts",
    "neox_model.worker",
    "neox_model.checkpoint.object_store",
    "neox_model.daemon_threads",  # The thread passes the exception on.
    "neox_model.checkpoint.outcome",
    "neox_model.metrics.writers.steady",
}
# Where something is renamed other than to write one file atomically.
RENAMES = {
    "neox_config.atomic": "atomic_write itself",
    "neox_data.block_index": "folders of indexes of blocks",
    "neox_data.whole_files": "written_aside, neox-data's own, which also locks the file",
    "neox_kernels.build": "a folder with a compiled module",
    "neox_kernels.choice": "decisions of trials, in a package that requires no other of this project",
    "neox_launcher.worker.reporting": "the end of a worker renames what announced its start",
    "neox_model.checkpoint.directory": "folders of checkpoints",
    "neox_model.convert.output": "folders of converted models",
    "neox_model.generate.results": "samples written before a failure stay in the partial file",
}
# Where JSON may hold NaN and Infinity. `neox_config.finite_json` writes null and a flag instead.
MAY_ENCODE_NONFINITE = {
    "neox_config.problems": "values in messages, as the user wrote them",
    "neox_data.tokenizers.huggingface": "the hash of a file that others wrote",
    "neox_model.checkpoint.contents": "the checksum of a manifest that an earlier version wrote",
}
# Where torch forms the default process group, whose gloo groups would have two worker threads each.
MAY_INIT_PROCESS_GROUP = {
    "packages/neox-model/src/neox_model/torch_compat.py": "init_process_group of ours, with one thread",
    "packages/neox-model/src/neox_model/contracts/__main__.py": "before torch_compat is imported",
    "packages/neox-model/tests/test_gloo.py": "as a program does",
}
INIT_PROCESS_GROUP = re.compile(
    r"\b(c10d|dist|distributed)\.init_process_group\(|from torch\.distributed import .*\binit_process_group\b"
)
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


def test_process_groups_are_formed_by_torch_compat():
    found = {place.rpartition(":")[0] for place in lines_matching(INIT_PROCESS_GROUP)}
    assert found == set(MAY_INIT_PROCESS_GROUP)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("    dist.INIT(backend)", True),
        ("torch.distributed.INIT()", True),
        ("from torch.distributed import get_rank, INIT", True),
        ("from neox_model.torch_compat import INIT", False),
        ("    INIT(backend)", False),
    ],
)
def test_a_group_that_torch_forms_is_found(line, is_found):
    assert bool(INIT_PROCESS_GROUP.search(line.replace("INIT", "init_process_group"))) == is_found


def test_no_rule_about_prints_docstrings_imports_or_complexity_is_switched_off_in_place():
    assert lines_matching(SWITCHED_OFF) == []


def test_only_optional_packages_are_imported_inside_functions():
    wrong = [
        f"{source.path}:{imported.line} imports {imported.module}"
        for source in sources()
        for imported in source.imports
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


def test_module_names_are_specific():
    assert [str(source.path) for source in sources() if source.path.stem in NAMELESS] == []


def test_test_folders_are_not_packages():
    assert [str(path) for path in (ROOT / "packages").glob("*/tests/**/__init__.py")] == []


def is_rename(node: ast.AST) -> bool:
    """Whether it renames a file: os.replace, os.rename, or a method of a path with the new path alone."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    holder, name = node.func.value, node.func.attr
    if isinstance(holder, ast.Name) and holder.id in ("os", "shutil"):
        return name in ("replace", "rename", "renames", "move")
    return name in ("replace", "rename") and len(node.args) == 1 and not node.keywords


def test_files_are_written_atomically_by_one_function():
    renaming = {source.module for source in sources() for node in ast.walk(source.tree) if is_rename(node)}
    assert renaming == set(RENAMES)


def test_json_never_holds_numbers_that_are_not_finite():
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in sources()
        if source.module not in MAY_ENCODE_NONFINITE
        for node in ast.walk(source.tree)
        if may_encode_nonfinite(node)
    ]
    assert wrong == []


def may_encode_nonfinite(node: ast.AST) -> bool:
    """Whether it encodes JSON without `allow_nan=False`, or imports the encoder under another name."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "json" and any(each.name.startswith("dump") for each in node.names)
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("json.dump", "json.dumps"):
        return False
    return "allow_nan=False" not in map(ast.unparse, node.keywords)
