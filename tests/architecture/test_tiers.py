"""What `make test` covers at least: the tests of this table are fast, with all cases of the named parameter.

Also how files that a run does not need are recognized without importing them (`conftest.py`).
"""

import ast
import importlib.util
from types import SimpleNamespace

import pytest

from support.refusals import refused
from support.sources import ROOT
from support.tiers import slow_except

# Of `support.hf_models`, which imports torch.
FAMILIES = ("gpt_neox", "gpt2", "llama", "mistral", "qwen2")
MODEL, DATA, INTEGRATION = "packages/neox-model/tests", "packages/neox-data/tests", "tests/integration"
# File, test, and the values of the parameter of which all are fast.
FAST: dict[str, list[tuple[str, str, str | None]]] = {
    "each architecture, and each kind of layout": [
        (
            f"{INTEGRATION}/test_layouts.py",
            "test_every_architecture_and_every_kind_of_layout_train_the_model_of_one_rank",
            None,
        ),
        (
            f"{MODEL}/generate/test_batch.py",
            "test_cached_batches_equal_one_by_one_and_recomputation",
            "CAUSAL_ARCHITECTURES",
        ),
        (
            f"{MODEL}/engine/test_torch_pipeline.py",
            "test_every_schedule_trains_what_deepspeeds_pipeline_trains_bit_for_bit",
            "PRECISIONS",
        ),
        (f"{MODEL}/assembly/test_layouts.py", "test_every_layout_is_the_same_model", None),
    ],
    "resume": [
        (
            f"{INTEGRATION}/test_training.py",
            "test_training_resumed_by_a_new_process_equals_the_uninterrupted_one",
            None,
        ),
        (f"{INTEGRATION}/test_adapters.py", "test_adapters_are_saved_alone_and_resume_to_the_last_bit", None),
        (f"{MODEL}/checkpoint/test_save_load.py", "test_everything_comes_back", None),
    ],
    "conversion of each family": [
        (
            f"{MODEL}/convert/test_round_trip.py",
            "test_a_plain_model_comes_back_as_the_class_that_was_read",
            "FAMILIES",
        ),
        (f"{INTEGRATION}/test_python.py", "test_a_model_of_transformers_has_its_logits", str([*FAMILIES])),
    ],
    "each command": [
        ("tests/architecture/test_output.py", "test_lost_output_is_one_line_and_exit_code_1", "PROGRAMS"),
        ("tests/architecture/test_commands.py", "test_ctrl_c_ends_with_130", None),
    ],
    "data to the byte": [
        (f"{DATA}/indexed/test_writer.py", "test_written_bytes_match_the_format", None),
        (
            f"{INTEGRATION}/test_megatron_core.py",
            "test_files_are_the_same_to_the_byte_and_each_reads_the_others",
            "DTYPES",
        ),
    ],
}
# Marks of the other runs.
OTHER_RUNS = {"slow", "sweep", "recipe", "cluster", "gpu"}


def marks_of(node: ast.AST) -> set[str]:
    """Return the names after `mark.` in an expression."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.value, ast.Attribute)
        and inner.value.attr == "mark"
    }


def why_not_fast(text: str, name: str, values: str | None) -> str | None:
    """Return why a test of a file, or a case of it, is not fast; None if all are."""
    body = ast.parse(text).body
    whole = [node for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    if any(marks_of(node) & OTHER_RUNS for node in whole):
        return "the file is of another run"
    test = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if test is None:
        return "there is no such test"
    if any(marks_of(decorator) & OTHER_RUNS for decorator in test.decorator_list):
        return "the test is of another run"
    given = [
        ast.unparse(each.args[1])
        for each in test.decorator_list
        if ast.unparse(each).startswith("pytest.mark.parametrize(")
    ]
    return None if values is None or values in given else f"not all of {values} are fast"


@pytest.mark.parametrize(
    ("file", "name", "values"), [entry for entries in FAST.values() for entry in entries]
)
def test_what_must_be_fast_is_fast(file, name, values):
    assert why_not_fast((ROOT / file).read_text(), name, values) is None


TEXT = """
{whole}
{test}
@pytest.mark.parametrize("family", {values})
def {name}(family): pass
"""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"whole": "pytestmark = [pytest.mark.slow]"}, "the file is of another run"),
        ({"test": "@pytest.mark.sweep"}, "the test is of another run"),
        ({"values": 'slow_except(FAMILIES, "llama")'}, "not all of FAMILIES are fast"),
        ({"name": "test_other"}, "there is no such test"),
    ],
)
def test_a_test_that_is_not_fast_is_found(changes, reason):
    text = TEXT.format(**{"whole": "", "test": "", "values": "FAMILIES", "name": "test_one"} | changes)
    assert why_not_fast(text, "test_one", "FAMILIES") == reason


def test_all_values_but_the_named_ones_are_slow():
    one, two, three = slow_except([("a", 1), ("b", 2), "c"], ("b", 2))
    assert (one.values, [mark.name for mark in one.marks]) == (("a", 1), ["slow"])
    assert two == ("b", 2)
    assert (three.values, [mark.name for mark in three.marks]) == (("c",), ["slow"])
    with refused(ValueError, "among the values"):
        slow_except(["a"], "b")


@pytest.mark.parametrize(
    ("text", "marks", "is_read"),
    [
        ("pytestmark = pytest.mark.slow\n", "not slow and not sweep", False),
        ("pytestmark = [\n    pytest.mark.cluster,\n    pytest.mark.slow,\n]\n", "not cluster", False),
        ("pytestmark = pytest.mark.slow\n", "slow and not sweep", True),
        ("@pytest.mark.slow\ndef test(): pass\n", "not slow", True),
        ("@pytest.mark.sweep\ndef test(): pass\n", "slow and not sweep", False),
        ("def test(): pass\n", "slow", False),
        ("def test(): pass\n", "slow or sweep", True),
        ("def test(): pass\n", "", True),
    ],
)
def test_files_without_a_test_of_the_run_are_not_read(tmp_path, text, marks, is_read):
    path = tmp_path / "test_some.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    config = SimpleNamespace(option=SimpleNamespace(markexpr=marks))
    assert conftest.pytest_ignore_collect(path, config) is (None if is_read else True)


def test_every_mark_of_a_run_is_written_in_its_file():
    """A file without the word is not read by a run that requires the mark: none may come from elsewhere."""
    folders = (ROOT / "tests/support", ROOT / "tools")
    with_marks = {
        path.name
        for folder in folders
        for path in folder.rglob("*.py")
        if not path.name.startswith("test_") and marks_of(ast.parse(path.read_text())) & OTHER_RUNS
    }
    assert with_marks == {"tiers.py"}
