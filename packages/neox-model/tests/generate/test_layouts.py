"""Results of an input file on several ranks: complete, in order, and those of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from neox_data.tokenizers import build_tokenizer
from neox_model.assembly.model import build_stage, padded_vocab_size
from neox_model.generate.batch import Batch
from neox_model.generate.engine import Engine
from neox_model.generate.forward import Forward
from neox_model.generate.modes import MODES, Job
from neox_model.generate.run import as_plain_model
from neox_model.generate.sampling import Sampling
from neox_model.initialization import initialize_parameters
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.settings import resolved_from

# More than two batches, an odd number, and one that is too long.
PROMPTS = ["a", "bcd", "e" * 30, "fg", "h" * 64, "ijklmnop", "q", "rs", "tuv"]
DTYPES = {"fp32": torch.float32, "bfloat16": torch.bfloat16}


def write_results(folder: Path, groups: Groups, precision: str, sizes: dict[str, int]) -> Path:
    """Continue the prompts with random weights, and return the file of the results."""
    tokenizer = build_tokenizer("CharLevelTokenizer")
    settings = {"num_layers": 2, "init_method_std": 0.3, "seq_length": 48, "max_position_embeddings": 48}
    resolved = as_plain_model(resolved_from(settings | sizes, devices=groups.world.size))
    model = build_stage(resolved, groups, vocab_size=tokenizer.vocab_size)
    initialize_parameters(model, seed=7, on_cpu=True)
    forward = Forward(
        model.to(DTYPES[precision]).eval(),
        hidden_size=resolved.config.model.hidden_size,
        vocab_size=tokenizer.vocab_size,
        model_vocab_size=padded_vocab_size(resolved.config, tokenizer.vocab_size),
        groups=groups,
    )
    output = folder / f"{precision}.jsonl"
    job = Job(
        engine=lambda slots, capacity: Engine(Batch(forward, slots=slots, capacity=capacity), tokenizer),
        tokenizer=tokenizer,
        groups=groups,
        seed=3,
        seq_length=48,
        maximum_tokens=12,
        batch_size=4,
        sampling=Sampling(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.2),
        input_file=folder / "prompts.txt",
        output_file=output,
    )
    MODES["input-file"](job)
    return output


def on_layout(folder: str, sizes: dict[str, int]) -> None:
    groups = create_groups(sizes.get("model_parallel_size", 1), sizes.get("pipe_parallel_size", 1))
    for precision in DTYPES:
        write_results(Path(folder), groups, precision, sizes)


def results_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize(
    "sizes",
    [{}, {"model_parallel_size": 2}, {"pipe_parallel_size": 2}],
    ids=["data 2", "tensor 2", "pipeline 2"],
)
def test_results_of_two_ranks_are_those_of_one_process(tmp_path, sizes):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    expected = {
        precision: results_of(write_results(tmp_path, SINGLE_PROCESS, precision, {})) for precision in DTYPES
    }
    run_ranks(on_layout, size=2, folder=str(tmp_path), sizes=sizes)
    for precision, alone in expected.items():
        found = results_of(tmp_path / f"{precision}.jsonl")
        assert [one["context"] for one in found] == PROMPTS
        reasons = [one["finish_reason"] for one in found]
        assert (reasons[4], set(reasons) - {"end-of-document"}) == (
            "prompt-too-long",
            {"maximum-tokens", "prompt-too-long"},
        )
        # In 16 bits, sums in another order may change a token, and all that follow.
        is_exact = precision == "fp32" or not sizes
        same = [one["tokens"] == other["tokens"] for one, other in zip(found, alone, strict=True)]
        assert all(same) if is_exact else sum(same) >= 2
        for one, other in zip(found, alone, strict=True):
            if one["tokens"] == other["tokens"]:
                near = pytest.approx(other["log_probabilities"], abs=1e-4 if precision == "fp32" else 0.15)
                assert one["log_probabilities"] == near
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bfloat16.jsonl",
        "fp32.jsonl",
        "prompts.txt",
    ]
