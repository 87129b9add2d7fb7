"""amp: matrix products in 16 bits, everything that lasts in float32, on every layout without ZeRO."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import resolved_from

pytestmark = pytest.mark.slow

ITERATIONS = 6
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "pos_emb": "rotary",
    "make_vocab_size_divisible_by": 19,
    "tokenizer_type": "CharLevelTokenizer",
    "split": "80,20,0",
    "train_iters": ITERATIONS,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003}},
    "gradient_clipping": 0.5,
    "init_method_std": 0.02,
    "log_interval": 1,
    "eval_interval": 3,
    "eval_iters": 1,
    "save_interval": 100,
    "checkpoint_activations": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"train_micro_batch_size_per_gpu": 2},
    "tensor 2": {"model_parallel_size": 2, "train_micro_batch_size_per_gpu": 4},
    "sequence 2": {
        "model_parallel_size": 2,
        "sequence_parallel": True,
        "train_micro_batch_size_per_gpu": 4,
    },
    "pipeline 2": {"pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 4},
}
ONE = {"train_micro_batch_size_per_gpu": 4}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "O0": {"amp": {"enabled": True, "opt_level": "O0"}},
    "fp16": {"amp": {"enabled": True, "loss_scale": "dynamic"}},
    "bf16": {"amp": {"enabled": True, "dtype": "bf16"}},
}
TRAINED = [("fp16", "data 2"), ("fp16", "sequence 2"), ("fp16", "pipeline 2"), ("bf16", "tensor 2")]
ROUNDING = {"fp16": 2e-4, "bf16": 1e-3}
# Of trainings whose loss scale must change: gradients do not fit float16 with it.
LARGE_SCALE = 2.0**20


class Products(TorchDispatchMode):
    """Collects the dtypes of matrix products, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            self.dtypes |= {str(each.dtype) for each in args if isinstance(each, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def train_each(folder: str, data_path: str, runs: list[list[Any]]) -> list[dict[str, list[str]]]:
    """Train each (name, settings), one after another; the dtypes that this rank saw."""
    from neox_config.spec import read_run
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    found, build_engine, usual_scale = [], open_run.build_engine, read_run._APEX_INITIAL_SCALE
    for name, settings in runs:
        seen: dict[str, set[str]] = {"gradients": set(), "weights": set()}

        def watching(*arguments: Any, seen: dict[str, set[str]] = seen, **options: Any) -> Any:
            engine = build_engine(*arguments, **options)
            seen["weights"] = {str(each.dtype) for each in engine.model.parameters()}
            engine.update.before(
                lambda pending: seen["gradients"].update(str(each.dtype) for *_, each in pending.weights())
            )
            return engine

        target = str(Path(folder, name))
        places = {"log_dir": target, "save": target, "load": target, "data_path": data_path}
        read_run._APEX_INITIAL_SCALE = LARGE_SCALE if name.startswith(("whole", "parts")) else usual_scale
        resolved = resolved_from(SETTINGS | places | settings, devices=int(os.environ["WORLD_SIZE"]))
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        open_run.build_engine = watching
        try:
            with Products() as products:
                open_run.train_in(groups, resolved)
        finally:
            open_run.build_engine, read_run._APEX_INITIAL_SCALE = build_engine, usual_scale
        found.append(
            {key: sorted(value) for key, value in seen.items()} | {"products": sorted(products.dtypes)}
        )
    return found


def record(folder: Path, metric: str) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line[metric] for line in lines if metric in line}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, list[str]]]]:
    """Folders by precision and layout, and the dtypes of the first rank."""
    folder = tmp_path_factory.mktemp("amp")
    common = {"folder": str(folder), "data_path": write_corpus(folder)}
    one = [[f"{name}, one", ONE | settings] for name, settings in PRECISIONS.items()]
    # Two halves of a run with a changing loss scale.
    dropping = ONE | PRECISIONS["fp16"] | {"hidden_dropout": 0.1}
    one += [["whole", dropping], ["parts", dropping | {"exit_interval": 2}], ["parts", dropping]]
    two = [
        [f"{name}, {layout}", settings | PRECISIONS[name]]
        for layout, settings in LAYOUTS.items()
        for name in ("fp16", "bf16")
        if (name, layout) in TRAINED
    ]
    two += [
        ["whole, pipeline", dropping | LAYOUTS["pipeline 2"]],
        ["parts, pipeline", dropping | LAYOUTS["pipeline 2"] | {"exit_interval": 2}],
        ["parts, pipeline", dropping | LAYOUTS["pipeline 2"]],
    ]
    dtypes = {}
    for size, runs in ((1, one), (2, two)):
        ranks = run_ranks(train_each, size=size, runs=runs, **common)
        dtypes |= {name: seen for (name, _), seen in zip(runs, ranks[0], strict=True)}
    return folder, dtypes


@pytest.mark.parametrize(("precision", "layout"), [*TRAINED, ("fp16", "one"), ("bf16", "one")])
def test_products_are_rounded_and_all_that_lasts_is_float32(trained, precision, layout):
    folder, dtypes = trained
    name = f"{precision}, {layout}"
    short = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[precision]
    assert dtypes[name]["weights"] == ["torch.float32"]
    assert dtypes[name]["gradients"] == ["torch.float32"]
    assert dtypes[name]["products"] == [short]
    for metric in ("loss/train", "loss/validation"):
        exact, found = (record(folder / each, metric) for each in ("fp32, one", name))
        assert found == pytest.approx(exact, abs=ROUNDING[precision]), metric
        assert found != exact, metric


@pytest.mark.parametrize(("precision", "layout"), TRAINED)
def test_every_layout_trains_as_one_process(trained, precision, layout):
    folder, _ = trained
    for metric in ("loss/train", "loss/validation"):
        one, found = (record(folder / f"{precision}, {each}", metric) for each in ("one", layout))
        assert found == pytest.approx(one, abs=ROUNDING[precision]), metric


def test_level_o0_is_float32(trained):
    folder, dtypes = trained
    assert record(folder / "O0, one", "loss/train") == record(folder / "fp32, one", "loss/train")
    assert dtypes["O0, one"]["products"] == ["torch.float32"]


def test_only_float16_scales_the_loss(trained):
    folder, _ = trained
    assert record(folder / "fp16, one", "optimizer/loss_scale")[1] == 2.0**16
    assert record(folder / "bf16, one", "optimizer/loss_scale") == {}


@pytest.mark.parametrize("layout", ["", ", pipeline"])
def test_a_resumed_training_is_the_uninterrupted_one(trained, layout):
    folder, _ = trained
    for metric in ("loss/train", "loss/validation", "optimizer/grad_norm", "optimizer/loss_scale"):
        whole = record(folder / f"whole{layout}", metric)
        assert record(folder / f"parts{layout}", metric) == whole
    assert len(record(folder / f"whole{layout}", "loss/train")) == ITERATIONS
    scales = list(record(folder / f"whole{layout}", "optimizer/loss_scale").values())
    # It is halved at every overflow, in both parts of the run; NVIDIA apex has no hysteresis.
    assert scales[0] == LARGE_SCALE
    assert scales[2] == LARGE_SCALE / 4
    assert scales[3:] == [LARGE_SCALE / 8] * 3
    losses = list(record(folder / f"whole{layout}", "loss/train").values())
    assert losses[-1] < losses[0] - 0.1
