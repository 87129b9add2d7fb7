import pytest
import torch

from neox_model.generate.sampling import Sampler, keep_top_k, keep_top_p

# Most to least likely: places 2, 0, 3, 1.
PROBABILITIES = torch.tensor([0.3, 0.05, 0.5, 0.15])
LOGITS = PROBABILITIES.log() + 3.0


def kept(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(logits > -torch.inf).flatten().tolist()


def frequencies(sampler: Sampler, count: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.tensor([sampler(LOGITS, generator) for _ in range(count)])
    return torch.bincount(drawn, minlength=len(LOGITS)) / count


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.1}])
def test_temperature_zero_is_greedy_with_any_filters(filters):
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    assert Sampler(temperature=0.0, **filters)(LOGITS, generator) == 2
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(("count", "expected"), [(1, [2]), (2, [0, 2]), (3, [0, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_the_likeliest(count, expected):
    filtered = keep_top_k(LOGITS, count)
    assert kept(filtered) == expected
    assert torch.equal(filtered[expected], LOGITS[expected])


@pytest.mark.parametrize(
    ("mass", "expected"),
    [(0.01, [2]), (0.49, [2]), (0.51, [0, 2]), (0.79, [0, 2]), (0.81, [0, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_token_that_crosses_it(mass, expected):
    filtered = keep_top_p(LOGITS, mass)
    assert kept(filtered) == expected
    assert torch.equal(filtered[expected], LOGITS[expected])


def test_equal_logits_are_cut_to_exactly_k():
    assert kept(keep_top_k(torch.ones(5), 2)) == kept(keep_top_k(torch.ones(5), 2))
    assert len(kept(keep_top_k(torch.ones(5), 2))) == 2


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(temperature=1.0), PROBABILITIES),
        (Sampler(temperature=0.5), PROBABILITIES**2 / (PROBABILITIES**2).sum()),
        (Sampler(temperature=1.0, top_k=2), torch.tensor([0.375, 0.0, 0.625, 0.0])),
        (Sampler(temperature=1.0, top_p=0.9), torch.tensor([0.3, 0.0, 0.5, 0.15]) / 0.95),
        # The two likeliest have 0.64 of the mass at temperature 2, 0.8 at 1: the temperature comes first.
        (
            Sampler(temperature=2.0, top_p=0.7),
            PROBABILITIES.sqrt().index_fill(0, torch.tensor([1]), 0.0) / 1.6421,
        ),
    ],
)
def test_tokens_come_with_their_probability(sampler, expected):
    assert torch.allclose(frequencies(sampler), expected, atol=0.025)


def test_the_same_seed_gives_the_same_tokens():
    sampler = Sampler(temperature=1.0)
    draws = [
        [sampler(LOGITS, generator) for _ in range(20)] for generator in (_seeded(3), _seeded(3), _seeded(4))
    ]
    assert draws[0] == draws[1] != draws[2]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
