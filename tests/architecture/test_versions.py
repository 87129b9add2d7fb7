"""The tables of docs/reports/versions.md are of the present bounds, and every bound was tested."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ("oldest", "newest")


def versions_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tools/versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = versions_tool()


@pytest.fixture
def report(tmp_path):
    """A copy of the report."""
    return tool.Report(shutil.copy(tool.REPORT, tmp_path / "versions.md") and tmp_path / "versions.md")


def _next_minor(version):
    major, minor = Version(version).release[:2]
    return f"{major}.{minor + 1}"


def untrue_bounds(report):
    """Bounds that exclude a version that was tested, or that end elsewhere than after the newest one."""
    found = []
    for name, row in report.versions.items():
        bounds = SpecifierSet(row["bounds"])
        tested = [row[column] for column in (*ENVIRONMENTS, "pinned") if row[column] != "-"]
        found += [f"{name} {version}" for version in tested if version not in bounds]
        for bound in bounds:
            if bound.operator == "<" and bound.version != _next_minor(row["newest"]):
                found.append(f"{name} {bound}")
    return found


def test_the_tables_are_of_the_present_bounds_and_pins(report):
    assert report.is_current(), "run: make test-versions"


def test_the_oldest_and_the_newest_versions_passed(report):
    assert set(report.runs) == set(ENVIRONMENTS)
    for name, row in report.runs.items():
        for column in ("contracts", "fast tests"):
            passed, failed = (int(part.split()[0].replace(",", "")) for part in row[column].split(", "))
            assert passed > 40, (name, column)
            assert failed == 0, (name, column)


def test_bounds_are_those_of_the_versions_that_were_tested(report):
    assert not untrue_bounds(report)
    oldest = {name: row for name, row in report.versions.items() if row["oldest"] != "-"}
    lowest = {
        name
        for name, row in oldest.items()
        for bound in SpecifierSet(row["bounds"])
        if bound.operator == ">=" and Version(bound.version) == Version(row["oldest"])
    }
    assert {"torch", "numpy", "pydantic", "transformers"} <= lowest


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [("torch", "newest", "2.99.0"), ("torch", "bounds", ">=2.13,<2.99"), ("numpy", "oldest", "0.1")],
)
def test_an_untrue_bound_is_found(report, name, column, value):
    report.versions[name][column] = value
    (found, *_) = untrue_bounds(report)
    assert found.startswith(name)


@pytest.mark.parametrize("column", ["bounds", "pinned"])
def test_a_changed_bound_or_pin_is_noticed(report, column):
    report.versions["numpy"][column] = "0"
    assert not report.is_current()


def test_a_run_writes_its_row_and_its_column(report):
    found = {"python": "3.99.0", "torch": "9.9.1+cu999", "deepspeed": "8.8.0", "numpy": "7.7.0"}
    report.record("newest", found, {"contracts": "3 passed, 0 failed", "fast tests": "5 passed, 1 failed"})
    report.write()
    written = tool.Report(report.path)
    assert written.runs["newest"] | {"date": ""} == {
        "environment": "newest",
        "Python": "3.99.0",
        "torch": "9.9.1+cu999",
        "DeepSpeed": "8.8.0",
        "contracts": "3 passed, 0 failed",
        "fast tests": "5 passed, 1 failed",
        "date": "",
    }
    assert written.runs.get("oldest") == report.runs.get("oldest")
    assert (written.versions["torch"]["newest"], written.versions["numpy"]["newest"]) == ("9.9.1", "7.7.0")
    assert written.is_current()
    before, after = (path.read_text().split("\n## ")[0] for path in (tool.REPORT, report.path))
    assert before == after
