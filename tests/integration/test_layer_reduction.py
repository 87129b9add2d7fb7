"""A student from layers of a teacher: its first weights, its loss, and the same on every layout."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.refusals import shows
from support.trainings import tensors_of, train_all

SIZES = {"hidden_size": 24, "num_attention_heads": 6, "log_interval": 1}
TEACHER = SIZES | {"num_layers": 4, "train_iters": 2, "seed": 7}


def student(teacher: Path, **distill: Any) -> dict[str, Any]:
    reduction = {
        "enabled": True,
        "teacher": str(teacher),
        "keep_number_layer": 2,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["embedding", "final_norm"],
    }
    if distill:
        reduction["distill"] = {"enabled": True, **distill}
    return SIZES | {
        "num_layers": 2,
        "train_iters": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "compression_training": {"layer_reduction": reduction},
    }


ALL = {"logits_share": 0.4, "temperature": 2.0, "hidden_states_weight": 0.3}


# The biases that choose experts are copied, too. Each layer of the student has experts, unlike the teacher's.
EXPERTS = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_expert_width": 8,
    "moe_router_type": "topk",
    "moe_expert_bias": True,
}


def first_weights(folder: str, corpus: str, more: dict[str, Any]) -> None:
    layers = {"moe_layers": [1, 2, 3], "moe_expert_bias_rate": 0.1} if more else {}
    train_all(folder, corpus, {"teacher": TEACHER | more | layers})
    still = student(Path(folder, "teacher")) | {
        "train_iters": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-30}},
        "save_interval": 1,
    }
    train_all(folder, corpus, {"student": still | more | ({"moe_expert_bias_rate": 0.0} if more else {})})


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_student_starts_from_the_layers_of_its_teacher(tmp_path, more) -> None:
    run_ranks(first_weights, size=1, folder=str(tmp_path), corpus=str(write_corpus(tmp_path)), more=more)
    theirs, own = tensors_of(tmp_path / "teacher", 2), tensors_of(tmp_path / "student", 1)
    biases = {name: name.removeprefix("model/") for name in own if name.endswith("router/bias")}
    assert len(biases) == (2 if more else 0)
    assert all(own[name].any() for name in biases)
    for tensors in (own, theirs):
        tensors |= {name.removeprefix("model/"): tensors[name] for name in set(tensors)}
    weights = [name for name in own if "/" not in name] + list(biases.values())
    assert len(weights) > 20
    for name in weights:
        source = name
        for layer, taken in ((0, 1), (1, 3)):
            if name.startswith(f"layers.{layer}."):
                source = name.replace(f"layers.{layer}.", f"layers.{taken}.", 1)
        assert torch.equal(own[name], theirs[source]), name
    assert not torch.equal(own["layers.0.attention.dense.weight"], theirs["layers.0.attention.dense.weight"])


def losses(folder: str, corpus: str, **layout: Any) -> list[float]:
    """Train a student with all terms in the present world; return its losses."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import open_run
    from neox_model.train.run import Callback, Extensions
    from support.settings import SMALL_TRAINING, resolved_from

    found: list[float] = []

    class Remember(Callback):
        def on_step(self, report) -> None:
            found.append(float(report.loss))

    given = SMALL_TRAINING | {"data_path": corpus} | student(Path(folder, "teacher"), **ALL) | layout
    resolved = resolved_from(given, devices=int(os.environ["WORLD_SIZE"]))
    groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    with open_run(groups, resolved, Extensions(callbacks=[Remember()])) as (_, loop):
        loop.run()
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "recomputed": (1, {"checkpoint_activations": True}),
    "tensor": (2, {"model_parallel_size": 2}),
    "data, ZeRO 3": (2, {"engine": "torch", "zero_optimization": {"stage": 3}}),
    "data, DeepSpeed": (2, {"engine": "deepspeed"}),
}


