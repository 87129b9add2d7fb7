"""`make test-versions`: contracts and fast tests with the oldest and the newest versions that we allow.

    python tools/versions.py [--check] [ENVIRONMENT ...]

ENVIRONMENT is oldest or newest, by default both: tools/environment.sh makes it in .venvs. The tables of
docs/reports/versions.md are written again after each one. --check runs nothing. Needs the standard library
alone. Exit code 1: a test failed; with --check, the tables are not of the present bounds and constraints.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["Report", "bounds", "main", "pins"]

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "docs/reports/versions.md"
ENVIRONMENTS = ("oldest", "newest")
FAST = "not slow and not sweep and not cluster and not recipe"
PARALLEL = ("-n", "logical", "--maxprocesses", "8", "--dist", "loadfile")
_RUNS = ("environment", "Python", "torch", "DeepSpeed", "contracts", "fast tests", "date")
_VERSIONS = ("dependency", "bounds", "oldest", "pinned", "newest")
# What prints the versions of an environment, in it: canonical name -> version.
_LIST = """
import json, platform, re
from importlib import metadata
found = {re.sub("[-_.]+", "-", item.name).lower(): item.version for item in metadata.distributions()}
print(json.dumps(found | {"python": platform.python_version()}))
"""


class Report:
    """The two tables of docs/reports/versions.md; the text around them is kept."""

    def __init__(self, path: Path = REPORT) -> None:
        self.path = path
        self.text = path.read_text()
        self.runs = self._rows(_RUNS)
        self.versions = self._rows(_VERSIONS)

    def _rows(self, columns: tuple[str, ...]) -> dict[str, dict[str, str]]:
        lines = self._table(columns)[0].splitlines()[2:]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return {row[0]: dict(zip(columns, row, strict=True)) for row in cells}

    def _table(self, columns: tuple[str, ...]) -> re.Match[str]:
        found = re.search(rf"^{re.escape(_line(columns))}(?:\|.*\n)+", self.text, re.MULTILINE)
        if found is None:
            sys.exit(f"{self.path}: no table with the columns {', '.join(columns)}")
        return found

    def write(self) -> None:
        """Write both tables, aside and renamed."""
        for columns, rows in ((_RUNS, self.runs), (_VERSIONS, self.versions)):
            body = "".join(_line([row[name] for name in columns]) for row in rows.values())
            table = _line(columns) + _line(["---"] * len(columns)) + body
            self.text = self.text.replace(self._table(columns)[0], table)
        aside = self.path.with_suffix(".new")
        aside.write_text(self.text)
        aside.replace(self.path)

    def record(self, name: str, versions: dict[str, str], results: dict[str, str]) -> None:
        """Set the row of an environment and its column of versions."""
        self.runs[name] = {
            "environment": name,
            "Python": versions["python"],
            "torch": versions["torch"],
            "DeepSpeed": versions["deepspeed"],
            **results,
            "date": datetime.now(UTC).date().isoformat(),
        }
        kept = self.versions
        self.versions = {}
        for dependency, bound in sorted(bounds().items()):
            row = {**dict.fromkeys(_VERSIONS, "-"), **kept.get(dependency, {})}
            row |= {"dependency": dependency, "bounds": bound, "pinned": pins().get(dependency, "-")}
            self.versions[dependency] = row | {name: versions.get(dependency, "-").split("+")[0]}

    def is_current(self) -> bool:
        """Say whether bounds and pinned versions are those of the packages and constraints.txt."""
        recorded = {name: (row["bounds"], row["pinned"]) for name, row in self.versions.items()}
        return recorded == {name: (bound, pins().get(name, "-")) for name, bound in bounds().items()}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def bounds() -> dict[str, str]:
    """Return what the packages require of others: canonical name -> bounds, the narrowest of each."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        for requirement in [*project["dependencies"], *(line for lines in extras for line in lines)]:
            name, bound = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", requirement).groups()
            if not name.startswith("neox-"):
                found.setdefault(re.sub("[-_.]+", "-", name).lower(), set()).update(bound.split(","))
    return {name: ",".join(_narrowest(parts)) for name, parts in found.items()}


def _narrowest(parts: set[str]) -> list[str]:
    lower = sorted((part for part in parts if part.startswith(">=")), key=_numbers)[-1:]
    upper = sorted((part for part in parts if part.startswith("<")), key=_numbers)[:1]
    return lower + upper


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def pins() -> dict[str, str]:
    """Return the versions of constraints.txt: canonical name -> version."""
    lines = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in lines}


def _run(name: str) -> bool:
    """Make an environment, run its tests and record the result; say whether all passed."""
    subprocess.run([ROOT / "tools/environment.sh", name], check=True)
    folder = ROOT / ".venvs" / name
    python = folder / "bin/python"
    versions = json.loads(subprocess.run([python, "-c", _LIST], capture_output=True, check=True).stdout)
    results = {
        "contracts": _tests(
            folder, "contracts", sorted((ROOT / "packages/neox-model/tests").rglob("test_*compat.py"))
        ),
        "fast tests": _tests(folder, "fast", [*PARALLEL, "-m", FAST, "packages", "tests"]),
    }
    report = Report()
    report.record(
        name,
        versions,
        {key: f"{passed} passed, {failed} failed" for key, (passed, failed) in results.items()},
    )
    report.write()
    return not any(failed for _, failed in results.values())


def _tests(folder: Path, title: str, arguments: list[str | Path]) -> tuple[int, int]:
    """Run pytest in an environment; return the numbers of passed and failed tests."""
    path = folder / f"{title}.xml"
    path.unlink(missing_ok=True)
    command = ["env", "--default-signal=INT,QUIT,HUP", folder / "bin/pytest", "-q", f"--junitxml={path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False)
    if not path.exists():
        return 0, 1
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    total, *others = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    return total - sum(others), sum(others[:2])


def main() -> None:
    """Run the environments that the command line names."""
    parser = argparse.ArgumentParser(description="Test the oldest and the newest versions that we allow.")
    parser.add_argument(
        "--check", action="store_true", help="only say by the exit code whether the tables are current"
    )
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help="oldest or newest; by default both")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(ENVIRONMENTS):
        parser.error(f"unknown environment {', '.join(sorted(unknown))}; use {' or '.join(ENVIRONMENTS)}")
    if arguments.check:
        sys.exit(not Report().is_current())
    passed = [_run(name) for name in arguments.names or ENVIRONMENTS]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
