import pytest
import torch
from torch import Tensor

from neox_model.generate.sampling import GREEDY, Sampling, SamplingTable, filtered, penalized

# Most to least likely: places 2, 0, 3, 1.
PROBABILITIES = torch.tensor([0.3, 0.05, 0.5, 0.15])
LOGITS = PROBABILITIES.log() + 3.0
VOCABULARY = 200


def table(samplings: list[Sampling], *, vocabulary: int = 4, draws: int = 4000) -> SamplingTable:
    made = SamplingTable(slots=len(samplings), draws=draws, vocab_size=vocabulary, device=torch.device("cpu"))
    for slot, settings in enumerate(samplings):
        made.set(slot, settings, torch.tensor([1]), draws)
    return made


def drawn(samplings: list[Sampling], logits_BV: Tensor, count: int) -> Tensor:
    made = table(samplings, vocabulary=logits_BV.shape[1], draws=count)
    return torch.stack([made.choose(logits_BV, 0)[0] for _ in range(count)])


def kept(top_k: int = 0, top_p: float = 0.0, logits: Tensor = LOGITS) -> list[int]:
    found = filtered(
        logits[None], torch.tensor([top_k]), torch.tensor([top_p]), count=min(top_k or 99, len(logits))
    )[0]
    places = torch.nonzero(found > -torch.inf).flatten().tolist()
    assert torch.equal(found[places], logits[places])
    return places


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.1}])
def test_temperature_zero_is_greedy_with_any_filters(filters):
    assert drawn([Sampling(temperature=0.0, **filters)], LOGITS[None], 3).flatten().tolist() == [2, 2, 2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-46])
def test_a_temperature_close_to_zero_is_almost_greedy(temperature):
    assert drawn([Sampling(temperature=temperature)], 50 * LOGITS[None], 3).flatten().tolist() == [2, 2, 2]


@pytest.mark.parametrize(("count", "expected"), [(1, [2]), (2, [0, 2]), (3, [0, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_the_likeliest(count, expected):
    assert kept(top_k=min(count, 4)) == expected


@pytest.mark.parametrize(
    ("mass", "expected"),
    [(0.01, [2]), (0.49, [2]), (0.51, [0, 2]), (0.79, [0, 2]), (0.81, [0, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_token_that_crosses_it(mass, expected):
    assert kept(top_p=mass) == expected


def test_equal_logits_are_kept_or_dropped_together():
    assert kept(top_k=2, logits=torch.tensor([1.0, 2.0, 1.0, 0.0])) == [0, 1, 2]
    assert kept(top_p=0.3, logits=torch.ones(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), PROBABILITIES),
        (Sampling(temperature=0.5), PROBABILITIES**2 / (PROBABILITIES**2).sum()),
        (Sampling(temperature=1.0, top_k=2), torch.tensor([0.375, 0.0, 0.625, 0.0])),
        (Sampling(temperature=1.0, top_p=0.9), torch.tensor([0.3, 0.0, 0.5, 0.15]) / 0.95),
        # The two likeliest have 0.64 of the mass at temperature 2, 0.8 at 1: the temperature comes first.
        (
            Sampling(temperature=2.0, top_p=0.7),
            PROBABILITIES.sqrt().index_fill(0, torch.tensor([1]), 0.0) / 1.6421,
        ),
    ],
)
def test_tokens_come_with_their_probability(sampling, expected):
    tokens = drawn([sampling], LOGITS[None], 4000).flatten()
    assert torch.allclose(torch.bincount(tokens, minlength=4) / 4000, expected, atol=0.025)


def test_the_seed_of_a_sequence_determines_its_tokens_alone_and_among_others():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    samplings = [
        Sampling(temperature=1.0, seed=3),
        GREEDY,
        Sampling(temperature=0.7, top_k=20, seed=3),
        Sampling(temperature=1.3, top_p=0.8, seed=4),
        Sampling(temperature=1.0, top_k=9, top_p=0.8, seed=5),
    ]
    together = drawn(samplings, logits.expand(5, -1), 50)
    for place, settings in enumerate(samplings):
        assert torch.equal(drawn([settings], logits, 50)[:, 0], together[:, place])
    assert len(set(together[:, 1].tolist())) == 1
    others = drawn([Sampling(temperature=1.0, seed=8)], logits, 50)
    assert not torch.equal(others[:, 0], together[:, 0])


def test_log_probabilities_are_those_of_the_model_before_all_filters():
    made = table([Sampling(temperature=0.3, top_k=2, repetition_penalty=3.0, seed=1)])
    for _ in range(5):
        tokens, log_probabilities = made.choose(LOGITS[None], 0)
        assert log_probabilities.item() == pytest.approx(PROBABILITIES[tokens.item()].log().item())


def test_a_penalty_counts_the_prompt_and_every_chosen_token():
    # 1 is in the prompt; greedy order of the others: 2, then those that were not said.
    logits = torch.tensor([[2.0, 2.9, 3.0, 1.9]])
    made = table([Sampling(repetition_penalty=2.0)])
    assert [made.choose(logits, 0)[0].item() for _ in range(3)] == [2, 0, 3]


@pytest.mark.parametrize("top_k", [0, 1, 7, VOCABULARY])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.6])
def test_filtered_probabilities_are_those_of_transformers(top_k, top_p, penalty):
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, VOCABULARY, generator=generator) * 4
    said = torch.randint(0, VOCABULARY, (3, 20), generator=generator)
    temperature = 0.7
    processors = [logits_process.RepetitionPenaltyLogitsProcessor(penalty)]
    processors += [logits_process.TemperatureLogitsWarper(temperature)]
    processors += [logits_process.TopKLogitsWarper(top_k)] if top_k else []
    processors += [logits_process.TopPLogitsWarper(top_p)] if 0 < top_p < 1 else []
    expected = logits.clone()
    for process in processors:
        expected = process(said, expected)
    seen = torch.zeros(3, VOCABULARY, dtype=torch.bool).scatter(1, said, True)
    found = filtered(
        penalized(logits, seen, torch.full((3,), penalty)) / temperature,
        torch.full((3,), top_k),
        torch.full((3,), top_p),
        count=VOCABULARY if top_k == 0 else top_k,
    )
    torch.testing.assert_close(found.softmax(1), expected.softmax(1), rtol=0, atol=1e-6)
    assert torch.equal(found > -torch.inf, expected > -torch.inf)
