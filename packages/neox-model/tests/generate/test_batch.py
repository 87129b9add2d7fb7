"""Batches with caches against one by one, recomputation, transformers, and other layouts."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neox_model.assembly.model import build_stage
from neox_model.generate.batch import Batch, NewTokens, Request, _groups
from neox_model.generate.forward import Forward
from neox_model.generate.sampling import GREEDY, Sampling
from neox_model.initialization import initialize_parameters
from neox_model.layers.cache import spans_of
from neox_model.layers.positions import lengths_of_requests
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.topology import create_groups
from neox_model.scoring.scorer import Part, Scorer
from support.decoding import continue_prompts, scores_of
from support.distributed import run_ranks
from support.layouts import CAUSAL_ARCHITECTURES, Layout, settings_of
from support.settings import resolved_from
from support.tiers import slow_except

VOCABULARY = 11
# Lengths that differ, with equal ones among them.
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 1], [2, 3, 4, 5, 6, 7], [3]]
SAMPLED = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, top_k=3, seed=2),
    GREEDY,
    Sampling(temperature=1.2, top_p=0.8, repetition_penalty=1.3, seed=3),
    Sampling(repetition_penalty=2.0),
    Sampling(temperature=1.0, top_k=4, top_p=0.7, seed=4),
]


def forward_of(
    settings: dict[str, Any], groups: Groups = SINGLE_PROCESS, vocab_size: int = VOCABULARY
) -> Forward:
    resolved = resolved_from(settings, devices=groups.world.size)
    model = build_stage(resolved.model, resolved.run, groups, vocab_size=vocab_size)
    initialize_parameters(model, seed=7, on_cpu=True)
    dtype = {"bfloat16": torch.bfloat16, "fp16": torch.float16}.get(settings.get("precision"), torch.float32)
    return Forward(
        model.to(dtype).eval(),
        hidden_size=resolved.config.model.hidden_size,
        vocab_size=vocab_size,
        model_vocab_size=resolved.model.embedding.entries(vocab_size),
        groups=groups,
    )


def small(architecture: str, **changes: Any) -> dict[str, Any]:
    settings = settings_of(architecture, Layout(1, {}), recomputes=False)
    return settings | {"init_method_std": 0.5, "train_batch_size": None} | changes


@pytest.mark.parametrize("precision", slow_except(["fp32", "bfloat16"], "fp32"))
@pytest.mark.parametrize("architecture", CAUSAL_ARCHITECTURES)
def test_cached_batches_equal_one_by_one_and_recomputation(architecture, precision):
    forward = forward_of(small(architecture, precision=precision))
    kinds = {
        "batch": continue_prompts(forward, PROMPTS, SAMPLED, count=9),
        "alone": continue_prompts(forward, PROMPTS, SAMPLED, count=9, together=False),
        "recomputed": continue_prompts(forward, PROMPTS, SAMPLED, count=9, recompute=True),
    }
    # Rounding may also choose another expert, whose output differs more.
    tolerance = 1e-4 if precision == "fp32" else 0.5 if "expert" in architecture else 0.15
    for name in ("alone", "recomputed"):
        for one, other in zip(kinds["batch"], kinds[name], strict=True):
            # In 16 bits, sums in another order may change which of two nearly equal logits is the largest.
            same = len(one.tokens)
            if precision != "fp32":
                differs = [first != second for first, second in zip(one.tokens, other.tokens, strict=True)]
                same = differs.index(True) if True in differs else same
            assert one.tokens[:same] == other.tokens[:same], name
            expected = pytest.approx(other.log_probabilities[:same], abs=tolerance)
            assert one.log_probabilities[:same] == expected, name
    if precision == "fp32":
        assert len({token for one in kinds["batch"] for token in one.tokens}) > 3


def test_slots_in_several_spans_continue_as_in_one(monkeypatch):
    forward = forward_of(small("half rotary, parallel residual, untied"))
    expected = continue_prompts(forward, PROMPTS, SAMPLED, count=6)
    monkeypatch.setattr("neox_model.generate.batch._HIDDEN_ROWS", 1)
    found = continue_prompts(forward, PROMPTS, SAMPLED, count=6)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-4)


def test_a_sequence_that_enters_later_or_moves_to_another_slot_continues_as_alone():
    settings = small("grouped queries, rmsnorm, swiglu, no biases")
    forward = forward_of(settings)
    expected = continue_prompts(forward, PROMPTS, SAMPLED, count=8, together=False)
    lengths = [8, 3, 5, 8, 2, 6]
    batch = Batch(forward, slots=3, capacity=14)
    waiting, running = list(range(len(PROMPTS))), []
    found: dict[int, list[int]] = {number: [] for number in waiting}

    def read_and_release() -> None:
        for number, fresh in zip(running, batch.read(), strict=True):
            found[number] += fresh.tokens
        for place in reversed(range(len(running))):
            if len(found[running[place]]) == lengths[running[place]]:
                last = running.pop()
                running[place : place + 1] = [last] if place < len(running) else []
                batch.release(place)

    while waiting or running:
        new, waiting = waiting[: 3 - len(running)], waiting[3 - len(running) :]
        running += new
        places = batch.admit(
            [Request(prompt=PROMPTS[one], sampling=SAMPLED[one], maximum_tokens=lengths[one]) for one in new]
        )
        for place, number in zip(places, new, strict=True):
            running[place] = number
        read_and_release()
        if running:
            batch.step()
            read_and_release()
    assert found == {number: expected[number].tokens[: lengths[number]] for number in found}


def test_padding_rows_of_the_vocabulary_are_never_chosen():
    forward = forward_of(small("learned positions, layernorm, tied", make_vocab_size_divisible_by=64))
    with torch.no_grad():
        for name, parameter in named_logical_parameters(forward.model):
            if name == "embedding.word_embeddings.weight":
                parameter[VOCABULARY:] = parameter[:VOCABULARY].abs().max() * 50
    settings = [Sampling(temperature=5.0, seed=seed) for seed in range(len(PROMPTS))]
    found = continue_prompts(forward, PROMPTS, settings, count=9)
    assert max(token for one in found for token in one.tokens) < VOCABULARY


def on_layout(architecture: str, sizes: dict[str, int], precision: str) -> list[list[int]]:
    """Return the tokens, then the log-probabilities, that a rank of a layout reads."""
    groups = create_groups(sizes.get("model_parallel_size", 1), sizes.get("pipe_parallel_size", 1))
    forward = forward_of(small(architecture, precision=precision, **sizes), groups)
    found = continue_prompts(forward, PROMPTS, SAMPLED, count=9)
    return [one.tokens for one in found] + [one.log_probabilities for one in found]


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        ("half rotary, parallel residual, untied", "fp32"),
        ("learned positions, layernorm, tied", "bfloat16"),
        ("shared layers", "fp32"),
        ("aMLP", "fp32"),
    ],
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"model_parallel_size": 2},
        {"pipe_parallel_size": 2},
        pytest.param({"model_parallel_size": 2, "pipe_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["tensor 2", "pipeline 2", "tensor 2 x pipeline 2"],
)
def test_every_rank_of_a_layout_reads_the_tokens_of_one_process(architecture, precision, sizes):
    found = continue_prompts(forward_of(small(architecture, precision=precision)), PROMPTS, SAMPLED, count=9)
    size = sizes.get("model_parallel_size", 1) * sizes.get("pipe_parallel_size", 1)
    ranks = run_ranks(on_layout, size=size, architecture=architecture, sizes=sizes, precision=precision)
    assert all(rank == ranks[0] for rank in ranks)
    tokens, values = ranks[0][: len(PROMPTS)], ranks[0][len(PROMPTS) :]
    for one, row, numbers in zip(found, tokens, values, strict=True):
        assert one.tokens == row or precision == "bfloat16"
        if one.tokens == row:
            assert numbers == pytest.approx(one.log_probabilities, abs=1e-4 if precision == "fp32" else 0.15)


PARTS = {
    "gpt_neox": {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.qkv": "attention.query_key_value",
        "attention.dense": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "embedding.word_embeddings": "embed_in",
        "final_norm": "final_layer_norm",
    },
    "model": {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.dense": "self_attn.o_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.down": "mlp.down_proj",
        "embedding.word_embeddings": "embed_tokens",
        "final_norm": "norm",
    },
}


def theirs_as_ours(prefix: str, weights: dict[str, Tensor], name: str) -> Tensor:
    """Return the weight of transformers for one of ours; Llama's query, key and value are joined by group."""
    part, kind = name.rsplit(".", 1)
    if part == "lm_head":
        return weights[name]
    layer = ""
    if part.startswith("layers."):
        _, index, part = part.split(".", 2)
        layer = f"layers.{index}."
    if part == "attention.qkv" and prefix == "model":
        rows = [weights[f"model.{layer}self_attn.{which}_proj.{kind}"] for which in "qkv"]
        groups = len(rows[1]) // 8
        return torch.cat([one.view(groups, -1, 8, 48) for one in rows], dim=1).reshape(-1, 48)
    return weights[f"{prefix}.{layer}{PARTS[prefix][part]}.{kind}"]


