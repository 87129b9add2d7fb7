"""A run that resumes with other settings: at the next sample, and never as another model in silence."""

import json
import logging
import os
import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neox_config.derive.unused import is_in_use
from neox_config.errors import ConfigError, NeoXError
from neox_config.facts.checkpoints import MANIFEST
from neox_config.schema.config import all_parameters
from neox_config.schema.parameter import Parameter
from neox_config.spec.resume import LEARNING_RATE
from neox_data.indexed import open_indexed
from neox_data.splits import split_documents
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.refusals import shows
from support.settings import resolved_from

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "tokenizer_type": "CharLevelTokenizer",
    "split": "80,20,0",
    "train_iters": 12,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003}},
    "init_method_std": 0.02,
    "log_interval": 1,
    "eval_interval": 2,
    "eval_iters": 1,
    "save_interval": 100,
    "num_workers": 1,
}


class Messages(logging.Handler):
    """Keeps the warnings of a run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def train_parts(folder: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each part, one after another in the same processes; what this rank read, and the warnings."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    results, open_streams = [], open_run.open_streams
    for settings in parts:
        read: dict[str, list[list[int]]] = {"train": [], "valid": [], "test": []}

        def watched(part: str, stream: Any, read: dict[str, Any] = read) -> Any:
            following = type(stream).__next__

            class Watched(type(stream)):
                def __next__(self) -> Any:
                    batch = following(self)
                    read[part].append(batch.tokens_BS.tolist())
                    return batch

            stream.__class__ = Watched
            return stream

        def opening(*arguments: Any, watched: Any = watched, **options: Any) -> Any:
            found = open_streams(*arguments, **options)
            return {
                part: lambda *places, part=part, opener=opener: watched(part, opener(*places))
                for part, opener in found.items()
            }

        resolved = resolved_from(
            SETTINGS | {"save": folder, "load": folder} | settings, devices=int(os.environ["WORLD_SIZE"])
        )
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        messages = Messages()
        logging.getLogger("neox_model").addHandler(messages)
        open_run.open_streams = opening
        try:
            open_run.train_in(groups, resolved)
            error = None
        except NeoXError as raised:
            error = str(raised)
        finally:
            open_run.open_streams = open_streams
            logging.getLogger("neox_model").removeHandler(messages)
        results.append({"read": read, "warnings": messages.found, "error": error})
    return results


def in_order(ranks: list[dict[str, Any]], part: str) -> list[list[int]]:
    """Return the samples that all ranks read of a part, in the order of the data."""
    micro_batches = zip(*(rank["read"][part] for rank in ranks), strict=True)
    return [row for step in micro_batches for batch in step for row in batch]


def items(settings: dict[str, Any], part: str, count: int) -> list[list[int]]:
    """Return the first samples of a part, from the dataset itself."""
    from neox_model.train.data.streams import build_datasets

    dataset = build_datasets(resolved_from(SETTINGS | settings))[part]
    return [dataset[item][:-1].tolist() for item in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def batch(micro: int, accumulation: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        **others,
    }


@pytest.mark.parametrize("order", ["lazy", "gpt_neox"])
def test_every_sample_is_read_once_for_any_batch_sizes_and_ranks(tmp_path, corpus, order):
    """Batches of 4, then 6 on two ranks, then 5, then 8 on two ranks: nothing twice, nothing left out."""
    # GPT-NeoX's order is one order as long as one epoch holds all samples.
    data = {"data_path": corpus, "sample_order": order, "split": "60,40,0"}
    whole = data | {"train_iters": 20, "eval_iters": 2}
    saved = str(tmp_path / "saved")
    alone = [data | batch(2, 2, exit_interval=5)]
    ranks = run_ranks(train_parts, size=1, folder=saved, parts=alone)
    train = in_order([rank[0] for rank in ranks], "train")
    valid = in_order([rank[0] for rank in ranks], "valid")
    following = [
        (2, data | batch(1, 3, exit_interval=7, eval_interval=1)),
        (1, data | batch(5, 1, exit_interval=10, eval_interval=5)),
        (2, data | batch(2, 2, eval_interval=6, eval_iters=2)),
    ]
    for size, settings in following:
        ranks = run_ranks(train_parts, size=size, folder=saved, parts=[settings])
        assert [rank[0]["error"] for rank in ranks] == [None] * size
        assert any("train-batch-size" in text for text in ranks[0][0]["warnings"])
        assert not any("another order" in text for text in ranks[0][0]["warnings"])
        train += in_order([rank[0] for rank in ranks], "train")
        valid += in_order([rank[0] for rank in ranks], "valid")
    # 5 iterations of 4 samples, 2 of 6, 3 of 5 and 2 of 8.
    assert train == items(whole, "train", 20 + 12 + 15 + 16)
    # Evaluations after 2 and 4 of 4 samples, after 6 and 7 of 6, after 10 of 5. After 12, the last
    # iteration, two batches of 8 are due and left to the end, which reads what follows them.
    expected = items(whole, "valid", 25 + 16 + 16)
    assert valid == expected[:25] + expected[41:]


def planned(settings: dict[str, Any], count: int) -> list[list[int]]:
    """Return the first samples of a run as `neox-data trace` finds them, from documents and offsets."""
    import numpy as np

    from neox_data.trace import passages
    from neox_model.train.data.streams import build_datasets

    dataset = build_datasets(resolved_from(SETTINGS | settings))["train"]
    found = ([each.tokens for each in passages(dataset, item)] for item in range(count))
    return [np.concatenate(tokens)[:-1].tolist() for tokens in found]


def test_three_changes_of_layout_in_a_row_with_other_batches_read_the_planned_samples(tmp_path, corpus):
    """Two replicas, then tensor 2, pipeline 2, and two replicas under ZeRO 1."""
    data = {"data_path": corpus, "eval_iters": 0, "precision": "bfloat16"}
    parts = [
        data | batch(2, 1, exit_interval=3),
        data | batch(3, 2, exit_interval=5, model_parallel_size=2),
        data | batch(1, 5, exit_interval=8, pipe_parallel_size=2),
        data | batch(2, 2, zero_optimization={"stage": 1}),
    ]
    ranks = run_ranks(train_parts, size=2, folder=str(tmp_path / "saved"), parts=parts, timeout_seconds=900)
    assert [part["error"] for rank in ranks for part in rank] == [None] * 8
    first, tensor, pipeline, last = ([rank[part] for rank in ranks] for part in range(4))
    assert tensor[0]["read"] == tensor[1]["read"]
    read = [in_order(part, "train") for part in (first, tensor[:1], pipeline[:1], last)]
    # 3 iterations of 4 samples, 2 of 6, 3 of 5 and 4 of 8.
    assert [len(part) for part in read] == [12, 12, 15, 32]
    assert [row for part in read for row in part] == planned(data | {"train_iters": 40}, 71)


def test_an_older_checkpoint_continues_at_its_iterations_times_its_batch(tmp_path, corpus):
    data, saved = {"data_path": corpus, "sample_order": "lazy"}, tmp_path / "saved"
    run_ranks(train_parts, size=1, folder=str(saved), parts=[data | batch(2, 2, exit_interval=5)])
    manifest = saved / "global_step5" / MANIFEST
    contents = json.loads(manifest.read_text())["contents"]
    for name in ("in_effect", "samples_digest"):
        del contents["config"][name]
    for name in ("samples", "validation_samples"):
        del contents["training"][name]
    text = json.dumps(contents, separators=(",", ":"), sort_keys=True)
    manifest.write_text(
        f'{{"format": "neox-checkpoint-1", "crc32": {zlib.crc32(text.encode())}, "contents": {text}}}\n'
    )
    parts = [data | batch(2, 2, activation="relu"), data | batch(3, 1, eval_interval=20)]
    ((refused, resumed),) = run_ranks(train_parts, size=1, folder=str(saved), parts=parts)
    assert shows(refused["error"], "activation", "gelu", "relu")
    assert resumed["error"] is None
    assert in_order([resumed], "train") == items(data | {"train_iters": 63}, "train", 41)[20:]
    assert in_order([resumed], "valid") == items(data | {"train_iters": 63}, "valid", 11)[8:]


def test_changed_order_of_samples_is_logged(tmp_path, corpus):
    """An epoch has some 200 samples: GPT-NeoX's shuffle changes if more are requested."""
    data, saved = {"data_path": corpus} | batch(2, 2), str(tmp_path / "saved")
    parts = [
        data | {"exit_interval": 3},
        data | {"exit_interval": 1, "train_iters": 20, "lr_decay_iters": 12},
        data | {"exit_interval": 1, "train_iters": 200, "lr_decay_iters": 12},
        data | {"exit_interval": 1, "seed": 1},
    ]
    (results,) = run_ranks(train_parts, size=1, folder=saved, parts=parts)
    assert [result["error"] for result in results] == [None] * 4
    says = ["different order" in "\n".join(result["warnings"]) for result in results]
    # The third one's checkpoint was written in the new order; the fourth goes back, with another seed.
    assert says == [False, False, True, True]
    assert re.search(r"train-iters +20 +200\n", "\n".join(results[2]["warnings"]) + "\n")
    # They are of the same data, of which each checkpoint records the number of documents.
    for manifest in Path(saved).glob(f"global_step*/{MANIFEST}"):
        recorded = json.loads(manifest.read_text())["contents"]["config"]["documents"]
        split = str(resolved_from(SETTINGS, devices=1).config.data.split)
        assert recorded == len(split_documents(split, len(open_indexed(corpus).document_starts) - 1)["train"])


