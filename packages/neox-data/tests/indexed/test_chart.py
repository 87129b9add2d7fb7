import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_data.cli import main
from support.refusals import shows


def inspect(prefix: Path, output: Path):
    return CliRunner().invoke(main, ["inspect", str(prefix), "--png", str(output)])


@pytest.mark.parametrize("documents", [[[1], [1, 2], [1] * 30], []])
def test_a_picture_of_the_lengths_is_written(write_dataset, tmp_path: Path, documents) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = inspect(write_dataset(documents), tmp_path / "lengths.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_reported_with_the_remedy(write_dataset, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = inspect(write_dataset([[1]]), tmp_path / "lengths.png")
    assert result.exit_code == 2
    assert shows(result.stderr, '"neox-data[plot]"', "--png")
    assert not (tmp_path / "lengths.png").exists()