def their_settings(kind: str) -> tuple[dict[str, Any], nn.Module, str]:
    """Return settings of ours, the same model of transformers, and the prefix of its weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    both = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "mlp_width": 100,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "pos_emb": "rotary",
    }
    shared = {
        **sizes,
        "intermediate_size": 100,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    if kind == "GPT-NeoX":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        theirs = transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(rope_parameters=rope, hidden_dropout=0.0, **shared)
        )
        settings = {"rotary_pct": 0.5, "gpt_j_residual": True, "no_weight_tying": True}
        return both | settings, theirs.eval(), "gpt_neox"
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters=rope, **shared)
    )
    settings = {
        "activation": "swiglu",
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-6,
        "num_kv_heads": 2,
        "no_weight_tying": True,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    }
    return both | settings, theirs.eval(), "model"


@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("kind", ["GPT-NeoX", "Llama"])
def test_greedy_tokens_are_those_of_transformers(kind, penalty):
    torch.manual_seed(5)
    settings, theirs, prefix = their_settings(kind)
    forward = forward_of(settings, vocab_size=50)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in named_logical_parameters(forward.model):
            parameter.copy_(theirs_as_ours(prefix, weights, name))
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(1, 50, (length,), generator=generator).tolist() for length in (3, 20, 9, 14, 1)]
    found = continue_prompts(forward, prompts, [Sampling(repetition_penalty=penalty)] * 5, count=30)
    for prompt, ours in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt])
        expected = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=30,
            do_sample=False,
            repetition_penalty=penalty,
            pad_token_id=0,
        )
        assert ours.tokens == expected[0, len(prompt) :].tolist()
    assert len({token for ours in found for token in ours.tokens}) > 10


def test_spans_cover_all_slots_and_read_few_hidden_rows():
    places = [300, 10, 12, 250, 251, 40, 40, 41]
    for max_waste in (0, 30, 1000, 10**6):
        spans = spans_of(places, torch.tensor(places), max_waste=max_waste)
        assert [span.first for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == len(places)
        for span in spans:
            inside = places[span.first : span.stop]
            assert span.num_keys == max(inside) + 1
            assert sum(max(inside) - place for place in inside) <= max_waste
            assert span.is_even == (len(set(inside)) == 1)
            assert span.positions.tolist() == inside
    assert len(spans_of(places, torch.tensor(places), max_waste=10**6)) == 1


def test_prompts_are_processed_in_groups_of_similar_length():
    lengths = [1, 1, 30, 32, 33, 100, 5000, 5001]
    groups = _groups(lengths)
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    assert [[lengths[index] for index in group] for group in groups] == [
        [1, 1],
        [30, 32, 33],
        [100],
        [5000],
        [5001],
    ]
    assert all(one.stop == other.start for one, other in pairwise(groups))
    assert _groups([]) == []


SCORED_ARCHITECTURE = "half rotary, parallel residual, untied"


def scored(forward, *, recompute: bool = False, count: int = 4) -> list[NewTokens]:
    """Return the first tokens behind each prompt. All prompts but the second are scored."""
    batch = Batch(forward, slots=len(PROMPTS), capacity=16, recompute=recompute)
    places = batch.admit(
        [
            Request(prompt=prompt, maximum_tokens=count, top_count=number % 4, scores_prompt=number != 1)
            for number, prompt in enumerate(PROMPTS)
        ]
    )
    first = batch.read()
    for _ in range(count - 1):
        batch.step()
    rest = batch.read()
    assert all(one.prompt is None for one in rest), "scores are read once"
    return [
        NewTokens(
            first[place].tokens + rest[place].tokens,
            first[place].log_probabilities + rest[place].log_probabilities,
            first[place].top + rest[place].top,
            first[place].prompt,
        )
        for place in places
    ]


def whole_text_TV(forward, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of all tokens behind each token of a text, in float64."""
    hidden = torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0)
    with torch.no_grad():
        for layer in forward.model.stack:
            hidden = layer(hidden)
    return hidden[0, :, :VOCABULARY].double().log_softmax(1)


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_scores_are_those_of_a_forward_pass_over_the_whole_text(recompute, precision, monkeypatch):
    # Prompts are scored in parts of two tokens.
    monkeypatch.setattr("neox_model.generate.forward._SCORED_ROWS", 2)
    forward = forward_of(small(SCORED_ARCHITECTURE, precision=precision))
    near = 1e-5 if precision == "fp32" else 0.15
    for number, (prompt, found) in enumerate(zip(PROMPTS, scored(forward, recompute=recompute), strict=True)):
        text = [*prompt, *found.tokens]
        values_TV = whole_text_TV(forward, text[:-1])
        expected = values_TV.gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1).tolist()
        values, tops = found.log_probabilities, found.top
        if number == 1:
            assert found.prompt is None
            expected, values_TV = expected[len(prompt) - 1 :], values_TV[len(prompt) - 1 :]
        else:
            values, tops = found.prompt.log_probabilities + values, found.prompt.top + tops
        assert values == pytest.approx(expected, abs=near)
        assert [len(top) for top in tops] == [number % 4] * len(values)
        for top, row_V in zip(tops, values_TV, strict=True):
            best = row_V.topk(len(top))
            assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=near)
            if precision == "fp32":
                assert [token for token, _ in top] == best.indices.tolist()
        if number % 4:
            # Greedy tokens are the most likely ones, to the last bit.
            assert [top[0] for top in found.top] == list(
                zip(found.tokens, found.log_probabilities, strict=True)
            )