# 100 changed configurations

# Parameters that cannot be tested in one process or in a short time, or that disable resuming.
_NOT_TRIED = {
    "save", "load", "finetune", "no_load_optim", "no_save_optim", "save_interval", "train_iters",
    "exit_interval", "eval_iters", "eval_interval", "data_path", "train_data_paths", "valid_data_paths",
    "test_data_paths", "distributed_backend", "num_workers", "compile", "lazy_mpu_init", "merge_file",
    "vocab_file", "log_dir", "tensorboard_dir", "use_wandb", "data_cache_dir", "profile_backward",
    "zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device",
    "override_lr_scheduler", "use_checkpoint_lr_scheduler", "mmap_warmup", "deepspeed", "amp.enabled",
}  # fmt: skip
_NOT_TRIED_IN = (
    "autotuning", "elasticity", "tensorboard", "wandb", "comet", "csv_monitor", "compression_training", "aio",
    "flops_profiler", "comms_logger", "eigenvalue",
)  # fmt: skip
_CANDIDATES: dict[str, list[Any]] = {
    "attention_config": [[[["global", "local"], 1]], [[["bslongformer"], 2]]],
    "split": ["60,40,0"],
    "num_attention_heads": [3, 12],
    "optimizer.type": ["adamw", "CPU_torch_adam", "SGD"],
    "tokenizer_type": [],
    # Two layers with two sets of weights share none, and two samples twice are four.
    "num_unique_layers": [1],
    # Null is the value of use_bias_in_attn_linear, true.
    "use_bias_in_qkv": [False],
    "train_batch_size": [],
}
# Reported by what they decide.
_BY_ANOTHER = {
    "train_epochs",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "weight_decay",
    "fp16.enabled",
    "bf16.enabled",
    "make_vocab_size_divisible_by",
    "sparsity_config.global_block_end_indices",
    "intermediate_size",
    "expansion_factor",
    # Refused by the learning-rate curve, whose values are named peak, floor, style, ...
    *LEARNING_RATE,
    *("warmup_iters", "decay_lr_to", "lr_decay_fraction", "lr_wsd_decay_iters"),
}
# In use as far as `used_when` says, but possibly without effect: no layer is sparse, the padded vocabulary
# has the same size, no position is learned, the width is a multiple already, scores are not stored, or all
# heads of the drawn layout agree.
_SAME_IN_EFFECT = {
    "head_dim",
    "sparsity_config.block",
    "sparsity_config.different_layout_per_head",
    "make_vocab_size_divisible_by",
    "max_position_embeddings",
    "mlp_multiple_of",
    "apply_query_key_layer_scaling",
}
_BASE: dict[str, Any] = SETTINGS | batch(2, 2, train_iters=3, eval_iters=0, sample_order="lazy")
# Architectures between which the parameters of each kind are in use.
_ARCHITECTURES: list[dict[str, Any]] = [
    {},
    {"pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "gpt_j_residual": True},
    {
        "pos_emb": "alibi",
        "attention_config": [[["sparse_variable", "local"], 1]],
        "sparsity_config": {"block": 4, "num_random_blocks": 1},
        "norm": "scalenorm",
    },
    {"pos_emb": "rpe", "attention_config": [[["bigbird"], 2]], "sparsity_config": {"block": 4}},
]


def other_values(parameter: Parameter, value: Any) -> list[Any]:
    """Values that differ from the one in use, the likeliest to be valid first."""
    if parameter.name in _CANDIDATES:
        return [candidate for candidate in _CANDIDATES[parameter.name] if candidate != value]
    kinds = parameter.type.split(" or ")
    if parameter.choices and "choice" in kinds:
        return [choice for choice in parameter.choices if choice != str(value)]
    if "true or false" in parameter.type:
        return [not value]
    if "list of numbers" in kinds:
        return [[each * 0.9 for each in value or (1, 1)]]
    if "list of whole numbers" in kinds:
        return [[2], [1], [2, 1]]
    if "whole number" in kinds:
        return [2 * (value or 2), (value or 4) + 1, (value or 4) // 2, 6]
    if "number" in kinds:
        return [0.5 * (value or 0.1), 2 * (value or 0.1), 1.0]
    return []


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return one | {
        name: merged(one[name], value) if isinstance(value, dict) and name in one else value
        for name, value in other.items()
    }


def changed_settings(parameter: Parameter, base: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Return configurations that differ in a parameter and that a launch would accept."""
    config = resolved_from(base).config
    for value in other_values(parameter, config.value_of(parameter.name)):
        settings = merged(base, nested(parameter.name, value))
        try:
            resolved_from(settings)
        except (ConfigError, ValueError):
            continue
        yield value, settings


def draw_changes(count: int, data_path: str) -> list[dict[str, Any]]:
    """Draw changed configurations: each class has a share, and its parameters equal probability."""
    generator = random.Random(10)
    parameters = [
        parameter
        for parameter in all_parameters()
        if not parameter.is_block
        and "<" not in parameter.name
        and parameter.name not in _NOT_TRIED
        and parameter.name.partition(".")[0] not in _NOT_TRIED_IN
    ]
    pairs = [(parameter, number) for parameter in parameters for number in range(len(_ARCHITECTURES))]
    generator.shuffle(pairs)
    left = {"model": count * 45 // 100, "training": count * 35 // 100}
    left["free"] = count - sum(left.values())
    found = []
    for parameter, number in pairs:
        base = _BASE | {"data_path": data_path} | _ARCHITECTURES[number]
        changed = next(changed_settings(parameter, base), None) if left[str(parameter.resume)] else None
        if changed is not None:
            left[str(parameter.resume)] -= 1
            value, settings = changed
            found.append(
                {"name": parameter.name, "value": value, "architecture": number, "settings": settings}
            )
    assert not any(left.values())
    return found


def resume_with_each(
    folder: str, data_path: str, changes: list[dict[str, Any]], declared_free: str = ""
) -> list[dict[str, Any]]:
    """Save one checkpoint per architecture, and resume from it with each change.

    Args:
        folder: for the checkpoints.
        data_path: of the corpus.
        changes: what `draw_changes` gives.
        declared_free: a parameter that has lost its class.
    """
    import torch

    from neox_config.spec import resume
    from neox_config.spec.resume import recorded_values
    from neox_model.assembly.model import build_model
    from neox_model.checkpoint.errors import CheckpointError
    from neox_model.checkpoint.load import load_weights
    from neox_model.parallel.groups import SINGLE_PROCESS
    from neox_model.parallel.topology import create_groups
    from neox_model.processes import load_tokenizer

    declared = resume.resume_of
    resume.resume_of = lambda section, name, around: (
        "free" if name == declared_free else declared(section, name, around)
    )
    tokens = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(3))

    def logits(settings: dict[str, Any], base: dict[str, Any], saved: str) -> Any:
        """Return the model's output on what its length allows, or None where the weights do not fit."""
        resolved, tokenizer = (
            resolved_from(settings),
            load_tokenizer(resolved_from(settings).config.tokenizer),
        )
        model = (
            build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=tokenizer.vocab_size)
            .eval()
            .float()
        )
        try:
            config = recorded_values(
                resolved_from(base), fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size
            )
            load_weights(Path(saved), model=model, groups=SINGLE_PROCESS, config=config)
        except CheckpointError:
            return None
        with torch.no_grad():
            return model(tokens[:, : resolved.config.model.seq_length])

    def is_prefix(found_BSV: Any, whole_BSV: Any) -> bool:
        return torch.allclose(found_BSV, whole_BSV[:, : found_BSV.shape[1]], rtol=1e-3, atol=1e-5)

    create_groups(1, 1)
    bases, expected = {}, {}
    for number in {change["architecture"] for change in changes}:
        bases[number] = base = _BASE | {"data_path": data_path} | _ARCHITECTURES[number]
        saved = str(Path(folder, str(number)))
        (first,) = train_parts(saved, [base | {"exit_interval": 2}])
        assert first["error"] is None
        expected[number] = logits(base, base, saved)
    results = []
    for change in changes:
        number = change["architecture"]
        saved = str(Path(folder, str(number)))
        (resumed,) = train_parts(saved, [change["settings"] | {"save": None, "load": saved}])
        found = logits(change["settings"], bases[number], saved)
        same = found is not None and is_prefix(found, expected[number])
        results.append({"error": resumed["error"], "warnings": resumed["warnings"], "is_same_model": same})
    return results


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, corpus) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    changes = draw_changes(100, corpus)
    folder = str(tmp_path_factory.mktemp("changes"))
    arguments = {"folder": folder, "data_path": corpus, "changes": changes}
    (results,) = run_ranks(resume_with_each, size=1, timeout_seconds=1800, **arguments)
    return list(zip(changes, results, strict=True))


def is_in_effect(change: dict[str, Any]) -> bool:
    """Whether the parameter can act before or after the change."""
    base = _BASE | _ARCHITECTURES[change["architecture"]] | {"data_path": "x"}
    name = change["name"]
    runs = [resolved_from(base).config, resolved_from(change["settings"]).config]
    return any(is_in_use(name, config) for config in runs)


def outcome_of(result: dict[str, Any]) -> str:
    """Whether a resume was refused, reported, or silent."""
    said = "\n".join(result["warnings"])
    return "refused" if result["error"] else "reported" if "settings that differ" in said else "silent"


def violations(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Resumes that their class does not allow, and accepted ones of another function of the weights."""
    classes = {parameter.name: str(parameter.resume) for parameter in all_parameters()}
    found = []
    for change, result in pairs:
        name, said = change["name"], result["error"] or "\n".join(result["warnings"])
        outcome, resume = outcome_of(result), classes[name]
        allowed = {"silent"}
        if resume != "free" and is_in_effect(change):
            allowed = {"refused"} if resume == "model" else {"refused", "reported"}
        if name in _SAME_IN_EFFECT:
            allowed |= {"silent"}
        is_named = outcome == "silent" or name.replace("_", "-") in said or name in _BY_ANOTHER
        is_model = outcome == "refused" or result["is_same_model"]
        if outcome not in allowed or not is_named or not is_model:
            where = f"{name}={change['value']} ({resume}, architecture {change['architecture']})"
            found.append(f"{where}: {outcome}, same model: {result['is_same_model']}; {said}")
    return found


def test_100_changed_configurations_are_refused_reported_or_free_by_their_class(resumed):
    assert len(resumed) == 100
    found = violations(resumed)
    assert not found, "\n".join(found)
    outcomes = [outcome_of(result) for _, result in resumed]
    assert outcomes.count("refused") > 20
    # Of 110 more parameters, most determine the model: the draw has fewer that are reported.
    assert outcomes.count("reported") >= 5


def test_a_lost_class_is_a_silent_change_of_the_model_and_is_found(tmp_path, corpus):
    settings = _BASE | {"data_path": corpus, "activation": "relu"}
    change = {"name": "activation", "value": "relu", "architecture": 0, "settings": settings}
    arguments = {"folder": str(tmp_path), "data_path": corpus, "changes": [change]}
    (results,) = run_ranks(resume_with_each, size=1, declared_free="activation", **arguments)
    assert (outcome_of(results[0]), results[0]["is_same_model"]) == ("silent", False)
    (found,) = violations([(change, results[0])])
    assert found.startswith("activation=relu (model, architecture 0): silent, same model: False")