@pytest.mark.slow
def test_a_student_learns_alike_on_every_layout(tmp_path) -> None:
    corpus = str(write_corpus(tmp_path))
    run_ranks(train_all, size=1, folder=str(tmp_path), corpus=corpus, trainings={"teacher": TEACHER})
    batch = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": None}
    # Replicas draw dropout apart.
    batch |= {"hidden_dropout": 0.0}
    found = {
        name: run_ranks(losses, size=ranks, folder=str(tmp_path), corpus=corpus, **batch, **layout)[0]
        for name, (ranks, layout) in LAYOUTS.items()
    }
    for name, values in found.items():
        assert values == pytest.approx(found["one"], abs=2e-5), name
    assert len(found["one"]) == 4
    assert found["one"][-1] < found["one"][0]


def resumed(folder: str, corpus: str) -> None:
    whole = student(Path(folder, "teacher"), **ALL) | {"precision": "bfloat16"}
    again = whole | {"load": f"{folder}/whole", "restart_at": 2}
    train_all(folder, corpus, {"teacher": TEACHER, "whole": whole, "again": again})


@pytest.mark.slow
def test_a_resumed_student_continues_to_the_last_bit(tmp_path) -> None:
    run_ranks(resumed, size=2, folder=str(tmp_path), corpus=str(write_corpus(tmp_path)))
    whole, again = tensors_of(tmp_path / "whole", 4), tensors_of(tmp_path / "again", 4)
    assert whole.keys() == again.keys()
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == []


def refusals(folder: str, corpus: str) -> dict[str, str]:
    from neox_data.tokenizers import CharLevelTokenizer
    from neox_model.checkpoint.errors import CheckpointError

    train_all(folder, corpus, {"teacher": TEACHER, "student": student(Path(folder, "teacher"))})
    found = {}
    distill = {"distill": {"enabled": True}}
    nothing = {"module_name_prefix": None, "teacher_layer": None, "keep_number_layer": None}
    nothing |= {"other_module_name": None, **distill}
    wrong: dict[str, dict[str, Any]] = {
        "width": {"hidden_size": 48},
        "absent layer": {"teacher_layer": [1, 9]},
        "tied head": {"other_module_name": ["lm_head"]},
        "no biases": {"use_bias_in_mlp": False},
        "nothing": {"teacher": f"{folder}/nothing"},
        "activation": {"activation": "relu"},
        "form of gelu": {"openai_gelu": True},
        "heads": {"num_attention_heads": 3},
        "residual": {"gpt_j_residual": True},
        "epsilon": {"layernorm_epsilon": 1e-6},
        "positions of layers": {"pos_emb": "rotary", "other_module_name": []},
        "positions of the embedding": {
            "pos_emb": "rotary",
            "module_name_prefix": None,
            "teacher_layer": None,
        },
        "attention": {"attention_config": [[["global", "local"], 1]]},
        "objective": {"objective": "masked"},
        "final norm": {
            "other_module_name": ["final_norm"],
            "module_name_prefix": None,
            "teacher_layer": None,
            "layernorm_epsilon": 1e-6,
            "activation": "relu",
        },
        "objective of the logits": {"objective": "masked", **nothing},
        "fewer layers": {
            "teacher_layer": [1, 9],
            "distill": {"enabled": True, "hidden_states_weight": 0.5},
            "load": f"{folder}/student",
        },
        "positions": {"other_module_name": [], "seq_length": 32, "max_position_embeddings": 32, **distill},
        "tokenizer": {},
        "tokenizer of logits": {"other_module_name": [], **distill},
    }
    fingerprint = CharLevelTokenizer.fingerprint
    for name, change in wrong.items():
        settings = student(Path(folder, "teacher"))
        reduction = settings["compression_training"]["layer_reduction"]
        inside = {key: value for key, value in change.items() if key in {*reduction, "distill"}}
        settings |= {key: value for key, value in change.items() if key not in inside}
        settings["compression_training"] = {"layer_reduction": reduction | inside}
        if name.startswith("tokenizer"):
            CharLevelTokenizer.fingerprint = "0" * 64
        try:
            train_all(folder, corpus, {name: settings})
        except CheckpointError as error:
            found[name] = str(error)
        finally:
            CharLevelTokenizer.fingerprint = fingerprint
    return found


