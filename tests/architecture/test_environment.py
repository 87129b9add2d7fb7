"""The stages that `make install` prints."""

import re
import subprocess
from pathlib import Path

SCRIPT = (Path(__file__).parents[2] / "tools/environment.sh").read_text()
STAGE = re.search(r"^stage\(\) \{\n.*?^\}\n", SCRIPT, re.DOTALL | re.MULTILINE)


def run(commands, tmp_path):
    assert STAGE is not None
    script = f"set -euo pipefail\nlog={tmp_path}/log\n{STAGE[0]}(\nset -e\n{commands}\n) 3>&1 >$log 2>&1"
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
