"""Results of an input file on several ranks: complete, in order, and those of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neox_config.schema.sections.generation import GenerationSection
from neox_data.tokenizers import build_tokenizer
from neox_model.assembly.model import build_stage
from neox_model.generate.forward import Forward
from neox_model.generate.modes import MODES, Job
from neox_model.initialization import initialize_parameters
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.topology import create_groups
from neox_model.scoring.scorer import Part, Scorer
from support.decoding import scores_of
from support.distributed import run_ranks
from support.settings import resolved_from

# More than two batches, an odd number, and one that is too long.
PROMPTS = ["a", "bcd", "e" * 30, "fg", "h" * 64, "ijklmnop", "q", "rs", "tuv"]
DTYPES = {"fp32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}
# Of log-probabilities: sums are made in another order.
TOLERANCES = {"fp32": 1e-4, "bfloat16": 0.15}
TOKENIZER = build_tokenizer("CharLevelTokenizer")


def forward_on(groups: Groups, precision: str, sizes: dict[str, int]) -> Forward:
    """Return the forward pass of a model with random weights."""
    settings = {"num_layers": 2, "init_method_std": 0.3, "seq_length": 48, "max_position_embeddings": 48}
    resolved = resolved_from(settings | sizes, devices=groups.world.size)
    model = build_stage(resolved.model, resolved.run, groups, vocab_size=TOKENIZER.vocab_size)
    initialize_parameters(model, seed=7, on_cpu=True)
    return Forward(
        model.to(DTYPES[precision]).eval(),
        hidden_size=resolved.config.model.hidden_size,
        vocab_size=TOKENIZER.vocab_size,
        model_vocab_size=resolved.model.embedding.entries(TOKENIZER.vocab_size),
        groups=groups,
    )


def write_results(folder: Path, groups: Groups, precision: str, forward: Forward) -> list[dict[str, Any]]:
    """Continue the prompts: sampled in fp32, the most likely tokens in 16 bits."""
    output = folder / f"{precision}.jsonl"
    sampled = SAMPLED if precision == "fp32" else {}
    settings = GenerationSection(
        maximum_tokens=12,
        generation_batch_size=4,
        sample_input_file=str(folder / "prompts.txt"),
        sample_output_file=str(output),
        return_logits=True,
        **sampled,
    )
    job = Job(settings, forward, TOKENIZER, groups, seed=3, seq_length=48)
    MODES["input-file"](job)
    return results_of(output) if groups.world.rank == 0 else []


def on_layout(folder: str, sizes: dict[str, int]) -> None:
    groups = create_groups(sizes.get("model_parallel_size", 1), sizes.get("pipe_parallel_size", 1))
    for precision in DTYPES:
        write_results(Path(folder), groups, precision, forward_on(groups, precision, sizes))


def results_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def differences(found: dict[str, Any], alone: dict[str, Any], scorer: Scorer, tolerance: float) -> list[str]:
    """Return how a text differs from that of one process, by more than rounding.

    In 16 bits, sums in another order may change which of two nearly equal logits is larger, and then all
    tokens that follow. Up to there log-probabilities must be equal up to the tolerance, and there those of
    both tokens under the model of one process.
    """
    one, other = tokens_of(found), tokens_of(alone)
    same = next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None
    )
    values = zip(found["log_probabilities"][:same], alone["log_probabilities"][:same], strict=False)
    wrong = [f"{value} instead of {right}" for value, right in values if abs(value - right) > tolerance]
    wrong += logits_apart(found, tolerance)
    # Up to where tokens differ, the logits are those of one process.
    both = [torch.tensor(each["logits"][:same]) for each in (found, alone)]
    if same != 0 and both[0].numel() and (both[0] - both[1]).abs().max() > 10 * tolerance:
        wrong.append("other logits")
    if same is None:
        return wrong if len(one) == len(other) else [*wrong, "another length"]
    before = [*TOKENIZER.encode(alone["context"]), *other[:same]]
    first, second = scores_of(scorer, [Part(before, [token]) for token in (other[same], one[same])])
    gap = first.log_likelihood - second.log_likelihood
    return wrong if gap <= 2 * tolerance else [*wrong, f"place {same}: a token that is less likely by {gap}"]


def logits_apart(result: dict[str, Any], tolerance: float) -> list[str]:
    """Return which logits of a result are not those of its tokens' log-probabilities."""
    if not result["tokens"]:
        return ["logits without a token"] if result.get("logits") else []
    logits_TV = torch.tensor(result["logits"], dtype=torch.float64)
    if logits_TV.shape != (len(result["tokens"]), TOKENIZER.vocab_size):
        return [f"logits of the shape {tuple(logits_TV.shape)}"]
    places = torch.tensor(result["tokens"]).unsqueeze(1)
    values_T = logits_TV.log_softmax(1).gather(1, places).squeeze(1)
    worst = (values_T - torch.tensor(result["log_probabilities"])).abs().max()
    return [] if worst <= tolerance else [f"logits that are off by {worst}"]