def scored_on_layout(sizes: dict[str, int]) -> list[list]:
    groups = (
        create_groups(sizes.get("model_parallel_size", 1), sizes.get("pipe_parallel_size", 1))
        if sizes
        else SINGLE_PROCESS
    )
    found = scored(forward_of(small(SCORED_ARCHITECTURE, **sizes), groups))
    prompts = [[] if one.prompt is None else one.prompt.log_probabilities for one in found]
    tops = [[value for row in one.top for _, value in row] for one in found]
    ids = [[token for row in one.top for token, _ in row] for one in found]
    return [prompts, tops, ids]


@pytest.mark.parametrize("sizes", [{"model_parallel_size": 2}, {"pipe_parallel_size": 2}], ids=str)
def test_every_rank_of_a_layout_reads_the_scores_of_one_process(sizes):
    expected = scored_on_layout({})
    ranks = run_ranks(scored_on_layout, size=2, sizes=sizes)
    assert ranks[0] == ranks[1]
    for kind in (0, 1):
        for mine, theirs in zip(expected[kind], ranks[0][kind], strict=True):
            assert theirs == pytest.approx(mine, abs=1e-4)
    assert ranks[0][2] == expected[2]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_batch_uses_the_weights_of_its_start(recompute):
    forward, changed = (forward_of(small("half rotary, parallel residual, untied")) for _ in range(2))
    before = continue_prompts(forward, PROMPTS, [GREEDY] * len(PROMPTS), count=5)
    for one in (forward, changed):
        with torch.no_grad():
            list(one.model.stack)[-1].weight.mul_(-1.0)
    after, expected = (
        continue_prompts(one, PROMPTS, [GREEDY] * len(PROMPTS), count=5, recompute=recompute)
        for one in (forward, changed)
    )
    assert [one.tokens for one in after] == [one.tokens for one in expected] != [one.tokens for one in before]


