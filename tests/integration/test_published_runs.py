"""The prediction of published runs: each is right within the error that the documents state."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_published_runs_are_predicted(tmp_path):
    rows = ROOT / "benchmarks" / "published-runs.yml"
    added = (
        "\n- {src: C, gpu: H100-500W, model: 8B, precision: float8, fsdp: 8, gpus: 8, batch: 16, tok: 8532}\n"
    )
    file = tmp_path / "rows.yml"
    file.write_text(rows.read_text() + added)
    command = [sys.executable, ROOT / "benchmarks" / "published_runs.py", file]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-2].endswith("fsdp 8: not counted: precision float8")
    errors = [float(found[1]) for line in lines if (found := re.search(r"error ([+-][\d.]+)%$", line))]
    assert len(errors) == 11
    assert sorted(map(abs, errors))[5] < 5
    assert max(map(abs, errors)) < 15
