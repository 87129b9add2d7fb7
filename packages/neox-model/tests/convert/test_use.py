"""What is imported is used as in transformers: it trains, generates and computes in 16 bits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from neox_model.api.model import load_model
from neox_model.convert.families import FAMILIES as TABLES
from neox_model.convert.reference import load_model as load_theirs
from support.hf_models import ENTRIES, FAMILIES, random_settings, write_model
from support.tiers import slow_except

LENGTH = {"gpt2": "n_positions"}


def written(folder, family, seed=3, **changes):
    settings = random_settings(family, seed) | {LENGTH.get(family, "max_position_embeddings"): 48}
    return write_model(folder, family, {**settings, "vocab_size": ENTRIES, **changes}, seed=seed)


def losses(parameters, logits_of):
    """Return the losses of four steps, of which three change the weights."""
    optimizer = torch.optim.SGD(parameters, lr=0.02)
    tokens = torch.randint(0, ENTRIES, (3, 33), generator=torch.Generator().manual_seed(5))
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = cross_entropy(logits_of(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("family", slow_except(FAMILIES, "gemma2"))
def test_steps_of_sgd_give_the_losses_of_transformers(tmp_path, family):
    folder = written(tmp_path / "theirs", family)
    ours, theirs = load_model(folder).module, load_theirs(folder, TABLES[family])
    mine = losses(ours.parameters(), lambda tokens: ours(tokens)[..., :ENTRIES])
    expected = losses(theirs.parameters(), lambda tokens: theirs(tokens, use_cache=False).logits)
    assert mine == pytest.approx(expected, rel=1e-5)
    assert expected[3] < 0.998 * expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_gives_the_tokens_of_transformers_with_and_without_a_cache(tmp_path, family):
    folder = written(tmp_path / "theirs", family)
    model, theirs = load_model(folder), load_theirs(folder, TABLES[family])
    for prompt in ("def f(x):", "import random and more text"):
        tokens = torch.tensor([model.tokenizer.encode(prompt)])
        asked = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        found = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **asked)
        expected = [each for each in found[0, tokens.shape[1] :].tolist() if each != 0]
        for recompute in (False, True):
            reply = model.generate(prompt, maximum_tokens=20, temperature=0.0, recompute=recompute)
            assert reply.tokens == expected, recompute


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3"])
def test_logits_in_bfloat16_are_as_exact_as_those_of_transformers(tmp_path, family):
    """Errors against float64; each rounds in other places."""
    errors = []
    for seed in range(4):
        folder = written(tmp_path / str(seed), family, seed)
        tokens = torch.randint(0, ENTRIES, (4, 40), generator=torch.Generator().manual_seed(seed))
        theirs, ours = load_theirs(folder, TABLES[family]), load_model(folder, precision="bf16").module
        with torch.no_grad():
            rounded = theirs.bfloat16()
            there = rounded(tokens, use_cache=False).logits.double()
            exact = rounded.double()(tokens, use_cache=False).logits
            mine = ours(tokens)[..., :ENTRIES].double()
        errors.append([float((each - exact).pow(2).mean().sqrt() / exact.std()) for each in (mine, there)])
    mine, there = torch.tensor(errors).mean(0).tolist()
    assert 0 < mine <= 2 * there
