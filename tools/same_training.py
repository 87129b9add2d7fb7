"""Cases that train: every architecture on every layout in every precision, and resumes of these."""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from same_case import Case, Command, Part
from support.architectures import ARCHITECTURES, SMALL, WIDE

__all__ = ["LAYOUTS", "PRECISIONS", "resume_cases", "training_cases"]

ITERATIONS, MIDDLE = 20, 10
CORPUS = "corpus_text_document"
PREPROCESS = Command(
    (
        *("preprocess_data", "--input", "corpus.jsonl", "--output-prefix", "corpus"),
        *("--tokenizer-type", "CharLevelTokenizer", "--append-eod", "--quiet"),
    )
)
COPIES = {"corpus.jsonl": "corpus.jsonl"}
# Dropout, so that the order of random numbers shows; a validation, which must not change them.
SETTINGS: dict[str, Any] = {
    "num_layers": 5,
    "train_iters": ITERATIONS,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "weight_decay": 0.1,
    "gradient_clipping": 0.4,
    "init_method_std": 0.1,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "make_vocab_size_divisible_by": 1,
    "tokenizer_type": "CharLevelTokenizer",
    "data_path": CORPUS,
    "split": "90,10,0",
    "eval_interval": MIDDLE,
    "eval_iters": 2,
    "save": "save",
    "save_interval": MIDDLE,
    "log_dir": "log",
    "log_interval": 1,
    "seed": 7,
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bfloat16"},
    # A scale that changes within 20 iterations.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 6}},
}


def _layout(ranks: int, engine: str = "torch", stage: int = 0, **more: Any) -> tuple[int, dict[str, Any]]:
    return ranks, {"engine": engine, "zero_optimization": {"stage": stage}, **more}


# Name -> number of ranks, and settings.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": _layout(1),
    "data 2": _layout(2, engine="auto"),
    "tensor 2 x ZeRO 1": _layout(4, stage=1, model_parallel_size=2),
    "sequence 2": _layout(2, model_parallel_size=2, sequence_parallel=True),
    "ZeRO 3": _layout(2, stage=3),
    "pipeline 2, interleaved": _layout(2, pipe_parallel_size=2, pipeline_schedule="interleaved"),
    "DeepSpeed's ZeRO 3": _layout(2, engine="deepspeed", stage=3),
    "DeepSpeed's pipeline 2": _layout(2, engine="deepspeed", pipe_parallel_size=2),
}
# Architecture, layout, precision, and another layout that resumes, too.
RESUMES = (
    ("learned positions, layernorm, tied", "one process", "fp32", "data 2"),
    ("grouped queries, rmsnorm, swiglu, no biases", "ZeRO 3", "bf16", "tensor 2 x ZeRO 1"),
    ("gMLP", "DeepSpeed's ZeRO 3", "fp32", "ZeRO 3"),
    ("masked, rotary, documents and padding", "pipeline 2, interleaved", "fp16", "one process"),
    ("half rotary, parallel residual, untied", "DeepSpeed's pipeline 2", "bf16", "pipeline 2, interleaved"),
    ("alibi, residual after the norm, mish", "sequence 2", "fp32", "data 2"),
)


def settings_of(architecture: str, layout: str, precision: str, *, sizes_of: str = "") -> dict[str, Any]:
    """Return the configuration of a run.

    Args:
        architecture: a key of ARCHITECTURES.
        layout: a key of LAYOUTS.
        precision: a key of PRECISIONS.
        sizes_of: the layout whose sizes it has, if another.
    """
    settings = LAYOUTS[layout][1]
    is_wide = LAYOUTS[sizes_of or layout][1].get("sequence_parallel", False)
    found = {
        **SETTINGS,
        **(WIDE if is_wide else SMALL),
        **ARCHITECTURES[architecture],
        **settings,
        **PRECISIONS[precision],
    }
    if found.get("num_kv_heads") == "half":
        found["num_kv_heads"] = 4 if is_wide else 2
    if "lora_base" in found:
        found["lora_base"] = "base"
    # Half of the cells recompute activations.
    places = _place(ARCHITECTURES, architecture), _place(LAYOUTS, layout), _place(PRECISIONS, precision)
    if sum(places) % 2:
        found |= {"checkpoint_activations": True, "checkpoint_num_layers": 2}
    return found


def _place(table: Mapping[str, Any], name: str) -> int:
    return list(table).index(name)


def _as_file(settings: dict[str, Any]) -> str:
    # JSON is YAML.
    return json.dumps(settings, indent=1)


def training(group: str, name: str, settings: dict[str, Any], *, ranks: int = 1, **more: Any) -> Case:
    """Return a case that makes the corpus and trains."""
    files, commands = {"settings.yml": _as_file(settings)}, [PREPROCESS]
    if "lora_base" in settings:
        alone = {key: value for key, value in settings.items() if not key.startswith("lora_")} | {
            **_layout(1)[1],
            **dict.fromkeys(("model_parallel_size", "pipe_parallel_size"), 1),
            "pipeline_schedule": "1f1b",
            "sequence_parallel": False,
            "train_iters": 1,
            "save": settings["lora_base"],
            "log_dir": None,
        }
        files["base.yml"] = _as_file(alone)
        commands.append(Command(("-m", "neox_model.train", "--config", "base.yml")))
    commands.append(Command(("-m", "neox_model.train", "--config", "settings.yml"), ranks=ranks))
    more = {
        "copies": COPIES,
        "metrics": "log/metrics.jsonl",
        "checkpoints": (f"save/global_step{ITERATIONS}",),
        **more,
    }
    return Case(group, name, tuple(commands), files=files, patterns=("*.npy", "*.bin", "*.idx"), **more)


def training_cases(part: Part) -> Iterator[Case]:
    """Yield the runs of a part of the table."""
    axes = ARCHITECTURES, LAYOUTS, PRECISIONS
    for names in product(*axes):
        places = [(_place(axis, name), len(axis)) for axis, name in zip(axes, names, strict=True)]
        if part.has(*places):
            yield training("training", " / ".join(names), settings_of(*names), ranks=LAYOUTS[names[1]][0])


def resume_cases() -> Iterator[Case]:
    """Yield trainings from the middle of the base's: on their layout, and on another."""
    for architecture, layout, precision, other in RESUMES:
        source = f"training: {architecture} / {layout} / {precision}"
        checkpoint = f"from/global_step{MIDDLE}"
        for target in (layout, other):
            settings = settings_of(architecture, target, precision, sizes_of=layout) | {"load": checkpoint}
            yield training(
                "resume",
                f"{architecture} / {precision} / {layout} -> {target}",
                settings,
                ranks=LAYOUTS[target][0],
                copies={**COPIES, checkpoint: f"base:{source}:save/global_step{MIDDLE}"},
                uninterrupted=source if target == layout else None,
            )