def tokens_of(result: dict[str, Any]) -> list[int]:
    return result["tokens"] + [TOKENIZER.end_of_document] * result["finished"]


@pytest.mark.parametrize(
    "sizes",
    [
        {"zero_optimization": {"stage": 3}},
        # Prompts of any length are not divided, also if samples are.
        {"model_parallel_size": 2, "sequence_parallel": True},
        {"pipe_parallel_size": 2},
    ],
    ids=["data 2", "tensor 2", "pipeline 2"],
)
def test_results_of_two_ranks_are_those_of_one_process(tmp_path, sizes):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    forwards = {precision: forward_on(SINGLE_PROCESS, precision, {}) for precision in DTYPES}
    expected = {
        precision: write_results(tmp_path, SINGLE_PROCESS, precision, forward)
        for precision, forward in forwards.items()
    }
    run_ranks(on_layout, size=2, folder=str(tmp_path), sizes=sizes)
    for precision, alone in expected.items():
        found = results_of(tmp_path / f"{precision}.jsonl")
        assert [one["context"] for one in found] == PROMPTS
        reasons = [one["finish_reason"] for one in found]
        assert reasons[4] == "prompt-too-long"
        assert set(reasons) <= {"maximum-tokens", "prompt-too-long", "end-of-document"}
        # In 16 bits, matrices of another number of rows are rounded in another order on some CPUs: each rank
        # of "data 2" has a part of the rows.
        if precision == "fp32":
            assert [one["tokens"] for one in found] == [one["tokens"] for one in alone]
        scorer = Scorer(forwards[precision], seq_length=48, batch_tokens=48)
        for one, other in zip(found, alone, strict=True):
            assert differences(one, other, scorer, TOLERANCES[precision]) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bfloat16.jsonl",
        "fp32.jsonl",
        "prompts.txt",
    ]


def swapped_halves(logits: Tensor) -> Tensor:
    """As if the parts of two ranks were joined in the wrong order: the largest logit is another token's."""
    return logits.roll(logits.shape[-1] // 2, dims=-1)


def lost_part(hidden: Tensor) -> Tensor:
    """As if a sum over two ranks lacked one of 64 features."""
    return torch.cat([hidden[..., :-1], torch.zeros_like(hidden[..., -1:])], dim=-1)


@pytest.mark.parametrize(("place", "fault"), [(-1, swapped_halves), (-2, lost_part)])
def test_the_comparison_finds_a_wrong_layout_in_16_bits(tmp_path, place, fault):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    forward = forward_on(SINGLE_PROCESS, "bfloat16", {})
    alone = write_results(tmp_path, SINGLE_PROCESS, "bfloat16", forward)
    wrong = forward_on(SINGLE_PROCESS, "bfloat16", {})
    list(wrong.model.stack)[place].register_forward_hook(lambda _, __, output: fault(output))
    found = write_results(tmp_path, SINGLE_PROCESS, "bfloat16", wrong)
    scorer = Scorer(forward, seq_length=48, batch_tokens=48)
    assert any(
        differences(one, other, scorer, TOLERANCES["bfloat16"])
        for one, other in zip(found, alone, strict=True)
    )
