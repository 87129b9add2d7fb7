"""Low-rank adapters in trainings: what is saved, resumed, refused and evaluated, on several layouts."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from neox_config.derive.adapters import base_of_adapters
from neox_config.facts.checkpoints import checkpoint_name
from neox_model.checkpoint.contents import Manifest
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from
from support.tiers import slow_except
from support.trainings import tensors_of, train_all

ADAPTERS = {"lora_rank": 2, "lora_alpha": 8.0, "lora_dropout": 0.1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"model_parallel_size": 2, "precision": "bfloat16"},
    "pipeline": {"pipe_parallel_size": 2, "precision": "fp16", "gradient_accumulation_steps": 2},
    "zero1": {"zero_optimization": {"stage": 1}, "precision": "fp16"},
    "zero2": {"zero_optimization": {"stage": 2}, "precision": "bfloat16"},
    "zero3": {"zero_optimization": {"stage": 3}, "precision": "bfloat16", "checkpoint_activations": True},
    "zero1 of DeepSpeed": {
        "engine": "deepspeed",
        "zero_optimization": {"stage": 1},
        "precision": "fp16",
    },
    "zero3 of DeepSpeed": {
        "engine": "deepspeed",
        "zero_optimization": {"stage": 3},
        "precision": "bfloat16",
        "checkpoint_activations": True,
    },
}
FAST = ("tensor",)
EXPERTS: dict[str, Any] = {
    "activation": "swiglu",
    "moe_num_experts": 3,
    "moe_top_k": 2,
    "moe_layers": [1],
    "moe_expert_width": 16,
    "moe_shared_width": 16,
    "moe_router_type": "topk",
    "moe_expert_bias": True,
    "moe_expert_bias_rate": 0.01,
}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights and states of the last checkpoint of a folder, by name."""
    checkpoint = folder / checkpoint_name(4)
    manifest = Manifest.read(checkpoint)
    shards = {name: load_file(checkpoint / name) for name in manifest.files}
    found = {}
    for name, record in manifest.tensors.items():
        if name.startswith("rng"):
            continue
        whole = torch.empty(record.shape, dtype=torch.float32)
        for piece in record.pieces:
            block = whole[tuple(slice(*limits) for limits in piece.block)]
            flat = block.reshape(-1).clone()
            flat[piece.start : piece.stop] = shards[piece.file][piece.key].float().reshape(-1)
            block.copy_(flat.view_as(block))
        found[name] = whole
    return found


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, *FAST))
def test_adapters_are_saved_alone_and_resume_to_the_last_bit(tmp_path, layout: str) -> None:
    corpus = str(write_corpus(tmp_path))
    settings = LAYOUTS[layout] | ADAPTERS | {"lora_base": f"{tmp_path}/base", "train_iters": 4}
    trainings = {
        "base": LAYOUTS[layout] | {"train_iters": 2},
        "adapters": settings,
        "resumed": settings | {"load": f"{tmp_path}/adapters", "restart_at": 2, "async_save": True},
    }
    run_ranks(train_all, size=2, folder=str(tmp_path), corpus=corpus, trainings=trainings)
    adapters, resumed = weights_of(tmp_path / "adapters"), weights_of(tmp_path / "resumed")
    weights = {name for name in adapters if "/" not in name}
    assert weights == {
        f"layers.{layer}.{matrix}.adapter.{side}"
        for layer in range(2)
        for matrix in ("attention.qkv", "attention.dense", "mlp.up", "mlp.down")
        for side in "ab"
    }
    assert {name.rpartition("/")[0] for name in adapters} - {""} == weights
    assert all(torch.equal(resumed[name], value) for name, value in adapters.items())
    assert all(value.abs().max() > 0 for name, value in adapters.items() if name.endswith(".b"))
    manifest = Manifest.read(tmp_path / "adapters" / checkpoint_name(4))
    assert manifest.config["base"]["iteration"] == 2
    assert manifest.config["base"]["folder"] == f"{tmp_path}/base"


