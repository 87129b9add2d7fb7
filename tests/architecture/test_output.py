"""Every program reports a standard output that cannot be written to in one line."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
PROGRAMS = {
    name: entry
    for path in sorted(PACKAGES.glob("*/pyproject.toml"))
    for name, entry in tomllib.loads(path.read_text())["project"]["scripts"].items()
}
# Written by the command itself, not by click.
MORE = {"neox-config": ("docs",), "neox-data": ("count", "--input", str(PACKAGES.parent / "README.md"))}
FULL = "standard output cannot be written to: No space left on device\n"


def run_on_a_full_disk(name, *arguments):
    module, _, function = PROGRAMS[name].partition(":")
    program = f"from {module} import {function}; {function}()"
    with Path("/dev/full").open("w") as full:
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_full_disk_is_one_line_and_exit_code_1(name):
    for arguments in (("--help",), *([MORE[name]] if name in MORE else [])):
        result = run_on_a_full_disk(name, *arguments)
        assert (result.returncode, result.stderr) == (1, FULL)


@pytest.mark.parametrize(("name", "copies"), [("interrupts.py", 3), ("output.py", 2)])
def test_every_package_has_the_same_handling(name, copies):
    """Copies differ in the name of their package alone."""
    paths = list(PACKAGES.glob(f"*/src/*/{name}"))
    assert len(paths) == copies
    own = {path: f"from {path.parent.name}." for path in paths}
    assert len({path.read_text().replace(own[path], "from PACKAGE.") for path in paths}) == 1


def test_a_reader_that_stops_reading_is_no_error():
    module, _, function = PROGRAMS["neox-config"].partition(":")
    command = f'{sys.executable} -c "from {module} import {function}; {function}()" docs | head -1'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("# Configuration\n", "")
