"""What is imported is used as in transformers: it trains, generates and computes in 16 bits."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from neox_model.api.model import load_model
from neox_model.convert import from_hf as importing
from neox_model.convert.families import FAMILIES as TABLES
from neox_model.convert.reference import load_model as load_theirs
from support.distributed import run_ranks
from support.hf_models import ENTRIES, FAMILIES, random_settings, write_model
from support.tiers import slow_except

LENGTH = {"gpt2": "n_positions"}
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


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


@pytest.mark.parametrize("family", slow_except(FAMILIES, "gemma2", "qwen2_moe"))
def test_steps_of_sgd_give_the_losses_of_transformers(tmp_path, family):
    folder = written(tmp_path / "theirs", family)
    ours, theirs = load_model(folder).module, load_theirs(folder, TABLES[family])
    ours.train(family in MIXTURES)  # Where some routers choose otherwise.
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
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3", "gpt_oss"])
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


def on_two_ranks(load: str, prompts: list[str]) -> list[list[int]]:
    from neox_config import load_config, resolve
    from neox_model.generate.modes import Job, replies
    from neox_model.generate.run import load_forward
    from neox_model.parallel.topology import create_groups
    from neox_model.processes import load_tokenizer

    asked = ["model-parallel-size=2", "maximum-tokens=20", "temperature=0.0"]
    config = load_config([Path(load, "model.yml")], overrides=asked)
    groups, tokenizer = create_groups(2, 1), load_tokenizer(config.tokenizer)
    forward, _ = load_forward(resolve(config, devices=2), load, groups, tokenizer)
    job = Job(config.generation, forward, tokenizer, groups, seed=1, seq_length=48)
    return [each.tokens for each in replies(job, prompts, range(len(prompts)))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "olmo2", "phi3", "mixtral", "qwen2_moe", "olmoe", "gpt_oss"]
)
def test_two_tensor_parallel_ranks_generate_what_one_process_generates(tmp_path, monkeypatch, family):
    heads = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20}
    heads |= (
        {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 8} if family == "qwen2_moe" else {}
    )
    rope = {"rope_parameters": {"rope_type": "default"}} if family == "phi3" else {}
    folder = written(tmp_path / "theirs", family, **heads, **rope)
    monkeypatch.setattr(importing, "prove", lambda *arguments, **options: {})
    importing.from_hf(folder, tmp_path / "ours")
    prompts = ["def f(x):", "import random and more text", "a"]
    alone = load_model(tmp_path / "ours").generate(prompts, maximum_tokens=20, temperature=0.0)
    found = run_ranks(on_two_ranks, size=2, load=str(tmp_path / "ours"), prompts=prompts)
    assert found[0] == [each.tokens for each in alone]
    assert len({tuple(each) for each in found[0]}) == 3


@pytest.mark.parametrize(
    "family", slow_except(["gemma3_text", "smollm3", "mixtral", "gpt_oss"], "gemma3_text")
)
def test_documents_in_one_sequence_have_the_logits_of_transformers_for_each_alone(tmp_path, family):
    """Of classes with windows, and of one whose layers partly have no positions."""
    own = {
        "gpt_oss": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        "mixtral": {"sliding_window": 5, "num_local_experts": 5},
        "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5},
    }
    folder = written(tmp_path, family, num_hidden_layers=2, **own[family])
    ours, theirs = load_model(folder).module, load_theirs(folder, TABLES[family])
    lengths = (7, 21, 12)
    tokens = torch.randint(0, ENTRIES, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    documents = torch.cat([torch.full((1, each), index) for index, each in enumerate(lengths)], 1)
    places = torch.cat([torch.arange(each) for each in lengths]).unsqueeze(0)
    with torch.no_grad():
        found = ours((tokens, documents, places))[..., :ENTRIES].split(lengths, 1)
        expected = [theirs(part, use_cache=False).logits for part in tokens.split(lengths, 1)]
        whole = theirs(tokens, use_cache=False).logits.split(lengths, 1)
    for index, (mine, there) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(mine, there, atol=1e-5 * float(there.abs().max()), rtol=0)
        assert index == 0 or not torch.allclose(whole[index], there, atol=1e-2)