@pytest.mark.slow
def test_a_teacher_that_does_not_fit_is_refused(tmp_path) -> None:
    [found] = run_ranks(refusals, size=1, folder=str(tmp_path), corpus=str(write_corpus(tmp_path)))
    assert "has the shape" in found["width"]
    assert "layers.9." in found["absent layer"]
    assert shows(found["tied head"], "lm_head", "other_module_name")
    assert "no such weight" in found["no biases"]
    assert "contains no checkpoint" in found["nothing"]
    for name, what in {
        "activation": "activation: gelu in the checkpoint, relu in this run",
        "form of gelu": "openai-gelu, bias-gelu-fusion: erf form in the checkpoint, tanh form in this run",
        "heads": "num-attention-heads: 6 in the checkpoint, 3 in this run",
        "residual": "gpt-j-residual: false in the checkpoint, true in this run",
        "epsilon": "layernorm-epsilon: 1e-05 in the checkpoint, 1e-06 in this run",
        "positions of layers": "pos-emb: learned in the checkpoint, rotary in this run",
        "positions of the embedding": "position_embeddings.weight is in the checkpoint but the student has",
        "attention": "its layer 3 has global attention, and layer 1 of the student, which copies it, local a",
        "objective": "objective: causal in the checkpoint, masked in this run",
        "final norm": "layernorm-epsilon: 1e-05 in the checkpoint, 1e-06 in this run",
    }.items():
        assert what in found[name], name
        assert "with distill" in found[name]
    assert shows(found["objective of the logits"], "causal", "masked")
    assert shows(found["fewer layers"], "4 layers", "teacher_layer", "9")
    assert shows(found["positions"], "16 positions", "seq-length", "32")
    for name in ("tokenizer", "tokenizer of logits"):
        assert "other ids" in found[name]


# Of the student below: its embedding alone has the width of the teacher's, which is read with other settings.
OTHER = {
    "activation": "swiglu",
    "pos_emb": "alibi",
    "apply_query_key_layer_scaling": True,
    "mlp_width": 40,
    "num_unique_layers": 2,
    "make_vocab_size_divisible_by": 640,
}


def different_teacher(folder: str, corpus: str) -> list[float]:
    """Train with the logits of a teacher alone that is quite another model; return losses, and those due."""
    from neox_model.api.model import load_model
    from neox_model.assembly.activation_checkpointing import run_layers
    from neox_model.extras.distillation.loss import Distillation

    train_all(folder, corpus, {"teacher": TEACHER | OTHER})
    expected = load_model(f"{folder}/teacher", precision="fp32")
    found: list[float] = []
    compute = Distillation.loss

    def remember(self, student, inputs, targets, **options: Any) -> torch.Tensor:
        result = compute(self, student, inputs, targets, **options)
        tokens, mask = inputs if isinstance(inputs, torch.Tensor) else inputs[0], targets[1]
        with torch.no_grad():
            own = run_layers(student, inputs, recomputation=None)
            theirs = torch.stack([expected.logits(row.tolist()) for row in tokens])
        size = min(own.shape[-1], theirs.shape[-1])
        own, theirs = (each[..., :size].double().log_softmax(-1) for each in (own, theirs))
        due = ((theirs.exp() * (theirs - own)).sum(-1) * mask).sum() / mask.sum()
        found.extend((float(result.detach()), float(due)))
        return result

    settings = student(Path(folder, "teacher"), logits_share=1.0)
    reduction = settings["compression_training"]["layer_reduction"]
    for name in ("keep_number_layer", "module_name_prefix", "teacher_layer", "other_module_name"):
        del reduction[name]
    Distillation.loss = remember
    try:
        train_all(folder, corpus, {"student": settings | {"hidden_size": 12, "hidden_dropout": 0.0}})
    finally:
        Distillation.loss = compute
    return found


def test_a_student_learns_from_a_teacher_that_is_quite_another_model(tmp_path) -> None:
    [found] = run_ranks(different_teacher, size=1, folder=str(tmp_path), corpus=str(write_corpus(tmp_path)))
    values, due = found[::2], found[1::2]
    assert len(values) >= 4
    assert min(values) > 1e-3
    assert values == pytest.approx(due, rel=1e-4)
