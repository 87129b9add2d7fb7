"""`neox-config schedule` prints the learning rates that the optimizer gets."""

import pytest
import torch

from neox_config import load_config, resolve
from neox_config.derive.learning_rate import learning_rate
from neox_config.facts.learning_rate import DECAY_STYLES
from neox_model.assembly.optimizer import build_schedule

SETTINGS = """\
num-layers: 2
hidden-size: 16
num-attention-heads: 2
max-position-embeddings: 8
train-iters: 60
train-micro-batch-size-per-gpu: 2
lr: 0.003
min-lr: 0.0004
lr-decay-iters: 47
"""


@pytest.mark.parametrize("warmup", [0.0, 0.01, 0.33, 1.0])
@pytest.mark.parametrize("style", DECAY_STYLES)
def test_the_optimizer_gets_the_printed_rate_at_every_update(tmp_path, style, warmup):
    path = tmp_path / "settings.yml"
    path.write_text(SETTINGS + f"lr-decay-style: {style}\nwarmup: {warmup}\n")
    resolved = resolve(load_config([path]), devices=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=9.0)
    schedule = build_schedule(resolved.config, optimizer, decay_iterations=resolved.derived.lr_decay_iters)
    used = []
    for _ in range(60):
        used.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert used == [learning_rate(resolved, update) for update in range(60)]
