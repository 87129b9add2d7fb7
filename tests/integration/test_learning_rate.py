"""`neox-config schedule` and the training's schedule are the same curve, written twice."""

import pytest

from neox_launcher.config import load_config, resolve
from neox_launcher.config.learning_rate import learning_rate
from neox_model.optim.lr_schedule import DECAY_STYLES, WarmupThenDecay

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
def test_both_give_the_same_rate_at_every_update(tmp_path, style, warmup):
    path = tmp_path / "settings.yml"
    path.write_text(SETTINGS + f"lr-decay-style: {style}\nwarmup: {warmup}\n")
    resolved = resolve(load_config([path]), devices=1)
    curve = WarmupThenDecay(style=style, peak=0.003, floor=0.0004, warmup=warmup, decay_iterations=47)
    assert [learning_rate(resolved, update) for update in range(60)] == [
        curve.rate(update) for update in range(60)
    ]
