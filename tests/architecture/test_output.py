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
LOST = {">/dev/full": "No space left on device", ">&-": "Bad file descriptor"}


def run_redirected(redirection, name, *arguments):
    module, _, function = PROGRAMS[name].partition(":")
    program = f"from {module} import {function}; {function}()"
    shell = ["sh", "-c", f'exec "$0" "$@" {redirection}', sys.executable, "-c", program, *arguments]
    return subprocess.run(shell, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("redirection", LOST)
@pytest.mark.parametrize("name", PROGRAMS)
def test_lost_output_is_one_line_and_exit_code_1(name, redirection):
    for arguments in (("--help",), *([MORE[name]] if name in MORE else [])):
        result = run_redirected(redirection, name, *arguments)
        sentence = f"standard output cannot be written to: {LOST[redirection]}\n"
        assert (result.returncode, result.stderr) == (1, sentence)


@pytest.mark.parametrize(("name", "copies"), [("interrupts.py", 3), ("pluralize.py", 2)])
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
