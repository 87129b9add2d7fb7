"""From a folder of texts to a run in two commands."""

import json
import math
from pathlib import Path

import pytest

from neox_config import load_config
from support.launches import shell
from support.refusals import shows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = 900


def test_two_commands_lead_from_a_folder_of_texts_to_a_trained_model(tmp_path):
    texts = tmp_path / "my texts"
    texts.mkdir()
    for name in ("docs/formats.md", "docs/launching.md", "README.md"):
        (texts / Path(name).name).write_bytes((ROOT / name).read_bytes())
    (texts / "picture.png").write_bytes(b"\x89PNG")
    command = "neox-launch init --data 'my texts' --output 'a run' --model pythia-14m --devices 2"
    found = shell(tmp_path, command, seconds=SECONDS)
    assert found.returncode == 0, found.stderr
    assert shows(found.stdout, "3 files", "3 documents")
    assert shows(found.stdout, "skipped 1", "texts/picture.png")
    path = tmp_path / "a run" / "config.yml"
    checked = shell(tmp_path, "neox-config check --files 'a run/config.yml'", seconds=SECONDS)
    assert (checked.returncode, "valid" in checked.stdout) == (0, True), checked.stderr
    config = load_config([path])
    assert (config.model.num_layers, config.model.hidden_size, config.launch.num_gpus) == (6, 128, 2)

    printed = found.stdout.splitlines()[-1].strip()
    assert shows(printed, "neox-launch --config", "run/config.yml'")
    steps = "--set train-iters=4 --set log-interval=1 --set eval-interval=4"
    trained = shell(tmp_path, f"{printed} {steps}", seconds=SECONDS)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (tmp_path / "a run" / "checkpoints" / "latest").read_text().strip() == "global_step4"
    record = map(json.loads, (tmp_path / "a run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss/train"] for line in record if "loss/train" in line]
    # A model that knows nothing has the loss ln(vocabulary); four iterations teach little.
    prepared = json.loads((tmp_path / "a run" / "prepared.json").read_text())
    assert losses == pytest.approx([math.log(prepared["entries"])] * 4, rel=0.1)

    again = shell(tmp_path, command, seconds=SECONDS)
    assert (again.returncode, "config.yml exists" in again.stderr) == (2, True)
    before = path.read_text()
    path.unlink()
    continued = shell(tmp_path, command, seconds=SECONDS)
    assert continued.stdout.count("complete since an earlier run") == 3
    assert path.read_text() == before


def test_a_time_shortens_the_training_whose_model_can_then_be_trained_longer(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "launching.md").write_bytes((ROOT / "docs" / "launching.md").read_bytes())
    found = shell(tmp_path, "neox-launch init --data texts --output run --time 1s", seconds=SECONDS)
    assert found.returncode == 0, found.stderr
    assert shows(found.stdout, "1 second", "(--time")
    iterations = load_config([tmp_path / "run" / "config.yml"]).training.train_iters
    short = "neox-launch --config run/config.yml --set log-interval=1 --set eval-iters=0"
    trained = shell(tmp_path, short, seconds=SECONDS)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    # The file saves every iteration; the longer schedule is that of a run that was long from the start.
    longer = f"{short} --set train-iters={iterations + 3}"
    refused = shell(tmp_path, longer, seconds=SECONDS)
    assert (refused.returncode, "set override-lr-scheduler: true" in refused.stderr) == (2, True)
    extended = shell(tmp_path, f"{longer} --set override-lr-scheduler=true", seconds=SECONDS)
    assert extended.returncode == 0, extended.stdout + extended.stderr
    whole = shell(tmp_path, f"{longer} --set save=whole --set load=null --set log-dir=whole", seconds=SECONDS)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    rates = {
        folder: {
            line["iteration"]: line["optimizer/learning_rate"]
            for line in map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
            if "optimizer/learning_rate" in line
        }
        for folder in ("run", "whole")
    }
    last = range(iterations + 1, iterations + 4)
    assert [rates["run"][number] for number in last] == [rates["whole"][number] for number in last]
