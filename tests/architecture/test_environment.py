"""The stages that `make install` prints, and the versions that it installs."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "tools/environment.sh").read_text()


def function(name):
    found = re.search(rf"^{name}\(\) \{{\n.*?^\}}\n", SCRIPT, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[0]


def run(commands, tmp_path):
    script = (
        f"set -euo pipefail\nlog={tmp_path}/log\n{function('stage')}(\nset -e\n{commands}\n) 3>&1 >$log 2>&1"
    )
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        env={"STAGE_INTERVAL": "0.2", "PATH": "/usr/bin:/bin"},
    )


def test_a_stage_prints_its_beginning_what_it_does_and_its_duration(tmp_path):
    found = run(
        "stage first sh -c 'echo Collecting torch; sleep 1'\nstage second true\nsleep 0.2; rm -f none",
        tmp_path,
    )
    assert found.returncode == 0, found
    first, *during, last, begun, ended = found.stdout.splitlines()
    assert first == "  first ..."
    assert during
    assert all(re.fullmatch(r"    after \d+ s: Collecting torch", line) for line in during)
    assert re.fullmatch(r"  first: took \d+ s", last)
    assert (begun, ended) == ("  second ...", "  second: took 0 s")


def test_a_stage_that_fails_ends_the_installation_and_its_lines(tmp_path):
    found = run("stage first false\nstage second true", tmp_path)
    assert (found.returncode, found.stdout) == (1, "  first ...\n")


def written_versions(tmp_path, **variables):
    settings = "".join(f"{name}={value}\n" for name, value in variables.items())
    script = f"set -euo pipefail\nfolder={tmp_path}\nversions={tmp_path}/versions\n{settings}"
    subprocess.run(
        ["bash", "-c", f"{script}{function('write_versions')}write_versions"],
        cwd=ROOT,
        check=True,
        timeout=30,
    )
    path = tmp_path / "versions"
    return path.read_text().splitlines() if path.exists() else None


def test_another_torch_replaces_the_pinned_one_and_is_remembered(tmp_path):
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    written = written_versions(tmp_path, name="full", torch="2.15.0")
    of_torch = {line for line in pinned if line.startswith(("torch==", "triton==", "nvidia-"))}
    assert set(pinned) - set(written) == of_torch
    assert set(written) - set(pinned) == {"torch==2.15.0"}
    assert (tmp_path / "torch").read_text() == "2.15.0\n"


def test_the_pinned_environment_has_the_versions_of_constraints_and_the_newest_has_none(tmp_path):
    assert written_versions(tmp_path, name="full", torch="") is None
    assert written_versions(tmp_path, name="newest", torch="") == []
