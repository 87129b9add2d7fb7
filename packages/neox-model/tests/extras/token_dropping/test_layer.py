"""Layers that see a part of the tokens: which, how many, and that those are computed as if alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from neox_model.assembly.model import build_model
from neox_model.extras.token_dropping.callback import DropTokens
from neox_model.extras.token_dropping.layer import (
    KeptTokens,
    choose_tokens,
    kept_tokens,
    token_dropping_layers,
)
from neox_model.parallel.groups import SINGLE_PROCESS, Groups
from neox_model.parallel.random import seed_streams
from neox_model.parallel.topology import create_groups
from neox_model.train.run import Callback
from support.distributed import run_ranks
from support.runs import count
from support.settings import resolved_from, specs_from

LENGTH, BATCH, WIDTH, KEPT = 12, 2, 24, 7


def dropping(**settings: Any) -> dict[str, Any]:
    """Layers 1 and 3 of four keep 4 tokens at first and all 12 from iteration 40 on."""
    random_ltd = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 3],
        "model_mask_name": "attention_mask",
        "model_type": "encoder" if settings.get("objective") == "masked" else "decoder",
        "hidden_state_order": "seq_batch_dim",
        "random_ltd_schedule": {
            "min_value": 4,
            "max_value": 12,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 40, "seq_per_step": 3},
        },
    }
    routing = {"enabled": True, "random_ltd": random_ltd}
    return {"num_layers": 4, "data_efficiency": {"enabled": True, "data_routing": routing}, **settings}


def model_of(groups: Groups = SINGLE_PROCESS, kept: int | None = KEPT, **settings: Any):
    resolved = resolved_from(dropping(**settings), devices=groups.world.size)
    model = build_model(resolved.model, resolved.run, groups, vocab_size=11)
    for layer in token_dropping_layers(model):
        layer.kept_tokens = kept
    return model


def test_chosen_tokens_are_in_order_without_repetition_and_differ_between_samples():
    torch.manual_seed(0)
    places = choose_tokens(50, 3, 20, torch.device("cpu"))
    assert places.shape == (20, 3)
    assert (places[1:] > places[:-1]).all()
    assert places.min() >= 0
    assert places.max() < 50
    assert not torch.equal(places[:, 0], places[:, 1])
    often = torch.zeros(50)
    for _ in range(300):
        often += torch.bincount(choose_tokens(50, 1, 20, torch.device("cpu"))[:, 0], minlength=50)
    assert often / 300 == pytest.approx(torch.full((50,), 0.4), abs=0.15)


def test_the_number_of_kept_tokens_grows_evenly_in_steps():
    schedule = KeptTokens(first=128, last=2048, iterations=200, step=16)
    assert [schedule.at(iteration) for iteration in (0, 1, 2, 100, 199, 200, 999)] == [
        128,
        128,  # 137.6 without steps
        144,  # 147.2
        1088,
        2032,
        2048,
        2048,
    ]
    assert KeptTokens(first=3, last=8, iterations=10, step=5).at(0) == 1


def test_configuration_selects_layers_that_drop_tokens_and_their_schedule():
    resolved = resolved_from(dropping())
    assert resolved.run.dropout.token_layers == {1, 3}
    kept = kept_tokens(resolved.config.data_efficiency.data_efficiency)
    assert kept == KeptTokens(first=4, last=12, iterations=40, step=3)
    off = dropping()
    off["data_efficiency"]["data_routing"]["enabled"] = False
    assert resolved_from(off).run.dropout.token_layers == frozenset()
    assert len(token_dropping_layers(build_model(*specs_from(off), SINGLE_PROCESS, vocab_size=11))) == 0


@pytest.mark.parametrize("position", ["rotary", "learned", "none"])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_kept_tokens_are_computed_as_if_the_others_were_hidden_and_the_others_pass_by(
    monkeypatch, position, with_documents, objective
):
    """Separate document ids hide them, so that the tokens keep their positions."""
    model = model_of(pos_emb=position, objective=objective)
    layer = token_dropping_layers(model)[0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(LENGTH, BATCH, WIDTH, generator=generator)
    places = choose_tokens(LENGTH, BATCH, KEPT, torch.device("cpu"))
    monkeypatch.setattr("neox_model.extras.token_dropping.layer.choose_tokens", lambda *sizes: places)
    documents = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    if with_documents:
        documents[:, 5:] = 1
    is_kept = torch.zeros(BATCH, LENGTH, dtype=torch.bool).scatter(1, places.t(), value=True)
    result = layer((hidden, documents))[0] if with_documents else layer(hidden)
    layer.kept_tokens = None
    alone = torch.where(is_kept, documents, 10 + torch.arange(LENGTH))
    expected = layer((hidden, alone))[0]
    is_kept_SB1 = is_kept.t().unsqueeze(-1)
    torch.testing.assert_close(result, torch.where(is_kept_SB1, expected, hidden), atol=2e-6, rtol=1e-5)


def test_all_tokens_are_seen_when_evaluating_and_when_all_are_kept():
    tokens = torch.arange(LENGTH).expand(BATCH, -1) % 11
    dropped, whole, evaluated = model_of(), model_of(kept=LENGTH), model_of().eval()
    expected = whole(tokens)
    assert torch.equal(evaluated(tokens), expected)
    assert not torch.allclose(dropped(tokens), expected)


def gradients(model, groups: Groups = SINGLE_PROCESS) -> list[Tensor]:
    seed_streams(3, groups)
    tokens = torch.arange(LENGTH + 1).expand(BATCH, -1) % 11
    loss = model.loss_fn(model(tokens[:, :-1]), (tokens[:, 1:], torch.ones(BATCH, LENGTH)))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_recomputed_layers_see_the_same_tokens_again():
    expected = gradients(model_of(hidden_dropout=0.1))
    found = gradients(model_of(hidden_dropout=0.1, checkpoint_activations=True))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def check_tensor_parallel() -> list[float]:
    groups = create_groups(2, 1)
    loss = gradients(model_of(groups, model_parallel_size=2, pos_emb="rotary"), groups)[0]
    return [float(loss), float(torch.rand(()))]


def test_tensor_parallel_ranks_see_the_same_tokens_and_their_streams_stay_together():
    first, second = run_ranks(check_tensor_parallel, size=2)
    assert first == second
    alone = float(gradients(model_of(pos_emb="rotary"))[0])
    assert first[0] == pytest.approx(alone, abs=1e-6)


def test_the_number_is_set_for_the_coming_iteration_also_after_a_restart():
    def trained(iteration):
        model, seen = model_of(kept=None), []

        class See(Callback):
            def around_step(self, step, batches):
                seen.append([layer.kept_tokens for layer in token_dropping_layers(model)])
                return step(batches)

        kept = KeptTokens(first=4, last=12, iterations=4, step=1).at
        count(See(), DropTokens(model, kept), last=6, iteration=iteration)
        return seen

    seen = trained(0)
    assert seen == [[4, 4], [6, 6], [8, 8], [10, 10], [12, 12], [12, 12]]
    assert trained(2) == seen[2:]