@pytest.mark.slow
def test_adapters_of_experts_are_saved_alone_and_resume_to_the_last_bit(tmp_path) -> None:
    """On two ranks, of which one has two experts and the other one."""
    corpus, base = str(write_corpus(tmp_path)), EXPERTS | LAYOUTS["zero3"] | {"train_iters": 2}
    settings = base | ADAPTERS | {"lora_base": f"{tmp_path}/base", "train_iters": 4}
    trainings = {
        "base": base,
        "adapters": settings,
        "resumed": settings | {"load": f"{tmp_path}/adapters", "restart_at": 2},
    }
    run_ranks(train_all, size=2, folder=str(tmp_path), corpus=corpus, trainings=trainings)
    adapters, resumed = weights_of(tmp_path / "adapters"), weights_of(tmp_path / "resumed")
    assert {name for name in adapters if "/" not in name and ".mlp." in name} == {
        *(f"layers.0.mlp.{name}.adapter.{side}" for name in ("up", "gate", "down") for side in "ab"),
        *(f"layers.1.mlp.experts.adapters.{name}.{side}" for name in ("up", "gate", "down") for side in "ab"),
        *(f"layers.1.mlp.shared.{name}.adapter.{side}" for name in ("up", "gate", "down") for side in "ab"),
    }
    assert all(torch.equal(resumed[name], value) for name, value in adapters.items())
    assert all(value.abs().max() > 0 for name, value in adapters.items() if name.endswith(".b"))


def train_and_merge(folder: str, corpus: str) -> dict[str, float]:
    """Return what `merge_and_compare` returns of experts, and differences of their biases to the base's."""
    adapted = EXPERTS | ADAPTERS | {"lora_base": f"{folder}/base"}
    trainings = {"base": EXPERTS | {"train_iters": 2}, "adapters": adapted | {"train_iters": 2}}
    train_all(folder, corpus, trainings)
    found = merge_and_compare(folder, EXPERTS)
    base, *others = (
        tensors_of(Path(folder, name), 2)["model/layers.1.mlp.router/bias"]
        for name in ("base", "adapters", "merged")
    )
    apart = max(float((bias - base).abs().max()) for bias in others)
    return found | {"bias": float(base.abs().max()), "bias apart": apart}


@pytest.mark.slow
def test_adapters_of_experts_are_merged_and_biases_stay(tmp_path) -> None:
    corpus = str(write_corpus(tmp_path))
    (found,) = run_ranks(train_and_merge, size=1, folder=str(tmp_path), corpus=corpus)
    assert found["merged"] <= 1e-5
    assert found["changed"] > 1e-3
    assert found["bias"] > 0.004
    assert found["bias apart"] == 0


def resume_elsewhere(folder: str, corpus: str) -> dict[str, str]:
    """Return the message of each load that must be refused."""
    from neox_model.checkpoint.errors import CheckpointError

    adapted = ADAPTERS | {"lora_base": f"{folder}/base", "train_iters": 6}
    cases = {
        "another base": adapted | {"lora_base": f"{folder}/other", "load": f"{folder}/adapters"},
        "no adapters": {"train_iters": 6, "load": f"{folder}/adapters"},
        "a model": adapted | {"load": f"{folder}/base"},
        "adapters as base": adapted | {"lora_base": f"{folder}/adapters"},
        "another width": adapted | {"hidden_size": 32},
        "another rank": adapted | {"lora_rank": 4, "load": f"{folder}/adapters"},
        "nothing": adapted | {"lora_base": f"{folder}/nothing"},
    }
    found = {}
    for name, settings in cases.items():
        try:
            train_all(folder, corpus, {"refused": settings})
            found[name] = ""
        except CheckpointError as error:
            found[name] = str(error)
    return found


