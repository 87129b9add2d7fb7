import json

import pytest
from click.testing import CliRunner

from neox_model.report import main, smoothed


def write_record(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_loss_curve_is_written_next_to_the_record(tmp_path):
    pytest.importorskip("matplotlib")
    write_record(
        tmp_path,
        [{"iteration": n, "loss/train": 9.0 / n} for n in range(1, 81)]
        + [{"iteration": 80, "loss/validation": 2}],
    )
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.output.strip() == str(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_the_mean_is_over_a_twentieth_of_the_points():
    points = [(10 * n, float(n % 2)) for n in range(1, 41)]
    assert smoothed(points) == [(10 * n, 0.5) for n in range(2, 41)]
    assert smoothed(points[:39]) == []


def test_a_record_without_losses_is_refused(tmp_path):
    write_record(tmp_path, [])
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 1
    assert "contains no loss" in result.output


def test_a_folder_without_record_is_refused_by_name(tmp_path):
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 1
    assert "metrics.jsonl" in result.output
