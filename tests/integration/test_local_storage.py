"""Trainings whose hosts have no shared folder: a host is a working directory and a host name."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from neox_config.facts.checkpoints import LATEST
from neox_model.checkpoint.contents import Manifest
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.refusals import shows
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

LOCAL = {"checkpoint": {"use_node_local_storage": True}}
TRAINING: dict[str, Any] = {
    "precision": "bfloat16",
    "train_batch_size": 8,
    "train_iters": 6,
    "save_interval": 2,
    "keep_last_n_checkpoints": 1,
}
ZERO = {"zero_optimization": {"stage": 1}}


def train_on_hosts(folder: str, trainings: list[list[Any]]) -> list[str]:
    """Train each in the same processes; return the errors. `lost` and `found`: the host of a disk.

    Args:
        folder: contains the folders of the hosts.
        trainings: settings, and the host of each rank; None: both share the folder.
    """
    from unittest.mock import patch

    from torch import distributed

    from neox_config.errors import NeoXError
    from neox_model.checkpoint import storage
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    rank, errors = distributed.get_rank(), []
    for settings, hosts in trainings:
        home = Path(folder) / (hosts[rank] if hosts else "shared")
        home.mkdir(exist_ok=True)
        os.chdir(home)
        if settings.pop("lost", None) == home.name:
            Path("save").rename("elsewhere")
        if settings.pop("found", None) == home.name:
            shutil.rmtree("save")
            Path("elsewhere").rename("save")
        resolved = resolved_from(SMALL_TRAINING | TRAINING | settings | {"save": "save"}, devices=2)
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        distributed.barrier()
        with patch.object(storage.socket, "gethostname", lambda home=home: home.name):
            try:
                open_run.train_in(groups, resolved)
                errors.append("")
            except NeoXError as error:
                errors.append(str(error))
        distributed.barrier()
    return errors


def shards(folder: Path, *hosts: str) -> dict[str, bytes]:
    """Return the bytes of the last checkpoint's shards on some hosts."""
    found = {}
    for host in hosts:
        for path in (folder / host / "save" / "global_step6").glob("*.safetensors"):
            assert found.setdefault(path.name, path.read_bytes()) == path.read_bytes()
    return found


def test_two_hosts_without_a_shared_folder_resume_bit_for_bit_on_the_same_and_another_layout(tmp_path):
    base = {"data_path": write_corpus(tmp_path)}
    hosts = ["A", "B"]
    local = base | LOCAL | {"load": "save"}
    ranks = run_ranks(
        train_on_hosts,
        size=2,
        folder=str(tmp_path),
        timeout_seconds=1500,
        trainings=[
            [base | ZERO, None],
            [local | ZERO | {"async_save": True, "exit_interval": 4}, hosts],
            # The hosts have exchanged their ranks.
            [local | ZERO, hosts[::-1]],
            # A host loses its disk, and gets it back; then another layout loads.
            [local | ZERO | {"lost": "B"}, hosts],
            [local | {"model_parallel_size": 2, "gradient_accumulation_steps": 4, "found": "B"}, hosts],
        ],
    )
    assert ranks[0] == ranks[1]
    assert [bool(error) for error in ranks[0]] == [False, False, False, True, False]
    expected = shards(tmp_path, "shared")
    assert len(expected) == 2
    assert shows(ranks[0][3], "save/global_step6", "shard-0000")
    assert "B has nothing" in ranks[0][3]
    assert (tmp_path / "A" / "save" / LATEST).read_text() == "global_step6\n"
    shared, here = (Manifest.read(tmp_path / host / "save" / "global_step6") for host in ("shared", "A"))
    assert here.tensors == shared.tensors
    # Each host wrote one shard, and copied the other one for the last layout.
    assert shards(tmp_path, "A") == shards(tmp_path, "B") == expected
    assert [path.name for path in (tmp_path / "A" / "save").glob("global_step*")] == ["global_step6"]
