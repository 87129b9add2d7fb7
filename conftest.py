"""What holds for every test of the repository, whichever package it belongs to."""

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow, and that fails no test. What was right yesterday is right today: every run tries the
# same examples; `--hypothesis-profile=random`, as in `make sweep NAME=chaos`, searches for new ones.
_PATIENT = settings(settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _PATIENT, derandomize=True)
settings.register_profile("random", _PATIENT)
settings.load_profile("same")

# Every Python program that a test starts prints its stacks when native code crashes.
os.environ["PYTHONFAULTHANDLER"] = "1"


# Marks that say in which run a test is.
_RUNS = {"slow", "sweep", "cluster", "recipe", "gpu"}
_OF_WHOLE_FILE = re.compile(r"^pytestmark = (\[.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a test of this run unread: importing all of them takes half a minute.

    These are files whose `pytestmark` has a mark that `-m` excludes, and files in which one that it requires
    does not occur.
    """
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    words = config.option.markexpr.split()
    if "or" in words or "(" in config.option.markexpr:
        return None
    excluded = {word for before, word in pairwise(words) if before == "not"}
    required = _RUNS & set(words) - excluded
    text = collection_path.read_text(encoding="utf-8")
    whole = _OF_WHOLE_FILE.search(text)
    has_excluded = whole and excluded & set(re.findall(r"mark\.(\w+)", whole[1]))
    return True if has_excluded or any(word not in text for word in required) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` say why they cannot run where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
