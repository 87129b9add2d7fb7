"""A configuration that works, for tests to change."""

from collections.abc import Callable
from pathlib import Path

import pytest

from neox_launcher.backends.local import LocalBackend
from neox_launcher.config import NeoXConfig, load_config

MINIMAL = """\
num-layers: 4
hidden-size: 64
num-attention-heads: 4
seq-length: 32
max-position-embeddings: 32
train-iters: 10
train-micro-batch-size-per-gpu: 2
optimizer: {type: Adam, params: {lr: 0.001}}
"""

Loader = Callable[..., NeoXConfig]


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """The file `minimal.yml`."""
    path = tmp_path / "minimal.yml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture
def load(minimal: Path) -> Loader:
    """load(text, "name=value", ...): the minimal configuration, a second file, and overrides."""

    def loader(text: str = "", *overrides: str) -> NeoXConfig:
        more = minimal.with_name("more.yml")
        more.write_text(text)
        return load_config([minimal, more], overrides=overrides)

    return loader


@pytest.fixture
def can_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with torch and neox-model, which the launcher alone does without."""
    monkeypatch.setattr(LocalBackend, "missing", lambda backend: None)
