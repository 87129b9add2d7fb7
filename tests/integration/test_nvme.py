"""States offloaded to NVMe (here: a folder): training, checkpoints and resumes equal those in host memory.

Requires DeepSpeed's operator async_io (`tools/aio.sh`); without it these tests are skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.git_version_info import installed_ops
from safetensors.torch import load_file

from neox_config.facts.checkpoints import checkpoint_name
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import resolved_from

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed_ops.get("async_io"),
        reason="DeepSpeed's operator async_io is not installed; run tools/aio.sh",
    ),
]

ITERATIONS = 4
# Sub-groups of more than 1 MiB go to files, and a rest stays in memory.
SETTINGS: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "hidden_dropout": 0.1,
    "tokenizer_type": "CharLevelTokenizer",
    "split": "80,20,0",
    "train_iters": ITERATIONS,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003}},
    "gradient_clipping": 0.5,
    "init_method_std": 0.02,
    "log_interval": 1,
    "eval_iters": 0,
    "save_interval": 2,
    "log_param_norm": True,
}
AIO = {
    "block_size": 65536,
    "queue_depth": 4,
    "thread_count": 2,
    "single_submit": True,
    "overlap_events": False,
}
BF16 = {"precision": "bfloat16"}
IN_BF16 = ["nvme", "parts", "moved", "in the background", "parameters"]


def zero(device: str, folder: Path, *, parameters: bool = False) -> dict[str, Any]:
    where = {"device": device} | ({"nvme_path": str(folder / "nvme")} if device == "nvme" else {})
    settings = {"stage": 3, "offload_optimizer": where, "sub_group_size": 262_144}
    # Small buffers: those of the default take gigabytes.
    small = {"buffer_size": 300_000, "max_in_cpu": 0} if device == "nvme" else {}
    return {"zero_optimization": settings | ({"offload_param": where | small} if parameters else {})}


def train_each(folder: str, data_path: str, runs: list[list[Any]]) -> list[dict[str, Any]]:
    """Train each (name, settings), one after another; how many states were in files, and aio's settings."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    found, build_engine = [], open_run.build_engine
    for name, settings in runs:
        engines = []

        def watching(*arguments: Any, engines: list[Any] = engines, **options: Any) -> Any:
            engines.append(build_engine(*arguments, **options))
            return engines[-1]

        target = str(Path(folder, name))
        places = {"log_dir": target, "save": target, "load": target, "data_path": data_path}
        resolved = resolved_from(SETTINGS | places | settings, devices=int(os.environ["WORLD_SIZE"]))
        groups = create_groups(1, 1)
        open_run.build_engine = watching
        try:
            open_run.train_in(groups, resolved)
        finally:
            open_run.build_engine = build_engine
        optimizer = engines[0]._inner.optimizer
        handle = optimizer.optimizer_swapper.aio_handle if optimizer.swap_optimizer else None
        names = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
        found.append(
            {
                "in files": sum(not flat.numel() for flat in optimizer.fp32_partitioned_groups_flat),
                "in memory": sum(flat.numel() > 0 for flat in optimizer.fp32_partitioned_groups_flat),
                "aio": handle and {name: getattr(handle, f"get_{name}")() for name in names},
            }
        )
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("nvme")
    host, nvme = ({"aio": AIO} | zero(device, folder) for device in ("cpu", "nvme"))
    runs: list[list[Any]] = [
        ["fp32 host", host],
        ["fp32 nvme", nvme],
        ["bf16 host", BF16 | host],
        ["bf16 nvme", BF16 | nvme],
        ["bf16 parts", BF16 | nvme | {"exit_interval": 2}],
        ["bf16 parts", BF16 | nvme],
        # A checkpoint is the same wherever the states were.
        ["bf16 moved", BF16 | nvme | {"exit_interval": 2}],
        ["bf16 moved", BF16 | host],
        ["bf16 in the background", BF16 | nvme | {"async_save": True}],
        ["bf16 parameters", BF16 | zero("nvme", folder, parameters=True)],
    ]
    ranks = run_ranks(
        train_each,
        size=2,
        folder=str(folder),
        data_path=write_corpus(folder),
        runs=runs,
        timeout_seconds=1200,
    )
    return folder, {name: found for (name, _), found in zip(runs, ranks[0], strict=True)}


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    names = ("loss/train", "optimizer/grad_norm", "param_norms/final_norm.weight")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        if "event" not in line:
            found.setdefault(line["iteration"], {}).update(
                {name: line[name] for name in names if name in line}
            )
    return found


def tensors(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(path) for path in sorted((folder / checkpoint_name(ITERATIONS)).glob("*.safetensors"))]


@pytest.mark.parametrize("name", ["fp32 nvme", *(f"bf16 {name}" for name in IN_BF16)])
def test_states_in_files_train_save_and_resume_as_those_in_memory(trained, name):
    folder, found = trained
    host = f"{name.partition(' ')[0]} host"
    assert metrics(folder / name) == metrics(folder / host)
    assert set(metrics(folder / host)) == set(range(1, ITERATIONS + 1))
    for ours, theirs in zip(tensors(folder / name), tensors(folder / host), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert found[host]["in files"] == 0
    if name != "bf16 moved":
        assert found[name]["in files"] >= 2
        assert found[name]["in memory"] >= 1


def test_the_operator_uses_the_configured_settings(trained):
    _, found = trained
    expected = AIO | {"intra_op_parallelism": AIO["thread_count"]}
    del expected["thread_count"]
    assert found["fp32 nvme"]["aio"] == expected