def test_a_request_has_the_factors_of_what_it_may_read_and_keeps_them():
    """The original length is 10 tokens: a prompt of 3 may read 10 with 8 new tokens, and 11 with 9."""
    forward = forward_of(small("windows and rotary embeddings by kind"))
    prompt, found = PROMPTS[0], []
    for count in (8, 9):
        batch = Batch(forward, slots=1, capacity=14)
        batch.admit([Request(prompt=prompt, maximum_tokens=count)])
        for _ in range(count - 1):
            batch.step()
        (new,) = batch.read()
        tokens = torch.tensor([[*prompt, *new.tokens]])
        with torch.no_grad(), lengths_of_requests(forward.model, torch.tensor([len(prompt) + count - 1])):
            whole = forward.model(tokens[:, :-1]).log_softmax(dim=-1)
        expected = whole[0, len(prompt) - 1 :].gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()
        assert new.log_probabilities == pytest.approx(expected, abs=1e-4)
        found.append(new.log_probabilities)
        # Scores of the same text agree.
        part = Part(prompt, new.tokens)
        (score,) = scores_of(Scorer(forward, seq_length=14, batch_tokens=100), [part])
        assert score.log_likelihood == pytest.approx(sum(expected), abs=1e-3)
    assert found[0] != pytest.approx(found[1][:8], abs=1e-2)