def merge_and_compare(folder: str, settings: dict[str, Any] | None = None) -> dict[str, float]:
    """Merge the adapters; return the largest difference of logits, and what the adapters change, relative."""
    from functools import partial

    from neox_config.spec.resume import recorded_values
    from neox_model.assembly.model import build_model
    from neox_model.assembly.zero_sharding import gathered_parameter
    from neox_model.checkpoint.adapters import merge_adapters
    from neox_model.checkpoint.base import load_base
    from neox_model.checkpoint.load import load_weights
    from neox_model.parallel.groups import SINGLE_PROCESS as ALONE
    from neox_model.processes import load_tokenizer

    merge_adapters(Path(folder, "adapters", checkpoint_name(2)), Path(folder, "merged"))
    tokens = torch.randint(97, 123, (4, 16), generator=torch.Generator().manual_seed(1))
    logits = {}
    for name in ("base", "merged", "adapters"):
        adapted = ADAPTERS | {"lora_base": f"{folder}/base"} if name == "adapters" else {}
        resolved = resolved_from(SMALL_TRAINING | {"precision": "fp32"} | (settings or {}) | adapted)
        tokenizer = load_tokenizer(resolved.config.tokenizer)
        model = build_model(resolved.model, resolved.run, ALONE, vocab_size=tokenizer.vocab_size).eval()
        recorded = recorded_values(
            resolved, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size
        )
        writable = partial(gathered_parameter, groups=ALONE)
        base = base_of_adapters(resolved.config)
        recorded |= load_base(base, model, adapters=None, groups=ALONE, config=recorded, writable=writable)
        load_weights(Path(folder, name), model=model, groups=ALONE, config=recorded)
        with torch.no_grad():
            logits[name] = model(tokens)
    scale = logits["merged"].abs().max()
    return {
        "merged": float((logits["merged"] - logits["adapters"]).abs().max() / scale),
        "changed": float((logits["base"] - logits["adapters"]).abs().max() / scale),
    }


def train_and_resume_elsewhere(folder: str, corpus: str) -> dict[str, Any]:
    adapted = ADAPTERS | {"lora_base": f"{folder}/base", "train_iters": 2}
    trainings = {"base": {"train_iters": 2}, "other": {"train_iters": 2, "seed": 8}, "adapters": adapted}
    train_all(folder, corpus, trainings)
    continued = {"train_iters": 4, "load": f"{folder}/merged", "finetune": True}
    compared = merge_and_compare(folder)
    train_all(folder, corpus, {"continued": continued})
    refused = resume_elsewhere(folder, corpus)
    return {"refused": refused, "compared": compared, "later": resume_after_the_base(folder, corpus)}


def resume_after_the_base(folder: str, corpus: str) -> dict[str, Any]:
    """Train the base on, and then its adapters, with the base named relative to the working directory."""
    from neox_model.checkpoint.errors import CheckpointError

    os.chdir(folder)
    longer = {"train_iters": 4, "override_lr_scheduler": True}
    train_all(folder, corpus, {"base": longer | {"load": f"{folder}/base"}})
    adapted = ADAPTERS | longer | {"lora_base": "base", "load": f"{folder}/adapters"}
    train_all(folder, corpus, {"later": adapted})
    recorded = Manifest.read(Path(folder, "later", checkpoint_name(4))).config["base"]
    Path(folder, "base", checkpoint_name(2)).rename(Path(folder, "elsewhere"))
    try:
        train_all(folder, corpus, {"refused": adapted})
    except CheckpointError as error:
        return {"recorded": recorded, "without it": str(error)}
    return {"recorded": recorded, "without it": ""}


@pytest.mark.slow
def test_adapters_are_merged_and_refused_on_another_base(tmp_path) -> None:
    corpus = str(write_corpus(tmp_path))
    (found,) = run_ranks(train_and_resume_elsewhere, size=1, folder=str(tmp_path), corpus=corpus)
    expected = {
        "another base": "were trained on another base than lora-base",
        "no adapters": "contains only adapters of",
        "a model": "contains a model without adapters",
        "adapters as base": "is a checkpoint of adapters, which contains no model",
        "another width": "different model",
        "another rank": "lora-rank",
        "nothing": "contains no checkpoint; set lora-base",
    }
    refused = found["refused"]
    assert {name: text for name, text in expected.items() if text not in refused[name]} == {}, refused
    recorded = found["later"]["recorded"]
    assert (recorded["folder"], recorded["iteration"]) == (f"{tmp_path}/base", 2)
    assert "global_step2, on which" in found["later"]["without it"]
    assert found["compared"]["merged"] <= 1e-5
    assert found["compared"]["changed"] > 1e-3
