from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neox_config.derive.generation import generation_mode
from neox_model.generate.decode import Decoder
from neox_model.generate.run import as_plain_model
from neox_model.generate.sampling import Sampler
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.settings import resolved_from

END, VOCABULARY = 0, 8


class Script(nn.Module):
    """Says the given tokens, one per place after the prompt; a padding row is always the likeliest."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.nothing = nn.Parameter(torch.zeros(1))
        self.inputs: list[list[int]] = []

    def forward(self, tokens_BS: Tensor) -> Tensor:
        self.inputs.append(tokens_BS[0].tolist())
        logits = torch.zeros(1, tokens_BS.shape[1], VOCABULARY + 2)
        logits[..., VOCABULARY:] = 9.0
        logits[:, -1, self.tokens[len(self.inputs) - 1]] = 5.0
        return logits


def decoder(model: nn.Module, **changes: object) -> Decoder:
    settings = {
        "vocab_size": VOCABULARY,
        "end_of_document": END,
        "seq_length": 6,
        "maximum_tokens": 4,
        "recompute": True,
    }
    return Decoder(model, Sampler(), **(settings | changes))


def test_a_text_ends_at_end_of_document_which_is_not_part_of_it():
    result = decoder(Script(3, 4, END, 5)).continue_prompt([1], torch.Generator())
    assert (result.tokens, result.finished, result.message) == ([3, 4], True, None)


def test_a_text_ends_after_maximum_tokens():
    result = decoder(Script(3, 4, 5, 6, 7), maximum_tokens=2).continue_prompt([1], torch.Generator())
    assert (result.tokens, result.finished) == ([3, 4], False)


def test_a_text_ends_when_seq_length_is_full():
    result = decoder(Script(3, 4, 5, 6, 7)).continue_prompt([1, 1, 1], torch.Generator())
    assert (result.tokens, result.finished) == ([3, 4, 5], False)


def test_empty_text_is_reported_with_the_reason():
    result = decoder(Script(END)).continue_prompt([1], torch.Generator())
    assert (result.tokens, result.finished, result.message) == (
        [],
        True,
        "the model ended the document immediately",
    )
    script = Script(3)
    result = decoder(script).continue_prompt([1] * 6, torch.Generator())
    assert (result.tokens, result.finished) == ([], False)
    assert result.message == "the prompt's 6 tokens already fill seq_length (6)"
    assert script.inputs == []


def test_an_empty_prompt_is_the_beginning_of_a_document_and_each_call_sees_the_whole_text():
    script = Script(3, 4, END)
    decoder(script).continue_prompt([], torch.Generator())
    assert script.inputs == [[END], [END, 3], [END, 3, 4]]


RANDOM_MODEL = {
    "num_layers": 2,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 5,
    "init_method_std": 0.5,
}


def continuations(
    settings: dict[str, Any], groups: Groups | None = None, *, recompute: bool, temperature: float
) -> list[list[int]]:
    """Return the continuations of three prompts by a model with random weights."""
    from neox_model.assembly.model import build_model

    groups = groups or create_groups(2, 1)
    resolved = resolved_from(settings, devices=groups.world.size)
    model = build_model(resolved, groups, vocab_size=512).eval()
    make = decoder(
        model,
        vocab_size=512,
        seq_length=32,
        maximum_tokens=30,
        recompute=recompute,
        group=groups.model,
    )
    make._choose = Sampler(temperature=temperature, top_k=50)
    prompts = ([], [5, 6, 7], list(range(1, 30)))
    return [make.continue_prompt(prompt, torch.Generator().manual_seed(7)).tokens for prompt in prompts]


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_keys_and_values_change_nothing(positions, temperature):
    settings = RANDOM_MODEL | {"pos_emb": positions}
    make = partial(continuations, settings, SINGLE_PROCESS, temperature=temperature)
    cached = make(recompute=False)
    assert len(cached[2]) == 3
    assert min(len(cached[0]), len(set(cached[1]))) > 5
    assert make(recompute=True) == cached == make(recompute=False)


def test_two_tensor_parallel_ranks_write_the_same_text_as_one():
    # 515 rows in two blocks of 258: padding of the vocabulary and of the layout.
    split = RANDOM_MODEL | {"model_parallel_size": 2}
    first, second = run_ranks(continuations, size=2, settings=split, recompute=False, temperature=1.0)
    assert first == second == continuations(RANDOM_MODEL, SINGLE_PROCESS, recompute=False, temperature=1.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "interactive"),
        ({"num_samples": 2}, "unconditional"),
        ({"num_samples": 2, "sample_input_file": "prompts.txt"}, "input-file"),
        ({"num_samples": 2, "text_gen_type": "interactive"}, "interactive"),
    ],
)
def test_the_mode_follows_from_the_settings(settings, expected):
    assert generation_mode(resolved_from(settings).config) == expected


def test_pipeline_stages_become_replicas():
    settings = {"pipe_parallel_size": 2, "model_parallel_size": 2, "zero_optimization": {"stage": 1}}
    plain = as_plain_model(resolved_from(settings, devices=8))
    assert plain.config.zero.zero_optimization.stage == 0
    derived = plain.derived
    assert not derived.uses_pipeline
    sizes = (derived.data_parallel_size, derived.model_parallel_size, derived.pipe_parallel_size)
    assert sizes == (4, 2, 1)
